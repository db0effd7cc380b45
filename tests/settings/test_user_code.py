"""Code of one's own, by name and by value: all kinds, from algorithms to metrics."""

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
import torch
from torch import nn
from torch.utils.data import TensorDataset

import copfl
from copfl.comparison.rows.entries import entries_of
from copfl.data.samples import Dataset
from copfl.errors import DataError, UsageError
from copfl.settings import components, named_code, user_code
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.toml import Tables
from tests.commands import TINY, called

Capture = pytest.CaptureFixture[str]
X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20) % 2
MODULE = """
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from copfl.algorithms import FedAvg
from copfl.core.optim import Sgd
from copfl.data.clients.partition import Partition
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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with named_code.scope():
        yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("mine", "mypackage"))]:
        del sys.modules[name]


@pytest.fixture
def package(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, with a package that has one of every kind."""
    (here / "mypackage").mkdir()
    (here / "mypackage" / "algos.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(here))
    return here


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("nets:Net", True),
        ("my.package.nets:Net.small", True),
        ("cnn", False),
        ("C:\\data\\mine.npz", False),
        ("./a:b/c", False),
        (":Net", False),
        ("nets:", False),
    ],
)
def test_a_reference_is_module_colon_attribute(name: str, is_one: bool) -> None:
    assert user_code.is_reference(name) is is_one


def test_modules_of_the_current_folder_are_found(here: Path) -> None:
    (here / "mine_single.py").write_text("class Net:\n    small = 3\n")
    (here / "mine_package").mkdir()
    (here / "mine_package" / "nets.py").write_text("answer = 42\n")
    named_code.name("mine_single", "mine_package.nets")
    assert user_code.attribute("model", "mine_single:Net.small") == 3
    assert user_code.attribute("model", "mine_package.nets:answer") == 42


TRICKS = """
import os
import subprocess
from functools import partial
from os import system
from subprocess import run as started

from torch import nn

class Net(nn.Linear):
    class Small(nn.Linear):
        pass

call = subprocess.run
later = partial(os.system, "true")
own = partial(Net, 2, 3)
net = nn.Linear(2, 3)
"""


@pytest.mark.parametrize(
    "name",
    [
        "os",
        "os.system",
        "subprocess.run",
        "system",
        "started",
        "call",
        "later",
        "nn",
        "nn.Linear",
        "Net.forward.__globals__",
        "Net.__init__",
        "Net.__class__",
        "__loader__.load_module",
        "__builtins__",
        "Net.load_state_dict",
        "Net.__subclasses__",
        "net.register_forward_hook",
    ],
)
def test_a_module_lends_only_what_it_defines_itself(here: Path, name: str) -> None:
    (here / "mine_tricks.py").write_text(TRICKS)
    named_code.name("mine_tricks")
    with pytest.raises(UsageError, match="mine_tricks does not define"):
        user_code.attribute("model", f"mine_tricks:{name}")


@pytest.mark.parametrize("name", ["Net", "Net.Small", "own", "net"])
def test_what_a_module_defines_is_found(here: Path, name: str) -> None:
    (here / "mine_tricks.py").write_text(TRICKS)
    named_code.name("mine_tricks")
    assert user_code.attribute("model", f"mine_tricks:{name}") is not None


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        (
            "",
            "mine_gone:Net",
            "there is no module mine_gone; .*start it in the folder that contains mine_gone",
        ),
        (
            "import not_installed_at_all",
            "mine:Net",
            "there is no module not_installed_at_all; pip install not_inst",
        ),
        ("class Net: pass", "mine:Nets", 'no model in mine "Nets"; did you mean "Net"'),
        (
            "1 / 0",
            "mine:Net",
            r"importing it raised ZeroDivisionError: division by zero \(.*mine\.py, line 1\)",
        ),
        (
            "import sys; sys.exit(4)",
            "mine:Net",
            r'importing it raised SystemExit: 4 \(.*mine\.py, line 1\); .* inside `if __name__ == "__main__":`',
        ),
        ("\nclass :", "mine:Net", r"importing it raised SyntaxError: invalid syntax \(.*mine\.py, line 2\)"),
    ],
)
def test_what_cannot_be_imported_says_why(here: Path, text: str, reference: str, message: str) -> None:
    (here / "mine.py").write_text(text + "\n")
    named_code.name(reference.partition(":")[0])
    with pytest.raises(UsageError, match=message):
        user_code.attribute("model", reference)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("mine.py:Net", "a file, and not a module; write mine:Net$"),
        ("./mine.py:Net", "; write mine:Net$"),
        ("nets/mine.py:Net", r"; write nets\.mine:Net$"),
        ("../nets/mine.py:Net", r"; start copfl in \.\./nets and write mine:Net$"),
    ],
)
@pytest.mark.parametrize("kind", ["algorithm", "model", "optimizer", "data"])
def test_a_file_in_place_of_a_module_is_told_what_to_write(kind: str, name: str, advice: str) -> None:
    with pytest.raises(UsageError, match=f'{kind} "{re.escape(name)}" .*{advice}'):
        complete({kind: {"name": name}})
    if kind == "algorithm":
        with pytest.raises(UsageError, match=advice):
            entries_of([f"fedavg,{name}:lr=0.1"])


ALGORITHMS_OF_A_USER = """
from dataclasses import dataclass
import math
from copfl.algorithms import FedAvg

@dataclass(frozen=True)
class Part:
    x: float = 1.0

@dataclass(frozen=True)
class FedShrink(FedAvg):
    keep: float = 0.5

class FedPlain(FedAvg):
    keep: float = 0.5
"""


def test_only_what_can_be_an_algorithm_is_listed(here: Path) -> None:
    (here / "mine_algos.py").write_text(ALGORITHMS_OF_A_USER)
    with pytest.raises(UsageError, match=r'did you mean "FedShrink"\? Known: FedPlain, FedShrink$'):
        complete({"algorithm": {"name": "mine_algos:FedShrnk"}}, code="mine_algos")
    for name in ("mine_algos", "mine_algos.py", "./mine_algos.py"):
        advice = (
            "is a module of this folder; write mine_algos:Part, mine_algos:FedShrink, mine_algos:FedPlain$"
        )
        with pytest.raises(UsageError, match=advice):
            complete({"algorithm": {"name": name}})
        with pytest.raises(UsageError, match=advice):
            entries_of([name])


def test_an_option_of_a_class_that_is_no_dataclass_is_told_the_decorator(here: Path) -> None:
    (here / "mine_plain.py").write_text(ALGORITHMS_OF_A_USER)
    named_code.name("mine_plain")
    assert (
        complete({"algorithm": {"name": "mine_plain:FedShrink", "keep": 0.1}}).algorithm.options["keep"]
        == 0.1
    )
    advice = (
        r"keep=0\.1 is no setting: FedPlain declares keep but is no dataclass: add @dataclass\(frozen=True\)"
    )
    with pytest.raises(UsageError, match=advice):
        complete({"algorithm": {"name": "mine_plain:FedPlain", "keep": 0.1}})


class Named(nn.Module):
    def __init__(self, classes: int, shape: tuple[int, ...], width: int = 3) -> None:
        super().__init__()
        self.given = (shape, classes, width)
        self.head = nn.Linear(2, 2)


class InOrder(nn.Module):
    def __init__(self, size: Any, outputs: int, width: int = 3) -> None:
        super().__init__()
        self.given = (size, outputs, width)
        self.head = nn.Linear(2, 2)


class Nothing(nn.Module):
    def __init__(self, width: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.given = (width, depth)
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("factory", "options", "given"),
    [
        (Named, {}, ((2,), 5, 3)),
        (Named, {"width": 8}, ((2,), 5, 8)),
        (InOrder, {}, ((2,), 5, 3)),
        (Nothing, {}, (3, 2)),
        (Nothing, {"depth": 4}, (3, 4)),
    ],
)
def test_a_factory_gets_the_shape_and_the_classes_if_it_takes_them(
    factory: Any, options: dict[str, Any], given: tuple[Any, ...]
) -> None:
    model: Any = user_code.model_of(factory, (2,), 5, 0, options)
    assert model.given == given


def test_a_factory_s_weights_follow_from_the_seed_alone() -> None:
    first, second, other = (user_code.model_of(Nothing, (2,), 5, seed, {}) for seed in (1, 1, 2))
    before = torch.get_rng_state()
    user_code.model_of(Nothing, (2,), 5, 3, {})
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(next(first.parameters()), next(second.parameters()))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_a_module_is_taken_as_it_is() -> None:
    model = nn.Linear(2, 2)
    assert user_code.model_of(model, (2,), 2, 0, {}) is model


def test_what_is_no_model_is_said() -> None:
    def broken() -> nn.Module:
        raise KeyError("width")

    with pytest.raises(UsageError, match=r"making it for samples of shape .* raised KeyError: 'width'"):
        user_code.model_of(broken, (2,), 2, 0, {})
    with pytest.raises(UsageError, match=r'"m:f" gave dict; a model is a torch nn.Module'):
        user_code.model_of(dict, (2,), 2, 0, {}, "m:f")
    with pytest.raises(UsageError, match=r'"m:x" is int; a model is an nn.Module, or a function'):
        user_code.model_of(3, (2,), 2, 0, {}, "m:x")


def torch_set(count: int) -> TensorDataset:
    return TensorDataset(torch.from_numpy(X[:count]), torch.from_numpy(Y[:count]))


@pytest.mark.parametrize(
    ("value", "train", "test"),
    [
        (torch_set(20), 16, 4),
        ((torch_set(20), torch_set(6)), 14, 6),  # the copies of test samples are left out of training
        ([torch_set(20), torch_set(10)], 24, 6),  # two clients
        ((X, Y), 16, 4),
        ((torch.from_numpy(X), torch.from_numpy(Y)), 16, 4),
        ((X, Y, X[:6], Y[:6]), 14, 6),
        (((X, Y), (X[:6], Y[:6])), 14, 6),
        ({"x": X, "y": Y}, 16, 4),
        ({"x": X, "y": Y, "x_test": X[:6], "y_test": Y[:6], "classes": ["a", "b"]}, 14, 6),
    ],
)
def test_data_of_one_s_own_may_be_torch_datasets_or_arrays(value: Any, train: int, test: int) -> None:
    found = user_code.as_dataset(value)
    assert (len(found.train), len(found.test)) == (train, test)
    assert user_code.as_dataset(found) is found


@pytest.mark.parametrize("value", [3, None, "digits", (X,), (X, Y, X), X, [], (torch_set(20), 3)])
def test_what_is_no_data_says_what_is(value: Any) -> None:
    with pytest.raises(UsageError, match=r"data of your own is a pandas DataFrame, .* not "):
        user_code.as_dataset(value)


def test_an_array_nobody_knows_is_named() -> None:
    with pytest.raises(UsageError, match='no array "labels"'):
        user_code.as_dataset({"x": X, "labels": Y})


def test_a_loader_gets_the_data_folder_and_its_options(tmp_path: Path) -> None:
    def load(data_dir: Path, count: int = 20) -> tuple[Any, Any]:
        assert data_dir == tmp_path
        return X[:count], Y[:count]

    found = user_code.dataset_of(load, tmp_path, {"count": 10}, "mine:load")
    assert (found.name, len(found.train) + len(found.test)) == ("load", 10)
    assert isinstance(user_code.dataset_of(lambda: (X, Y), None, {}, "mine:f"), Dataset)
    assert len(user_code.dataset_of(torch_set(20), None, {}, "mine:data").train) == 16
    with pytest.raises(UsageError, match='"mine:data" is no function, so it has no option "count"'):
        user_code.dataset_of(torch_set(20), None, {"count": 3}, "mine:data")


def test_a_loader_that_fails_says_where() -> None:
    def load() -> None:
        raise FileNotFoundError("photos.bin")

    with pytest.raises(
        UsageError, match=r'data "mine:load": loading it raised FileNotFoundError: photos.bin \(.*py'
    ):
        user_code.dataset_of(load, None, {}, "mine:load")

    def odd() -> None:
        raise DataError("too few")

    with pytest.raises(DataError, match="too few"):
        user_code.dataset_of(odd, None, {}, "mine:odd")


def test_a_list_is_one_data_set_per_client() -> None:
    found = user_code.as_dataset(
        [(X, Y), TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), {"x": X, "y": Y}]
    )
    assert found.natural
    assert found.groups == ("0", "1", "2")
    assert found.train.group is not None
    assert np.bincount(found.train.group).tolist() == [16, 16, 16]
    result = copfl.run("fedavg", [(X, Y)] * 3, model="mlp", rounds=1, engine="sequential")
    assert result.accuracy.shape == (1, 3)


def test_every_kind_may_be_ones_own(package: Path) -> None:
    run = complete(EVERYTHING, code="mypackage.algos")
    result = copfl.run(run, out=package / "run", code="mypackage.algos")
    algorithm = result.experiment.algorithm
    assert type(algorithm).__name__ == "Tight"
    assert algorithm.grip == 3.0  # type: ignore[attr-defined]
    inner = algorithm.algorithm  # type: ignore[attr-defined]
    assert (type(inner).__name__, inner.part.strength) == ("FedMine", 0.7)
    assert (type(inner.optimizer).__name__, inner.optimizer.factor, inner.optimizer.lr) == ("Slow", 0.1, 0.2)
    assert result.experiment.federation.partition.scheme == "every_other"
    assert result.primary.name == "hits"
    assert result.experiment.task.module.body[1].out_features == 5  # type: ignore[index, union-attr]
    with pytest.raises(UsageError, match=r"add --code mypackage.algos .*sha256 \w{64}.*\(the same\)"):
        copfl.resume(package / "run", rounds=2)
    again = copfl.resume(package / "run", rounds=2, code="mypackage.algos")  # from run.toml alone
    assert again.records[:1] == result.records


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("kind", [kind for kind in EVERYTHING if kind not in ("run", "task")])
def test_a_typo_in_its_name_or_options_is_a_setting_error(kind: str) -> None:
    table = EVERYTHING[kind]
    module, _, name = table["name"].partition(":")
    with pytest.raises(UsageError, match=rf'in {module} "{name}x"; did you mean "{name}"'):
        complete({**EVERYTHING, kind: {**table, "name": f"{table['name']}x"}}, code=module)
    if kind != "data":  # a function that loads data is called with its options
        with pytest.raises(SettingError, match=rf"{kind}\.wrong=1 is no setting; allowed are"):
            complete({**EVERYTHING, kind: {**table, "wrong": 1}}, code=module)


@pytest.mark.parametrize(
    ("line", "row"), [("mypackage", "mypackage.algos:FedMine"), ("mine", "mine:FedTanh")]
)
def test_the_lines_of_the_contributors_guide_compare(
    package: Path, capsys: Capture, line: str, row: str
) -> None:
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    (command,) = re.findall(rf"^(?:> )?(copfl compare -a {line}\b.*)$", guide, re.MULTILINE)
    (package / "mine.py").write_text(re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)[0])
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


@pytest.mark.job
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
    assert {row.label for row in choice.ranking} >= {"FedMine", "local"}


@pytest.mark.usefixtures("package")
def test_an_entry_point_adds_a_name(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    entry = metadata.EntryPoint("fedmine", "mypackage.algos:FedMine", "copfl.algorithms")
    other = metadata.EntryPoint("gone", "nowhere.algos:Gone", "copfl.algorithms")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry, other])
    named_code.plugins.cache_clear()
    try:
        table = {"algorithm": {"name": "fedmine", "strength": 0.2}}
        with pytest.raises(UsageError, match=r"is mypackage.algos:FedMine, .* add --code mypackage.algos"):
            complete(table)  # of a file, which names no code
        assert complete(table, code="mypackage.algos").algorithm.options["strength"] == 0.2
        listed = called(capsys, "list", "algorithms").out
        assert "fedmine" in listed
        assert "gone" in listed
        small = ("-a", "fedmine", *TINY, "-r", "1", "--out", "of-entry-point")
        assert called(capsys, "run", *small).code == 0  # the line names it
        assert "nowhere" not in sys.modules
        with pytest.raises(UsageError, match="there is no module nowhere"):
            copfl.run("gone", rounds=1)
    finally:
        named_code.plugins.cache_clear()


@pytest.mark.usefixtures("package")
def test_a_partition_gets_only_what_it_takes() -> None:
    named_code.name("mypackage.algos")
    dataset = user_code.as_dataset((np.zeros((20, 6), np.float32), np.arange(20) % 2))
    made = components.build("partition", complete(EVERYTHING).partition, dataset=dataset, clients=2, seed=0)
    assert made.clients == 2
