"""The daemon of MPS is started, tried and ended, and nothing is set where that fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from copfl.engine import mps
from copfl.telling import heard

DAEMON = """#!/bin/sh
echo "$0 $*" "$(cat)" "$CUDA_MPS_PIPE_DIRECTORY" >> {log}
exit {code}
"""


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> Path:
    """A control program that writes how it is called to the file."""
    log = folder / "calls"
    program = folder / mps.CONTROL
    program.write_text(DAEMON.format(log=log, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(mps, "USUAL", folder / "none")
    monkeypatch.delenv(mps.PIPES, raising=False)
    return log


def test_new_processes_get_the_folder_of_a_daemon_that_ends_with_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, said = installed(tmp_path, monkeypatch), list[str]()
    monkeypatch.setattr(mps, "TRIAL", "pass")
    with heard(said.append), mps.shared() as environment:
        pipes = Path(environment[mps.PIPES])
        assert pipes.is_dir()
        assert mps.PIPES not in os.environ  # this process may use the GPU without it already
    assert not pipes.exists()
    first, last = log.read_text().splitlines()
    assert "-d" in first.split()
    assert last.split()[1:] == ["quit", str(pipes)]
    assert said == ["the runs share the GPU through MPS"]


def test_a_gpu_that_does_not_open_through_it_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, said = installed(tmp_path, monkeypatch), list[str]()
    monkeypatch.setattr(mps, "TRIAL", "raise SystemExit('error 805')")
    with heard(said.append), mps.shared() as environment:
        assert environment == {}
    assert "quit" in log.read_text().splitlines()[-1]  # the daemon does not stay
    assert said == ["the runs take turns on the GPU: MPS does not work here (error 805)"]


def test_a_daemon_that_does_not_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, code=1)
    said = list[str]()
    with heard(said.append), mps.shared() as environment:
        assert environment == {}
    assert said == ["the runs take turns on the GPU: MPS does not work here (exit 1)"]


def test_an_mps_that_is_on_is_used_and_left_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = installed(tmp_path, monkeypatch)
    monkeypatch.setenv(mps.PIPES, str(tmp_path))
    (tmp_path / "control").touch()
    with mps.shared() as environment:
        assert environment == {}
    assert not log.exists()


def test_without_the_program_nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "USUAL", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(mps.PIPES, raising=False)
    with mps.shared() as environment:
        assert environment == {}
