"""Every benchmark loads with the library as it is now; what it measures takes too long for a test."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OTHERS = {"baseline_pfl": "pfl"}  # the library that a benchmark compares with


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_it_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem in OTHERS:
        pytest.importorskip(OTHERS[path.stem])
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    assert runpy.run_path(str(path), run_name="loaded")["__doc__"]
