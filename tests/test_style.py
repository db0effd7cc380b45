"""Types and style are tests like the others, so that one command covers everything."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["ruff", "format", "--check", "--diff", "."], "ruff format"),
        (["ruff", "check", "."], "ruff check --fix"),
        pytest.param(["mypy"], "mypy, and mend what it names", marks=pytest.mark.long),
    ],
    ids=["ruff format", "ruff check", "mypy"],
)
def test_style(words: list[str], remedy: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run: {remedy}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


def test_what_mypy_does_not_read_is_not_imported() -> None:
    """So that it knows as much of this code as if it had read everything."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]["overrides"]
    (skipped,) = (table["module"] for table in tables if table.get("follow_imports") == "skip")
    names = "|".join(re.escape(name.removesuffix(".*")) for name in skipped)
    for path in [
        path for folder in ("src", "tests", "benchmarks", "fuzz") for path in (ROOT / folder).rglob("*.py")
    ]:
        found = re.search(rf"^\s*(?:import|from) (?:{names})\b", path.read_text("utf-8"), re.MULTILINE)
        assert not found, (
            f"{path.relative_to(ROOT)} has {found[0].strip()!r}: let mypy read it (pyproject.toml)"
        )
