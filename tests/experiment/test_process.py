"""What a run does to its process ends with it, and importing copfl does nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import copfl
from copfl.errors import UsageError
from copfl.experiment.process import ENVIRONMENT, environment, importing
from tests.commands import environment as of_tests


def state() -> tuple[object, ...]:
    return (
        dict(os.environ),
        list(sys.path),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )


def test_importing_copfl_changes_nothing() -> None:
    look = "import os, sys; before = dict(os.environ), list(sys.path); import copfl\n"
    look += "assert (dict(os.environ), list(sys.path)) == before; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", look], check=True, env=of_tests())


def test_a_run_leaves_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_network.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    before = state()
    seen = []
    how = {
        "model": "my_network:net",
        "clients": 2,
        "rounds": 1,
        "threads": 2,
        "engine": "sequential",
    }
    copfl.run("fedavg", "digits", **how, on_round=lambda round, seconds: seen.append(state()))  # type: ignore[arg-type]
    assert state() == before
    inside = seen[0]
    assert inside[2] == 2
    assert str(tmp_path) in inside[1]  # type: ignore[operator]
    assert ENVIRONMENT.items() <= inside[0].items()  # type: ignore[attr-defined]
    with pytest.raises(UsageError):
        copfl.run("fedavg", "digits", threads=2, buffers="none")
    assert state() == before


def test_a_variable_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "5")
    with environment():
        assert os.environ["MIMALLOC_PURGE_DELAY"] == "5"
    assert os.environ["MIMALLOC_PURGE_DELAY"] == "5"


@pytest.mark.parametrize("was_on", [True, False])
def test_what_is_imported_is_not_searched_for_garbage(was_on: bool) -> None:
    if not was_on:
        gc.disable()
    try:
        with importing():
            made: list[object] = []
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
        assert not any(known is made for known in gc.get_objects())
        later: list[object] = []
        assert any(known is later for known in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable()
