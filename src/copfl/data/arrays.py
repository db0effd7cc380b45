"""A user's data as a checked data set: a .npz file, a folder of images, a torch Dataset, or arrays.

`settings.user_code` comes here with what a program passed, and `datasets` with the name of a file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from copfl.data import reading
from copfl.data.held_out import Marks, split_off, without_tested
from copfl.data.samples import CLASSIFICATION, SURVIVAL, Dataset, Inputs, Samples, by_name, each, shown
from copfl.data.targets import Targets, as_array, lost_at_once, numbered, spelled_alike, targets_of
from copfl.errors import DataError

NPZ_ARRAYS = ("x", "y", "x_test", "y_test", "group", "group_test")


def npz_file(path: Path, *, kind: str | None = None, augment: bool = False) -> Dataset:
    """A .npz file with x and y, and optionally x_test and y_test, group and group_test; see `from_arrays`.

    Args:
        path: The file. Samples of several arrays are x.NAME, ... and x_test.NAME, ...
        kind: Of the targets, as of `from_arrays`.
        augment: Whether training images get random crops and flips.
    """
    arrays = npz_content(path)
    if missing := [name for name in ("x", "y") if name not in arrays]:
        raise DataError(f"the file lacks the array {missing[0]}; it has {', '.join(arrays) or 'none'}")
    return from_arrays(**arrays, name=path.stem, kind=kind, augment=augment)


def npz_content(path: Path) -> dict[str, Any]:
    """The arrays of a user's .npz file, those called x.NAME as one dict, x."""
    content: dict[str, Any] = {}
    for key, array in reading.npz_arrays(path).items():
        name, dot, extension = key.partition(".")
        if name not in NPZ_ARRAYS or (dot and name not in ("x", "x_test")):
            known = f"{', '.join(NPZ_ARRAYS)}, x.NAME and x_test.NAME"
            raise DataError(f"the file has an array {key}; known are {known}")
        if dot:
            content.setdefault(name, {})[extension] = array
        else:
            content[name] = array
    return content


def from_torch(
    train: Any, test: Any = None, *, name: str = "torch", kind: str | None = None, augment: bool = False
) -> Dataset:
    """Any torch Dataset of (x, y) items as arrays; without `test`, every fifth sample of a class is test.

    Args:
        train: The Dataset. Every item is read once: give it no random transform.
        test: The Dataset of the test samples.
        name: Of the data set, for titles.
        kind: Of the targets, as of `from_arrays`.
        augment: Whether training images get random crops and flips.
    """
    x, y = _torch_arrays(train, "train")
    x_test, y_test = (None, None) if test is None else _torch_arrays(test, "test")
    classes = getattr(train, "classes", None)  # as in torchvision's data sets
    return from_arrays(x, y, x_test, y_test, name=name, kind=kind, classes=classes, augment=augment)


def _torch_arrays(dataset: Any, which: str) -> tuple[Inputs, NDArray[Any]]:
    """All items (x, y) of a torch Dataset, stacked."""
    items = (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else iter(dataset)
    xs: list[Inputs] = []
    ys: list[NDArray[Any]] = []
    for position, item in enumerate(items):
        try:
            x, y = item
            xs.append({key: _as_array(v) for key, v in x.items()} if isinstance(x, Mapping) else _as_array(x))
            ys.append(_as_array(y))
            for arrays in (xs, ys):
                shape, first = (each(lambda array: list(array.shape), arrays[index]) for index in (-1, 0))
                if shape != first:
                    raise ValueError(f"its shape is {shape}, that of the first {first}")
        except (TypeError, ValueError) as error:
            expected = "a pair (x, y) with x and y of one shape each"
            raise DataError(f"item {position} of the {which} set is not {expected}: {error}") from error
    if not xs:
        raise DataError(f"the {which} set is empty")
    if isinstance(xs[0], dict):
        return {key: np.stack([x[key] for x in xs]) for key in xs[0]}, np.stack(ys)
    return np.stack(xs), np.stack(ys)


def _as_array(value: Any) -> NDArray[Any]:
    """An item's tensor, Pillow image, number or text as an array."""
    if hasattr(value, "convert"):  # a Pillow image
        if value.mode not in reading.EIGHT_BIT_MODES:  # 16 bits would be cut off at 255
            raise ValueError(f"its pixels have mode {value.mode}; 8 bits per channel were expected")
        image = np.atleast_3d(value.convert("L" if value.mode in ("1", "L") else "RGB"))
        return image.transpose(2, 0, 1)
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def from_arrays(
    x: ArrayLike | Mapping[str, ArrayLike],
    y: ArrayLike,
    x_test: ArrayLike | Mapping[str, ArrayLike] | None = None,
    y_test: ArrayLike | None = None,
    *,
    group: ArrayLike | None = None,
    group_test: ArrayLike | None = None,
    classes: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    kind: str | None = None,
    name: str = "arrays",
    augment: bool = False,
    note: str = "",
    called: str = "y",
    marks: Sequence[Marks] = (),
    split: int = 0,
    leave_out: bool = True,
) -> Dataset:
    """Arrays as a data set; without a test part, a fifth of each class, or of each group, is test.

    Args:
        x: The samples. uint8 images may be [n, h, w], [n, h, w, channels] or [n, channels, h, w]; they are
            normalised by the mean and deviation of the train images. Other arrays are used as they are.
            Samples of several arrays are a dict.
        y: The targets: whole numbers, texts or one-hot labels; of other targets see `targets_of`.
        x_test: The test samples.
        y_test: Their targets.
        group: Whose sample it is, any whole numbers or texts. A group is a client, unless a partition says
            otherwise.
        group_test: The same of the test samples.
        classes: The names of the classes, in the order of their numbers.
        groups: The names of the groups, in the order of their numbers.
        kind: Of the targets: classification, multilabel, regression or next_token; None: inferred.
        name: Of the data set, for titles.
        augment: Whether training images get random crops and flips.
        note: What the reader of a result must know about the data.
        called: What messages call the targets.
        marks: Of the rows of a table, of each part.
        split: The seed of the draw of their test rows.
        leave_out: Whether training samples that are copies of test samples are left out.
    """
    if (x_test is None) != (y_test is None):
        raise DataError("x_test and y_test must be given together")
    if x_test is not None and (group is None) != (group_test is None):
        raise DataError("group and group_test must be given together")
    inputs = [_inputs(array, suffix) for array, suffix in ((x, ""), (x_test, "_test")) if array is not None]
    sizes = [len(next(iter(by_name(samples).values()))) for samples in inputs]
    targets = targets_of([t for t in (y, y_test) if t is not None], kind, classes, called)
    origins = Targets([None] * len(inputs), (), "")
    if group is not None:
        origins = numbered("group", [g for g in (group, group_test) if g is not None], groups)
    for suffix, size, labels, origin in zip(("", "_test"), sizes, targets.parts, origins.parts, strict=False):
        for what, values in ((f"y{suffix}", labels), (f"group{suffix}", origin)):
            if values is not None and len(values) != size:
                raise DataError(f"{what} has shape {list(values.shape)}, but there are {size:,} samples")
    notes = [note, targets.note, origins.note]
    if targets.kind == CLASSIFICATION:
        notes.append(spelled_alike("classes", targets.names))
    notes.append(spelled_alike("groups", origins.names))
    splits = [Samples(*arrays) for arrays in zip(inputs, targets.parts, origins.parts, strict=True)]
    splits = (
        [replace(samples, unit=m.unit, time=m.time) for samples, m in zip(splits, marks, strict=True)]
        if marks
        else splits
    )
    if targets.kind == SURVIVAL:
        kept = [~lost_at_once(samples.y) for samples in splits]
        if not all(mask.any() for mask in kept):
            raise DataError(
                f"every time of {called} is censored at 0, so nothing is known of any sample; name the times"
            )
        splits = [samples.take(mask) for samples, mask in zip(splits, kept, strict=True)]
        marks = [m.take(mask) for m, mask in zip(marks, kept, strict=bool(marks))]
    warning = ""
    if len(splits) == 1:
        train, test, how = split_off(splits[0], marks[0].keys if marks else None, split)
        notes.append(how)
    else:
        train, test = splits
    kinds = [shown(samples.x) for samples in (train, test)]
    if kinds[0] != kinds[1]:
        raise DataError(f"a sample of x is {kinds[0]}, one of x_test is {kinds[1]}; they must be alike")
    if len(splits) == 2 and leave_out:
        train, test, warning = without_tested(train, test, bool(marks))
    is_image = not isinstance(train.x, dict) and train.x.dtype == np.uint8 and train.x.ndim == 4
    mean, std = statistics(train.x) if is_image else ((), ())
    return Dataset(
        name,
        train,
        test,
        targets.names,
        origins.names,
        mean,
        std,
        augment=augment,
        note="; ".join(filter(None, notes)),
        warnings=(warning,) if warning else (),
        kind=targets.kind,
    )


def from_splits(splits: Iterable[Sequence[Any]], **options: Any) -> Dataset:
    """`from_arrays` of splits.

    Args:
        splits: (x, y) or (x, y, group) of train, and of test if there are two of them.
        options: Of `from_arrays`.
    """
    arrays = {
        f"{name}{suffix}": array
        for suffix, split in zip(("", "_test"), splits, strict=False)
        for name, array in zip(("x", "y", "group"), split, strict=False)
    }
    return from_arrays(**arrays, **options)


def _inputs(x: Any, suffix: str) -> Inputs:
    """Checked inputs of one split; `suffix` is the end of their names in messages."""
    if not isinstance(x, Mapping):
        return _input(x, f"x{suffix}")
    arrays = {str(key): _input(value, f"x{suffix}.{key}") for key, value in x.items()}
    if len({len(array) for array in arrays.values()}) != 1:
        sizes = ", ".join(f"{key} {len(array):,}" for key, array in arrays.items()) or "none"
        raise DataError(f"the arrays of x{suffix} have different numbers of samples: {sizes}")
    return arrays


def _input(x: Any, what: str) -> NDArray[Any]:
    x = as_array(x, what)
    is_text = x.dtype.kind == "U" and x.ndim == 1
    if x.dtype.kind not in "biuf" and not is_text:
        raise DataError(f"{what} has dtype {x.dtype}; numbers, or texts of shape [n], were expected")
    if x.ndim < 2 and not is_text:
        raise DataError(f"{what} has shape {list(x.shape)}; [n, ...] of at least one sample was expected")
    if x.dtype.kind == "f" and not (finite := np.isfinite(x)).all():
        first = int(np.argwhere(~finite)[0][0])
        raise DataError(f"{what} has NaN or infinity, first in sample {first}; all values must be finite")
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    elif x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("="))


def joined(of_clients: Sequence[Dataset], name: str = "clients", clients: Sequence[str] = ()) -> Dataset:
    """One data set of several clients' own, whose groups are the clients.

    Args:
        of_clients: The data set of each client.
        name: Of the data set, for titles.
        clients: The names of the clients; none: their numbers.
    """
    called = list(clients) or list(map(str, range(len(of_clients))))
    first = of_clients[0]
    notes = [
        f"client {one}: {data_of_client.note}"
        for one, data_of_client in zip(called, of_clients, strict=True)
        if data_of_client.note
    ]
    of_classes = first.kind == CLASSIFICATION
    classes = tuple(dict.fromkeys(label for data_of_client in of_clients for label in data_of_client.classes))
    if all(label.lstrip("-").isdecimal() for label in classes):
        classes = tuple(sorted(classes, key=int))
    for one, data_of_client in zip(called, of_clients, strict=True):
        kinds = [(p.kind, shown(p.train.x)) for p in (first, data_of_client)]
        if kinds[0] != kinds[1]:
            difference = f"client {called[0]} has {kinds[0][0]} with samples {kinds[0][1]}"
            raise DataError(
                f"{difference}, client {one} has {kinds[1][0]} with {kinds[1][1]}; they must be alike"
            )
    splits = []
    for side in ("train", "test"):
        sides: list[Samples] = [getattr(data_of_client, side) for data_of_client in of_clients]
        x = {
            key: np.concatenate([by_name(data_of_client.x)[key] for data_of_client in sides])
            for key in by_name(first.train.x)
        }
        labels = (
            [
                np.array(data_of_client.classes)[getattr(data_of_client, side).y]
                for data_of_client in of_clients
            ]
            if of_classes
            else None
        )
        y = np.concatenate(labels or [samples.y for samples in sides])
        group = np.repeat(np.arange(len(of_clients)), [len(samples) for samples in sides])
        splits.append((x if isinstance(first.train.x, dict) else x["x"], y, group))
    names = {"classes": classes if of_classes else first.classes, "groups": called}
    data = from_splits(
        splits, name=name, kind=first.kind, note="; ".join(notes[:3]), leave_out=False, **names
    )
    if any(data_of_client.train.unit is not None for data_of_client in of_clients):
        units = [_units(data_of_client) for data_of_client in of_clients]
        begins = np.cumsum([0, *(1 + int(unit.max()) for unit in units[:-1])])
        of_train = [begin + u[: len(p.train)] for begin, u, p in zip(begins, units, of_clients, strict=True)]
        of_test = [begin + u[len(p.train) :] for begin, u, p in zip(begins, units, of_clients, strict=True)]
        data = replace(
            data,
            train=replace(data.train, unit=np.concatenate(of_train)),
            test=replace(data.test, unit=np.concatenate(of_test)),
        )
    if all(data_of_client.train.time is not None for data_of_client in of_clients):
        train, test = (
            np.concatenate([getattr(p, side).time for p in of_clients]) for side in ("train", "test")
        )
        data = replace(data, train=replace(data.train, time=train), test=replace(data.test, time=test))
    warnings = tuple(
        f"client {one}: {warning}"
        for one, data_of_client in zip(called, of_clients, strict=True)
        for warning in data_of_client.warnings
    )
    return replace(data, augment=first.augment, table=first.table, warnings=warnings)


def _units(data: Dataset) -> NDArray[np.int64]:
    """The unit of each sample, of train and then of test."""
    train, test = data.train.unit, data.test.unit
    return (
        np.arange(len(data.train) + len(data.test))
        if train is None or test is None
        else np.concatenate([train, test])
    )


def statistics(x: NDArray[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of every channel of uint8 images, scaled to 0..1."""
    counts = np.stack([np.bincount(x[:, channel].ravel(), minlength=256) for channel in range(x.shape[1])])
    values = np.arange(256) / 255
    fraction = counts / counts.sum(axis=1, keepdims=True)
    mean = fraction @ values
    std = np.sqrt(np.maximum(fraction @ values**2 - mean**2, 0))
    std[std < 1e-6] = 1  # a constant channel is not scaled
    return tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())
