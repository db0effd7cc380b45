"""Which of a node's data are the same: by hashes of their samples, whatever file, run or server is named.

Data are the same if they have a sample in common. What a node has given away of its data is remembered under
their names: the members of secure sums (`secure_memory`), and the epsilon that was spent (`ledger`).
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data.samples import Inputs
from copfl.data.tables.columns import Table, row_texts
from copfl.errors import RunError, raised_as
from copfl.files import write_bytes

Hashes = NDArray[np.uint64]


def row_hashes(x: Inputs) -> Hashes:
    """A hash of each sample, as it is on disk: no setting of a run changes it."""
    columns = [x[name] for name in sorted(x)] if isinstance(x, dict) else [x]
    rows = map(b"\0".join, zip(*map(_contents, columns), strict=True))
    digests = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def _contents(column: NDArray[Any]) -> list[bytes]:
    """The bytes of each row of an array, or its text."""
    if column.dtype.kind in "UO":
        return [str(value).encode() for value in column]
    content, size = column.tobytes(), column[:1].nbytes
    return [content[row * size : (row + 1) * size] for row in range(len(column))]


def hashes_of(x: Inputs) -> Hashes:
    """The hashes of the samples, each once and in order."""
    return np.unique(row_hashes(x))


def cells_of(table: Table) -> Inputs:
    """The rows of a table, which are known by all their cells."""
    return {name: cells.astype(str) for name, cells in row_texts(table).items()}


class KnownData:
    """The hashes of the data that a node has used, a file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def name_of(self, samples: Hashes) -> str:
        """The name by which the samples are known; their hashes are stored."""
        content = samples.astype("<u8").tobytes()
        name = hashlib.sha256(content).hexdigest()[:32]
        if not self.has(name):
            write_bytes(self._path(name), content, private=True)
        return name

    def overlap(self, samples: str, others: str) -> bool:
        """Whether the data of both names have a sample in common."""
        return samples == others or bool(np.isin(self.hashes(samples), self.hashes(others)).any())

    def has(self, name: str) -> bool:
        """Whether there are hashes of this name."""
        return self._path(name).exists()

    def hashes(self, name: str) -> Hashes:
        """Those of the data of this name."""
        damaged = "the hashes of samples cannot be used: {}; restore the node's state-dir"
        with raised_as(RunError, damaged, OSError, ValueError):
            return np.frombuffer(self._path(name).read_bytes(), "<u8").astype(np.uint64)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.samples"
