"""Types and style are tests like the others, so that one command covers everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["ruff", "format", "--check", "--diff", "."], "ruff format"),
        (["ruff", "check", "."], "ruff check --fix"),
        (["mypy"], "mypy, and mend what it names"),
    ],
    ids=["ruff format", "ruff check", "mypy"],
)
def test_style(words: list[str], remedy: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run: {remedy}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
