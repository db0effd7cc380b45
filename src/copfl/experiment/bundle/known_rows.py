"""Which rows a run trained on: in its folder, for its owner, and recognised when a model is measured on them.

`rows.csv` says of each row of the owner's file what it was for. `fingerprints.npz` has hashes of the samples, from
which somebody who guesses a row can tell that it was there. So both stay in the folder of the run, where the data's
owner has everything else: no bundle has them, and `copfl export` does not copy them.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from copfl import files, foreign
from copfl.data.clients.federation import FederatedData
from copfl.data.copies import Hashes, mixed, row_hashes
from copfl.data.reading import npz_arrays
from copfl.data.samples import Inputs, each
from copfl.errors import DataError, RunError, raised_as
from copfl.tables import Table, as_csv

MODELS = "models"  # the folder of the bundles, in that of the run
ROWS, FINGERPRINTS = "rows.csv", "fingerprints.npz"
TRAIN, TEST, VALIDATION = "train", "test", "validation"


def write(folder: Path, federation: FederatedData, names: list[str]) -> None:
    """Writes both files.

    Args:
        folder: Of the run.
        federation: Its data.
        names: Of the clients.
    """
    data, partition = federation.dataset, federation.partition
    trained = np.unique(np.concatenate(partition.train))
    of_rows, of_samples = _hashes(data.train.x, data.train.y)
    content = io.BytesIO()
    np.savez(content, rows=np.unique(of_rows[trained]), samples=np.unique(of_samples[trained]))
    files.write_bytes(folder / FINGERPRINTS, content.getvalue(), private=True)
    tested = data.test if partition.test_from == "test" else data.train
    if data.train.row is None or tested.row is None:
        return
    lines: list[tuple[int, str, str]] = []
    sides = ((TRAIN, data.train.row, partition.train), (TEST, tested.row, partition.test))
    for use, row, of_clients in (*sides, (VALIDATION, data.train.row, partition.validation)):
        for name, chosen in zip(names, of_clients, strict=bool(of_clients)):
            lines += [(number + 1, name, use) for number in row[chosen].tolist()]
    cells = [[str(number), name, use] for number, name, use in sorted(set(lines))]
    files.write_bytes(
        folder / ROWS, as_csv(Table("", ["row", "client", "use"], cells)).encode(), private=True
    )


def about(bundle: Path | None, x: Inputs, y: NDArray[np.generic] | None) -> str:
    """What is said of samples that a model is measured on, if it was trained on some of them; "" if not.

    Args:
        bundle: The folder of the model; None: it has none.
        x: Inputs of the network.
        y: Their targets, as the metrics take them; None: not known.
    """
    if bundle is None or bundle.parent.name != MODELS or not (bundle.parent.parent / FINGERPRINTS).is_file():
        return ""
    folder = bundle.parent.parent
    damaged = f"{folder / FINGERPRINTS} is damaged ({{}}); delete it, or restore it from a copy"
    with raised_as(RunError, damaged, DataError, *foreign.DAMAGE):
        arrays = npz_arrays(foreign.inside(folder, folder / FINGERPRINTS))
        rows, samples = arrays["rows"], arrays["samples"]
    found = np.isin(_hashes(x, None)[0], rows) if y is None else np.isin(_hashes(x, y)[1], samples)
    if not found.any():
        return ""
    which = f"; {folder / ROWS} says which rows are test rows" if (folder / ROWS).is_file() else ""
    return (
        f"{int(found.sum()):,} of {len(found):,} samples are among those that this model was trained on, or equal "
        f"one of them: it is better on them than on new ones{which}"
    )


def _hashes(x: Inputs, y: NDArray[np.generic] | None) -> tuple[Hashes, Hashes]:
    """A number for each input, and one for each input with its target."""
    inputs = row_hashes(each(_plain, x))
    targets = np.zeros((len(inputs), 1), np.float32) if y is None else np.asarray(y, np.float32)
    both = mixed(inputs + mixed(row_hashes(targets.reshape(len(inputs), -1))))
    return inputs, both


def _plain(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Numbers of one type, in which files and arrays agree."""
    return array.astype(np.float32) if array.dtype.kind == "f" else array
