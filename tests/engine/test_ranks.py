from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from copfl.engine import ranks
from copfl.errors import UsageError
from tests.commands import TINY, called, command, environment, files, found
from tests.slow import slow

SETTINGS = (*TINY, "--clients", "7", "--set", "run.chunk=2", "--set", "run.checkpoint_every=2", "--quiet")


def results(folder: Path) -> dict[str, bytes]:
    """All that must be the same for any number of processes."""
    names = ("run.toml", "gains.json", "checkpoint/state.safetensors")
    return {**found(folder), **{name: files(folder).get(name, b"") for name in names}}


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    texts = {name: str(n) for name, n in {**numbers, "MASTER_PORT": port}.items()}
    return {**texts, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.job
def test_two_ranks_give_the_bytes_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Partial participation: some clients are trained by another rank than before. Ditto has a state.
    words = ("run", "--algorithm", "ditto", "--participation", "0.7", "--rounds", "4", *SETTINGS)
    assert called(capsys, *words, "--workers", "1", "--out", tmp_path / "one").code == 0
    port, line = free_port(), (*words, "--out", tmp_path / "two")
    other = subprocess.Popen(
        command(*line), env={**environment(), **variables(1, 2, port)}, stderr=subprocess.PIPE, text=True
    )
    try:
        for name, value in variables(0, 2, port).items():
            monkeypatch.setenv(name, value)
        assert called(capsys, *line) == (0, "", "")
        assert other.communicate(timeout=60)[1] == ""
        assert other.returncode == 0
    finally:
        other.kill()
    assert not ranks.joined()
    assert results(tmp_path / "two") == results(tmp_path / "one")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ((2, "memory", "cpu"), "leave out workers=2"),
        ((1, "disk", "cpu"), "leave out store=disk"),
        ((1, "memory", "cuda:1"), "use --device cuda"),
    ],
)
def test_what_needs_one_process_is_refused(
    setting: tuple[int, str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        ranks.check(*setting)


def test_other_commands_are_refused_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, shown in enumerate(("start `copfl compare` without it", "")):
        for name, value in variables(rank, 2, 1).items():
            monkeypatch.setenv(name, value)
        answer = called(capsys, "compare")
        assert answer.code == 2
        assert answer.err.strip().endswith(shown)


def torchrun(count: int, *words: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    line += ["-m", "copfl", *map(str, words)]
    return subprocess.Popen(line, env=environment(), stderr=subprocess.PIPE, text=True)


@slow
@pytest.mark.parametrize("algorithm", ["copfl", "ditto"])
def test_any_number_of_ranks_gives_the_same_bytes(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--algorithm", algorithm, "--rounds", "3", *SETTINGS)
    assert called(capsys, *words, "--workers", "1", "--out", tmp_path / "plain").code == 0
    for count in (1, 2, 3, 4):
        run = torchrun(count, *words, "--out", tmp_path / str(count))
        _, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        assert results(tmp_path / str(count)) == results(tmp_path / "plain")


@slow
@pytest.mark.parametrize(("killed", "later"), [(0, 3), (1, 1), (2, 2)])
def test_a_run_that_loses_a_rank_resumes_on_another_number(
    killed: int, later: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--algorithm", "ditto", "--rounds", "150", *SETTINGS, "--set", "run.checkpoint_every=7")
    assert called(capsys, *words, "--workers", "1", "--out", tmp_path / "plain").code == 0
    run, rounds = torchrun(3, *words, "--out", tmp_path / "lost"), tmp_path / "lost" / "rounds.jsonl"
    end = time.monotonic() + 240
    while not (rounds.exists() and rounds.read_bytes().count(b"\n") > 9):
        assert time.monotonic() < end
        time.sleep(0.1)
    os.kill(process_of(run.pid, killed), signal.SIGKILL)
    start = time.monotonic()
    _, err = run.communicate(timeout=60)
    assert time.monotonic() - start < 30
    assert run.returncode == 1
    assert "copfl resume" in err
    assert "(SIGKILL)" in err  # torchrun's own
    run = torchrun(later, "resume", tmp_path / "lost", "--quiet")
    _, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert results(tmp_path / "lost") == results(tmp_path / "plain")


def process_of(parent: int, rank: int) -> int:
    """The child process of torchrun that has this rank."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and f"\0RANK={rank}\0" in (entry / "environ").read_text():
                return int(entry.name)
    raise AssertionError(f"rank {rank} is not running")
