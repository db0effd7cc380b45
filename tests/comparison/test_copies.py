"""The processes of runs are copies of one that has imported torch, on a GPU too, and has not touched the GPU."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from copfl.comparison import copies


def _told(answers: multiprocessing.SimpleQueue[tuple[int, bool, bool, list[str]]]) -> None:
    """What a process finds as it begins: before anything of it has run."""
    torch = sys.modules.get("torch")
    maps = Path("/proc/self/maps")
    loaded: Iterable[str] = maps.read_text().splitlines() if maps.exists() else ()
    drivers = [line for line in loaded if "libcuda.so" in line]
    answers.put((os.getppid(), torch is not None, torch is not None and torch.cuda.is_initialized(), drivers))


@pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="the system has none")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_has_torch_and_no_driver_of_a_gpu(device: str) -> None:
    copies.import_early(device)
    context = copies.process_context(device)
    answers = context.SimpleQueue()
    process = context.Process(target=_told, args=(answers,))  # type: ignore[attr-defined]
    process.start()
    parent, has_torch, is_initialized, drivers = answers.get()
    process.join()
    assert parent != os.getpid()  # the process that is copied
    assert has_torch
    assert not is_initialized
    assert drivers == []
