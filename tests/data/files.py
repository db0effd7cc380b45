"""Small files, valid and malicious, and the invariants of every data set."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from copfl.data.samples import Dataset


def write_image(
    path: Path, size: tuple[int, int] = (32, 32), colour: Any = (10, 20, 30), mode: str = "RGB"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def assert_well_formed(found: Dataset) -> None:
    for part in (found.train, found.test):
        assert len(part) > 0
        assert len(part.x) == len(part.y)
        assert part.y.dtype == np.int64
        assert part.x.flags.c_contiguous
        assert part.x.flags.writeable  # torch warns of arrays that are not
        assert 0 <= part.y.min() <= part.y.max() < len(found.classes)
        assert (part.group is None) == (found.groups == ())
        if part.group is not None:
            assert part.group.shape == part.y.shape
            assert 0 <= part.group.min() <= part.group.max() < len(found.groups)
    assert len(found.mean) == len(found.std)
    if found.mean:
        assert found.train.x.shape[1] == len(found.mean)


class Payload:
    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.arguments


def saved(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()
