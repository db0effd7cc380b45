"""Which rows of a node count in a training: none whose target too few of its rows have.

A sum has a vector for each output of the model: for each class, label, value or interval of time. Of an output that
concerns one row alone it is this row. So rows of a class of which the node has fewer than its policy's `least_rows` do
not count, and intervals are merged until as many end in each. An algorithm that adds up products of columns has such a
vector for each column of the samples, too. The answer has the same form, whatever the data are: nothing is refused, and
the node's owner alone is told.
"""

from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.criteria import Criterion, standardised_targets
from copfl.core.task import Data
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, REGRESSION, SURVIVAL

MOST_COMPARED = 100  # columns, of which every two are compared
Targets = NDArray[np.float64]  # [n] or [n, columns]
Mask = NDArray[np.bool_]  # of the rows


class CountedRows(NamedTuple):
    """What a node trains on."""

    train: Data
    left_out: int  # rows
    merged: int  # of the intervals of discrete time, how many have the end of another one


def counted_rows(criterion: Criterion, train: Data, least: int, *, has_products: bool = False) -> CountedRows:
    """The rows that count, with merged intervals of discrete time.

    A model of all sites has all intervals. A node that merges some says of a row alone that its event was before the
    end of the last of them, and that it was censored before the first.

    Args:
        criterion: Of the objective.
        train: The node's rows.
        least: How many rows of the node must have a target.
        has_products: Whether the algorithm adds up products of the samples' columns.
    """
    if least <= 1 or criterion.kind == NEXT_TOKEN:
        return CountedRows(train, 0, 0)
    found, size = _by_targets(criterion, train, least), -1
    while has_products and isinstance(found.train.x, Tensor) and len(found.train.y) != size:
        size = len(found.train.y)
        columns = found.train.x.cpu().double().numpy().reshape(size, -1)
        kept = _varied(_compared(columns) if columns.shape[1] <= MOST_COMPARED else columns, least)
        found = _by_targets(criterion, _of(found.train, kept), least)
    return found._replace(left_out=int(train.size - found.train.size))


def alike(criterion: Criterion, train: Data, rows: Mask, least: int, *, has_products: bool) -> Mask:
    """Those of some rows whose target, and with products of columns whose values, enough of them have.

    Args:
        criterion: Of the objective, of classes, labels or values.
        train: The node's rows.
        rows: Which of them.
        least: As of `counted_rows`.
        has_products: As of `counted_rows`.
    """
    kept, columns = rows.copy(), np.zeros((len(rows), 0))
    if has_products and isinstance(train.x, Tensor):
        columns = train.x.cpu().double().numpy().reshape(len(rows), -1)
        columns = _compared(columns) if columns.shape[1] <= MOST_COMPARED else columns
    y = train.y.cpu().double()
    while True:
        before = kept.sum()
        kept[kept] = _with_alike_targets(criterion, y[torch.from_numpy(kept)], least)
        kept[kept] = _varied(columns[kept], least)
        if kept.sum() < least:
            kept[:] = False
        if kept.sum() == before:
            return kept


def _with_alike_targets(criterion: Criterion, y: Tensor, least: int) -> Mask:
    """The rows whose class enough rows have, or whose values and labels vary in enough of them."""
    if criterion.kind == CLASSIFICATION:
        return _frequent(y.numpy(), np.ones(len(y), bool), least)
    columns = (standardised_targets(criterion, y) if criterion.kind == REGRESSION else y).numpy()
    return _varied(_compared(columns.reshape(len(y), -1)), least) if len(y) else np.zeros(0, bool)


def _by_targets(criterion: Criterion, train: Data, least: int) -> CountedRows:
    """The rows whose target enough rows have, with merged intervals of discrete time."""
    y, merged = train.y.cpu().double().numpy(), 0
    if criterion.kind != SURVIVAL:
        kept = _with_alike_targets(criterion, train.y.cpu().double(), least)
    else:
        kept = _varied((y[:, 1:2] > 0.5).astype(float), least)
        if criterion.cuts:
            cuts = (
                torch.tensor(criterion.cuts, dtype=train.y.dtype).double().numpy()
            )  # as they are compared in training
            groups = _groups(y[kept], cuts, least)
            known, merged = _known(y, cuts, groups), len(cuts) + 1 - len(groups)
            kept &= _frequent(known, kept, least)
            y = known if merged else y
    if kept.sum() < least:
        kept[:] = False
    if kept.all() and not merged:
        return CountedRows(train, 0, 0)
    known_train = train._replace(y=torch.from_numpy(y).to(train.y)) if merged else train
    return CountedRows(_of(known_train, kept), len(y) - int(kept.sum()), merged)


def _of(train: Data, kept: Mask) -> Data:
    """Some of the rows."""
    mask = torch.from_numpy(kept).to(train.y.device)
    x, y = tree.each(lambda t: t[mask], (train.x, train.y))
    return Data(x, y, train.size - int((~kept).sum()))


def _frequent(y: Targets, among: Mask, least: int) -> Mask:
    """The rows whose target is that of enough rows.

    Args:
        y: Of each row.
        among: The rows that are counted.
        least: How many are enough.
    """
    kept = np.zeros(len(y), bool)
    _, code, counts = np.unique(y[among], axis=0, return_inverse=True, return_counts=True)
    kept[among] = counts[code.reshape(-1)] >= least
    return kept


def _compared(y: Targets) -> Targets:
    """The columns, and what every two of them have together and apart: where they differ in one row, so do two sums."""
    pairs = combinations(y.T, 2)
    return np.stack([*y.T, *(column for a, b in pairs for column in (a + b, a - b))], 1).round(6)


def _varied(y: Targets, least: int) -> Mask:
    """The rows without those that alone have another value than the usual one in a column.

    Of a column with one value but in a row or two, the sum is that of these rows.

    Args:
        y: [n, columns]
        least: How many rows must have another value than the usual one, unless none has.
    """
    kept = np.ones(len(y), bool)
    while True:
        before = kept.sum()
        for column in y.T:
            values, code, counts = np.unique(column, return_inverse=True, return_counts=True)
            counts = np.bincount(code[kept], minlength=len(values))
            if 0 < kept.sum() - counts.max(initial=0) < least:
                kept &= code == counts.argmax()
        if kept.sum() == before:
            return kept


# -- intervals of discrete time ------------------------------------------------------------------------------

Groups = list[tuple[int, int]]  # from and to, of the intervals and of what is after the last


def _ends(y: Targets, cuts: Targets) -> tuple[NDArray[np.int64], Mask]:
    """In which interval each row ends, and whether with its event; the last one is what is after all cuts."""
    has_event = (y[:, 1] > 0.5) & (y[:, 0] <= cuts[-1])
    # A row that is censored at the end of an interval went through it, see `criteria._passage`.
    through = np.searchsorted(cuts, y[:, 0], "right")
    return np.where(has_event, np.searchsorted(cuts, y[:, 0], "left"), through), has_event


def _groups(y: Targets, cuts: Targets, least: int) -> Groups:
    """Neighbouring intervals in which enough events end, or none, and as many other rows, or none."""
    interval, has_event = _ends(y, cuts)
    number = len(cuts) + 1
    until = [
        np.concatenate([[0], np.bincount(interval[rows], minlength=number).cumsum()])
        for rows in (has_event, ~has_event)
    ]

    def is_enough(begin: int, end: int) -> bool:
        return all(count[end] - count[begin] == 0 or count[end] - count[begin] >= least for count in until)

    def divided(begin: int, end: int) -> Groups:
        for at in sorted(range(begin + 1, end), key=lambda at: abs(2 * at - begin - end)):
            if is_enough(begin, at) and is_enough(at, end):
                return [*divided(begin, at), *divided(at, end)]
        return [(begin, end)]

    return divided(0, number)


def _known(y: Targets, cuts: Targets, groups: Groups) -> Targets:
    """The targets as groups tell them: an event by the end of its group, a censored time by the beginning."""
    interval, has_event = _ends(y, cuts)
    times = np.array([0.0, *cuts])
    group = np.repeat(np.arange(len(groups)), [end - begin for begin, end in groups])
    begins = np.array([begin for begin, _ in groups])[group]  # of the group of each interval
    ends = np.array([min(end, len(cuts)) for _, end in groups])[group]
    time = np.where(has_event, times[ends[interval]], times[begins[interval]])
    columns = [time, has_event.astype(float)]
    if y.shape[1] > 2:  # a row that came to be at risk within a group counts from its end on
        entered = np.searchsorted(cuts, y[:, 2], "right").clip(max=len(cuts))
        is_first = entered == begins[entered]
        columns.append(np.where(is_first, times[entered], times[ends[entered]]))
    return np.stack(columns, 1)
