"""Which of a node's data are the same: by hashes of their samples, whatever file, run or server is named.

Data are the same if they have a sample in common. What a node has given away of its data is remembered under
their names: the members of secure sums (`secure_memory`), and the epsilon that was spent (`ledger`).
"""

import hashlib
from pathlib import Path

import numpy as np

from copfl.data.copies import Hashes, row_hashes
from copfl.data.samples import Inputs
from copfl.data.tables.columns import DataTable, row_texts
from copfl.errors import RunError, raised_as
from copfl.files import write_bytes


def hashes_of(x: Inputs) -> Hashes:
    """The hashes of the samples as they are on disk, which no setting of a run changes: each once, in order."""
    return np.unique(row_hashes(x))


def cells_of(table: DataTable) -> Inputs:
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
        """Whether the data of both names have a sample in common.

        Args:
            samples: The name of some data.
            others: The name of other data.
        """
        return samples == others or bool(np.isin(self.hashes(samples), self.hashes(others)).any())

    def has(self, name: str) -> bool:
        """Whether there are hashes of this name."""
        return self._path(name).exists()

    def hashes(self, name: str) -> Hashes:
        """The hashes of the data of this name."""
        damaged = "the hashes of samples cannot be used: {}; restore the node's state-dir"
        with raised_as(RunError, damaged, OSError, ValueError):
            return np.frombuffer(self._path(name).read_bytes(), "<u8").astype(np.uint64)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.samples"
