"""The clients' records between their local updates.

`simulate` keeps one: in memory, in a file, shared with worker processes or divided among ranks.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.task import Task
from copfl.errors import RunError
from copfl.wire import packed, unpacked

NEVER = -1  # the slot of a client that has never taken part


class MemoryStore:
    """All clients' records in one tree of rows on the device."""

    def __init__(self, algorithm: AnyAlgorithm, task: Task, clients: int) -> None:
        self.all = tree.each(torch.clone, tree.repeat(algorithm.client_init(task), clients))
        self.clients = clients
        self.shared = False

    def rows(self, ids: Tensor) -> Any:
        return self.all if len(ids) == self.clients else tree.rows(self.all, ids)

    def put(self, ids: Tensor, records: Any) -> None:
        if len(ids) == self.clients and not self.shared:  # ids are sorted and distinct: these are all clients
            self.all = records
        else:
            tree.put_rows(self.all, ids, records)

    def saved(self) -> Any:
        return self.all

    def settled(self) -> None:
        pass

    def restore(self, saved: Any) -> None:
        self.all = saved

    def share(self) -> None:
        self.all = tree.each(shared, self.all)
        self.shared = True


class DiskStore:
    """All clients' records in one file; only the requested ones are in memory.

    Every client has two slots in the file. A record is written to the slot that the last checkpoint does not
    need, so that a killed run can resume from the other one. A client that has never taken part takes no
    space.
    """

    def __init__(self, algorithm: AnyAlgorithm, task: Task, clients: int, path: Path) -> None:
        self.path, self.device = path, task.device
        self.initial = tree.each(lambda t: t.cpu(), algorithm.client_init(task))
        self.now = torch.full((clients,), NEVER, dtype=torch.int8)  # the slot of each client's record
        self.needed = self.now.clone()  # the same, as of the last checkpoint
        self.sizes = [_to_bytes(t).nbytes for t in tree.leaves(self.initial)]
        self.size = sum(self.sizes)
        self.length = -(-self.size // 4096) * 4096  # whole pages, so that no two records share one

    @contextmanager
    def _file(self) -> Iterator[IO[bytes]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
            with open(handle, "r+b") as file:
                yield file
        except OSError as error:
            raise RunError(
                f"cannot store the clients' records in {self.path}: {error.strerror or error}; free some "
                "space or name another folder, then run again, or resume the run if rounds are done"
            ) from error

    def rows(self, ids: Tensor) -> Any:
        with self._file() as file:
            records = [self._read(file, n) for n in ids.tolist()]
        return tree.each(lambda t: t.to(self.device), tree.stack(records))

    def _read(self, file: IO[bytes], n: int) -> Any:
        slot = int(self.now[n])
        if slot == NEVER:
            return self.initial
        file.seek((2 * n + slot) * self.length)
        content = np.fromfile(file, np.uint8, self.size)
        if len(content) < self.size:
            raise RunError(f"{self.path} is truncated; restore it from a copy, or start the run again")
        arrays = np.split(content, np.cumsum(self.sizes)[:-1])
        return tree.rebuild(self.initial, list(map(_from_bytes, arrays, tree.leaves(self.initial))))

    def put(self, ids: Tensor, records: Any) -> None:
        records = tree.each(lambda t: t.cpu(), records)
        with self._file() as file:
            for row, n in enumerate(ids.tolist()):
                slot = 1 if int(self.needed[n]) == 0 else 0
                file.seek((2 * n + slot) * self.length)
                for t in tree.leaves(tree.row(records, row)):
                    file.write(_to_bytes(t))
                file.flush()
                self.now[n] = slot

    def saved(self) -> Any:
        with self._file() as file:
            os.fsync(file.fileno())
        return {"place": self.now}

    def settled(self) -> None:
        self.needed.copy_(self.now)

    def restore(self, saved: Any) -> None:
        self.now.copy_(saved["place"])
        self.settled()

    def share(self) -> None:
        self.now, self.needed = shared(self.now), shared(self.needed)


def shared(t: Tensor) -> Tensor:
    """A copy in shared memory."""
    copy: Tensor = t.contiguous().clone().share_memory_()  # type: ignore[no-untyped-call]
    return copy


def _to_bytes(t: Tensor) -> memoryview:
    """A tensor as bytes, a mask's entries as bits."""
    content = packed(t) if t.dtype == torch.bool else t.contiguous().reshape(-1).view(torch.uint8)
    return content.numpy().data


def _from_bytes(content: np.ndarray[Any, np.dtype[np.uint8]], like: Tensor) -> Tensor:
    if like.dtype == torch.bool:
        return unpacked(content, like)
    if not len(content):  # torch views nothing of another dtype
        return like.clone()
    return torch.from_numpy(content.copy()).view(like.dtype).view(like.shape)
