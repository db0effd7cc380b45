"""Worker processes that train clients side by side on a CPU, one thread each; the results are those of one process.

Which clients go together in one program is the engine's choice and does not depend on the workers; each such part goes
to whoever is free, the records are where all can reach them, and the totals are added in the order of the parts.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing  # teaches multiprocessing to share tensors between processes
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import EvalModels
from copfl.engine.autotune import keep_freed_memory, mkldnn_enabled, set_mkldnn
from copfl.engine.mapping import Done
from copfl.engine.simulate import Ids, Setting, State, together_of
from copfl.engine.store import Store, shared
from copfl.errors import RunError, UsageError

LARGE = 2**20  # bytes from which a tensor goes through shared memory: a pipe copies it five times


class Workers:
    """Processes that live as long as the `with` block, or as the process that started them."""

    def __init__(self, setting: Setting, state: State, count: int) -> None:
        state.clients.share()
        self.server = tree.each(shared, state.server)
        self.trays = [_tray(4 * setting.task.initial.nbytes) for _ in range(count)]  # space for some vectors
        self.setting, self.store = setting, state.clients
        self.processes: list[Any] = []
        self.lines: list[Connection] = []

    def __enter__(self) -> Workers:
        spawn = multiprocessing.get_context("spawn")
        given = (self.setting, self.store, self.server, mkldnn_enabled())
        try:
            for tray in self.trays:
                here, there = spawn.Pipe()
                process = spawn.Process(target=_work, args=(there, tray, *given), daemon=True)
                with there:
                    process.start()
                self.processes.append(process)
                self.lines.append(here)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise UsageError(
                f"this run cannot be sent to worker processes ({error}); define its model and algorithm in a module, "
                "at the top level, or use workers=1"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes: a line that is closed tells them, and who is in the middle of a turn is stopped."""
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.terminate()
            process.join()
            process.close()
        self.lines, self.processes = [], []

    def turns(self, state: State, parts: Sequence[Ids], look: EvalModels) -> Iterator[Done]:
        """What the turns of each part leave, in the order of the parts."""
        tree.each(lambda mine, new: mine.copy_(new), self.server, state.server)
        waiting = list(enumerate(parts))[::-1]
        busy: dict[Connection, int] = {}
        done: dict[int, Done] = {}
        for place in range(len(parts)):
            while place not in done:
                for line in self.lines:
                    if line not in busy and waiting:
                        busy[line], part = waiting.pop()
                        with contextlib.suppress(
                            BrokenPipeError
                        ):  # a worker that died is noticed as its line is read
                            line.send((state.round, part, look))
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    done[busy.pop(ready)] = self._answer(ready)
            yield done.pop(place)

    def _answer(self, line: Connection) -> Done:
        worker = self.lines.index(line)
        try:
            answer = _unpacked(line.recv_bytes(), self.trays[worker])
        except (EOFError, OSError) as error:
            process = self.processes[worker]
            process.join(5)
            raise RunError(
                f"a worker process ended (exit code {process.exitcode}), perhaps for want of memory; "
                "`copfl resume` goes on from the last checkpoint, with --set run.workers=1 if need be"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Done)
        return answer


def _work(line: Connection, tray: Tensor, setting: Setting, store: Store, server: Any, mkldnn: bool) -> None:
    """A worker's life: turns as they are asked for, until the line is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    torch.set_num_threads(1)
    set_mkldnn(mkldnn)
    keep_freed_memory()
    with contextlib.suppress(EOFError, OSError):
        while True:
            round, part, look = line.recv()
            line.send_bytes(_turns(setting, store, server, round, part, look, tray))


def _turns(
    setting: Setting, store: Store, server: Any, round: int, part: Ids, look: EvalModels, tray: Tensor
) -> bytes:
    """What the turns leave, or what went wrong, as bytes and what is on the tray."""
    try:
        return _packed(together_of(setting, server, store, round, part, look), tray)
    except Exception as error:
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))  # not every exception survives the journey
            return _packed(error, tray)
        return _packed(RunError(f"a worker process failed: {traceback.format_exc(limit=-1)}"), tray)


# -- answers: what is small through the pipe, large tensors on the worker's tray, which is read before its next turn --


def _tray(size: int) -> Tensor:
    """So many bytes that other processes which are sent them read and write too."""
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))  # type: ignore[no-untyped-call]


class _Pickler(pickle.Pickler):
    """Takes tensors for arrays: pickle can leave the memory of those to somebody else."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor) and not value.requires_grad and value.dtype != torch.bfloat16:
            return torch.from_numpy, (value.contiguous().numpy(),)
        return NotImplemented


def _packed(answer: object, tray: Tensor) -> bytes:
    """The answer as bytes; large tensors are put on the tray as long as there is room."""
    space, sizes, content = memoryview(tray.numpy()), list[int](), io.BytesIO()  # type: ignore[arg-type]

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw, start = buffer.raw(), sum(sizes)
        if raw.nbytes < LARGE or start + raw.nbytes > len(space):
            return True
        space[start : start + raw.nbytes] = raw
        sizes.append(raw.nbytes)
        return False

    _Pickler(content, pickle.HIGHEST_PROTOCOL, buffer_callback=stays).dump(answer)
    return pickle.dumps((sizes, content.getvalue()))


def _unpacked(message: bytes, tray: Tensor) -> object:
    """What `_packed` packed, in memory of its own."""
    sizes, content = pickle.loads(message)
    parts = torch.split(tray[: sum(sizes)], sizes)
    return pickle.loads(content, buffers=[part.clone().numpy() for part in parts])
