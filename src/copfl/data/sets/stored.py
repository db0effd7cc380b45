"""A data set as one file, so that a run on a program's own arrays can be used again without the program.

A run folder writes it where a program passed its data, and reads it when the run is resumed.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from copfl import foreign
from copfl.data import reading
from copfl.data.samples import KINDS, Dataset, Samples, by_name
from copfl.errors import DataError

FACTS = ("group", "unit", "time")  # of samples, which they may have
LARGEST_STORED = 512 * reading.MIB  # bytes of a data set
# Fields of the data set beside its samples, and the types of their values, in tuples those of the entries.
NAMES: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "classes": (str,),
    "groups": (str,),
    "mean": (int, float),
    "std": (int, float),
    "augment": bool,
    "note": str,
    "warnings": (str,),
    "kind": str,
    "groups_are_clients": bool,
    "origin": str,
}


def stored(dataset: Dataset) -> bytes | None:
    """The file's content; None where the arrays have more than LARGEST_STORED bytes."""
    arrays: dict[str, Any] = {}
    for side, samples in (("train", dataset.train), ("test", dataset.test)):
        arrays |= {f"{side}.x.{name}": array for name, array in by_name(samples.x).items()}
        arrays[f"{side}.y"] = samples.y
        facts = {name: getattr(samples, name) for name in FACTS}
        arrays |= {f"{side}.{name}": fact for name, fact in facts.items() if fact is not None}
    if sum(array.nbytes for array in arrays.values()) > LARGEST_STORED:
        return None
    about = {name: getattr(dataset, name) for name in NAMES} | {
        "single": not isinstance(dataset.train.x, dict)
    }
    file = io.BytesIO()
    np.savez(file, about=np.array(json.dumps(about)), **arrays)
    return file.getvalue()


def read_stored(path: Path) -> Dataset:
    """The data set of a file that `stored` made."""
    arrays: dict[str, Any] = reading.npz_arrays(path)
    try:
        about = foreign.json_of(str(arrays["about"]))
        splits = [_samples(arrays, side, about["single"]) for side in ("train", "test")]
        facts: dict[str, Any] = {name: _fact(about[name], kind) for name, kind in NAMES.items()}
        if facts["kind"] not in KINDS:
            raise ValueError("its targets are of no kind that copfl knows")
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); restore it, or pass the data again") from error
    return Dataset(train=splits[0], test=splits[1], **facts)


def _fact(value: Any, kind: type | tuple[type, ...]) -> Any:
    """The value of a field, if it has the type; TypeError if not."""
    if not isinstance(kind, tuple):
        if type(value) is not kind:
            raise TypeError("a field has a value of another type")
        return value
    if not isinstance(value, list) or not all(type(entry) in kind for entry in value):
        raise TypeError("a field is no list of such values")
    return tuple(value)


def _samples(arrays: dict[str, Any], side: str, single: bool) -> Samples:
    start = f"{side}.x."
    x = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
    facts = (arrays.get(f"{side}.{name}") for name in FACTS)
    return Samples(x["x"] if single else x, arrays[f"{side}.y"], *facts)
