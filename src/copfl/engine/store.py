"""The clients' records between their local updates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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
        self.size = sum(_sizes(self.initial))
        self.length = -(-self.size // 4096) * 4096  # whole pages, so that no two records share one
        self._file: int | None = None

    @property
    def file(self) -> int:
        if self._file is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
            except OSError as error:
                raise self._error(error) from error
        return self._file

    def _error(self, error: OSError) -> RunError:
        return RunError(
            f"cannot store the clients' records in {self.path}: {error.strerror or error}; free some space "
            "or name another folder, then run again, or `copfl resume` if rounds are done"
        )

    def rows(self, ids: Tensor) -> Any:
        records = [self._read(int(n)) for n in ids]
        return tree.each(lambda t: t.to(self.device), tree.stack(records))

    def _read(self, n: int) -> Any:
        slot = int(self.now[n])
        if slot == NEVER:
            return self.initial
        content = bytearray(self.size)
        start, done = (2 * n + slot) * self.length, 0
        while done < len(content):
            count = os.preadv(self.file, [memoryview(content)[done:]], start + done)
            if count == 0:
                raise RunError(f"{self.path} is truncated; restore it from a copy, or start the run again")
            done += count
        return _from_bytes(content, self.initial)

    def put(self, ids: Tensor, records: Any) -> None:
        records = tree.each(lambda t: t.cpu(), records)
        for row, n in enumerate(ids.tolist()):
            slot = 1 if int(self.needed[n]) == 0 else 0
            content = memoryview(b"".join(map(_to_bytes, tree.leaves(tree.row(records, row)))))
            start = (2 * n + slot) * self.length
            try:
                while content:
                    written = os.pwrite(self.file, content, start)
                    content, start = content[written:], start + written
            except OSError as error:
                raise self._error(error) from error
            self.now[n] = slot

    def saved(self) -> Any:
        try:
            os.fsync(self.file)
        except OSError as error:
            raise self._error(error) from error
        return {"place": self.now}

    def settled(self) -> None:
        self.needed.copy_(self.now)

    def restore(self, saved: Any) -> None:
        self.now.copy_(saved["place"])
        self.settled()

    def share(self) -> None:
        self.now, self.needed = shared(self.now), shared(self.needed)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}  # the receiver opens the file again

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def shared(t: Tensor) -> Tensor:
    """A copy in shared memory."""
    copy: Tensor = t.contiguous().clone().share_memory_()  # type: ignore[no-untyped-call]
    return copy


def _to_bytes(t: Tensor) -> bytes:
    """A tensor as bytes, a mask's entries as bits."""
    content = packed(t) if t.dtype == torch.bool else t.contiguous().reshape(-1).view(torch.uint8)
    return content.numpy().tobytes()


def _sizes(like: Any) -> list[int]:
    """The bytes of each tensor of a record."""
    return [-(-t.numel() // 8) if t.dtype == torch.bool else t.nbytes for t in tree.leaves(like)]


def _from_bytes(content: bytearray, like: Any) -> Any:
    """The record from the bytes of its tensors."""
    tensors, start = [], 0
    for t, size in zip(tree.leaves(like), _sizes(like), strict=True):
        part = np.frombuffer(content, np.uint8, size, start)
        is_mask = t.dtype == torch.bool
        tensors.append(
            unpacked(part, t) if is_mask else torch.from_numpy(part.copy()).view(t.dtype).view(t.shape)
        )
        start += size
    return tree.rebuild(like, tensors)
