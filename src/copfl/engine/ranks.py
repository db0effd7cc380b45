"""One run over several processes that torchrun started, on the GPUs of one machine or of several.

Rank 0 has the round loop, and is the only one that reads and writes the run folder; the others train. The
parts of a round do not depend on the number of ranks. Each rank has a block of consecutive parts. It adds
their totals to the sum of the ranks before it and passes the sum on: the same additions in the same order as
in one process. A client's record stays with the rank that trained it last, until another one trains it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from copfl.core import tree
from copfl.core.algorithm import Metrics
from copfl.core.evaluation import EvalModels
from copfl.engine.mapping import ChunkResult
from copfl.engine.rounds import Ids, State
from copfl.engine.simulate import InProcess, Simulation
from copfl.errors import RunError, UsageError

T = TypeVar("T")
VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # that torchrun sets
PATIENCE = timedelta(days=7)  # a rank may train or write for long; one that ends is noticed at once
NOBODY = -1  # the rank of a client that has never been trained
STOP = "stop"  # what rank 0 announces where it fails between two commands


# -- the processes -----------------------------------------------------------------------------------------


class _Group:
    """What this process knows about its group, beside what torch knows."""

    nccl: Any = None  # for the tensors on GPUs, where every process has its own GPU
    busy = False  # whether the other ranks are in a command of rank 0
    joined = False


def started() -> int:
    """The number of processes that torchrun started together with this one; 0 if it did not."""
    return int(os.environ["WORLD_SIZE"]) if os.environ.keys() >= VARIABLES else 0


def follower() -> bool:
    """Whether this process was started as another rank than 0."""
    return bool(started()) and os.environ["RANK"] != "0"


def joined() -> bool:
    """Whether this process is in the group now; a group that the user's own program made does not count."""
    return _Group.joined


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Joins the other processes, if torchrun started this one; ends when rank 0 does."""
    if not started():
        yield
        return
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    dist.init_process_group("gloo", timeout=PATIENCE)
    own_devices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(own_devices, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus)
    # NCCL refuses two processes on one GPU; gloo sends from the memory of the host.
    _Group.nccl = dist.new_group(backend="nccl", timeout=PATIENCE) if all(own_devices) else None
    _Group.joined = True
    try:
        yield
    except BaseException:
        if dist.get_rank() == 0 and not _Group.busy:
            with contextlib.suppress(RunError):
                announce(STOP)
        raise
    announce("end")
    dist.destroy_process_group()
    _Group.joined = False


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """RunError in place of torch's error where the other process has ended."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RunError(
            f"rank {dist.get_rank()}: another process of this run has ended; its own message, or torchrun's, "
            "names the reason (SIGKILL is often a lack of memory). `copfl resume FOLDER` continues from the "
            "last checkpoint, with torchrun and any number of processes, or without"
        ) from error


@_connected()
def announce(value: Any = None) -> Any:
    """Rank 0's value, on every rank. Where it is STOP, the other ranks end."""
    values = [value]
    dist.broadcast_object_list(values, 0)
    if isinstance(values[0], str) and values[0] == STOP and dist.get_rank():
        raise SystemExit(0)  # rank 0 has printed why
    return values[0]


@contextlib.contextmanager
def _command(*command: Any) -> Iterator[None]:
    """Rank 0: all ranks are in this command."""
    _Group.busy = True
    announce(command)
    yield
    _Group.busy = False


# -- tensors between ranks ---------------------------------------------------------------------------------


def _bytes(t: Tensor) -> Tensor:
    """The content as a vector of bytes, in the memory that the group sends from."""
    flat = (t if _Group.nccl else t.cpu()).reshape(-1)
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _empty(t: Tensor) -> Tensor:
    """Memory for such a content."""
    return torch.empty(t.nbytes, dtype=torch.uint8, device=t.device if _Group.nccl else "cpu")


def _tensor(content: Tensor, like: Tensor) -> Tensor:
    return content.view(like.dtype).view(like.shape).to(like.device)


@_connected()
def _give(record: Any, to: int) -> None:
    for t in tree.leaves(record):
        dist.send(_bytes(t), to, group=_Group.nccl)


@_connected()
def _take(like: T, source: int) -> T:
    """The record that this rank gives, with the shapes and devices of `like`."""

    def received(t: Tensor) -> Tensor:
        content = _empty(t)
        dist.recv(content, source, group=_Group.nccl)
        return _tensor(content, t)

    return tree.each(received, like)


@_connected()
def _send(value: Any, to: int) -> None:
    """A tree of any shapes: the shapes, then the content."""
    dist.send_object_list([tree.each(lambda t: t.to("meta"), value)], to)
    _give(value, to)


@_connected()
def _receive(source: int, device: torch.device) -> Any:
    shapes: list[Any] = [None]
    dist.recv_object_list(shapes, source)
    return _take(tree.each(lambda t: torch.empty_like(t, device=device), shapes[0]), source)


@_connected()
def _broadcast(value: T) -> T:
    """Rank 0's tree, on every rank; the others give one of the same shapes."""

    def same(t: Tensor) -> Tensor:
        content = _empty(t) if dist.get_rank() else _bytes(t)
        dist.broadcast(content, 0, group=_Group.nccl)
        return _tensor(content, t) if dist.get_rank() else t

    return tree.each(same, value)


# -- the clients' records ----------------------------------------------------------------------------------


class RankStore:
    """The records of the clients that this rank trained last, and where those of the others are."""

    def __init__(self, simulation: Simulation) -> None:
        self.initial = simulation.algorithm.client_init(simulation.task)
        self.device = simulation.task.device
        self.own: dict[int, Any] = {}
        self.rank_of = np.full(simulation.federation.clients, NOBODY)  # the same on every rank

    def rows(self, ids: Tensor) -> Any:
        records = tree.stack([self.own.get(n, self.initial) for n in ids.tolist()])
        return tree.each(lambda t: t.to(self.device), records)

    def put(self, ids: Tensor, records: Any) -> None:
        for row, n in enumerate(ids.tolist()):
            self.own[n] = tree.each(torch.clone, tree.row(records, row))

    def move(self, blocks: Sequence[Ids]) -> None:
        """Every rank: the records of each block go to its rank, in the order of the clients."""
        here = dist.get_rank()
        for rank, block in enumerate(blocks):
            for n in block.tolist():
                source = int(self.rank_of[n])
                if source not in (rank, NOBODY):
                    if source == here:
                        _give(self._on_device(self.own.pop(n)), rank)
                    elif rank == here:
                        self.own[n] = _take(self.initial, source)
            self.rank_of[block] = rank

    def collect(self) -> Any:
        """Every rank: all records as one tree of rows in the host's memory of rank 0."""
        if dist.get_rank():
            for n in np.flatnonzero(self.rank_of == dist.get_rank()).tolist():
                _give(self._on_device(self.own[n]), 0)
            return None
        whole = tree.each(lambda t: t.cpu().clone(), tree.repeat(self.initial, len(self.rank_of)))
        for rank in range(dist.get_world_size()):
            for n in np.flatnonzero(self.rank_of == rank).tolist():
                record = _take(self.initial, rank) if rank else self.own[n]
                tree.each(lambda rows, t, n=n: rows[n].copy_(t), whole, record)
        return whole

    def _on_device(self, record: Any) -> Any:
        return tree.each(lambda t: t.to(self.device), record)

    # Rank 0, in the round loop:

    def saved(self) -> Any:
        with _command("collect") if (self.rank_of > 0).any() else contextlib.nullcontext():
            return self.collect()

    def settled(self) -> None:
        pass

    def restore(self, saved: Any) -> None:
        self.own = {n: tree.row(saved, n) for n in range(len(self.rank_of))}
        self.rank_of[:] = 0

    def share(self) -> None:
        raise NotImplementedError("the ranks have no memory in common")


# -- a round -----------------------------------------------------------------------------------------------


class _Training:
    """The local updates of one simulation on this rank."""

    def __init__(self, simulation: Simulation) -> None:
        self.device = simulation.task.device
        self.store = RankStore(simulation)
        self.here = InProcess(simulation)

    def round(self, state: State, chunks: Sequence[Ids], models: EvalModels) -> tuple[Any, list[Metrics]]:
        """Every rank: the total and the metrics of the parts on rank 0, on others what they add to it."""
        rank, ranks = dist.get_rank(), min(dist.get_world_size(), len(chunks))  # a rank without a part idles
        numbers = np.array_split(np.arange(len(chunks)), ranks)  # of the parts of each rank, one at least
        blocks = [
            np.concatenate(chunks[numbers_of_rank[0] : numbers_of_rank[-1] + 1])
            for numbers_of_rank in numbers
        ]
        self.store.move(blocks)
        if rank >= ranks:
            return None, []
        results = self.here.local_updates(state, [blocks[rank]], models)
        total: Any = None
        if rank:
            results = iter(list(results))  # before this rank waits for the sum of those before it
            total = _receive(rank - 1, self.device)
        metrics, dtypes = [], list[torch.dtype]()
        for result in results:
            dtypes = [t.dtype for t in tree.leaves(result.total)]
            total = tree.wide(result.total) if total is None else tree.add(total, result.total)
            metrics.append(result.metrics)
        if ranks > 1:
            _send(total, (rank + 1) % ranks)
        if rank:
            _send(tuple(metrics), 0)
            return None, []
        if ranks > 1:
            total = _receive(ranks - 1, self.device)
        for other in range(1, ranks):
            metrics += _receive(other, self.device)
        return tree.narrow(total, dtypes), metrics


class Ranks:
    """The executor of rank 0: all ranks train. The records are in its store, at the end all on rank 0."""

    def __init__(self, simulation: Simulation, state: State) -> None:
        self.training = _Training(simulation)
        if state.round:
            self.training.store.restore(tree.each(Tensor.cpu, state.clients.saved()))
        state.clients = self.training.store

    def __enter__(self) -> Ranks:
        announce(self.training.store.rank_of)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            store = self.training.store
            store.restore(store.saved())
            announce(None)

    def local_updates(self, state: State, chunks: Sequence[Ids], models: EvalModels) -> Iterator[ChunkResult]:
        """The metrics of each part; the first has the total of all."""
        with _command("train", state.round, chunks, models):
            state.server = _broadcast(state.server)
            total, metrics = self.training.round(state, chunks, models)
        for metrics_of_chunk in metrics:
            yield ChunkResult(None, total, metrics_of_chunk)
            total = None


def serve(simulation: Simulation) -> None:
    """The other ranks: local updates on request, until rank 0 ends the simulation."""
    training = _Training(simulation)
    server = simulation.algorithm.server_init(simulation.task, simulation.federation.clients)
    state = State(server, training.store, torch.empty(0))
    training.store.rank_of = announce()
    while (command := announce()) is not None:
        if command[0] == "collect":
            training.store.collect()
            continue
        _, state.round, chunks, models = command
        state.server = _broadcast(state.server)
        training.round(state, chunks, models)


def check(workers: int, store: str, device: str) -> None:
    """UsageError for settings that do not fit to a run over several processes.

    Args:
        workers: Processes of each rank.
        store: Where clients' records are kept.
        device: Where the run trains.
    """
    if workers > 1:
        raise UsageError(
            f"torchrun has started {started()} processes, and each trains by itself; leave out "
            f"workers={workers} and use --nproc-per-node=N for more of them"
        )
    if store == "disk":
        raise UsageError(
            "store=disk keeps the clients' states in one file, but processes of torchrun keep them in the "
            "memory of each; leave out store=disk, or run without torchrun and with --workers N"
        )
    if ":" in device and started() > 1:
        raise UsageError(
            f"device={device} names one GPU for {started()} processes; use --device cuda, and "
            "each process takes the GPU of its number"
        )
