"""Types and style are tests like the others, so that one command covers everything."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src" / "copfl").rglob("*.py"))
MOST_LINES, LONGEST_LINE = 450, 110  # lines of one module; characters of one line
MOST_IN_ALL = 32_688  # lines of the package: lower it where code is removed
MOST_POSITIONAL, MOST_UNPACKED = 8, 4


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["ruff", "format", "--check", "--diff", "."], "ruff format"),
        (["ruff", "check", "."], "ruff check --fix"),
        pytest.param(["mypy"], "mypy, and fix what it names", marks=pytest.mark.long),
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


def test_modules_and_lines_are_short() -> None:
    modules = {str(path): path.read_text("utf-8").splitlines() for path in SOURCES}
    assert {name for name, lines in modules.items() if len(lines) > MOST_LINES} == set()
    assert sum(map(len, modules.values())) <= MOST_IN_ALL, "remove or share code, before the bound is raised"
    assert {
        name for name, lines in modules.items() if len(max(lines, key=len, default="")) > LONGEST_LINE
    } == set()


def is_triton(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a GPU kernel, whose pointers and sizes can only be passed one by one."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "copfl")))
def test_signatures_and_tuples_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_triton(node):
            names = [
                a.arg
                for a in (*node.args.posonlyargs, *node.args.args)
                if a.arg not in ("self", "cls", "ctx")
            ]
            assert len(names) <= MOST_POSITIONAL, (
                f"line {node.lineno}: {node.name} takes {len(names)} in order"
            )
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for target in node.targets:
                count = len(target.elts) if isinstance(target, ast.Tuple) else 0
                assert count <= MOST_UNPACKED, (
                    f"line {node.lineno}: {count} values out of one call; use a record"
                )
