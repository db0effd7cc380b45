"""Every kind of data in every way: benchmarks/exam.py on a CPU, in searches of few rounds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "exam.py"


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("exam", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exam = _loaded()


@pytest.mark.parametrize("name", [kind.name for kind in exam.kinds()])
def test_a_kind_of_data_in_every_way(name: str) -> None:
    cells = exam.examined(name, "cpu", list(exam.WAYS), exam.MOST)
    assert len(cells) == len(exam.WAYS)
    assert [str(cell) for cell in cells if not cell.passed] == []
