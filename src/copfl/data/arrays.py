"""Data of one's own as a data set: a .npz file, a folder of images, a torch Dataset, arrays; everything is checked."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from copfl.data import reading
from copfl.data.images import folder_pictures
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError, UsageError

MOST_CLASSES = 2**16  # a label beyond is taken for a mistake


def npz_file(path: Path, *, augment: bool = False) -> Dataset:
    """A .npz file with x and y, and where it has them x_test and y_test, group and group_test; see `from_arrays`."""
    check_flag("augment", augment)
    arrays: dict[str, Any] = dict(reading.npz_arrays(path))
    allowed = ("x", "y", "x_test", "y_test", "group", "group_test")
    if missing := [name for name in ("x", "y") if name not in arrays]:
        raise DataError(f"the file lacks the array {missing[0]}; it holds {', '.join(arrays) or 'nothing'}")
    if strange := [name for name in arrays if name not in allowed]:
        raise DataError(f"the file holds an array {strange[0]}; known are {', '.join(allowed)}")
    return from_arrays(**arrays, name=path.stem, augment=augment)


def image_folder(
    path: Path, *, size: int | None = None, gray: bool = False, augment: bool = False
) -> Dataset:
    """A folder <class>/*.png|jpg, of which every fifth is test, or {train,test}/<class>/*.png|jpg, all at one size."""
    if size is not None:
        check_whole("size", size, 1, reading.LARGEST_IMAGE_SIDE)
    check_flag("gray", gray)
    check_flag("augment", augment)
    split = (path / "train").is_dir() and (path / "test").is_dir()
    roots = {"train": path / "train", "test": path / "test"} if split else {"": path}
    pictures = [picture for name, root in roots.items() for picture in folder_pictures(root, name)]
    classes = tuple(sorted({picture.label for picture in pictures if picture.split != "test"}))
    if not classes:
        raise DataError("no images; expected <class>/*.png or *.jpg, or {train,test}/<class>/*.png or *.jpg")
    if strange := {picture.label for picture in pictures} - set(classes):
        raise DataError(f"test/ holds a class {min(strange)} which train/ lacks")
    sizes = Counter(reading.image_size(p.read(), p.place) for p in pictures)
    shape = sizes.most_common(1)[0][0] if size is None else (size, size)
    arrays: dict[str, Any] = {}
    for name in roots:
        chosen = [picture for picture in pictures if picture.split == name]
        suffix = "_test" if name == "test" else ""
        arrays[f"x{suffix}"] = reading.decode_all([(p.place, p.read) for p in chosen], shape, gray)
        arrays[f"y{suffix}"] = np.array([classes.index(picture.label) for picture in chosen], dtype=np.int64)
    resized = len(pictures) - sizes[shape]
    note = f"{resized:,} of {len(pictures):,} images resized to {shape[1]} x {shape[0]}" if resized else ""
    return from_arrays(**arrays, name=path.resolve().name, classes=classes, augment=augment, note=note)


def from_torch(train: Any, test: Any = None, *, name: str = "torch", augment: bool = False) -> Dataset:
    """Any torch Dataset of (x, y) items as arrays; without `test`, every fifth sample of a class is test.

    Every item is asked for once: give it no random transform, and set `augment` for random crops and flips.
    """
    x, y = _torch_arrays(train, "train")
    x_test, y_test = (None, None) if test is None else _torch_arrays(test, "test")
    classes = getattr(train, "classes", None)  # as torchvision's sets name them
    return from_arrays(x, y, x_test, y_test, name=name, classes=classes, augment=augment)


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

    uint8 images may be [n, h, w], [n, h, w, channels] or [n, channels, h, w]; they are normalised by the mean and
    deviation of the train images. Anything else is used as it is.
    """
    if (x_test is None) != (y_test is None):
        raise DataError("x_test and y_test must be given together")
    if x_test is not None and (group is None) != (group_test is None):
        raise DataError("group and group_test must be given together")
    train = _checked(x, y, group, "")
    if x_test is not None and y_test is not None:
        test = _checked(x_test, y_test, group_test, "_test")
    else:
        held = held_out(train.y, 1, 5)
        if not held.any():
            raise DataError(
                "too few samples to hold a test part back: give x_test and y_test, or five of one class"
            )
        train, test = _taken(train, ~held), _taken(train, held)
        note = "; ".join(filter(None, (note, f"every fifth sample of a class is test: {len(test):,}")))
    if (train.x.shape[1:], train.x.dtype) != (test.x.shape[1:], test.x.dtype):
        ours, theirs = (f"{part.x.dtype} {list(part.x.shape[1:])}" for part in (train, test))
        raise DataError(f"a sample of x is {ours}, one of x_test is {theirs}; they must be alike")
    is_image = train.x.dtype == np.uint8 and train.x.ndim == 4
    mean, std = statistics(train.x) if is_image else ((), ())
    return Dataset(
        name,
        train,
        test,
        classes=_names(classes, "label", train.y, test.y),
        groups=()
        if train.group is None or test.group is None
        else _names(groups, "group", train.group, test.group),
        mean=mean,
        std=std,
        augment=augment,
        note=note,
    )


def held_out(y: NDArray[np.int64], part: int, whole: int) -> NDArray[np.bool_]:
    """Which samples are test: `part` of every `whole` successive samples of a class, evenly spread."""
    rank = rank_within_class(y)
    held: NDArray[np.bool_] = (rank + 1) * part // whole > rank * part // whole
    return held


def rank_within_class(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every sample, how many samples of its class precede it."""
    order = np.argsort(y, kind="stable")
    rank = np.empty(len(y), dtype=np.int64)
    rank[order] = np.arange(len(y)) - np.searchsorted(y[order], y[order])
    return rank


# What is given, checked


def check_whole(option: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{option} is {value!r}; it must be a whole number from {low} to {high:,}")


def check_flag(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{option} is {value!r}; it must be true or false")


def _checked(x: ArrayLike, y: ArrayLike, group: ArrayLike | None, suffix: str) -> Samples:
    """One split from arrays that may be anything; `suffix` is the end of their names in messages."""
    try:
        x, y = np.asarray(x), np.asarray(y)
        group = None if group is None else np.asarray(group)
    except ValueError as why:
        raise DataError(f"x{suffix} and y{suffix} must be arrays: {why}") from why
    if x.dtype.kind not in "biuf":
        raise DataError(f"x{suffix} has dtype {x.dtype}; numbers were expected")
    if x.ndim < 2:
        raise DataError(f"x{suffix} has shape {list(x.shape)}; [n, ...] with at least two axes was expected")
    if x.size == 0:
        raise DataError(
            f"x{suffix} is empty, of shape {list(x.shape)}; at least one sample of a value was expected"
        )
    if x.dtype.kind == "f" and not (finite := np.isfinite(x)).all():
        bad = int(np.argwhere(~finite)[0][0])
        raise DataError(
            f"x{suffix} holds NaN or infinity, first in sample {bad}; every value must be a finite number"
        )
    numbers = _checked_numbers(y, f"y{suffix}", len(x))
    groups = None if group is None else _checked_numbers(group, f"group{suffix}", len(x))
    return Samples(_channels_first(x), numbers, groups)


def _checked_numbers(values: NDArray[Any], what: str, length: int) -> NDArray[np.int64]:
    """Labels or groups [n] as int64."""
    if values.dtype.kind not in "iu":
        raise DataError(
            f"{what} has dtype {values.dtype}; whole numbers were expected: {what}.astype('int64')"
        )
    if values.shape != (length,):
        raise DataError(
            f"{what} has shape {list(values.shape)}, but there are {length:,} samples: expected [{length}]"
        )
    if values.min() < 0 or values.max() >= MOST_CLASSES:
        bad = values.min() if values.min() < 0 else values.max()
        raise DataError(f"{what} holds {bad}; numbers from 0 to {MOST_CLASSES - 1:,} were expected")
    return values.astype(np.int64)


def _channels_first(x: NDArray[Any]) -> NDArray[Any]:
    """uint8 images as [n, channels, h, w]; anything else as it is."""
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    elif x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x)


def _names(
    given: Sequence[str] | None, what: str, train: NDArray[np.int64], test: NDArray[np.int64]
) -> tuple[str, ...]:
    """The names of the labels or groups; their numbers where none are given."""
    highest = int(max(train.max(), test.max()))
    if given is None:
        return tuple(str(number) for number in range(highest + 1))
    if highest >= len(given):
        raise DataError(
            f"there is a {what} {highest}, but only {len(given)} names: 0 to {len(given) - 1} were expected"
        )
    return tuple(str(name) for name in given)


def _taken(samples: Samples, chosen: NDArray[np.bool_]) -> Samples:
    group = None if samples.group is None else samples.group[chosen]
    return Samples(samples.x[chosen], samples.y[chosen], group)


def statistics(x: NDArray[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of every channel of uint8 images, scaled to 0..1."""
    counts = np.stack([np.bincount(x[:, channel].ravel(), minlength=256) for channel in range(x.shape[1])])
    values = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ values
    std = np.sqrt(np.maximum(share @ values**2 - mean**2, 0))
    std[std < 1e-6] = 1  # a constant channel stays as it is
    return tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())


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
        except (TypeError, ValueError) as why:
            raise DataError(
                f"item {position} of the {which} set is no pair (x, whole number): {why}"
            ) from why
        if xs[-1].shape != xs[0].shape:
            shapes = f"{list(xs[-1].shape)}, the first {list(xs[0].shape)}"
            raise DataError(
                f"item {position} of the {which} set has shape {shapes}; all must be of one shape"
            )
    if not xs:
        raise DataError(f"the {which} set is empty")
    return np.stack(xs), np.array(ys, dtype=np.int64)
