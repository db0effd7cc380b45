"""Which modules may be imported: those that the command names, for as long as it lasts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import copfl
from copfl.errors import UsageError
from copfl.settings import named_code, user_code
from copfl.settings.named_code import UnnamedCode, modules_in
from copfl.settings.toml import Tables

OWN = "from dataclasses import dataclass\nfrom copfl.algorithms import FedAvg\n"
OWN += "@dataclass(frozen=True)\nclass FedMine(FedAvg):\n    pass\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a package whose import is noticed."""
    (tmp_path / "named_pkg").mkdir()
    (tmp_path / "named_pkg" / "__init__.py").write_text("")
    (tmp_path / "named_pkg" / "nets.py").write_text("answer = 42\n")
    (tmp_path / "named_algos.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("named_pkg", "named_pkg.nets", "named_algos"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("value", "modules"),
    [
        ("mymodule:Net", ["mymodule"]),
        ("auc, my.module:f,other:g", ["my.module", "other"]),
        ({"model": {"name": "a:B", "width": 3}, "task": {"metrics": ["c:d"]}}, ["a", "c"]),
        ("timm:resnet18", []),
        ("hf:folder", []),
        ("cnn", []),
        ("/data/a:b", []),
        (None, []),
        (3, []),
    ],
)
def test_what_is_typed_names_its_modules(value: object, modules: list[str]) -> None:
    assert modules_in(value) == modules


def test_a_name_lasts_as_long_as_its_scope(here: Path) -> None:
    with pytest.raises(UnnamedCode, match=r"add --code named_pkg\.nets "):
        user_code.attribute("model", "named_pkg.nets:answer")
    assert "named_pkg" not in sys.modules  # nor was its parent imported to find the file
    with named_code.scope():
        named_code.name("named_pkg.nets")
        assert user_code.attribute("model", "named_pkg.nets:answer") == 42
        with pytest.raises(UnnamedCode):  # its package is not named
            user_code.attribute("model", "named_pkg:nets")
    with pytest.raises(UnnamedCode):
        user_code.attribute("model", "named_pkg.nets:answer")  # though it is imported


def test_another_thread_has_named_nothing() -> None:
    seen: list[tuple[str, ...]] = []
    with named_code.scope():
        named_code.name("mymodule")
        thread = threading.Thread(target=lambda: seen.append(named_code.named()))
        thread.start()
        thread.join()
        assert named_code.named() == ("mymodule",)
    assert seen == [()]


@pytest.mark.parametrize("module", ["mine.py", "./mine", "a:b", "", "a..b", "a-b"])
def test_what_is_no_module_is_told(module: str) -> None:
    with named_code.scope(), pytest.raises(UsageError, match="is no module; name the module without"):
        named_code.name(module)


@pytest.mark.parametrize(
    "reference", ["os:system", "subprocess:run", "importlib.util:find_spec", "builtins:exec"]
)
def test_the_standard_library_is_refused_even_if_it_is_named(reference: str) -> None:
    with named_code.scope():
        named_code.name(reference.partition(":")[0])
        with pytest.raises(UnnamedCode, match="standard library"):
            user_code.attribute("model", reference)


def test_the_file_here_is_compared_with_that_of_the_training(here: Path) -> None:
    recorded = named_code.digests("named_pkg.nets:answer", "named_pkg.nets:other")
    assert recorded == f"named_pkg.nets={named_code.digest_of('named_pkg.nets')}"
    assert named_code.changed("named_pkg.nets:answer", recorded) == ""
    with pytest.raises(UnnamedCode, match=r"nets\.py, sha256 \w{64} \(the same\)$"):
        named_code.check("model", "named_pkg.nets:answer", recorded)
    (here / "named_pkg" / "nets.py").write_text("answer = 43\n")
    with pytest.raises(UnnamedCode, match=r"\(another one\)$"):
        named_code.check("model", "named_pkg.nets:answer", recorded)
    assert "is not as it was in training" in named_code.changed("named_pkg.nets:answer", recorded)
    with pytest.raises(UnnamedCode, match="is not known; here: "):
        named_code.check("model", "named_pkg.nets:answer", "named_pkg.nets=as-copfl-recommends")
    with pytest.raises(UnnamedCode, match=r"here there is no file of it$"):
        named_code.check("model", "named_gone:Net")


def test_what_a_module_imports_of_its_author_is_recorded_too(here: Path) -> None:
    package = here / "named_pkg"
    (package / "nets.py").write_text("import torch, json\nfrom . import layers\nfrom .deep import more\n")
    (package / "layers.py").write_text("import named_algos\nfrom named_pkg.nets import missing\n")
    (package / "deep").mkdir()
    (package / "deep" / "__init__.py").write_text("from ..layers import one\nfrom . import more\n")
    (package / "deep" / "more.py").write_text("this is no Python\n")
    expected = ["nets", "layers", "deep.more", "deep"]
    found = named_code.with_imported("named_pkg.nets")
    assert {*found} == {"named_algos", "named_pkg", *(f"named_pkg.{name}" for name in expected)}
    recorded = named_code.digests("named_pkg.nets:answer")
    assert named_code.changed("named_pkg.nets:answer", recorded) == ""
    (package / "layers.py").write_text("import named_algos\n")
    assert "named_pkg.layers is not as it was" in named_code.changed("named_pkg.nets:answer", recorded)
    now = named_code.digests("named_pkg.nets:answer")
    assert named_code.changed_modules(recorded, now) == ["named_pkg.layers"]
    assert named_code.with_imported("named_gone") == ["named_gone"]


def test_processes_of_a_comparison_may_import_what_the_call_names(here: Path) -> None:
    base: Tables = {"run": {"rounds": 1, "clients": 2}, "model": {"name": "mlp", "width": 4}}
    rows = ["named_algos:FedMine", "local"]
    found = copfl.compare(rows, seeds=[0], base_tables=base, out=here / "table", tune={}, jobs=2)
    assert [row.label for row in found.rows] == rows
    assert named_code.named() == ()
