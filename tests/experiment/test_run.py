"""`copfl.run` and `copfl.resume`, from names or values to a result."""

from __future__ import annotations

import dataclasses
import doctest
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import copfl
from copfl.algorithms import FedAvg
from copfl.core.optim import Adam
from copfl.core.task import Data, Task
from copfl.data import arrays
from copfl.data.clients.partition import Partition
from copfl.data.sets.datasets import load
from copfl.data.sets.stored import read_stored, stored
from copfl.errors import CopflError, DataError, RunError, UsageError
from copfl.experiment import preparation
from copfl.experiment.preparation import prepare
from copfl.models import MLP
from copfl.settings.complete import complete
from copfl.settings.schema import RunSettings
from copfl.settings.toml import Tables
from tests.commands import files, found

TINY: dict[str, Any] = {"model": "mlp", "clients": 2, "rounds": 2, "model_options": {"width": 4}}


class Net(nn.Module):
    """Draws its own random numbers in training, as dropout does."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(shape[-1] * shape[-2], 6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.last(self.drop(torch.relu(self.first(x.flatten(1)))))
        return answer


class Branching(nn.Module):
    """Looks at a value, which works for one client and not for many at once."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.last(x.flatten(1))
        return answer * 2 if float(answer.detach().sum()) > 0 else answer


def test_the_example_in_the_docstring() -> None:
    module = sys.modules[copfl.run.__module__]
    assert doctest.testmod(module).attempted >= 3
    assert doctest.testmod(module).failed == 0


def test_three_lines_give_the_metrics_as_arrays() -> None:
    result = copfl.run("copfl", "digits", **TINY)
    for metrics in (result.accuracy, result.accuracy_before, result.accuracy_global, result.weight):
        assert metrics.shape == (2, 2)
        assert np.isfinite(metrics).all()
    assert ((result.accuracy >= 0) & (result.accuracy <= 1)).all()
    assert result.weight.sum(1) == pytest.approx([1, 1])
    with pytest.raises(UsageError, match='no metric "los"; did you mean "loss"'):
        result.metric("los")
    assert len(result.seconds) == 2
    assert result.folder is None


@pytest.mark.parametrize("algorithm", ["copfl", "fedavg", "fedpac"])
def test_a_single_client_is_a_federation_too(algorithm: str, tmp_path: Path) -> None:
    result = copfl.run(algorithm, **{**TINY, "clients": 1}, out=tmp_path / "one")
    assert np.isfinite(result.accuracy).all()
    again = copfl.resume(tmp_path / "one", rounds=3)
    whole = copfl.run(algorithm, **{**TINY, "clients": 1, "rounds": 3})
    assert again.records == whole.records


def test_a_result_prints_a_line_and_has_networks(tmp_path: Path) -> None:
    result = copfl.run("fedper", **TINY, optimizer="adam", lr=0.01, epochs=2, out=tmp_path / "run")
    assert result.experiment.run.optimizer.name == "adam"
    assert result.experiment.run.optimizer.lr == 0.01
    assert result.experiment.run.algorithm.epochs == 2
    mean = 100 * result.accuracy[-1].mean()
    assert (
        str(result)
        == f"fedper on digits: 2 clients, partition classes, 2 rounds, accuracy {mean:.1f} %, in {tmp_path / 'run'}"
    )
    federation, task = result.experiment.federation, result.experiment.task
    x = task.numbers(torch.from_numpy(federation.dataset.test.x[:5]))
    saved = [copfl.load(tmp_path / "run", client) for client in (1, "global")]
    for net, bundle in zip((result.model(1), result.global_model()), saved, strict=True):
        with torch.no_grad():
            answers = net(x).log_softmax(1).exp().numpy()
        expected = bundle.predict_proba(federation.dataset.test.x[:5])
        assert answers == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UsageError, match="the run has clients 0 to 1"):
        result.model(2)


def test_nan_where_a_client_was_not_asked_or_not_looked_at() -> None:
    result = copfl.run("fedavg", **{**TINY, "clients": 4, "rounds": 3}, participation=0.5, eval_every=3)
    took_part = np.isfinite(result.metric("loss"))
    assert (took_part.sum(1) == 2).all()
    assert np.isnan(result.accuracy[:2]).all()
    assert (np.isfinite(result.accuracy[2]) == took_part[2]).all()


def test_one_seed_one_result_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    runs = [copfl.run("copfl", model=Net, clients=2, rounds=2, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert runs[0].records == runs[1].records
    assert runs[0].records != runs[2].records


def test_augmentation_can_be_switched_off() -> None:
    image = dataclasses.replace(load("digits"), augment=True)
    for augment in (True, False):
        made = prepare(
            complete(
                {"run": {"clients": 2, "augment": augment}, "model": {"name": "mlp"}}, values={"data": image}
            )
        )
        assert made.federation.dataset.augment == augment


def test_everyday_keywords_are_the_settings_of_their_tables() -> None:
    small: dict[str, Any] = {"model": "mlp", "clients": 2, "rounds": 1}
    everyday = copfl.run("fedavg", **small, epochs=2, batch_size=4, lr=0.01, optimizer="adam")
    tables: dict[str, Any] = {
        "algorithm_options": {"epochs": 2},
        "optimizer": {"name": "adam", "lr": 0.01},
    }
    assert everyday.records == copfl.run("fedavg", **small, batch=4, **tables).records


def test_a_partition_is_the_same_for_every_algorithm() -> None:
    prepared = [prepare(complete({"algorithm": {"name": name}})) for name in ("copfl", "fedavg", "local")]
    assert len({e.federation.partition.fingerprint for e in prepared}) == 1
    assert all(torch.equal(prepared[0].task.initial, e.task.initial) for e in prepared)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_run_that_ends_early_and_goes_on_is_the_run_that_never_ended(tmp_path: Path, rounds: int) -> None:
    # With dropout inside the model, momentum kept, a part of the clients, and a checkpoint in between.
    how: dict[str, Any] = {
        "model": Net,
        "clients": 4,
        "participation": 0.5,
        "checkpoint_every": 2,
        "batch": 4,
    }
    copfl.run("copfl", **how, rounds=5, out=tmp_path / "whole")
    copfl.run("copfl", **how, rounds=rounds, out=tmp_path / "parts")
    result = copfl.resume(tmp_path / "parts", rounds=5, model=Net)
    assert found(tmp_path / "parts") == found(tmp_path / "whole")
    assert files(tmp_path / "parts").keys() == files(tmp_path / "whole").keys()
    assert len(result.seconds) == len(result.records) == 5
    assert (tmp_path / "parts" / "run.toml").read_text() == (tmp_path / "whole" / "run.toml").read_text()


def test_going_on_with_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = copfl.run("copfl", **TINY, out=tmp_path / "run")
    before = files(tmp_path / "run")
    again = copfl.resume(tmp_path / "run")
    assert files(tmp_path / "run") == before
    assert np.array_equal(again.accuracy, first.accuracy)
    assert again.seconds == pytest.approx(first.seconds, abs=1e-5)


def test_fewer_rounds_than_are_done_are_refused(tmp_path: Path) -> None:
    copfl.run("fedavg", **TINY, out=tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(RunError, match="has 2 rounds already; rounds=1 must be at least as many"):
        copfl.resume(tmp_path / "run", rounds=1)
    assert files(tmp_path / "run") == before


def test_values_of_one_s_own(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    y = np.arange(60) % 3
    own = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    data = arrays.from_arrays(x, y)
    parts = Partition((np.arange(10), np.arange(10, 25)), (np.arange(6), np.arange(6, 12)), "by hand")
    algorithm = FedAvg(Adam(lr=0.01), epochs=2)
    given: dict[str, Any] = {"model": model, "partition": parts, "rounds": 2}
    result = copfl.run(algorithm, own, **given, out=tmp_path / "run")
    assert result.accuracy.shape == (2, 2)
    assert copfl.run(algorithm, data, **given).records == result.records
    assert copfl.run(algorithm, (x, y), **given).records == result.records
    with pytest.raises(
        UsageError,
        match=r"the data of this run is own@\w{12}, a value that a Python program passed; .*dataset=",
    ):
        copfl.resume(tmp_path / "run")
    again = copfl.resume(tmp_path / "run", data=data, model=model, rounds=3)
    assert again.records == copfl.run(algorithm, data, **{**given, "rounds": 3}).records
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["partition"]["scheme"] == "by hand"


def test_names_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_things.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, shape, classes, width=4):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(shape[0], width), nn.ReLU(), nn.Linear(width, classes))\n\n\n"
        "def load(count=40):\n"
        "    x = torch.arange(count * 5.0).reshape(count, 5) / count\n"
        "    return x, torch.arange(count) % 2\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    how: dict[str, Any] = {"model": "my_things:Net", "clients": 2, "rounds": 2, "model_options": {"width": 6}}
    try:
        result = copfl.run(
            "fedavg", "my_things:load", **how, data_options={"count": 60}, out=tmp_path / "run"
        )
        assert result.experiment.task.d == 5 * 6 + 6 + 6 * 2 + 2
        assert result.experiment.title == "fedavg on load"
        tables = result.experiment.run.tables()
        code = f"my_things={hashlib.sha256((tmp_path / 'my_things.py').read_bytes()).hexdigest()}"
        assert tables["model"] == {"name": "my_things:Net", "width": 6, "code": code}
        assert tables["data"] == {"name": "my_things:load", "count": 60, "code": code}
        assert str(tmp_path) not in (tmp_path / "run" / "run.toml").read_text()
        del sys.modules["my_things"]
        with pytest.raises(UsageError, match=r"add --code my_things .*\(the same\)$"):
            copfl.resume(tmp_path / "run", rounds=3)
        assert "my_things" not in sys.modules
        assert copfl.resume(tmp_path / "run", rounds=3, code="my_things").records[:2] == result.records
        with (tmp_path / "my_things.py").open("a") as file:
            file.write("# changed\n")
        with pytest.raises(UsageError, match=r"\(another one\)$"):
            copfl.resume(tmp_path / "run", rounds=4)
        with pytest.warns(RuntimeWarning, match="my_things is not as it was in training"):
            copfl.resume(tmp_path / "run", rounds=4, code="my_things")
        with pytest.raises(UsageError, match=r'model.wide=3 is no setting; did you mean "width"'):
            copfl.run("fedavg", "my_things:load", model="my_things:Net", model_options={"wide": 3})
    finally:
        sys.modules.pop("my_things", None)


def test_the_engine_that_a_model_cannot_take_is_left(tmp_path: Path) -> None:
    assert prepare(complete(values={"model": Net})).engine.name == "vmap"
    assert prepare(complete(values={"model": Branching()})).engine.name == "sequential"
    with pytest.raises(
        UsageError, match=r"cannot be trained in batches of clients .*; use engine='sequential'"
    ):
        prepare(complete({"run": {"engine": "vmap"}}, values={"model": Branching()}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"model": nn.Linear(7, 10)},
            r"the model does not fit samples of shape \[1, 8, 8\]: RuntimeError: .*; choose another model=",
        ),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 4))},
            r"output for a sample has shape \[4\] instead of \[10\]",
        ),
        ({"dataset": None}, "dataset is None; pass the name of a data set, or a pandas DataFrame"),
        (
            {"model": "mlp", "dataset": (np.eye(30, dtype=int), np.arange(30) % 3)},
            r"pass x\.astype\('float32'\)",
        ),
        (
            {"model": nn.Linear(5, 3), "dataset": (np.zeros((30, 5), np.float32), 4 - np.arange(30) % 5)},
            r"output for a sample has shape \[3\] instead of \[5\]",
        ),
        ({"model": nn.Flatten()}, "the model has no parameter to train"),
        ({"model": "mlp", "model_options": {"head": "hat"}}, 'the model has no module "hat"'),
        ({"model": Net, "model_options": {"head": "drop"}, "buffers": "mine"}, "buffers='mine'"),
        (
            {"model": "resnet18", "dataset": (np.zeros((30, 5), np.float32), np.arange(30) % 3)},
            r"resnet18 needs images .*try mlp",
        ),
        ({"device": "tpu"}, "device='tpu' is unknown; use cpu, cuda"),
        ({"device": "meta"}, "device='meta' is not supported; use cpu, cuda"),
        ({"device": "cuda:99"}, "device=.cuda:99. needs a CUDA GPU .*device='cpu'"),
        ({"clients": 10_000}, "clients"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_written(
    tmp_path: Path, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(CopflError, match=message):
        copfl.run(out=tmp_path / "run", **how)
    assert not list(tmp_path.iterdir())


def test_models_are_not_written_where_nobody_wants_them(tmp_path: Path) -> None:
    copfl.run("local", "digits", rounds=1, save_models=False, out=tmp_path / "run")
    assert not (tmp_path / "run" / "models").exists()
    assert (tmp_path / "run" / "rounds.jsonl").exists()


@pytest.mark.parametrize(
    "model", [{"name": "cnn"}, {"name": "cnn", "norm": "batch"}, {"name": "resnet18", "width": 4}]
)
def test_runs_of_our_models_take_the_fast_path_and_say_so(model: dict[str, str]) -> None:
    made = prepare(complete({"model": model, "run": {"engine": "vmap"}}))
    assert made.about()["batched_model"] is True
    alone = prepare(complete({"model": model, "run": {"engine": "sequential"}}))
    assert alone.about()["batched_model"] is False


def test_a_result_of_a_programs_own_arrays_is_saved_and_used_without_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype(np.float32), np.array(["red", "blue", "green"])[np.arange(60) % 3]
    data = {"x": x, "y": y, "group": np.array(["north", "south"])[np.arange(60) // 30]}
    settings: dict[str, Any] = {"model": "mlp", "epochs": 2, "optimizer": "adam", "lr": 0.01}
    result = copfl.run("fedper", data, rounds=2, partition="by_group", **settings)
    assert result.save(tmp_path / "saved") == result.folder
    copfl.run("fedper", data, rounds=2, partition="by_group", out=tmp_path / "written", **settings)
    assert not (tmp_path / "written" / "data.npz").exists()  # samples are stored only where `save` is called
    for name in ("rounds.jsonl", "run.toml", "models/client-0001/weights.safetensors"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "written" / name).read_bytes()
    answers = copfl.load(tmp_path / "saved", "south").predict_proba(x)
    with torch.no_grad():
        assert np.allclose(answers, result.model(1)(torch.from_numpy(x)).softmax(1), atol=1e-5)
    longer = copfl.resume(tmp_path / "saved", rounds=3)
    whole = copfl.run("fedper", data, rounds=3, partition="by_group", **settings)
    assert longer.records == whole.records
    with pytest.raises(RunError, match="already contains a run"):
        result.save(tmp_path / "saved")
    (tmp_path / "saved" / "data.npz").write_bytes(b"not a file")
    with pytest.raises(DataError, match=r"data\.npz"):
        copfl.resume(tmp_path / "saved", rounds=4)


def test_encoders_of_the_rows_that_train_come_back_from_a_saved_run(tmp_path: Path) -> None:
    """A folder has the numbers, and not the cells that another split would need."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"age": rng.normal(50, 9, 80), "ward": rng.choice(["a", "b"], 80)})
    table["ill"], table["site"] = (table.age > 52).map({True: "yes", False: "no"}), ["north", "south"] * 40
    settings: dict[str, Any] = {"model": "mlp", "validation": 0.25, "target": "ill", "client": "site"}
    settings |= {"rivals": False}
    result = copfl.run("fedavg", table, rounds=1, **settings)
    federation = result.experiment.federation
    trained = federation.dataset.train.x[np.concatenate(federation.partition.train)]
    assert abs(float(trained[:, 0].mean())) < 1e-6
    result.save(tmp_path / "saved")
    assert (
        copfl.resume(tmp_path / "saved", rounds=2).records
        == copfl.run("fedavg", table, rounds=2, **settings).records
    )


def test_a_data_set_of_several_arrays_comes_back_from_its_file(tmp_path: Path) -> None:
    y = np.arange(20) % 2
    given = arrays.from_arrays({"a": np.ones((20, 2)), "b": np.arange(40).reshape(20, 2)}, y, name="two")
    content = stored(given)
    assert content is not None
    (tmp_path / "data.npz").write_bytes(content)
    found = read_stored(tmp_path / "data.npz")
    assert (found.name, found.classes, found.note) == (given.name, given.classes, given.note)
    for own, other in ((found.train, given.train), (found.test, given.test)):
        assert sorted(own.x) == ["a", "b"]
        assert (own.x["b"] == other.x["b"]).all()
        assert (own.y == other.y).all()


@pytest.mark.parametrize(
    "change",
    [
        {"groups": 3},
        {"classes": [["a"]]},
        {"kind": []},
        {"kind": "x"},
        {"name": True},
        {"mean": ["0"]},
        {"augment": 1},
    ],
)
def test_a_stored_data_set_with_other_types_is_damaged(change: dict[str, Any], tmp_path: Path) -> None:
    """A run folder of somebody else has such a file."""
    content = stored(arrays.from_arrays(np.ones((20, 2)), np.arange(20) % 2, name="two"))
    assert content is not None
    file = dict(np.load(io.BytesIO(content)))
    file["about"] = np.array(json.dumps(json.loads(str(file["about"])) | change))
    np.savez(tmp_path / "data.npz", **file)
    with pytest.raises(DataError, match="is damaged"):
        read_stored(tmp_path / "data.npz")


def test_the_batched_form_of_an_own_model_is_compared_once_and_of_a_users_in_every_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[type[nn.Module]] = []
    agrees = Task._agrees

    def noted(task: Task, other: Task, data: Data) -> bool:
        compared.append(type(task.module))
        return agrees(task, other, data)

    monkeypatch.setattr(preparation, "_COMPARED", set())
    monkeypatch.setattr(Task, "_agrees", noted)
    for width in (4, 5, 4):  # other layers are compared too
        tables: Tables = {"model": {"name": "mlp", "width": width}, "run": {"clients": 2, "engine": "vmap"}}
        assert prepare(complete(tables)).task.batched is not None
    assert compared == [MLP, MLP]
    for _ in range(2):
        prepare(complete({"run": {"clients": 2, "engine": "vmap"}}, values={"model": Net((8, 8), 10)}))
    assert compared == [MLP, MLP, Net, Net]


@pytest.mark.parametrize(("beside", "path"), [
    ({"rounds": 1}, "run.rounds=1"),
    ({"lr": 0.5}, "optimizer.lr=0.5"),
    ({"dataset": "wine"}, "data.name='wine'"),
    ({"preset": "demo"}, "preset='demo'"),
    ({"model": torch.nn.Linear(64, 10)}, "model"),
])  # fmt: skip
def test_settings_beside_a_complete_record_are_an_error(beside: dict[str, Any], path: str) -> None:
    with pytest.raises(UsageError, match=f"^{path} cannot be set beside a complete copfl.Run"):
        copfl.run(complete({"run": {"rounds": 1, "clients": 2}}), **beside)


def test_a_record_that_is_not_complete_is_run_with_settings_beside_it() -> None:
    record = copfl.Run(run=RunSettings(rounds=1, clients=2))
    beside = copfl.run(record, algorithm_options={"name": "fedavg"}, lr=0.05)
    named = copfl.run("fedavg", rounds=1, clients=2, lr=0.05)
    assert beside.records == named.records
