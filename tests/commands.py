"""copfl's command line called inside the test process, and as a process of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import typer.main

typer.main.get_command = functools.cache(
    typer.main.get_command
)  # or it is made from its annotations at every call

TINY = (
    "--model",
    "mlp",
    "--clients",
    "2",
    "--set",
    "mlp.width=4",
)  # two clients and a few hundred parameters


class Answer(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def called(capsys: pytest.CaptureFixture[str], *words: object) -> Answer:
    """The answer to `copfl WORDS`, from this very process."""
    from copfl.cli import main as cli

    capsys.readouterr()
    with mock.patch.object(sys, "argv", ["copfl", *map(str, words)]), pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    assert isinstance(exit.value.code, int)
    return Answer(exit.value.code, out, err)


def command(*words: object) -> list[str]:
    """The command line that starts `copfl WORDS` as a process of its own."""
    return [sys.executable, "-m", "copfl", *map(str, words)]


def started(*words: object, cwd: Path) -> Answer:
    """The answer to `copfl WORDS`, from a process of its own."""
    done = subprocess.run(
        command(*words), cwd=cwd, capture_output=True, text=True, timeout=300, env=environment()
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def environment() -> dict[str, str]:
    """This process's environment, without what would change the answers."""
    return {
        k: v for k, v in os.environ.items() if k not in ("COPFL_DATA", "COLUMNS", "FORCE_COLOR", "NO_COLOR")
    }


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def found(folder: Path) -> dict[str, bytes]:
    """What a run found, and a run like it must find again: its records and its models."""
    return {
        name: content
        for name, content in files(folder).items()
        if name.startswith(("rounds.jsonl", "models/"))
    }
