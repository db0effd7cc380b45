"""copfl's command line, called inside the test process or started as a subprocess."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import typer.main

# Cached: typer builds the command from its annotations at every call.
typer.main.get_command = functools.cache(typer.main.get_command)

# Two clients, a few hundred parameters, and few steps.
TINY = ("--model", "mlp", "--clients", "2", "--set", "model.width=4", "--batch-size", "64")


class Answer(NamedTuple):
    """The output of a command and its exit code."""

    code: int
    out: str
    err: str


def called(capsys: pytest.CaptureFixture[str], *words: object) -> Answer:
    """The answer to `copfl WORDS`, called in this process."""
    from copfl.cli import main as cli

    capsys.readouterr()
    with mock.patch.object(sys, "argv", ["copfl", *map(str, words)]), pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    assert isinstance(exit.value.code, int)
    return Answer(exit.value.code, out, err)


def command(*words: object) -> list[str]:
    """The command line that starts `copfl WORDS` as a subprocess."""
    return [sys.executable, "-m", "copfl", *map(str, words)]


def environment() -> dict[str, str]:
    """This process's environment without variables that affect the output."""
    return {
        k: v for k, v in os.environ.items() if k not in ("COPFL_DATA", "COLUMNS", "FORCE_COLOR", "NO_COLOR")
    }


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def found(folder: Path) -> dict[str, bytes]:
    """The results of a run, which an equal run must reproduce: its records and its models."""
    return {
        name: content
        for name, content in files(folder).items()
        if name.startswith(("rounds.jsonl", "models/"))
    }
