"""The processes of runs are copies of one that has imported torch, on a GPU too, and has not touched the GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from copfl.comparison.jobs import copies

pytestmark = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="the system has none"
)


def _told(answers: multiprocessing.SimpleQueue[tuple[int, bool, bool, list[str]]]) -> None:
    """What a process finds as it begins: before anything of it has run."""
    torch = sys.modules.get("torch")
    maps = Path("/proc/self/maps")
    loaded: Iterable[str] = maps.read_text().splitlines() if maps.exists() else ()
    drivers = [line for line in loaded if "libcuda.so" in line]
    answers.put((os.getppid(), torch is not None, torch is not None and torch.cuda.is_initialized(), drivers))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_has_torch_and_no_driver_of_a_gpu(device: str) -> None:
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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[forkserver.ForkServer]:
    """What starts the process that is copied, as if none was started before; it imports nothing."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([])
    monkeypatch.setattr(forkserver, "ensure_running", server.ensure_running)
    yield server
    if server._forkserver_pid is not None:  # type: ignore[attr-defined]
        os.close(server._forkserver_alive_fd)  # type: ignore[attr-defined]
        os.waitpid(server._forkserver_pid, 0)  # type: ignore[attr-defined]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not show it")
def test_signals_of_a_terminal_and_modules_of_the_current_folder_do_not_reach_the_process_that_is_copied(
    server: forkserver.ForkServer,
) -> None:
    assert copies.process_context("cpu").get_start_method() == "forkserver"
    about = Path("/proc") / str(server._forkserver_pid)  # type: ignore[attr-defined]
    while not (environment := (about / "environ").read_bytes()):  # it has not begun
        time.sleep(0.01)
    status = dict(
        line.split(":\t", 1) for line in (about / "status").read_text().splitlines() if ":\t" in line
    )
    blocked = {number for number in signal.Signals if int(status["SigBlk"], 16) & 1 << number - 1}
    assert blocked >= {signal.SIGINT, signal.SIGHUP}
    assert b"PYTHONSAFEPATH=1" in environment.split(b"\0")
    assert not blocked & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_ctrl_c_that_waited_finds_the_environment_as_it_was() -> None:
    with pytest.raises(KeyboardInterrupt), copies._undisturbed():
        signal.raise_signal(signal.SIGINT)
    assert copies.SAFE_PATH not in os.environ


def test_where_no_socket_can_be_made_each_process_imports_torch_by_itself(
    server: forkserver.ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a socket has about 100 bytes, and a cluster's folders of temporary files longer paths."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("multiprocessing.util.get_temp_dir", lambda: str(folder))
    assert copies.process_context("cpu").get_start_method() == "spawn"
    assert server._forkserver_pid is None  # type: ignore[attr-defined]
