"""Models and data of one's own, by name and by value."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import copfl
from copfl.comparison.entries import entries_of
from copfl.data.samples import Dataset
from copfl.errors import DataError, UsageError
from copfl.settings import user_code
from copfl.settings.complete import complete

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20) % 2


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("mine")]:  # another test's
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


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
    assert user_code.attribute("model", "mine_single:Net.small") == 3
    assert user_code.attribute("model", "mine_package.nets:answer") == 42
    assert user_code.folder_of("mine_single:Net.small") == str(here)
    assert user_code.folder_of("mine_package.nets:answer") == str(here)
    assert user_code.folder_of("pytest:fixture") is None


def test_modules_of_a_named_folder_are_found_from_elsewhere(here: Path) -> None:
    (here / "code").mkdir()
    (here / "code" / "mine_there.py").write_text("answer = 7\n")
    assert user_code.attribute("model", "mine_there:answer", str(here / "code")) == 7


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
        ("\nclass :", "mine:Net", r"importing it raised SyntaxError: invalid syntax \(.*mine\.py, line 2\)"),
    ],
)
def test_what_cannot_be_imported_says_why(here: Path, text: str, reference: str, message: str) -> None:
    (here / "mine.py").write_text(text + "\n")
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
        complete({"algorithm": {"name": "mine_algos:FedShrnk"}})
    for name in ("mine_algos", "mine_algos.py", "./mine_algos.py"):
        advice = "is a module of this folder; write mine_algos:FedShrink, mine_algos:FedPlain$"
        with pytest.raises(UsageError, match=advice):
            complete({"algorithm": {"name": name}})
        with pytest.raises(UsageError, match=advice):
            entries_of([name])


def test_an_option_of_a_class_that_is_no_dataclass_is_told_the_decorator(here: Path) -> None:
    (here / "mine_plain.py").write_text(ALGORITHMS_OF_A_USER)
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
        ((torch_set(20), torch_set(6)), 20, 6),
        ([torch_set(20), torch_set(10)], 24, 6),  # two clients
        ((X, Y), 16, 4),
        ((torch.from_numpy(X), torch.from_numpy(Y)), 16, 4),
        ((X, Y, X[:6], Y[:6]), 20, 6),
        (((X, Y), (X[:6], Y[:6])), 20, 6),
        ({"x": X, "y": Y}, 16, 4),
        ({"x": X, "y": Y, "x_test": X[:6], "y_test": Y[:6], "classes": ["a", "b"]}, 20, 6),
    ],
)
def test_data_of_one_s_own_may_be_torch_datasets_or_arrays(value: Any, train: int, test: int) -> None:
    found = user_code.as_dataset(value)
    assert (len(found.train), len(found.test)) == (train, test)
    assert user_code.as_dataset(found) is found


@pytest.mark.parametrize("value", [3, None, "digits", (X,), (X, Y, X), X, [], (torch_set(20), 3)])
def test_what_is_no_data_says_what_is(value: Any) -> None:
    with pytest.raises(UsageError, match=r"data of your own is a copfl Dataset, .* not "):
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
