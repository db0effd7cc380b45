"""Targets and groups as people have them (numbers with gaps, texts, one-hot), as numbers with names.

`arrays`, `tables` and contracts come here with what people call y.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from copfl.data.samples import CLASSIFICATION, KINDS, MULTILABEL, NEXT_TOKEN, REGRESSION, RISK, SURVIVAL
from copfl.errors import DataError, how_to_set, one_of, raised_as
from copfl.tables import listed

MOST_CLASSES = 2**16  # more are taken for a mistake
LARGEST_NUMBER = 1e30  # its square must fit into float64 and ten times it into float32
MOST_SHOWN = 6  # names in a note
WHOLE_NUMBER = re.compile(r"([+-]?)0*(\d+)(?:\.0*)?")  # 1, 01 and 1.0
MOST_AMBIGUOUS = 20  # so many different whole numbers of a float array may be classes or values


class Targets(NamedTuple):
    """Targets, or groups, of one split or of train and test."""

    parts: list[Any]  # arrays, or None for groups that are not given
    names: tuple[str, ...]
    kind: str
    note: str = ""


def targets_of(
    splits: Sequence[ArrayLike], kind: str | None, classes: Sequence[str] | None, called: str = "y"
) -> Targets:
    """The targets of train, and of test if there are two, with their kind; without one, it is inferred.

    Whole numbers and texts [n] are classes, and so are rows with one 1 [n, k]; other rows of 0 and 1 are
    labels. Other floats [n] or [n, k] are values to predict, whole numbers [n, T] are tokens. Times until an
    event are not inferred. Messages say what the targets are `called`.

    Args:
        splits: Of train, and of test if there are two.
        kind: Of the targets; None: what they look like.
        classes: Their names; None: what is in the targets.
        called: The targets, in messages.
    """
    if kind is not None:
        one_of(KINDS, kind=kind)
    names_of_parts = (called, "y_test" if called == "y" else f"{called} of the test rows")
    parts = [as_array(part, name) for name, part in zip(names_of_parts, splits, strict=False)]
    if len({part.shape[1:] for part in parts}) > 1:
        raise DataError(
            f"a target of {names_of_parts[0]} has shape {list(parts[0].shape[1:])}, of {names_of_parts[1]} "
            f"{list(parts[1].shape[1:])}"
        )
    y, note = parts[0], ""
    kind = kind or _inferred(y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y)
    if kind == CLASSIFICATION:
        parts = [part[:, 0] if part.ndim == 2 and part.shape[1] == 1 else part for part in parts]
        if y.ndim == 2 and all(_is_one_hot(part) for part in parts):
            parts, note = [part.argmax(axis=1) for part in parts], "one-hot labels are classes"
            classes = classes or [str(k) for k in range(y.shape[1])]
        labels = numbered("label", parts, classes)
        return labels._replace(note="; ".join(filter(None, (note, labels.note))))
    if any(part.dtype.kind not in "biuf" for part in parts):
        raise DataError(f"{called} has dtype {y.dtype}; {kind} needs numbers")
    if kind == NEXT_TOKEN:
        return _tokens(parts, classes)
    if kind == SURVIVAL:
        return _survival(parts, names_of_parts)
    for name, part in zip(names_of_parts, parts, strict=False):
        if not (finite := np.abs(part) <= LARGEST_NUMBER).all():
            first = int(np.argwhere(~finite)[0][0])
            raise DataError(f"{name} has NaN or infinity, first in sample {first}; all values must be finite")
        if kind == MULTILABEL and not (part.ndim == 2 and _is_binary(part)):
            several = "an array [n, labels]" if called == "y" else "a column for each label"
            raise DataError(f"{name} has shape {list(part.shape)}; labels are 0 or 1 in {several}")
    exact = y.astype(np.float64)
    lost = np.abs(y.astype(np.float32) - exact).max(axis=0)
    if ((lost > 0.01 * exact.std(axis=0)) & (np.ptp(exact, axis=0) > 0)).any():  # it would change results
        raise DataError(
            f"{called} has values up to {np.abs(exact).max():.4g} that differ by little: float32 rounds them "
            f"by up to {lost.max():.2g}; subtract a constant from all of them, such as their mean"
        )
    outputs = y.shape[1] if y.ndim == 2 else 1
    names = tuple(map(str, classes)) if classes else tuple(f"target {k}" for k in range(outputs))
    if y.ndim > 2 or len(names) != outputs:
        raise DataError(f"y has shape {list(y.shape)}, but there are {len(names)} names of targets")
    return Targets([part.astype(np.float32) for part in parts], names, kind)


def numbered(what: str, splits: Sequence[ArrayLike], names: Sequence[str] | None = None) -> Targets:
    """Labels or groups [n] as numbers 0 to k - 1 with names; whole numbers index `names`, if given.

    Args:
        what: They are, for the error: "label" or "group".
        splits: An array each.
        names: Which whole numbers index.
    """
    parts = [as_array(part, what) for part in splits]
    for part in parts:
        if part.ndim != 1:
            raise DataError(
                f"a {what} must be one number or text per sample, not an array {list(part.shape)}"
            )
        if part.dtype.kind not in "biuU":
            raise DataError(f"{what}s have dtype {part.dtype}; whole numbers or texts were expected")
    values = np.unique(
        np.concatenate([part.astype(np.int64) if part.dtype.kind == "b" else part for part in parts])
    )
    if names is not None:
        return _found(what, parts, tuple(str(name) for name in names), values)
    if len(values) > MOST_CLASSES:
        problem = f"there are {len(values):,} different {what}s, at most {MOST_CLASSES:,} are accepted"
        remedy = (
            f"; numbers to predict: {how_to_set('kind', 'regression', '--task')}" if what == "label" else ""
        )
        raise DataError(f"{problem}: is it the right array or column?{remedy}")
    numbers = [np.searchsorted(values, part).astype(np.int64) for part in parts]
    shown = tuple(str(value) for value in values.tolist())
    is_text = values.dtype.kind == "U"
    is_plain = what == "group" if is_text else bool(values[0] == 0 and values[-1] == len(values) - 1)
    few = ", ".join(shown[:3]) + (f", ..., {shown[-1]}" if len(shown) > 4 else ", ".join(("", *shown[3:])))
    return Targets(numbers, shown, CLASSIFICATION, "" if is_plain else f"{what}s {few} are numbered from 0")


def plain_spelling(text: str) -> str:
    """The text without capital letters and spaces; a whole number without leading zeros and without ".0"."""
    plain = "".join(text.split()).casefold()
    number = WHOLE_NUMBER.fullmatch(plain)
    return plain if number is None else f"{number[1].strip('+')}{number[2]}"


def spelled_alike(what: str, names: Sequence[str]) -> str:
    """A note about names that differ only in their spelling, such as Yes and yes or 1 and 1.0; "" if none do.

    Args:
        what: The names are of.
        names: All of them.
    """
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(plain_spelling(name), []).append(name)
    doubtful = [f'"{name}"' for alike in spellings.values() if len(alike) > 1 for name in alike]
    if not doubtful:
        return ""
    return (
        f"{what} that differ only in capital letters, spaces or zeros, to make alike if they are the same: "
        f"{listed(doubtful, MOST_SHOWN)}"
    )


def named(y: NDArray[Any], names: Sequence[str]) -> NDArray[Any]:
    """Labels of a further file; whole numbers as texts where the names of the classes are whole numbers.

    Args:
        y: The labels.
        names: Of the classes.
    """
    are_numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return y.astype(np.str_) if are_numbers and y.dtype.kind in "iu" and y.ndim == 1 else y


def _found(what: str, parts: list[NDArray[Any]], names: tuple[str, ...], values: NDArray[Any]) -> Targets:
    """Labels that are names, or numbers of names."""
    if values.dtype.kind == "U":
        if unknown := sorted(set(values.tolist()) - set(names)):
            raise DataError(f"there is a {what} {unknown[0]!r}, but the names are {', '.join(names)}")
        number = np.array([names.index(value) for value in values.tolist()], np.int64)
        parts = [number[np.searchsorted(values, part)] for part in parts]
    elif int(values[0]) < 0 or int(values[-1]) >= len(names):
        wrong = values[0] if values[0] < 0 else values[-1]
        raise DataError(f"there is a {what} {wrong}, but only {len(names)} names; name every {what}")
    return Targets([part.astype(np.int64) for part in parts], names, CLASSIFICATION)


def as_array(values: Any, what: str) -> NDArray[Any]:
    """The values, or a tensor's, as an array; texts among Python objects as texts.

    Args:
        values: An array, a list or a tensor.
        what: They are, for the error.
    """
    with raised_as(DataError, f"{what} must be an array: {{}}", ValueError):
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.dtype == object and all(isinstance(value, str) for value in array.ravel()):
        array = array.astype(np.str_)
    if not array.ndim or not array.size:
        raise DataError(f"{what} has shape {list(array.shape)}; at least one sample was expected")
    return array


def _inferred(y: NDArray[Any]) -> str:
    if y.ndim == 1:
        if y.dtype.kind != "f":
            return CLASSIFICATION
        different = np.unique(y)
        if len(different) <= MOST_AMBIGUOUS and (different == np.round(different)).all():
            raise DataError(
                f"y has {len(different)} different whole numbers of dtype {y.dtype}: if they are classes, "
                f"use y.astype('int64'); if values to predict, {how_to_set('kind', 'regression', '--task')}"
            )
        return REGRESSION
    if _is_binary(y):
        return CLASSIFICATION if _is_one_hot(y) else MULTILABEL
    return REGRESSION if y.dtype.kind == "f" else NEXT_TOKEN if y.dtype.kind in "iu" else CLASSIFICATION


def _is_binary(y: NDArray[Any]) -> bool:
    return y.dtype.kind in "biuf" and bool(np.isin(y, (0, 1)).all())


def _is_one_hot(y: NDArray[Any]) -> bool:
    return y.ndim == 2 and y.shape[1] > 1 and _is_binary(y) and bool((y.sum(axis=1) == 1).all())


def _tokens(parts: list[NDArray[Any]], names: Sequence[str] | None) -> Targets:
    """Tokens [n, T]; their number is the number of names, or the largest."""
    if any(part.dtype.kind not in "iu" or part.ndim != 2 for part in parts):
        raise DataError(f"y has {parts[0].dtype} {list(parts[0].shape)}; tokens are whole numbers [n, T]")
    largest = max(int(part.max()) for part in parts)
    shown = tuple(map(str, names or range(largest + 1)))
    if largest >= len(shown):
        raise DataError(f"there is a token {largest}, but only {len(shown)} names")
    return Targets([part.astype(np.int64) for part in parts], shown, NEXT_TOKEN)


def lost_at_once(y: NDArray[Any]) -> NDArray[np.bool_]:
    """A mask [n] of the samples of survival that were lost sight of at time 0: nothing is known of them."""
    return np.asarray((y[:, 0] == 0) & (y[:, 1] == 0))


def _survival(parts: list[NDArray[Any]], names: Sequence[str]) -> Targets:
    """Times until an event: the time, whether the event was seen then or the sample was lost sight of, and, where a
    third column says so, the start after which the sample is at risk."""
    for name, part in zip(names, parts, strict=False):
        if part.ndim != 2 or part.shape[1] not in (2, 3):
            raise DataError(
                f"{name} has shape {list(part.shape)}; survival has two columns, the time and the event, "
                "or three with the start"
            )
        time, event, start = part[:, 0], part[:, 1], part[:, 2] if part.shape[1] > 2 else np.zeros(len(part))
        if len(wrong := np.flatnonzero(~((time >= 0) & (time <= LARGEST_NUMBER)))):
            raise DataError(
                f"{name} has the time {time[wrong[0]]:g} in sample {wrong[0]}; times are 0 or more: count them from "
                "the start of each sample, and leave out what has none"
            )
        if len(wrong := np.flatnonzero(~np.isin(event, (0, 1)))):
            raise DataError(
                f"{name} has the event {event[wrong[0]]:g} in sample {wrong[0]}; it is 1 where the event was seen at "
                "the time, and 0 where the time is censored"
            )
        has_length = (start >= 0) & (start.astype(np.float32) < time.astype(np.float32))
        if part.shape[1] == 2:
            has_length |= time == 0  # an event at once
        if len(wrong := np.flatnonzero(~(has_length | lost_at_once(part)))):
            row = wrong[0]
            raise DataError(
                f"{name} has the start {start[row]:g} and the time {time[row]:g} in sample {row}; a sample is at risk "
                "from after its start, which is 0 or more, until its time, which is later: leave out rows without a "
                "length"
            )
    seen = sum(int(part[:, 1].sum()) for part in parts)
    lost = sum(int(lost_at_once(part).sum()) for part in parts)
    note = f"{seen:,} of {sum(map(len, parts)) - lost:,} times end with the event, the others are censored"
    if at_once := sum(int(((part[:, 0] == 0) & (part[:, 1] == 1)).sum()) for part in parts):
        note += f"; {at_once:,} events at time 0 count before the first other time"
    if lost:
        note += f"; {lost:,} samples that are censored at time 0 are left out, as nothing is known of them"
    return Targets([part.astype(np.float32) for part in parts], RISK, SURVIVAL, note)
