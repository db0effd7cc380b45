"""kNN-Per: FedAvg, and a vote that an implementation in numpy gives as well."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import copfl
from copfl.algorithms import FedAvg, KNNPer
from copfl.core import Data, Task, task_of
from copfl.core.criteria import multilabel, next_token, regression
from copfl.errors import CopflError, UsageError
from tests.algorithms.chain import PLAIN, one_at_a_time
from tests.algorithms.updates import clients_of, down_of, output_of, three_rounds

Array = NDArray[np.float64]
FEATURES, CLASSES = 3, 4


def network(criterion: Any = None) -> Task:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(2, FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES))
    return task_of(body, CLASSES, criterion=criterion, dtype=torch.float64, head="2")


def drawn(count: int, seed: int = 0) -> tuple[Array, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2))
    return x, (
        2 * (x[:, 0] > 0.9 * rng.normal(size=count)) + (x[:, 1] > 0.9 * rng.normal(size=count))
    ).astype(np.int64)


def as_data(x: Array, y: Any, padding: int = 0) -> Data:
    padded = [np.concatenate([a, np.zeros((padding, *a.shape[1:]), a.dtype)]) for a in (x, y)]
    return Data(torch.from_numpy(padded[0]), torch.from_numpy(padded[1]), torch.tensor(len(x)))


# -- the method in numpy, sample by sample -------------------------------------------------------------------


def outputs_of(task: Task, x: Array) -> tuple[Array, Array]:
    """Features and probabilities of the network with its initial weights."""
    tensors = {name: t.numpy() for name, t in task.layout.split(task.initial).items()}
    features = np.tanh(x @ tensors["0.weight"].T + tensors["0.bias"])
    logits = features @ tensors["2.weight"].T + tensors["2.bias"]
    powers = np.exp(logits)
    return features, powers / powers.sum(1, keepdims=True)


def voted(point: Array, keys: Array, labels: NDArray[np.int64], k: int, scale: float) -> Array:
    found = np.zeros(CLASSES)
    distances = [float(np.sum((point - key) ** 2)) for key in keys]
    nearest = sorted(range(len(keys)), key=distances.__getitem__)[:k]
    for place in nearest:
        found[labels[place]] += np.exp(-distances[place] / (scale * FEATURES))
    result: Array = found / found.sum()
    return result


def chosen_share(
    points: Array, probabilities: Array, y: NDArray[np.int64], held: list[int], k: int, scale: float
) -> float:
    """The share of a tenth each with the lowest log loss on samples that have no vote on themselves."""
    losses = []
    for share in np.arange(10) / 10:
        loss = 0.0
        for n in held:
            others = [m for m in range(len(points)) if m != n]
            of_others = voted(points[n], points[others], y[others], k, scale)
            loss -= np.log(share * of_others[y[n]] + (1 - share) * probabilities[n, y[n]])
        losses.append(loss)
    return float(np.argmin(losses) / 10)


@pytest.mark.parametrize(("holdout", "k", "scale"), [(0, 9, 0.1), (2, 9, 0.05), (3, 4, 1.0)])
def test_a_client_predicts_as_an_implementation_in_numpy(holdout: int, k: int, scale: float) -> None:
    task, (x, y), (new, _) = network(), drawn(30), drawn(20, seed=1)
    algorithm = KNNPer(PLAIN, neighbours=k, scale=scale, samples=40, holdout=holdout)
    output = output_of(algorithm, task, as_data(x, y, padding=7), one_at_a_time(range(30)))

    points, probabilities = outputs_of(task, x)
    held = [n for n in range(30) if n % holdout == holdout - 1] if holdout else list(range(30))
    share = chosen_share(points, probabilities, y, held, k, scale)
    assert output.metrics["vote"].item() == pytest.approx(share)
    assert 0 < share < 0.9  # otherwise the test would show half of the method
    of_new, of_global = outputs_of(task, new)
    expected = [
        share * voted(point, points, y, k, scale) + (1 - share) * row
        for point, row in zip(of_new, of_global, strict=True)
    ]
    found = task.predict(output.trained, torch.from_numpy(new)).exp().numpy()
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-9)


# -- laws ----------------------------------------------------------------------------------------------------


def test_the_global_model_is_fedavgs() -> None:
    _, ours, _ = three_rounds(KNNPer(holdout=0, samples=16))
    _, plain, _ = three_rounds(FedAvg())
    assert torch.equal(ours.server.w, plain.server.w)


def test_held_out_samples_are_never_trained_on() -> None:
    task, (x, y) = network(), drawn(9)
    wrong = np.where(np.arange(9) % 3 == 2, (y + 1) % CLASSES, y)
    first, second = (
        output_of(KNNPer(PLAIN, samples=9, holdout=3), task, as_data(x, labels), one_at_a_time(range(9)))
        for labels in (y, wrong)
    )
    assert torch.equal(first.upload.w, second.upload.w)
    assert not torch.equal(first.client.memory.targets, second.client.memory.targets)


def test_of_many_samples_evenly_spaced_ones_are_kept() -> None:
    task, (x, y) = network(), drawn(10)
    output = output_of(KNNPer(PLAIN, samples=4), task, as_data(x, y), one_at_a_time(range(10)))
    np.testing.assert_allclose(output.client.memory.features, outputs_of(task, x[[0, 2, 5, 7]])[0])
    assert output.client.memory.targets.argmax(1).tolist() == y[[0, 2, 5, 7]].tolist()


@pytest.mark.parametrize("count", [0, 1])
def test_a_client_of_no_or_one_sample_has_the_global_model(count: int) -> None:
    task, (x, y) = network(), drawn(5)
    data = as_data(x, y)._replace(size=torch.tensor(count))
    output = output_of(KNNPer(PLAIN, samples=3, holdout=0), task, data, one_at_a_time([0]))
    assert output.metrics["vote"].item() == 0
    assert int(output.client.memory.used.sum()) == count
    new = torch.from_numpy(x)
    torch.testing.assert_close(task.predict(output.trained, new), task.predict(task.initial, new))


def test_a_new_client_predicts_with_the_global_model_and_an_old_one_with_its_own() -> None:
    task, algorithm, (x, y) = network(), KNNPer(PLAIN, samples=30), drawn(30)
    later = task.initial + 1
    new = torch.from_numpy(drawn(9, seed=2)[0])
    personal = algorithm.personal_model(task, algorithm.client_init(task), down_of(algorithm, task, later))
    torch.testing.assert_close(task.predict(personal, new), task.predict(later, new))
    output = output_of(algorithm, task, as_data(x, y), one_at_a_time(range(30)))
    personal = algorithm.personal_model(task, output.client, down_of(algorithm, task, later))
    assert torch.equal(task.predict(personal, new), task.predict(output.trained, new))


def test_what_is_sent_is_fedavgs_message() -> None:
    task, (x, y) = network(), drawn(30)
    upload = output_of(KNNPer(PLAIN), task, as_data(x, y), one_at_a_time(range(30))).upload
    assert upload._fields == ("w", "size")
    assert upload.w.shape == task.initial.shape


def test_a_memory_is_that_of_the_received_weights_with_the_clients_own_statistics() -> None:
    """Batch norm's statistics are of all samples, so that two clients with the same samples remember the same."""
    task, state, _ = three_rounds(KNNPer(samples=16))
    record = clients_of(state)
    assert record.w.shape[1] > task.d
    assert not torch.equal(record.w[0, task.d :], record.w[1, task.d :])


def test_values_and_labels_are_remembered_as_they_are() -> None:
    x, _ = drawn(8)
    values = np.random.default_rng(0).normal(size=(8, CLASSES))
    for criterion, targets in ((regression(), values), (multilabel(), (values > 0).astype(np.float64))):
        task = network(criterion)
        output = output_of(KNNPer(PLAIN, samples=8), task, as_data(x, targets), one_at_a_time(range(8)))
        np.testing.assert_array_equal(output.client.memory.targets, targets)


def test_settings_and_tasks_that_make_no_sense_are_refused() -> None:
    for wrong, message in (
        ({"neighbours": 0}, "neighbours=0"),
        ({"samples": 0}, "samples=0"),
        ({"scale": 0.0}, "scale=0"),
        ({"holdout": 1}, "holdout=1 leaves no sample"),
    ):
        with pytest.raises(UsageError, match=message):
            KNNPer(**wrong)
    with pytest.raises(
        UsageError, match="knn_per mixes classes, labels or values of samples; this task is next_token"
    ):
        KNNPer().client_init(network(next_token()))


def test_the_card_says_whose_samples_a_model_remembers(tmp_path: Path) -> None:
    copfl.run("knn_per", "digits", clients=2, model="mlp", rounds=1, out=tmp_path / "run")
    sentence = "features of training samples, one by one. Keep it where the samples are"
    cards = {path.parent.name: path.read_text() for path in (tmp_path / "run" / "models").glob("*/README.md")}
    assert len(cards) == 3
    assert {name for name, card in cards.items() if sentence not in card} == {"global"}
    bundle = copfl.load(tmp_path / "run", 0)
    assert sentence in (bundle.save(tmp_path / "sent") / "README.md").read_text()


@pytest.mark.job
@pytest.mark.parametrize("algorithm", ["knn_per", "feddpa"])
def test_a_mixture_of_somebody_else_predicts_or_is_one_error(algorithm: str, tmp_path: Path) -> None:
    """Whatever shapes its memory, its shares and its features have."""
    copfl.run(algorithm, "digits", clients=2, model="mlp", rounds=1, rivals=False, out=tmp_path / "run")
    file = copfl.load(tmp_path / "run", 0).save(tmp_path / "sent") / "weights.safetensors"
    with safe_open(file, "pt") as content:
        about = content.metadata()
    own, samples = load_file(file), np.zeros((2, 1, 8, 8), np.uint8)
    for name in (name for name in own if "/" not in name):
        tensor = own[name]
        shapes = ((), (0,), (2 * tensor.numel(),), (2, 3), (1, *tensor.shape))
        changed = [torch.ones(shape, dtype=tensor.dtype) for shape in shapes]
        for other in (*changed, torch.full_like(tensor.float(), np.nan), tensor.int()):
            save_file({**own, name: other.contiguous()}, file, metadata=about)
            with contextlib.suppress(CopflError):
                assert len(copfl.load(tmp_path / "sent").predict(samples)) == 2
