"""WideLevels against scipy and scikit-learn; by sums; alone; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import Ridge
from torch import nn

import copfl
from copfl.algorithms import WideLevels
from copfl.algorithms.wide_levels import USUAL_WEIGHT
from copfl.core import task_of
from copfl.data.samples import CLASSIFICATION, MULTILABEL, REGRESSION, Dataset, Samples
from copfl.errors import UsageError
from copfl.experiment.models.network import tokenized
from copfl.models.networks import MLP, Words
from copfl.settings.complete import complete
from copfl.testing import check_algorithm

TOPICS = ("goal match team player", "vote party law minister", "market bank price share")
FILLERS = ["the", "a", "of", "in", "on", "and", "it", "was", "with", "for"]
DESKS, EACH = 4, 30


def texts(classes: int = 3) -> Dataset:
    """Texts of desks that have topics in different proportions, and half of the words of a topic each."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(classes), DESKS)

    def of_desk(desk: int, count: int) -> tuple[list[str], list[int]]:
        topics = rng.choice(classes, count, p=shares[desk])
        said = [rng.choice(TOPICS[topic].split(), 1).tolist() for topic in topics]
        return [" ".join([*rng.choice(FILLERS, 6), *words]) for words in said], topics.tolist()

    def samples(count: int) -> Samples:
        parts = [of_desk(desk, count) for desk in range(DESKS)]
        x, y = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
        return Samples(x, y, np.repeat(np.arange(DESKS), count))

    names = tuple(f"t{n}" for n in range(classes))
    return Dataset("news", samples(EACH), samples(EACH), names, tuple("abcd"), kind=CLASSIFICATION)


def run(dataset: Dataset, **settings: Any) -> Any:
    usual = {
        "partition": "by_group",
        "model": "words",
        "model_options": {"words": 500, "pairs": 0},
        "rivals": False,
    }
    return copfl.run("wide_levels", dataset, **{**usual, **settings})


@pytest.mark.job
def test_it_is_an_algorithm() -> None:
    check_algorithm(WideLevels())


@pytest.mark.job
def test_of_one_site_it_is_the_penalised_logistic_regression() -> None:
    dataset = texts()
    options = {"words": 500, "pairs": 300}
    varying = {"varying": "none"}
    result = run(
        dataset, partition="iid", clients=1, algorithm_options=varying, model_options=options, rounds=60
    )
    task = result.experiment.task
    model = complete({"model": {"name": "words", **options}}).model
    arrays = tokenized(dataset, model).train.x
    n, words, classes = len(dataset.train), 500, 3
    counts = np.zeros((n, 801))
    np.add.at(counts, (np.arange(n)[:, None], arrays["input_ids"]), arrays["attention_mask"])
    used = np.flatnonzero(counts.sum(0))
    of_words, of_pairs = (counts * (np.arange(801) <= words), counts * (np.arange(801) > words))
    x = (
        of_words / np.sqrt(of_words.sum(1, keepdims=True))
        + of_pairs / np.sqrt(of_pairs.sum(1, keepdims=True)) / 2
    )
    x = x[:, used]
    scale = (1 + np.log((1 + n) / (1 + (counts[:, used] > 0).sum(0)))) / USUAL_WEIGHT

    def loss(z: Any) -> Any:
        slopes, intercept = torch.split(torch.as_tensor(z), [len(used) * classes, classes])
        eta = torch.as_tensor(x * scale) @ slopes.view(-1, classes) + intercept
        value = nn.functional.cross_entropy(eta, torch.as_tensor(dataset.train.y), reduction="sum")
        return value + 0.05 * slopes @ slopes

    def with_gradient(z: Any) -> tuple[float, Any]:
        at = torch.tensor(z, requires_grad=True)
        value = loss(at)
        value.backward()
        return float(value.detach()), at.grad.numpy()  # type: ignore[union-attr]

    start = np.zeros((len(used) + 1) * classes)
    expected = minimize(
        with_gradient, start, jac=True, method="L-BFGS-B", options={"gtol": 1e-8, "maxiter": 500}
    )
    table = task.layout.entries(result.client_model(0), "embedding.weight").view(-1, classes)[used].numpy()
    found = (table / scale[:, None]).ravel()
    np.testing.assert_allclose(found, expected.x[: len(found)], atol=2e-3)


@pytest.mark.job
def test_pairs_tell_the_order_of_words() -> None:
    rng = np.random.default_rng(0)
    y, site = np.arange(80) % 2, np.arange(80) // 2 % 2
    said = np.array(["not bad but good", "not good but bad"])[y]
    x = np.array([f"{rng.choice(FILLERS)} {text} {rng.choice(FILLERS)}" for text in said])
    data = Dataset("said", Samples(x, y, site), Samples(x, y, site), ("yes", "no"), ("a", "b"))
    pairs, words = (
        run(data, model_options={"words": 500, "pairs": number}, rounds=10).final("accuracy").mean()
        for number in (500, 0)
    )
    assert pairs == 1.0
    assert words < 0.8


def test_words_of_other_sites_help() -> None:
    chosen = complete({"algorithm": {"name": "wide_levels"}}, values={"data": texts()})
    assert (chosen.model.name, chosen.run.rounds) == ("words", WideLevels.usual_rounds)
    result = run(texts(), local_baseline=True, rounds=15)
    together, alone = result.final("accuracy").mean(), result.analysis.alone.mean()
    assert together > 0.95
    assert together >= alone
    norms = [record["federation"]["gradient"] for record in result.records]
    assert norms[-1] < 0.05 * norms[0]


def test_alone_nothing_is_sent() -> None:
    task = task_of(Words((), 3, words=16, pairs=8), 3)
    for alone in (WideLevels(alone=True), WideLevels().trained_alone()):
        assert alone.trained_alone() == alone
        server = alone.server_init(task, 2)
        assert alone.server_update(task, server, None) == (server, {})  # type: ignore[arg-type]


def test_the_site_with_another_share_has_another_intercept() -> None:
    rng = np.random.default_rng(0)
    x, site = rng.normal(size=(400, 2)).astype(np.float32), np.repeat([0, 1], 200)
    y = (x[:, 0] + np.where(site == 0, 1.5, -1.5) + rng.logistic(size=400) > 0).astype(np.int64)
    samples = Samples(x, y, site)
    result = run(
        Dataset("two", samples, samples, ("no", "yes"), ("a", "b")),
        model="linear",
        model_options={},
        rounds=15,
    )
    layout = result.experiment.task.layout
    odds = [float(np.diff(layout.entries(result.client_model(n), "head.bias").numpy())[0]) for n in (0, 1)]
    assert 1.0 < odds[0] < 2.0
    assert -2.0 < odds[1] < -1.0
    slopes = [layout.entries(result.client_model(n), "head.weight") for n in (0, 1)]
    torch.testing.assert_close(slopes[0], slopes[1])


def test_values_are_a_ridge_regression() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + rng.normal(size=60)).astype(np.float32)
    samples = Samples(x, y)
    options: dict[str, Any] = {"partition": "iid", "clients": 1, "model": "linear", "model_options": {}}
    varying = {"varying": "none", "penalty": 7.0}
    data = Dataset("values", samples, samples, ("y",), kind=REGRESSION)
    result = run(data, **options, algorithm_options=varying, rounds=20)
    expected = Ridge(alpha=7.0).fit(x, (y - y.mean()) / y.std())
    layout = result.experiment.task.layout
    found = layout.entries(result.client_model(0), "head.weight").numpy()
    np.testing.assert_allclose(found, expected.coef_, atol=1e-4)


@pytest.mark.job
def test_several_labels_have_an_intercept_each() -> None:
    rng = np.random.default_rng(0)
    x, site = rng.normal(size=(200, 2)).astype(np.float32), np.repeat([0, 1], 100)
    y = np.stack([site == 0, x[:, 0] > 0], 1).astype(np.float32)
    samples = Samples(x, y, site)
    data = Dataset("labels", samples, samples, ("first", "second"), ("a", "b"), kind=MULTILABEL)
    result = run(data, model="linear", model_options={}, rounds=15)
    layout = result.experiment.task.layout
    first, second = (layout.entries(result.client_model(n), "head.bias") for n in (0, 1))
    assert float(first[0]) > 1 > -1 > float(second[0])


def test_the_weight_of_a_word_is_by_the_texts_that_have_it() -> None:
    words = Words((), 2, words=3, pairs=2)
    ids = torch.tensor([[1, 1, 2, 0], [2, 3, 0, 0], [4, 0, 0, 0]])
    valid = torch.tensor([True, True, False])
    assert words.texts_with(ids, None, valid).tolist() == [0, 1, 2, 1, 0, 0]
    assert words.texts_with(ids, (ids == 2).long(), valid).tolist() == [0, 0, 2, 0, 0, 0]


def test_every_averaging_method_trains_the_model_of_words() -> None:
    for name in ("fedavg", "fedper", "ditto"):
        result = copfl.run(
            name,
            texts(),
            model="words",
            partition="by_group",
            rounds=5,
            rivals=False,
            model_options={"words": 500, "pairs": 300},
        )
        assert result.final("accuracy").mean() > 0.6


def test_its_bundle_predicts_texts(tmp_path: Path) -> None:
    result = run(texts(), rounds=8, out=tmp_path / "run")
    bundle = copfl.load(tmp_path / "run", client=1)
    assert bundle.predict(["goal of the team", "the bank was a share"]).tolist() == ["t0", "t2"]
    expected = result.final("accuracy")[1]
    test = texts().test.take(texts().test.group == 1)  # type: ignore[arg-type]
    found = bundle.evaluate(test.x, np.array([f"t{n}" for n in test.y])).metrics["accuracy"]
    assert found == pytest.approx(expected)


def test_what_it_refuses() -> None:
    with pytest.raises(UsageError, match="penalty=0"):
        WideLevels(penalty=0)
    with pytest.raises(UsageError, match='no varying "all"'):
        WideLevels(varying="all")
    with pytest.raises(UsageError, match="use --model words for texts, else --model linear"):
        WideLevels().server_init(task_of(nn.Sequential(nn.Linear(3, 2, bias=False)), 2), 2)
    with pytest.raises(UsageError, match="has layers before its last"):
        copfl.run("wide_levels", "heart", model="mlp", rounds=1)
    with pytest.raises(UsageError, match="has layers before its last"):
        copfl.run(WideLevels(), "heart", model=MLP((27,), 2), rounds=1)
