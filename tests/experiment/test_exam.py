"""Every kind of data in every way: benchmarks/exam.py on a CPU, in searches of few rounds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slow import slow

PATH = Path(__file__).parents[2] / "benchmarks" / "exam.py"


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("exam", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exam = _loaded()


MARKS = {"classes": (), "images": (pytest.mark.job,), "texts": (pytest.mark.job,)}


# A CPU records no rounds, so two do where they are named. `pytest` has one kind, CI three, every night all of them.
@pytest.mark.parametrize(
    "name", [pytest.param(kind.name, marks=MARKS.get(kind.name, (slow,))) for kind in exam.kinds()]
)
def test_a_kind_of_data_in_every_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exam, "FEW", 2)
    cells = exam.examined(name, "cpu", list(exam.WAYS), most=3)
    assert len(cells) == len(exam.WAYS)
    assert [str(cell) for cell in cells if not cell.passed] == []
