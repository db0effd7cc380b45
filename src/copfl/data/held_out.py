"""Which samples are test, where a user's data do not say it; and which a client holds out of its training.

What belongs together (`Samples.unit`) stays together, and with a time the later samples are tested. A site's samples
are divided by themselves, by what they contain and not by their place in a file. So the same rows have the same
test rows in one file of all sites and in a file per site.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.data.copies import Codes, Hashes, columns_of, copies, mixed, row_hashes, rows_of_sites
from copfl.data.samples import Samples, by_name
from copfl.errors import DataError, how_to_set

FEWEST = 5  # samples of which one is for testing
Mask = NDArray[np.bool_]


class Marks(NamedTuple):
    """What rows of a table are known by, and what decides on which side they may be; see Samples."""

    keys: Hashes  # by which rows are drawn: equal for copies at a site, see `told_apart`
    unit: Codes | None
    time: NDArray[np.float64] | None

    def take(self, rows: slice | Mask) -> "Marks":
        """The marks of these rows."""
        unit, time = self.unit, self.time
        return Marks(
            self.keys[rows], None if unit is None else unit[rows], None if time is None else time[rows]
        )


class Sides(NamedTuple):
    """Masks; a sample of neither is left out, as others that belong to it are test."""

    train: Mask
    test: Mask


def split_off(samples: Samples, keys: Hashes | None = None, seed: int = 0) -> tuple[Samples, Samples, str]:
    """Train and test, a fifth, and a note: of each class, or of each group's own samples, class by class.

    Args:
        samples: All of them.
        keys: Of rows of a table, by which they are drawn; None: evenly spaced samples are test, unless some of
            them are copies, belong together, or have a time.
        seed: Of the draw.
    """
    if len(np.unique(samples.strata)) == len(samples) >= FEWEST:
        numbers = how_to_set("kind", "regression", "--task")
        raise DataError(
            f"each of the {len(samples):,} samples has a class of its own, so none can be learned and "
            f"tested: is it the right target? To predict numbers: {numbers}"
        )
    if keys is None:
        return _split_arrays(samples)
    sides = divided(samples, mixed(keys + mixed(np.full(1, seed, np.uint64))))
    whose = "the samples" if samples.group is None else "each group's samples"
    late = samples.time is not None
    return _on_sides(samples, sides, f"the last fifth of {whose} by time" if late else f"a fifth of {whose}")


def _split_arrays(samples: Samples) -> tuple[Samples, Samples, str]:
    """Evenly spaced test samples, or drawn ones if some are copies, belong together, or have a time."""
    if samples.unit is None and samples.time is None and (unit := units_of([samples])) is not None:
        with_units = replace(samples, unit=unit)
        sides = divided(with_units, row_hashes(_contents(samples)))
        if sides.test.any():
            return _on_sides(with_units, sides, "a fifth of the samples, copies of one sample on one side,")
    elif samples.unit is not None or samples.time is not None:
        return split_off(samples, row_hashes(_contents(samples)))
    if samples.group is None:
        is_test, how = held_out(samples.strata, 1, 5), "every fifth sample of a class"
    else:
        is_test, how = held_out_of_groups(samples.group, samples.strata), "a fifth of each group's samples"
    return _on_sides(samples, Sides(~is_test, is_test), how)


def _on_sides(samples: Samples, sides: Sides, how: str) -> tuple[Samples, Samples, str]:
    """The samples of each side, and a note."""
    if not sides.test.any():
        raise DataError(
            "too few samples for a test part: five of one class or client, or test samples, are needed"
        )
    if not sides.train.any():
        raise DataError("every sample belongs together with a test sample, so none is left to train on")
    note = f"{how} is test: {int(sides.test.sum()):,}"
    if left_out := int((~sides.train & ~sides.test).sum()):
        note += f"; {left_out:,} earlier ones, which belong to test samples, are left out"
    return samples.take(sides.train), samples.take(sides.test), note


def without_tested(train: Samples, test: Samples, are_marked: bool) -> tuple[Samples, Samples, str]:
    """The training samples that belong to no test sample and are earlier than their site's test samples; and a warning.

    Where that would leave a class without a training sample, all stay.

    Args:
        train, test: Named by the data's owner.
        are_marked: Whether it is known what belongs together; else copies do.
    """
    if not are_marked and (unit := units_of([train, test])) is not None:
        train, test = replace(train, unit=unit[: len(train)]), replace(test, unit=unit[len(train) :])
    leaves = np.zeros(len(train), bool)
    if train.unit is not None and test.unit is not None:
        leaves |= np.isin(train.unit, test.unit)
    if train.time is not None and test.time is not None:
        site, begin = _site_of(train), np.full(1 + max(_site_of(train).max(), _site_of(test).max()), np.inf)
        np.minimum.at(begin, _site_of(test), test.time)
        leaves |= train.time >= begin[site]
    if not leaves.any():
        return train, test, ""
    how = f"{int(leaves.sum()):,} of {len(train):,} training samples are copies of test samples, belong to them or are"
    if len(np.setdiff1d(train.strata, train.strata[~leaves])) or leaves.all():
        without = (
            "without them a class would have none to train on, so they stay, and the test also rewards memory"
        )
        return train, test, f"{how} not earlier; {without}"
    return train.take(~leaves), test, f"{how} not earlier, and are left out of training"


def units_of(splits: Sequence[Samples]) -> Codes | None:
    """What belongs together in these samples, one after the other: copies at a site; None: there are none."""
    contents = [_contents(samples) for samples in splits]
    site, keys = np.concatenate([*map(_site_of, splits)]), np.concatenate([*map(row_hashes, contents)])
    if len(np.unique(mixed(keys + mixed(site.astype(np.uint64))))) == len(keys):
        return None
    if any(
        samples[name].shape[1:] != array.shape[1:]
        for samples in contents
        for name, array in contents[0].items()
    ):
        return None  # an error that is named later
    together = {name: np.concatenate([samples[name] for samples in contents]) for name in contents[0]}
    return united(
        copies(
            keys, columns_of(together), site, together["x"].dtype.kind == "U" if "x" in together else False
        )
    )


def united(first: Codes) -> Codes | None:
    """Units as of Samples, from the first sample of each; None where each is alone."""
    return first if (first != np.arange(len(first))).any() else None


def _contents(samples: Samples) -> dict[str, NDArray[Any]]:
    return {**by_name(samples.x), "y of a sample": samples.y}


def _site_of(samples: Samples) -> Codes:
    return np.zeros(len(samples), np.int64) if samples.group is None else samples.group


def divided(samples: Samples, order: Hashes) -> Sides:
    """A fifth of each site's samples for testing: class by class in this order, or the last ones by time.

    A class keeps at least one train sample somewhere, unless all of its samples are late.

    Args:
        samples: All of them; a group is a site.
        order: Of each; copies have the same.
    """
    train, test = np.ones(len(samples), bool), np.zeros(len(samples), bool)
    unit = np.arange(len(samples)) if samples.unit is None else samples.unit
    strata = samples.strata
    for rows in rows_of_sites(_site_of(samples)):
        wanted = max(1, len(rows) // FEWEST)
        if samples.time is None:
            test[rows] = drawn(strata[rows], unit[rows], order[rows], wanted)
        else:
            sides = latest(samples.time[rows], unit[rows], wanted)
            train[rows], test[rows] = sides
    if samples.time is None:
        untrained = np.isin(strata, np.setdiff1d(strata[test], strata[~test]))
        test[np.isin(unit, unit[test & untrained])] = False
        train = ~test
    return Sides(train, test)


def drawn(strata: Codes, unit: Codes, order: NDArray[np.uint64] | Codes, wanted: int) -> Mask:
    """About so many samples, whole units of them: of each class its share, the first ones in this order.

    A class with several units keeps one at least; where each has one alone, the smallest unit is drawn.

    Args:
        strata: The class of each sample.
        unit: What belongs together has the same number.
        order: Of each sample.
        wanted: How many.
    """
    names, member = np.unique(unit, return_inverse=True)
    sizes, chosen = np.bincount(member), np.zeros(len(names), bool)
    if len(names) < 2 or wanted < 1:
        return np.zeros(len(unit), bool)
    rank = np.full(len(names), np.iinfo(order.dtype).max, order.dtype)
    np.minimum.at(rank, member, order)
    stratum = np.full(len(names), strata.min())
    np.maximum.at(stratum, member, strata)
    listed = np.lexsort((rank, stratum))
    share, goal, rows_drawn = wanted / len(unit), 0.0, 0
    for block in np.split(listed, np.flatnonzero(np.diff(stratum[listed])) + 1):
        goal += share * sizes[block].sum()
        reached = rows_drawn + np.cumsum(sizes[block]) - sizes[block] / 2
        most = min(max(len(block) // 2, round(share * len(block))), len(block) - 1)
        count = min(int(np.searchsorted(reached, goal + 1e-9, side="right")), most)
        chosen[block[:count]] = True
        rows_drawn += int(sizes[block[:count]].sum())
    if not rows_drawn:
        chosen[np.lexsort((rank, sizes))[0]] = True
    return np.asarray(chosen[member])


def latest(time: NDArray[np.float64], unit: Codes, wanted: int) -> Sides:
    """The later samples for testing, about so many, and the earlier ones that belong to none of them.

    Args:
        time: Of each sample; samples of one time are on one side.
        unit: What belongs together has the same number.
        wanted: How many.
    """
    times, counts = np.unique(time, return_counts=True)
    if len(times) < 2 or wanted < 1:
        return Sides(np.ones(len(time), bool), np.zeros(len(time), bool))
    later = len(time) - np.cumsum(counts)[:-1]
    test = time > times[np.argmin(np.abs(later - wanted))]
    return Sides(~test & ~np.isin(unit, unit[test]), test)


def held_out_of_groups(group: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A mask of the test samples: a fifth of each group, evenly over its classes, and one of two or more.

    A class keeps at least one train sample in some group.

    Args:
        group: Of each sample.
        y: The class of each sample.
    """
    order = np.lexsort((y, group))
    size = np.bincount(group)[group]
    first = np.searchsorted(group[order], group)
    rank = np.empty(len(group), np.int64)
    rank[order] = np.arange(len(group))
    rank -= first
    count = np.where(size > 1, np.maximum(size // 5, 1), 0)
    shift = size // 2  # so that small groups do not always lose their last class
    position = (rank + shift) % size
    is_test: NDArray[np.bool_] = (position + 1) * count // size > position * count // size
    is_test[np.isin(y, np.setdiff1d(y[is_test], y[~is_test]))] = False
    return is_test


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
