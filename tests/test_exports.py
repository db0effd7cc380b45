from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import copfl
from copfl.algorithms import ALGORITHMS
from copfl.data import arrays
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets import datasets, hub, image_folder, published
from copfl.data.tables import tables
from copfl.engine import simulate
from copfl.experiment.export import formats
from copfl.settings.checking import parameters_of

ROOT = Path(__file__).parents[1]


def packages() -> list[str]:
    return ["copfl", *(m.name for m in pkgutil.walk_packages(copfl.__path__, "copfl.") if m.ispkg)]


@pytest.mark.parametrize("package", packages())
def test_every_exported_name_exists(package: str) -> None:
    if package == "copfl.federation":
        pytest.importorskip("flwr", reason="Flower is an extra")
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(module, name) is not None, f"{package}.{name}"


def test_the_front_door_lists_what_it_hands_out() -> None:
    for name in copfl.__all__:
        assert name in dir(copfl) or getattr(copfl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        copfl.nonsense  # noqa: B018


READERS = (arrays.npz_file, image_folder.image_folder, published.leaf, tables.table_file, hub.hub_dataset)
CALLED = {  # in a program
    **{name: getattr(copfl, name) for name in copfl.__all__ if callable(getattr(copfl, name))},
    **{
        f.__name__: f for f in (*READERS, arrays.from_arrays, arrays.from_torch, arrays.joined, formats.write)
    },
    **{f"datasets.{f.__name__}": f for f in (datasets.load, datasets.check)},
    **{f"simulate.{f.__name__}": f for f in (simulate.begin, simulate.simulate)},
    **{f"partition {name}": scheme for name, scheme in SCHEMES.items()},
    **{f"dataset {name}": reader for name, reader in datasets.DATASETS.items()},
}


def methods_of(called: Any) -> dict[str, Any]:
    """The public methods that a class defines itself."""
    members = vars(called).items() if inspect.isclass(called) else ()
    plain = {name: getattr(member, "__func__", member) for name, member in members if name[0] != "_"}
    return {name: member for name, member in plain.items() if inspect.isfunction(member)}


@pytest.mark.parametrize("name", CALLED)
def test_the_documentation_names_every_argument(name: str) -> None:
    called = CALLED[name]
    for function in (called, *methods_of(called).values()):
        bases = inspect.getmro(function)[:-1] if inspect.isclass(function) else (function,)
        documentation = " ".join(inspect.getdoc(base) or "" for base in bases)  # of inherited fields, too
        arguments = set(inspect.signature(function).parameters) - {"self", "cls"}
        if name.startswith("dataset "):
            arguments -= {"data_dir"}  # of all of them, see `datasets.load`
        missing = sorted(a for a in arguments if not re.search(rf"\b{a}\b", documentation))
        assert not missing, f"{function.__qualname__}: {', '.join(missing)}"


def test_every_algorithm_is_registered_under_its_files_name() -> None:
    files = {m.name for m in pkgutil.iter_modules(importlib.import_module("copfl.algorithms").__path__)}
    assert ALGORITHMS.keys() == files
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.__module__ == f"copfl.algorithms.{name}"
        assert algorithm.__name__.lower() == name.replace("_", "")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_a_default_and_a_type_for_every_field(name: str) -> None:
    ALGORITHMS[name]()
    for parameter in inspect.signature(ALGORITHMS[name]).parameters.values():
        assert parameter.default is not inspect.Parameter.empty, f"{name}({parameter.name}) has no default"
        assert parameter.annotation is not inspect.Parameter.empty, f"{name}({parameter.name}) has no type"
    assert ALGORITHMS[name].__doc__, f"{name} does not say what it is"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_page(name: str) -> None:
    page = ROOT / "docs" / "algorithms" / f"{name}.md"
    assert page.is_file(), f"write docs/algorithms/{name}.md"
    for parameter in parameters_of(ALGORITHMS[name]):
        assert f"`{parameter}" in page.read_text(encoding="utf-8"), (
            f"{page.name} does not explain {parameter}"
        )


def test_the_list_of_algorithms_is_complete() -> None:
    text = (ROOT / "docs" / "algorithms" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\[`(\w+)`\]\(\w+\.md\)", text)) == ALGORITHMS.keys()


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"fedavg", "fedper", "local"}))
def test_a_departure_from_the_paper_is_marked_in_the_code(name: str) -> None:
    """The three others have none."""
    assert "Paper:" in (ROOT / "src" / "copfl" / "algorithms" / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_lines_that_a_page_quotes_are_there(name: str) -> None:
    page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    files = re.findall(r"`(?:src/copfl/)?((?:algorithms|parts)/\w+\.py)`", page)
    assert f"algorithms/{name}.py" in files
    code = [
        (ROOT / "src" / "copfl" / file).read_text(encoding="utf-8") for file in ("parts/averaging.py", *files)
    ]
    words = set(re.findall(r"\w+", "".join(code)))
    rows = re.findall(
        r"^\| [^|]+ \| (.*) \|$", page.partition("our line |\n")[2].partition("\n\n")[0], re.MULTILINE
    )
    assert rows or "the line that matters" in page or name == "local", (
        "no table of the paper's steps and our lines"
    )
    for row in rows:
        for span in re.findall(r"`([^`]+)`", row):
            gone = [word for word in re.findall(r"[A-Za-z_]\w*", span) if word not in words]
            assert not gone, f"{name}.md quotes `{span}`, but {', '.join(gone)} is not in {', '.join(files)}"
