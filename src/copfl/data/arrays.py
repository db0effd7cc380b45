"""A user's data as a checked data set: a .npz file, a folder of images, a torch Dataset, or arrays."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from copfl.data import reading
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError

MOST_CLASSES = 2**16  # a larger label is taken for a mistake
NPZ_ARRAYS = ("x", "y", "x_test", "y_test", "group", "group_test")


def npz_file(path: Path, *, augment: bool = False) -> Dataset:
    """A .npz file with x and y, and optionally x_test and y_test, group and group_test; see `from_arrays`."""
    arrays: dict[str, Any] = dict(reading.npz_arrays(path))
    if missing := [name for name in ("x", "y") if name not in arrays]:
        raise DataError(f"the file lacks the array {missing[0]}; it has {', '.join(arrays) or 'none'}")
    if extra := [name for name in arrays if name not in NPZ_ARRAYS]:
        raise DataError(f"the file has an array {extra[0]}; known are {', '.join(NPZ_ARRAYS)}")
    return from_arrays(**arrays, name=path.stem, augment=augment)


def image_folder(
    path: Path, *, size: int | None = None, gray: bool = False, augment: bool = False
) -> Dataset:
    """A folder [{train,test}/]<class>/*.png|jpg, at one size; without splits every fifth image is test."""
    images = reading.image_files(path)
    given = {image.split for image in images}
    parts = {"": "train", "_test": "test"} if given >= {"train", "test"} else {"": ""}
    images = [image for image in images if image.split in parts.values()]
    classes = tuple(sorted({image.label for image in images if image.split != "test"}))
    for folder in sorted((path / parts[""]).glob("[!.]*/")):
        if folder.name not in classes:
            raise DataError(f"{folder} has no images (*.png, *.jpg)")
    if not classes:
        raise DataError("no images; expected <class>/*.png or *.jpg, or {train,test}/<class>/*.png or *.jpg")
    if extra := {image.label for image in images} - set(classes):
        raise DataError(f"test/ has a class {min(extra)} which train/ lacks")
    sizes = Counter(reading.image_size(image.read(), image.source) for image in images)
    shape = sizes.most_common(1)[0][0] if size is None else (size, size)
    arrays: dict[str, Any] = {}
    for suffix, split in parts.items():
        chosen = [image for image in images if image.split == split]
        arrays[f"x{suffix}"] = reading.decode_all(chosen, shape, gray)
        arrays[f"y{suffix}"] = np.array([classes.index(image.label) for image in chosen], dtype=np.int64)
    resized = len(images) - sizes[shape]
    note = f"{resized:,} of {len(images):,} images resized to {shape[1]} x {shape[0]}" if resized else ""
    return from_arrays(**arrays, name=path.resolve().name, classes=classes, augment=augment, note=note)


def from_torch(train: Any, test: Any = None, *, name: str = "torch", augment: bool = False) -> Dataset:
    """Any torch Dataset of (x, y) items as arrays; without `test`, every fifth sample of a class is test.

    Every item is read once: give it no random transform, and set `augment` for random crops and flips.
    """
    x, y = _torch_arrays(train, "train")
    x_test, y_test = (None, None) if test is None else _torch_arrays(test, "test")
    classes = getattr(train, "classes", None)  # as in torchvision's data sets
    return from_arrays(x, y, x_test, y_test, name=name, classes=classes, augment=augment)


def _torch_arrays(dataset: Any, which: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All items (x, y) of a torch Dataset, stacked."""
    import torch

    items = (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else iter(dataset)
    xs: list[NDArray[Any]] = []
    ys: list[int] = []
    for position, item in enumerate(items):
        try:
            x, y = item
            if isinstance(x, torch.Tensor):
                x = x.detach().cpu().numpy()
            elif hasattr(x, "convert"):  # a Pillow image
                x = np.atleast_3d(x.convert("L" if x.mode in ("1", "L") else "RGB")).transpose(2, 0, 1)
            xs.append(np.asarray(x))
            ys.append(operator.index(y))
            if xs[-1].shape != xs[0].shape:
                raise ValueError(f"its shape is {list(xs[-1].shape)}, that of the first {list(xs[0].shape)}")
        except (TypeError, ValueError) as error:
            expected = "a pair (x, whole number) with x of one shape"
            raise DataError(f"item {position} of the {which} set is not {expected}: {error}") from error
    if not xs:
        raise DataError(f"the {which} set is empty")
    return np.stack(xs), np.array(ys, dtype=np.int64)


def from_arrays(
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    *,
    group: ArrayLike | None = None,
    group_test: ArrayLike | None = None,
    classes: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    name: str = "arrays",
    augment: bool = False,
    note: str = "",
) -> Dataset:
    """Arrays as a data set; without a test part, every fifth sample of a class is test.

    uint8 images may be [n, h, w], [n, h, w, channels] or [n, channels, h, w]; they are normalised by the mean
    and deviation of the train images. Other arrays are used as they are.
    """
    if (x_test is None) != (y_test is None):
        raise DataError("x_test and y_test must be given together")
    if x_test is not None and (group is None) != (group_test is None):
        raise DataError("group and group_test must be given together")
    train = _checked(x, y, group, "")
    if x_test is not None and y_test is not None:
        test = _checked(x_test, y_test, group_test, "_test")
    else:
        is_test = held_out(train.y, 1, 5)
        if not is_test.any():
            raise DataError("too few samples for a test part: give x_test and y_test, or five of one class")
        train, test = train.take(~is_test), train.take(is_test)
        note = "; ".join(filter(None, (note, f"every fifth sample of a class is test: {len(test):,}")))
    if (train.x.shape[1:], train.x.dtype) != (test.x.shape[1:], test.x.dtype):
        kinds = [f"{part.x.dtype} {list(part.x.shape[1:])}" for part in (train, test)]
        raise DataError(f"a sample of x is {kinds[0]}, one of x_test is {kinds[1]}; they must be alike")
    is_image = train.x.dtype == np.uint8 and train.x.ndim == 4
    mean, std = statistics(train.x) if is_image else ((), ())
    labels = _names(classes, "label", train.y, test.y)
    origins = _names(groups, "group", train.group, test.group)
    return Dataset(name, train, test, labels, origins, mean, std, augment, note)


def _checked(x: ArrayLike, y: ArrayLike, group: ArrayLike | None, suffix: str) -> Samples:
    """One split from arrays of unknown content; `suffix` is the end of their names in messages."""
    try:
        x, y = np.asarray(x), np.asarray(y)
        group = None if group is None else np.asarray(group)
    except ValueError as error:
        raise DataError(f"x{suffix} and y{suffix} must be arrays: {error}") from error
    if x.dtype.kind not in "biuf":
        raise DataError(f"x{suffix} has dtype {x.dtype}; numbers were expected")
    if x.ndim < 2 or x.size == 0:
        raise DataError(f"x{suffix} has shape {list(x.shape)}; [n, ...] of at least one sample was expected")
    if x.dtype.kind == "f" and not (finite := np.isfinite(x)).all():
        first = int(np.argwhere(~finite)[0][0])
        raise DataError(f"x{suffix} has NaN or infinity, first in sample {first}; all values must be finite")
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    elif x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    labels = _checked_labels(y, f"y{suffix}", len(x))
    groups = None if group is None else _checked_labels(group, f"group{suffix}", len(x))
    return Samples(np.ascontiguousarray(x), labels, groups)


def _checked_labels(values: NDArray[Any], what: str, length: int) -> NDArray[np.int64]:
    """Labels or groups [n] as int64."""
    if values.dtype.kind not in "iu":
        expected = f"whole numbers were expected: {what}.astype('int64')"
        raise DataError(f"{what} has dtype {values.dtype}; {expected}")
    if values.shape != (length,):
        raise DataError(f"{what} has shape {list(values.shape)}, but there are {length:,} samples")
    if values.min() < 0 or values.max() >= MOST_CLASSES:
        wrong = values.min() if values.min() < 0 else values.max()
        raise DataError(f"{what} has {wrong}; numbers from 0 to {MOST_CLASSES - 1:,} were expected")
    return values.astype(np.int64)


def _names(given: Sequence[str] | None, what: str, *parts: NDArray[np.int64] | None) -> tuple[str, ...]:
    """The names of the labels or groups; their numbers if no names are given."""
    present = [int(part.max()) for part in parts if part is not None]
    if not present:
        return ()
    if given is None:
        return tuple(str(number) for number in range(max(present) + 1))
    if max(present) >= len(given):
        raise DataError(f"there is a {what} {max(present)}, but only {len(given)} names; name every {what}")
    return tuple(str(name) for name in given)


def held_out(y: NDArray[np.int64], part: int, whole: int) -> NDArray[np.bool_]:
    """A mask of the test samples: `part` of every `whole` successive samples of a class, evenly spaced."""
    rank = rank_within_class(y)
    is_test: NDArray[np.bool_] = (rank + 1) * part // whole > rank * part // whole
    return is_test


def rank_within_class(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every sample, the number of samples of its class before it."""
    order = np.argsort(y, kind="stable")
    rank = np.empty(len(y), dtype=np.int64)
    rank[order] = np.arange(len(y)) - np.searchsorted(y[order], y[order])
    return rank


def statistics(x: NDArray[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of every channel of uint8 images, scaled to 0..1."""
    counts = np.stack([np.bincount(x[:, channel].ravel(), minlength=256) for channel in range(x.shape[1])])
    values = np.arange(256) / 255
    fraction = counts / counts.sum(axis=1, keepdims=True)
    mean = fraction @ values
    std = np.sqrt(np.maximum(fraction @ values**2 - mean**2, 0))
    std[std < 1e-6] = 1  # a constant channel is not scaled
    return tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())
