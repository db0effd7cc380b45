"""Where the clients' states are between their turns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.task import Task
from copfl.errors import RunError

NEVER = -1  # the place of a client that never took part


class Store(Protocol):
    """The clients' records, handed out and taken back as trees of rows."""

    def rows(self, ids: Tensor) -> Any:
        """These clients' records; do not write into them."""

    def put(self, ids: Tensor, records: Any) -> None:
        """Takes these clients' new records."""

    def saved(self) -> Any:
        """A tree for the checkpoint, from which `restore` finds every record as it is now."""

    def settled(self) -> None:
        """The checkpoint with the tree of the last `saved` is on disk: what it does not need may be written over."""

    def restore(self, saved: Any) -> None:
        """Goes back to when `saved` gave this tree."""

    def share(self) -> None:
        """Lets other processes that are sent this store read and write the same records."""


class MemoryStore:
    """All clients' records in one tree of rows on the device."""

    def __init__(self, algorithm: AnyAlgorithm, task: Task, clients: int) -> None:
        self.all = tree.each(torch.clone, tree.repeat(algorithm.client_init(task), clients))
        self.clients = clients
        self.shared = False

    def rows(self, ids: Tensor) -> Any:
        return self.all if len(ids) == self.clients else tree.rows(self.all, ids)

    def put(self, ids: Tensor, records: Any) -> None:
        if len(ids) == self.clients and not self.shared:  # ids are sorted and distinct: this is everybody
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
    """All clients' records in one file, of which only what is asked for is in memory.

    Every client has two places in the file. A record is written to the one that the last checkpoint does not need, so
    a run that is killed finds the other as the checkpoint left it. A client that never took part takes no space.
    """

    def __init__(self, algorithm: AnyAlgorithm, task: Task, clients: int, path: Path) -> None:
        self.path, self.device = path, task.device
        self.first = tree.each(lambda t: t.cpu(), algorithm.client_init(task))
        self.now = torch.full((clients,), NEVER, dtype=torch.int8)  # the place of each client's record
        self.needed = self.now.clone()  # the same, as of the last checkpoint
        self.size = sum(_sizes(self.first))
        self.length = -(-self.size // 4096) * 4096  # whole pages, so that no two records share one
        self._file: int | None = None

    @property
    def file(self) -> int:
        if self._file is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
            except OSError as error:
                raise self._trouble(error) from error
        return self._file

    def _trouble(self, error: OSError) -> RunError:
        return RunError(
            f"cannot keep the clients' states in {self.path}: {error.strerror or error}; free some space or name "
            "another folder, then run again, or `copfl resume` if rounds are done"
        )

    def rows(self, ids: Tensor) -> Any:
        found = [self._read(int(n)) for n in ids]
        return tree.each(lambda t: t.to(self.device), tree.stack(found))

    def _read(self, n: int) -> Any:
        place = int(self.now[n])
        if place == NEVER:
            return self.first
        content = bytearray(self.size)
        done = 0
        while done < len(content):
            got = os.preadv(self.file, [memoryview(content)[done:]], (2 * n + place) * self.length + done)
            if got == 0:
                raise RunError(f"{self.path} is cut short; restore it from a copy, or start the run again")
            done += got
        return _unpacked(content, self.first)

    def put(self, ids: Tensor, records: Any) -> None:
        records = tree.each(lambda t: t.cpu(), records)
        for row, n in enumerate(ids.tolist()):
            place = 1 if int(self.needed[n]) == 0 else 0
            content = memoryview(_packed(tree.row(records, row)))
            start = (2 * n + place) * self.length
            try:
                while content:
                    written = os.pwrite(self.file, content, start)
                    content, start = content[written:], start + written
            except OSError as error:
                raise self._trouble(error) from error
            self.now[n] = place

    def saved(self) -> Any:
        try:
            os.fsync(self.file)
        except OSError as error:
            raise self._trouble(error) from error
        return {"place": self.now}

    def settled(self) -> None:
        self.needed.copy_(self.now)

    def restore(self, saved: Any) -> None:
        self.now.copy_(saved["place"])
        self.settled()

    def share(self) -> None:
        self.now, self.needed = shared(self.now), shared(self.needed)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}  # the file is opened again where the store is sent

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def shared(t: Tensor) -> Tensor:
    """A copy that other processes which are sent it read and write too."""
    copy: Tensor = t.contiguous().clone().share_memory_()  # type: ignore[no-untyped-call]
    return copy


def _packed(record: Any) -> bytes:
    """A client's record as bytes, a mask's entries as bits."""
    return b"".join(_bytes(t) for t in tree.leaves(record))


def _bytes(t: Tensor) -> bytes:
    if t.dtype == torch.bool:
        return np.packbits(t.numpy().reshape(-1)).tobytes()
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _sizes(like: Any) -> list[int]:
    """How many bytes each tensor of a record takes."""
    return [
        -(-t.numel() // 8) if t.dtype == torch.bool else t.numel() * t.element_size()
        for t in tree.leaves(like)
    ]


def _unpacked(content: bytearray, like: Any) -> Any:
    """What `_packed` packed."""
    tensors, start = [], 0
    for t, size in zip(tree.leaves(like), _sizes(like), strict=True):
        part = np.frombuffer(content, np.uint8, size, start)
        if t.dtype == torch.bool:
            found = torch.from_numpy(np.unpackbits(part, count=t.numel()).view(bool))
        else:
            found = torch.from_numpy(part.copy()).view(t.dtype)
        tensors.append(found.view(t.shape))
        start += size
    return tree.rebuild(like, tensors)
