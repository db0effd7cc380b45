"""A run of trees that is killed ten times and resumed is the uninterrupted one, byte for byte."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.algorithms import Trees

KILLS, EVERY = 10, 1  # rounds after which a process is killed


def run(out: Path, on_round: Any = None) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    data = {"x": x, "y": np.digitize(x[:, 0] + x[:, 1], [-0.5, 0.5]), "kind": "classification"}
    how = Trees(own=2, rows=0.8, columns=0.7, least=3, own_penalty=0.5)
    settings: dict[str, Any] = {
        "model": "trees", "model_options": {"trees": 10, "depth": 3}, "clients": 4, "engine": "vmap",
        "checkpoint_every": 1, "rivals": False, "local_baseline": False, "on_round": on_round,
    }  # fmt: skip
    if (out / "run.toml").is_file():
        copfl.resume(out, algorithm=how, data=data, on_round=on_round)
    else:
        copfl.run(how, data, out=out, **settings)


def killed(out: Path) -> bool:
    """Whether a process that goes on with the run was killed before its end."""
    pid = os.fork()
    if not pid:
        seen: list[int] = []

        def count(*_: Any) -> None:
            seen.append(0)
            if len(seen) > EVERY:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            run(out, count)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def contents(out: Path) -> dict[str, bytes]:
    files = [out / "rounds.jsonl", *sorted((out / "models").rglob("*.safetensors"))]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


@pytest.mark.job
def test_ten_kills_change_no_byte(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    kills = 0
    while killed(tmp_path / "killed"):
        kills += 1
    assert kills >= KILLS
    whole = contents(tmp_path / "whole")
    assert len(whole) > 4
    assert contents(tmp_path / "killed") == whole
