"""Folders that PFLlib's scripts made: train/N.npz and test/N.npz are the samples of client N."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data import reading
from copfl.data.arrays import from_splits
from copfl.data.samples import Dataset
from copfl.errors import DataError
from copfl.tables import listed

ENTRY = "data"  # of a file: a dictionary of x and y, as an array of one Python object


def is_pfllib(location: Path) -> bool:
    """Whether a folder has train/N.npz."""
    return any(path.stem.isdecimal() and path.is_file() for path in (location / "train").glob("*.npz"))


def pfllib(location: Path, *, kind: str | None = None, augment: bool = False) -> Dataset:
    """A folder of PFLlib; clients, and what of theirs is train and test, are as they are there.

    Args:
        location: The folder with train/ and test/.
        kind: Of the targets, see `copfl.data.arrays.from_arrays`; None: inferred.
        augment: Whether training images get random crops and flips.
    """
    files = {split: _numbered(location / split) for split in ("train", "test")}
    if alone := sorted(files["train"].keys() ^ files["test"].keys()):
        lacks = "test" if alone[0] in files["train"] else "train"
        raise DataError(
            f"{location} lacks {lacks}/{alone[0]}.npz; each client has a file in train/ and in test/"
        )
    clients = sorted(files["train"])
    reading.require_room([path for paths in files.values() for path in paths.values()], location)
    splits = []
    for paths in files.values():
        parts = [_samples(paths[client]) for client in clients]
        shapes = {x.shape[1:]: client for client, (x, _) in zip(clients, parts, strict=True) if len(x)}
        if len(shapes) > 1:
            (one, first), (other, second) = list(shapes.items())[:2]
            raise DataError(
                f"a sample of client {first} is {list(one)}, and of client {second} {list(other)}; they must be alike"
            )
        group = np.repeat([str(client) for client in clients], [len(y) for _, y in parts])
        filled = [part for part in parts if len(part[0])] or parts
        splits.append((*(np.concatenate(arrays) for arrays in zip(*filled, strict=True)), group))
    options: dict[str, Any] = {
        "kind": kind,
        "augment": augment,
        "groups": [str(client) for client in clients],
    }
    return from_splits(splits, name=location.resolve().name, leave_out=False, **options)


def _numbered(folder: Path) -> dict[int, Path]:
    """The files of the clients by their number; pipes and devices are none."""
    files = [path for path in sorted(folder.glob("*.npz")) if path.stem.isdecimal() and path.is_file()]
    by_number = {int(path.stem): path for path in files}
    if twice := [path.name for path in files if by_number[int(path.stem)] != path]:
        raise DataError(f"{folder} has two files of one client, {twice[0]} among them; remove one")
    return by_number


def _samples(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """x and y of a client."""
    arrays = reading.pickled_npz(path, ENTRY)
    if missing := [name for name in ("x", "y") if name not in arrays]:
        has = listed([repr(name[:40]) for name in arrays], 8)
        raise DataError(f"{path} has no {missing[0]}; it has {has or 'nothing'}")
    x, y = arrays["x"], arrays["y"]
    if not x.ndim or not y.ndim or len(x) != len(y):
        raise DataError(f"{path} has x of the shape {list(x.shape)} and y of the shape {list(y.shape)}")
    return x, y
