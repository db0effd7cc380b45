"""Code of one's own, by name: algorithms, optimizers, models, data, partitions, robust rules, metrics, objectives."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.algorithms import FedAvg
from copfl.errors import UsageError
from copfl.settings import components
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.toml import Tables
from tests.commands import TINY, called

Capture = pytest.CaptureFixture[str]
MODULE = """
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from copfl.algorithms import FedAvg
from copfl.core.optim import Sgd
from copfl.data.partition import Partition
from copfl.wrappers.robust import Clipped


@dataclass(frozen=True)
class Part:
    strength: float = 0.5


@dataclass(frozen=True)
class FedMine(FedAvg):
    part: Part = field(default_factory=Part)


@dataclass(frozen=True)
class Branches(FedAvg):
    def client_update(self, task, client, down, data, plan):
        output = super().client_update(task, client, down, data, plan)
        if output.metrics["loss"] > 0:
            return output
        return output


@dataclass(frozen=True)
class Slow(Sgd):
    factor: float = 0.5


@dataclass(frozen=True)
class Tight(Clipped):
    grip: float = 2.0


class Net(nn.Module):
    def __init__(self, shape, classes, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.body(x))


def load(many=90):
    rng = np.random.default_rng(0)
    return rng.normal(size=(many, 6)).astype("float32"), np.arange(many) % 3


def every_other(dataset, clients, seed, shift=0):
    train, test = (np.arange(len(part)) for part in (dataset.train, dataset.test))
    parts = [tuple(rows[(rows + shift) % clients == n] for n in range(clients)) for rows in (train, test)]
    return Partition(*parts, "every_other")


def hits(predictions, targets):
    return float((np.asarray(predictions).argmax(1) == np.asarray(targets)).mean())


def halved(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none") / 2
"""
EVERYTHING: dict[str, dict[str, Any]] = {
    "algorithm": {"name": "mypackage.algos:FedMine", "strength": 0.7, "epochs": 1},
    "optimizer": {"name": "mypackage.algos:Slow", "factor": 0.1, "lr": 0.2},
    "data": {"name": "mypackage.algos:load", "many": 60},
    "partition": {"name": "mypackage.algos:every_other", "shift": 1},
    "model": {"name": "mypackage.algos:Net", "width": 5},
    "robust": {"name": "mypackage.algos:Tight", "grip": 3.0},
    "task": {"loss": "mypackage.algos:halved", "metrics": ["mypackage.algos:hits"]},
    "run": {"rounds": 1, "clients": 2},
}


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "algos.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("mypackage", "mypackage.algos", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_every_kind_may_be_ones_own(package: Path) -> None:
    run = complete(EVERYTHING)
    result = copfl.run(run, out=package / "run")
    algorithm = result.experiment.algorithm
    assert type(algorithm).__name__ == "Tight"
    assert algorithm.grip == 3.0  # type: ignore[attr-defined]
    inner = algorithm.algorithm  # type: ignore[attr-defined]
    assert (type(inner).__name__, inner.part.strength) == ("FedMine", 0.7)
    assert (type(inner.optimizer).__name__, inner.optimizer.factor, inner.optimizer.lr) == ("Slow", 0.1, 0.2)
    assert result.experiment.federation.partition.scheme == "every_other"
    assert result.primary.name == "hits"
    assert result.experiment.task.module.body[1].out_features == 5  # type: ignore[index, union-attr]
    again = copfl.resume(package / "run", rounds=2)  # from run.toml alone
    assert again.records[:1] == result.records


@pytest.mark.parametrize("kind", [kind for kind in EVERYTHING if kind not in ("run", "task")])
def test_a_typo_in_its_name_or_options_is_a_setting_error(kind: str) -> None:
    table = EVERYTHING[kind]
    module, _, name = table["name"].partition(":")
    with pytest.raises(UsageError, match=rf'in {module} "{name}x"; did you mean "{name}"'):
        complete({**EVERYTHING, kind: {**table, "name": f"{table['name']}x"}})
    if kind != "data":  # a function that loads data is called with its options
        with pytest.raises(SettingError, match=rf"{kind}\.wrong=1 is no setting; allowed are"):
            complete({**EVERYTHING, kind: {**table, "wrong": 1}})


@pytest.mark.parametrize(
    ("line", "row"), [("mypackage", "mypackage.algos:FedMine"), ("mine", "mine:FedTanh")]
)
def test_the_lines_of_the_contributors_guide_compare(
    package: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, line: str, row: str
) -> None:
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    (command,) = re.findall(rf"^(?:> )?(copfl compare -a {line}\b.*)$", guide, re.MULTILINE)
    (package / "mine.py").write_text(re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)[0])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    small = ["-r", "1", "--seeds", "0", "--no-tune", "--no-plots", "--jobs", "1", "--out", "table"]
    answer = called(capsys, *shlex.split(command)[1:], *TINY, *small)
    assert answer.code == 0, answer.err
    assert row in answer.out
    assert "fedavg" in answer.out


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_python_branch_on_a_tensor_is_one_error_and_runs_one_by_one(
    package: Path, capsys: Capture, command: str
) -> None:
    line = MODULE[: MODULE.index("if output.metrics")].count("\n") + 1
    of_compare = ("--seeds", "0", "--no-tune", "--no-plots", "--jobs", "1") if command == "compare" else ()
    words = (command, "-a", "mypackage.algos:Branches", "-r", "1", *TINY, *of_compare)
    answer = called(capsys, *words, "--out", "batched")
    assert answer.code == 2
    assert "Traceback" not in answer.err
    message = answer.err.splitlines()[-1]
    assert f"algos.py:{line} cannot be computed for many clients at once: it is a Python branch" in message
    assert message.endswith("write torch.where; or use --engine sequential, one client after the other")
    assert called(capsys, *words, "--out", "one-by-one", "--engine", "sequential").code == 0


def test_values_are_rows_of_a_comparison(package: Path) -> None:
    from mypackage.algos import FedMine, Part  # type: ignore[import-not-found]

    base: Tables = {"run": {"rounds": 1, "clients": 2}, "model": {"name": "mlp"}}
    rows = [FedMine(part=Part(strength=0.9)), copfl.ALGORITHMS["fedper"](epochs=2), "local"]
    found = copfl.compare(rows, seeds=[0], base_tables=base, out=package / "table", tune={})
    assert [row.label for row in found.rows] == ["FedMine strength=0.9", "fedper epochs=2", "local"]
    assert {row.optimizer["name"] for row in found.rows} == {"adam"}
    choice = copfl.choose(
        [FedMine()], budget=4, seeds=[0], base_tables=base, out=package / "choice", retrain=False
    )
    assert {row.label for row in choice.ranking} == {"FedMine", "local"}


def test_an_entry_point_adds_a_name(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    entry = metadata.EntryPoint("fedmine", "mypackage.algos:FedMine", "copfl.algorithms")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    components.algorithms.cache_clear()
    try:
        assert (
            complete({"algorithm": {"name": "fedmine", "strength": 0.2}}).algorithm.options["strength"] == 0.2
        )
        assert "fedmine" in called(capsys, "list", "algorithms").out
    finally:
        components.algorithms.cache_clear()


def test_a_package_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("gone", "nowhere.algos:Gone", "copfl.algorithms")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    components.algorithms.cache_clear()
    try:
        with pytest.raises(
            UsageError, match=r'the algorithm "gone" of nowhere.algos:Gone cannot be imported'
        ):
            complete()
    finally:
        components.algorithms.cache_clear()


def test_a_value_that_has_no_name_is_no_row() -> None:
    class Inner(FedAvg):
        """Of a function."""

    with pytest.raises(UsageError, match=r"Inner cannot be a row: .* in a module that can be imported"):
        copfl.compare([Inner(), "local"], seeds=[0])


def test_a_partition_gets_only_what_it_takes() -> None:
    made = components.build(
        "partition", complete(EVERYTHING).partition, dataset=complete_data(), clients=2, seed=0
    )
    assert made.clients == 2


def complete_data() -> Any:
    from copfl.data.arrays import from_arrays

    return from_arrays(np.zeros((20, 6), np.float32), np.arange(20) % 2)
