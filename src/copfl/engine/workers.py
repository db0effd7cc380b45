"""Worker processes for local updates on a CPU, one thread each; one process has the same results.

The parts of a round do not depend on the workers. Each part goes to the next free worker, the records are in
shared memory or in one file, and the totals are added in the order of the parts.
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
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # registers how multiprocessing shares tensors between processes
from torch import Tensor

from copfl.core import tree
from copfl.core.evaluation import EvalModels
from copfl.engine.autotune import keep_freed_memory
from copfl.engine.mapping import ChunkResult
from copfl.engine.rounds import Ids, State, Store
from copfl.engine.simulate import Simulation, train_part
from copfl.engine.store import shared
from copfl.errors import RunError, UsageError, how_to_set

LARGE = 2**20  # bytes from which a tensor goes through shared memory: a pipe copies it five times


class _Shared(NamedTuple):
    """The values that every worker has."""

    simulation: Simulation
    store: Store
    server: Any  # in shared memory, overwritten before each round


class Workers:
    """Processes that live as long as the `with` block, or as the process that started them."""

    def __init__(self, simulation: Simulation, state: State, count: int) -> None:
        state.clients.share()
        server = tree.each(shared, state.server)
        self.shared = _Shared(simulation, state.clients, server)
        self.buffers = [_buffer(4 * simulation.task.initial.nbytes) for _ in range(count)]  # for some vectors
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def __enter__(self) -> Workers:
        spawn = multiprocessing.get_context("spawn")
        try:
            for buffer in self.buffers:
                here, there = spawn.Pipe()
                process = spawn.Process(target=_work, args=(there, buffer, self.shared), daemon=True)
                with there:
                    process.start()
                self.processes.append(process)
                self.pipes.append(here)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.__exit__()
            raise UsageError(
                f"this run cannot be sent to worker processes ({error}); define its model and algorithm "
                "in a module, at the top level, or use workers=1"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes, also during a local update."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.terminate()
            process.join()
            process.close()
        self.pipes, self.processes = [], []

    def local_updates(self, state: State, chunks: Sequence[Ids], models: EvalModels) -> Iterator[ChunkResult]:
        """The result of each part's local updates, in the order of the parts."""
        tree.each(lambda old, new: old.copy_(new), self.shared.server, state.server)
        waiting = list(enumerate(chunks))[::-1]
        busy: dict[Connection, int] = {}
        results: dict[int, ChunkResult] = {}
        for n in range(len(chunks)):
            while n not in results:
                for pipe in self.pipes:
                    if pipe not in busy and waiting:
                        busy[pipe], chunk = waiting.pop()
                        with contextlib.suppress(BrokenPipeError):  # reading reports a worker that died
                            pipe.send((state.round, chunk, models))
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    results[busy.pop(ready)] = self._receive(ready)
            yield results.pop(n)

    def _receive(self, pipe: Connection) -> ChunkResult:
        worker = self.pipes.index(pipe)
        try:
            result = _unpickled(pipe.recv_bytes(), self.buffers[worker])
        except (EOFError, OSError) as error:
            process = self.processes[worker]
            process.join(5)
            raise RunError(
                f"a worker process ended (exit code {process.exitcode}), perhaps out of memory; "
                f"resumed, the run continues from the last checkpoint, with {how_to_set('run.workers', 1)} if need be"
            ) from error
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, ChunkResult)
        return result


def _work(pipe: Connection, buffer: Tensor, shared: _Shared) -> None:
    """The main loop of a worker: local updates on request, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is left to the process that started this one
    torch.set_num_threads(1)
    keep_freed_memory()
    with contextlib.suppress(EOFError, OSError):
        while True:
            round, ids, models = pipe.recv()
            pipe.send_bytes(_pickled(_result(shared, round, ids, models), buffer))


def _result(shared: _Shared, round: int, ids: Ids, models: EvalModels) -> ChunkResult | Exception:
    """The result of the part's local updates, or the error."""
    try:
        return train_part(shared.simulation, shared.server, shared.store, round, ids, models)
    except Exception as error:
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))  # not every exception can be pickled
            return error
        return RunError(f"a worker process failed: {traceback.format_exc(limit=-1)}")


# -- results: small tensors through the pipe, large ones through the buffer, read before the next request ---


def _buffer(size: int) -> Tensor:
    """This many bytes in shared memory."""
    storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, whose memory pickle can pass out of band."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor) and not value.requires_grad and value.dtype != torch.bfloat16:
            return torch.from_numpy, (value.contiguous().numpy(),)
        return NotImplemented


def _pickled(result: object, buffer: Tensor) -> bytes:
    """The result as bytes; large tensors are written to the buffer as long as they fit."""
    space, sizes, content = memoryview(buffer.numpy()), list[int](), io.BytesIO()  # type: ignore[arg-type]

    def in_band(array: pickle.PickleBuffer) -> bool:
        raw, start = array.raw(), sum(sizes)
        if raw.nbytes < LARGE or start + raw.nbytes > len(space):
            return True
        space[start : start + raw.nbytes] = raw
        sizes.append(raw.nbytes)
        return False

    _Pickler(content, pickle.HIGHEST_PROTOCOL, buffer_callback=in_band).dump(result)
    return pickle.dumps((sizes, content.getvalue()))


def _unpickled(message: bytes, buffer: Tensor) -> object:
    """The result that `_pickled` wrote, in new memory."""
    sizes, content = pickle.loads(message)
    pieces = torch.split(buffer[: sum(sizes)], sizes)
    return pickle.loads(content, buffers=[piece.clone().numpy() for piece in pieces])
