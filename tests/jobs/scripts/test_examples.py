"""Every example does what it says; where it names a command, that too."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import copfl
from tests.commands import called

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "own_algorithm",
        "own_data",
        "ablation",
        "five_tasks",
        "visits",
    }


def test_the_visits_are_the_table_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = example("visits", monkeypatch).visits()
    sizes = Counter(row[1] for row in rows)
    assert sizes == {"Lindenhof": 320, "Hafen": 210, "Westpark": 120, "Nordring": 70}
    assert sum(row[7] == "" for row in rows) == 62
    assert rows[0] == [1018, "Lindenhof", "2024-12-21", 82, "m", "planned", 2, 12.2, 19, "yes"]


def test_own_algorithm_obeys_the_laws_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_algorithm.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("FedMix passes the contract; accuracy ")
    assert float(said.split()[-2]) > 50  # a guess is right in 33 %: three classes a client


def test_own_algorithm_without_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it: the example itself."""
    algorithm = example("own_algorithm", monkeypatch).FedMix(keep=0.25)
    copfl.check_algorithm(algorithm, rounds=2, batch=6, norm="none")


def test_own_data_learns_from_tables_texts_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    found = example("own_data", monkeypatch).main()
    assert found.keys() == {"wine", "texts", "digits"}
    assert min(found.values()) > 70  # a guess is right in 50 %: two classes a client


def test_own_data_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    words = ("run", "-d", "own_data:wine", "-m", "own_data:Net", "-n", "5", "-r", "1", "--json")
    answer = called(capsys, *words, "--out", tmp_path / "run")
    assert (answer.code, answer.err) == (0, "")
    assert '"rounds": 1' in answer.out


def test_the_ablation_has_a_row_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("ablation", monkeypatch)
    found = module.main(rounds=1, seeds=(0,))
    assert len(found.rows) == len(module.ROWS)
    assert found.reference == "copfl"
    assert "copfl score=none" in str(found)
