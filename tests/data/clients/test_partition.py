"""Partitions: arithmetic by hand, laws, the paper's settings, damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from copfl.data.clients.groups import number_of_groups
from copfl.data.clients.partition import Partition, count_by, hold_out, validation_part, with_validation
from copfl.data.clients.schemes import SCHEMES, by_group, classes, dirichlet, iid, quantity
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError, RunError, UsageError

Ints = NDArray[np.int64]
law = settings(max_examples=30, deadline=None)


def samples(y: Ints, group: Ints | None = None) -> Samples:
    return Samples(np.zeros((len(y), 1), np.uint8), np.asarray(y, np.int64), group)


def balanced(kinds: int, train: int, test: int, groups: int = 0) -> Dataset:
    """A data set with so many samples of each class; in each class the groups take turns."""

    def split(each: int) -> Samples:
        y = np.tile(np.arange(kinds), each)
        return samples(y, np.arange(len(y)) // kinds % groups if groups else None)

    names = tuple(f"c{kind}" for kind in range(kinds)), tuple(f"g{group}" for group in range(groups))
    return Dataset("toy", split(train), split(test), *names)


class Table(NamedTuple):
    """Counts per client and class, and per client and group."""

    train: Ints
    test: Ints
    train_groups: Ints
    test_groups: Ints


def table_of(split: Partition, dataset: Dataset) -> Table:
    sides = ((split.train, dataset.train), (split.test, split.tested(dataset)))
    labels = [count_by(parts, side.y, len(dataset.classes)) for parts, side in sides]
    none = np.zeros(0, np.int64)
    groups = [
        none if side.group is None else count_by(parts, side.group, len(dataset.groups))
        for parts, side in sides
    ]
    np.testing.assert_array_equal(split.label_counts(dataset), labels[0])
    return Table(*labels, *groups)


def disjoint(parts: tuple[Ints, ...]) -> bool:
    everything = np.concatenate(parts)
    return len(np.unique(everything)) == len(everything)


def sizes(parts: tuple[Ints, ...]) -> list[int]:
    return [len(part) for part in parts]


# --- classes: the paper's settings


@pytest.mark.parametrize("clients", [10, 20, 50])
def test_cifar(clients: int) -> None:
    dataset = balanced(10, 5000, 1000)
    split = classes(dataset, clients, 1)
    table = table_of(split, dataset)
    assert split.clients == clients
    assert sizes(split.train) == [100] * clients
    assert (
        sizes(split.test) == [200] * clients
    )  # N = 50: 10 clients with 1000/10 = 100 test images, just enough
    assert ((table.train == 0) | (table.train == 50)).all()
    np.testing.assert_array_equal(table.test, 2 * table.train)
    np.testing.assert_array_equal((table.train > 0).sum(axis=0), clients * 2 // 10)
    assert disjoint(split.train)
    assert disjoint(split.test)
    assert split.notes == ()


@pytest.mark.parametrize(("clients", "per_class"), [(20, 2), (50, 5)])
def test_mini_imagenet(clients: int, per_class: int) -> None:
    """500 train and 100 test images of each of 100 classes: all its clients are tested on the same 100."""
    dataset = balanced(100, 500, 100)
    split = classes(dataset, clients, 1, per_client=10)
    table = table_of(split, dataset)
    assert sizes(split.train) == [500] * clients
    assert sizes(split.test) == [1000] * clients
    np.testing.assert_array_equal((table.train > 0).sum(axis=0), per_class)
    np.testing.assert_array_equal(table.test, 2 * table.train)
    assert disjoint(split.train)
    assert len(split.notes) == 1
    assert "100 classes" in split.notes[0]


def test_short_shards_are_taken_whole_and_noted() -> None:
    dataset = balanced(2, 70, 30)
    split = classes(dataset, 4, 0, per_client=1, test_per_class=15)
    assert sizes(split.train) == [35] * 4  # 70 images, 2 clients, 50 asked
    assert sizes(split.test) == [15] * 4
    assert disjoint(split.test)
    assert len(split.notes) == 1
    assert "only 35" in split.notes[0]


def test_a_common_test_pool_is_cut_to_size() -> None:
    split = classes(balanced(2, 100, 30), 4, 0, per_client=1, test_per_class=20)
    assert sizes(split.test) == [20] * 4
    assert len({tuple(part) for part in split.test}) == 2  # one pool per class


def test_without_distinct_a_client_may_have_one_class_twice() -> None:
    dataset = balanced(10, 5000, 1000)
    split = classes(dataset, 50, 3, distinct=False)
    table = table_of(split, dataset)
    np.testing.assert_array_equal(table.train.sum(axis=0), 500)  # 10 slots of 50 each
    assert sizes(split.train) == [100] * 50
    assert set(np.unique(table.train)) == {0, 50, 100}
    assert (table_of(classes(dataset, 50, 3), dataset).train <= 50).all()


def test_a_class_assigned_twice_adds_a_shared_pool_once() -> None:
    split = classes(
        balanced(1, 100, 30), 3, 0, per_client=2, train_per_class=10, test_per_class=20, distinct=False
    )
    assert sizes(split.train) == [20] * 3
    assert sizes(split.test) == [20] * 3


@law
@given(st.data())
def test_distinct_classes_and_equal_counts(data: st.DataObject) -> None:
    kinds = data.draw(st.integers(1, 12))
    per_client = data.draw(st.integers(1, kinds))
    clients = data.draw(st.integers(1, 30))
    dataset = balanced(kinds, 70, 7)
    split = classes(dataset, clients, data.draw(st.integers(0, 99)), per_client=per_client, test_per_class=3)
    table = table_of(split, dataset)
    has = table.train > 0
    assert (has.sum(axis=1) == per_client).all()
    per_class = has.sum(axis=0)
    assert per_class.max() - per_class.min() <= 1
    expected = np.minimum(50, 70 // np.maximum(per_class, 1))
    np.testing.assert_array_equal(table.train, has * expected)
    np.testing.assert_array_equal(table.test, has * 3)
    assert disjoint(split.train)


def test_groups_per_client() -> None:
    dataset = balanced(10, 300, 150, groups=3)
    split = classes(dataset, 10, 0, train_per_class=20, test_per_class=10, group_per_client=True)
    table = table_of(split, dataset)
    expected = np.eye(3, dtype=np.int64)[np.arange(10) % 3]
    np.testing.assert_array_equal(table.train_groups, 40 * expected)
    np.testing.assert_array_equal(table.test_groups, 20 * expected)
    assert ((table.train > 0).sum(axis=1) == 2).all()
    assert disjoint(split.train)


def test_groups_per_client_say_what_is_missing() -> None:
    dataset = balanced(2, 40, 40, groups=2)
    with pytest.raises(
        DataError, match=r'20 train samples of class "c0" in group "g0" .* train_per_class to 10'
    ):
        classes(dataset, 4, 0, group_per_client=True, test_per_class=5)
    with pytest.raises(DataError, match=r"20 test samples .* lower test_per_class to 20"):
        classes(dataset, 4, 0, group_per_client=True, train_per_class=10, test_per_class=21)
    assert (
        sizes(classes(dataset, 4, 0, group_per_client=True, train_per_class=10, test_per_class=20).train)
        == [20] * 4
    )
    with pytest.raises(DataError, match="no groups"):
        classes(balanced(2, 40, 40), 4, 0, group_per_client=True)


def test_a_client_without_train_samples_is_an_error() -> None:
    dataset = Dataset("toy", samples(np.array([0, 0, 0, 0, 1])), samples(np.array([0, 1])), ("a", "b"))
    with pytest.raises(DataError, match="no train samples"):
        classes(dataset, 4, 0, per_client=1)  # 2 clients for 1 image of b
    with pytest.raises(DataError, match=r"8 clients .* need 8, but .* has 6; use at most 6"):
        classes(balanced(2, 3, 3), 8, 0, per_client=1)


def test_a_client_without_test_samples_is_an_error() -> None:
    dataset = Dataset("toy", samples(np.array([0, 0, 1, 1])), samples(np.array([0, 0])), ("a", "b"))
    with pytest.raises(DataError, match="no test samples"):
        classes(dataset, 2, 0, per_client=1)


@pytest.mark.parametrize(
    "keywords", [{"per_client": 0}, {"per_client": 4}, {"train_per_class": 0}, {"test_per_class": 0}]
)
def test_values_that_classes_does_not_allow(keywords: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        classes(balanced(3, 10, 10), 2, 0, **keywords)


# --- dirichlet


@law
@given(
    st.integers(1, 8),
    st.integers(1, 60),
    st.integers(1, 4),
    st.sampled_from([1e-100, 1e-6, 0.05, 0.3, 1.0, 100.0, 1e6, 1e300]),
    st.integers(0, 9),
    st.integers(0, 40),
    st.integers(1, 30),
)
def test_dirichlet_assigns_every_sample_and_keeps_the_minimum(
    kinds: int, clients: int, minimum: int, alpha: float, seed: int, spare: int, tests: int
) -> None:
    rng = np.random.default_rng(seed)
    train, test = rng.integers(kinds, size=clients * minimum + spare), rng.integers(kinds, size=tests)
    train[0] = test[0]  # or there may be nothing to test on
    dataset = Dataset("toy", samples(train), samples(test), ("c",) * kinds)
    split = dirichlet(dataset, clients, seed, alpha=alpha, minimum=minimum)
    assert min(sizes(split.train)) >= minimum
    np.testing.assert_array_equal(np.sort(np.concatenate(split.train)), np.arange(len(train)))
    assert min(sizes(split.test)) >= 1
    usable = np.flatnonzero(np.isin(test, train))
    np.testing.assert_array_equal(np.unique(np.concatenate(split.test)), usable)
    if clients <= len(usable):
        assert disjoint(split.test)


def test_a_tiny_alpha_gives_each_class_to_one_client() -> None:
    dataset = balanced(10, 500, 100)
    table = table_of(dirichlet(dataset, 10, 0, alpha=1e-6), dataset)
    assert (np.sort(table.train, axis=0)[-1] >= 500 - 2 * 9).all()  # all but what others got as their minimum
    assert ((table.train.sum(axis=1) == 2) == (table.train.max(axis=1) <= 2)).all()


def test_a_huge_alpha_gives_equal_parts() -> None:
    dataset = balanced(10, 500, 100)
    table = table_of(dirichlet(dataset, 10, 0, alpha=1e6), dataset)
    assert np.abs(table.train - 50).max() <= 3
    assert np.abs(table.test - 10).max() <= 3


def test_dirichlet_divides_as_many_train_samples_as_wanted() -> None:
    dataset = balanced(10, 50, 10)
    split = dirichlet(dataset, 5, 4, samples=60)
    assert sum(sizes(split.train)) == 60
    assert disjoint(split.train)
    assert "samples" in split.keywords
    assert "samples" not in dirichlet(dataset, 5, 4, samples=0).keywords  # as before there was the option


def test_the_test_part_follows_the_train_labels() -> None:
    dataset = balanced(10, 5000, 1000)
    split = dirichlet(dataset, 10, 4)
    table = table_of(split, dataset)
    assert np.abs(table.test - table.train / 5).max() <= 2  # one by the minimum, one by rounding
    assert sum(sizes(split.test)) == 10_000
    even = dirichlet(dataset, 10, 4, test="iid")
    assert sizes(even.test) == [1000] * 10
    assert disjoint(even.test)


def test_skew_survives_where_the_minimum_is_all_there_is() -> None:
    """2 samples for each of 500 clients and none left: skewed clients still have them of one class, mostly."""
    dataset = balanced(10, 100, 10)
    one_class = [
        (table_of(dirichlet(dataset, 500, 0, alpha=c), dataset).train.max(axis=1) == 2).mean()
        for c in (0.01, 1e6)
    ]
    assert one_class[0] > 0.5
    assert one_class[1] < 0.2


def test_rounding_favours_nobody() -> None:
    """1000 clients and 1 sample of each of 1000 classes beyond the minimum: not for the same client every time."""
    split = dirichlet(balanced(1000, 2, 1), 1000, 0, alpha=1e6, minimum=1)
    assert max(sizes(split.train)) <= 20


def test_more_clients_than_test_samples_share_them() -> None:
    split = dirichlet(balanced(4, 100, 2), 30, 0)
    assert min(sizes(split.test)) >= 1
    assert split.notes == ("test: 30 clients share 8 samples",)


@pytest.mark.job
def test_ten_thousand_clients() -> None:
    rng = np.random.default_rng(0)
    train, test = rng.integers(10, size=1_000_000), rng.integers(10, size=100_000)
    dataset = Dataset("large", samples(train), samples(test), tuple("0123456789"))
    split = dirichlet(dataset, 10_000, 0)
    assert split.clients == 10_000
    assert min(sizes(split.train)) >= 2
    assert sum(sizes(split.train)) == 1_000_000
    assert min(sizes(split.test)) >= 1
    assert disjoint(split.test)


def test_dirichlet_refuses_with_the_numbers() -> None:
    dataset = balanced(2, 10, 10)
    with pytest.raises(
        DataError, match=r"11 clients .* 2 train samples each need 22.*has 20; use at most 10"
    ):
        dirichlet(dataset, 11, 0)
    dirichlet(dataset, 10, 0)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="alpha"):
            dirichlet(dataset, 2, 0, alpha=alpha)
    with pytest.raises(UsageError, match="minimum"):
        dirichlet(dataset, 2, 0, minimum=0)
    with pytest.raises(UsageError, match='did you mean "same"'):
        dirichlet(dataset, 2, 0, test="sam")
    foreign = Dataset("toy", samples(np.zeros(9, np.int64)), samples(np.ones(9, np.int64)), ("a", "b"))
    with pytest.raises(DataError, match="no test samples of its train classes"):
        dirichlet(foreign, 2, 0)


# --- iid and by_group


def test_iid_parts_are_equal() -> None:
    split = iid(balanced(2, 11, 3), 5, 0)
    assert sorted(sizes(split.train)) == [4, 4, 4, 5, 5]
    assert sorted(sizes(split.test)) == [1, 1, 1, 1, 2]
    assert disjoint(split.train)
    assert disjoint(split.test)
    with pytest.raises(DataError, match="has 22"):
        iid(balanced(2, 11, 3), 23, 0)


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        (3, [[40, 0, 0], [0, 40, 0], [0, 0, 40]]),
        (2, [[40, 0, 40], [0, 40, 0]]),
        (5, [[20, 0, 0], [0, 20, 0], [0, 0, 40], [20, 0, 0], [0, 20, 0]]),
        (1, [[40, 40, 40]]),
    ],
)
def test_groups(clients: int, expected: list[list[int]]) -> None:
    dataset = balanced(4, 30, 15, groups=3)
    split = by_group(dataset, clients, 0)
    table = table_of(split, dataset)
    np.testing.assert_array_equal(table.train_groups, expected)
    np.testing.assert_array_equal(2 * table.test_groups, expected)
    assert disjoint(split.train)
    assert disjoint(split.test)


def test_groups_that_do_not_suffice() -> None:
    dataset = balanced(1, 6, 3, groups=3)  # 2 train samples and 1 test sample of each group
    split = by_group(dataset, 6, 0)
    assert sizes(split.train) == sizes(split.test) == [1] * 6
    assert len(split.notes) == 3
    unequal = replace(
        dataset, train=samples(np.zeros(10, np.int64), np.array([0, 0, 1, 1, 1, 1, 2, 2, 2, 2]))
    )
    with pytest.raises(DataError, match='"g0" has 2 train samples for 3 clients'):
        by_group(unequal, 7, 0)
    with pytest.raises(DataError, match="no groups"):
        by_group(balanced(1, 6, 3), 2, 0)
    untested = replace(dataset, test=samples(np.zeros(2, np.int64), np.array([0, 1])))
    divided = by_group(untested, 3, 0)
    assert (sizes(divided.train), sizes(divided.test)) == ([2, 2, 2], [1, 1, 0])
    assert divided.notes == ('groups with train samples and no test sample train, and are not tested: "g2"',)


def test_joined_groups_are_reported() -> None:
    dataset = balanced(4, 30, 15, groups=3)
    assert by_group(dataset, 2, 0).notes == (
        "3 groups are joined to 2 clients; leave out the number of clients for one each",
    )
    assert by_group(dataset, 3, 0).notes == ()
    groups = dataset.train.group
    assert groups is not None
    without_g2 = replace(dataset, train=dataset.train.take(np.asarray(groups != 2)))
    assert by_group(without_g2, 2, 0).notes == (
        'groups with test samples and no train sample are left out: "g2"',
    )
    assert by_group(balanced(4, 30, 15, groups=1), 1, 0).notes == (
        "there is one client, so nothing is federated",
    )
    assert number_of_groups(dataset) == 3


def test_quantity_gives_parts_of_unequal_size() -> None:
    dataset = balanced(4, 100, 50)
    split = quantity(dataset, 8, 0, alpha=0.3, minimum=3)
    assert sum(sizes(split.train)) == 400
    assert sum(sizes(split.test)) == 200
    assert min(sizes(split.train)) >= 3
    assert max(sizes(split.train)) > 4 * min(sizes(split.train))
    assert disjoint(split.train)
    even = quantity(dataset, 8, 0, alpha=1e6)
    assert max(sizes(even.train)) - min(sizes(even.train)) <= 3


@pytest.mark.parametrize("scheme", ["classes", "dirichlet"])
def test_a_scheme_by_class_refuses_other_targets(scheme: str) -> None:
    values = Samples(np.zeros((30, 1)), np.linspace(0, 1, 30))
    dataset = Dataset("prices", values, values, ("price",), kind="regression")
    message = (
        rf'the partition "{scheme}" assigns classes, but the targets of "prices" are of the kind regression'
    )
    with pytest.raises(DataError, match=message + "; use partition='iid' or partition='quantity'"):
        SCHEMES[scheme](dataset, 3, 0)
    for other in ("iid", "quantity"):
        held = hold_out(SCHEMES[other](dataset, 3, 0), 0.2, dataset, 0)
        assert sum(sizes(held.train)) + sum(sizes(held.test)) == 30


# --- all schemes

SMALL = balanced(4, 40, 20, groups=2)
keywords = st.sampled_from(
    [
        ("classes", {"train_per_class": 7}),
        ("dirichlet", {}),
        ("iid", {}),
        ("quantity", {}),
        ("by_group", {}),
        ("overlapping", {"train_size": 30}),
    ]
)


def test_more_clients_than_samples() -> None:
    """160 train samples make five disjoint parts of 30 in each permutation."""
    split = SCHEMES["overlapping"](SMALL, 1000, 0, train_size=30, test_size=7)
    assert sizes(split.train) == [30] * 1000
    assert sizes(split.test) == [7] * 1000
    times = np.bincount(np.concatenate(split.train))
    assert times.min() > 150
    assert times.max() <= 200
    first = np.concatenate(split.train[:5])
    assert len(np.unique(first)) == len(first)
    with pytest.raises(UsageError, match="test_size=81 must be at most 80"):
        SCHEMES["overlapping"](SMALL, 3, 0, test_size=81)


@law
@given(keywords, st.integers(1, 9), st.integers(0, 2**40))
def test_the_seed_is_everything(scheme: tuple[str, dict[str, Any]], clients: int, seed: int) -> None:
    name, options = scheme
    first = SCHEMES[name](SMALL, clients, seed, **options)
    np.random.default_rng().random(seed % 5)
    assert SCHEMES[first.scheme](SMALL, first.clients, **first.keywords).fingerprint == first.fingerprint
    if clients > 2:
        other = SCHEMES[name](SMALL, clients, seed + 1, **options)
        assert [part.tolist() for part in other.train] != [part.tolist() for part in first.train]
    for part in (*first.train, *first.test):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_no_scheme_allows(scheme: str) -> None:
    with pytest.raises(UsageError, match="clients=0 must be a number of at least 1"):
        SCHEMES[scheme](SMALL, 0, 0)
    with pytest.raises(UsageError, match="seed=-1 must be a number of at least 0"):
        SCHEMES[scheme](SMALL, 2, -1)
    empty = samples(np.empty(0, np.int64))
    with pytest.raises(DataError, match="0 test samples"):
        SCHEMES[scheme](Dataset("toy", SMALL.train, empty, SMALL.classes), 2, 0)


# --- validation


@law
@given(keywords, st.integers(1, 9), st.floats(0.01, 0.99), st.integers(0, 99))
def test_hold_out(scheme: tuple[str, dict[str, Any]], clients: int, fraction: float, seed: int) -> None:
    name, options = scheme
    whole = SCHEMES[name](SMALL, clients, seed, **options)
    split = hold_out(whole, fraction, SMALL, seed)
    assert split.test_from == "train"
    assert split.tested(SMALL) is SMALL.train
    before, after = table_of(whole, SMALL).train, table_of(split, SMALL)
    np.testing.assert_array_equal(after.train + after.test, before)
    assert np.intersect1d(np.concatenate(split.train), np.concatenate(split.test)).size == 0
    for whole_part, train, test, counts, taken in zip(
        whole.train, split.train, split.test, before, after.test, strict=True
    ):
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), whole_part)
        assert len(train)
        if not disjoint(whole.train):  # what is held out from one client is held out from the others
            continue
        assert len(test) == max(1, min(round(fraction * len(whole_part)), len(whole_part) - 1))
        assert (np.abs(taken - counts * len(test) / len(whole_part)) < 1).all()
    assert hold_out(whole, fraction, SMALL, seed).fingerprint == split.fingerprint


@pytest.mark.parametrize("parts", [([0, 0],), ([3, -1],), ([0.5],), ([[1]],), ([0, 1], [2, 2])])
def test_parts_that_are_not_distinct_samples(parts: tuple[Any, ...]) -> None:
    good = tuple(np.array([0, 2, 1]) for _ in parts)
    with pytest.raises(DataError, match="indices must be distinct int64 numbers from 0 on"):
        Partition(good, tuple(map(np.array, parts)), "by hand")
    Partition(good, (np.array([], np.int64), *good[1:]), "by hand")


def test_hold_out_of_few_samples() -> None:
    parts = tuple(np.array(part) for part in ([0], [1, 2], [3, 4, 5]))
    split = hold_out(Partition(parts, parts, "by hand"), 0.01, SMALL, 0)
    assert sizes(split.train) == [1, 1, 2]
    assert sizes(split.test) == [0, 1, 1]
    assert sizes(hold_out(split, 0.99, SMALL, 0).test) == [0, 0, 1]
    for fraction in (0.0, 1.0, float("nan")):
        with pytest.raises(UsageError, match="fraction"):
            hold_out(split, fraction, SMALL, 0)


@pytest.mark.parametrize(("clients", "size"), [(30, 20), (200, 20), (200, 2), (500, 1)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_client_trains_on_a_validation_sample_of_another(clients: int, size: int, seed: int) -> None:
    whole = SCHEMES["overlapping"](SMALL, clients, seed, train_size=size)
    split = hold_out(whole, 0.2, SMALL, seed)
    assert np.intersect1d(np.concatenate(split.train), np.concatenate(split.test)).size == 0
    for before, train, test in zip(whole.train, split.train, split.test, strict=True):
        np.testing.assert_array_equal(np.union1d(train, test), before)
        assert len(train)
    if size == 20:
        assert abs(np.mean(sizes(split.test)) - 4) < 0.5


def test_hold_out_where_each_pair_of_clients_shares_a_sample() -> None:
    """Any two of the samples 0, 1, 2 would be a whole client's: one is held out, and one client has none."""
    parts = tuple(np.array(part) for part in ([0, 1], [1, 2], [0, 2]))
    for seed in range(20):
        split = hold_out(Partition(parts, parts, "by hand"), 0.5, SMALL, seed)
        assert sorted(sizes(split.test)) == [0, 1, 1]
        assert len(set(np.concatenate(split.test).tolist())) == 1


def test_under_concept_shift_a_validation_part_and_a_file_keep_each_clients_labels(tmp_path: Path) -> None:
    dataset = balanced(4, 40, 20)
    whole = SCHEMES["concept_shift"](dataset, 6, 3, per_client=3, train_per_class=2)
    split = hold_out(whole, 0.6, dataset, 3)  # so that some clients train on fewer classes than they have
    before, after = (table_of_classes(part, dataset) for part in (whole, split))
    assert (after.sum(axis=1) < before.sum(axis=1)).any()
    split.save(tmp_path / "split.json")
    for same in (split, Partition.load(tmp_path / "split.json")):
        np.testing.assert_array_equal(same.labels, whole.labels)


def table_of_classes(split: Partition, dataset: Dataset) -> NDArray[np.bool_]:
    return count_by(split.train, dataset.train.y, len(dataset.classes)) > 0


def test_label_counts_are_of_the_clients_own_labels() -> None:
    data = Dataset("toy", samples(np.array([0, 0, 1])), samples(np.array([0, 1])), ("a", "b"))
    parts = (np.array([0, 1, 2]),)
    split = Partition(parts, (np.array([0]),), "by hand", labels=np.array([[1, 0]]))
    assert split.label_counts(data).tolist() == [[1, 2]]


def test_labels_that_are_no_permutation_are_refused() -> None:
    parts = (np.array([0]), np.array([1]))
    for labels in ([[0, 1]], [[0, 0], [0, 1]], [0, 1]):
        with pytest.raises(DataError, match="must be a permutation of the classes"):
            Partition(parts, parts, "by hand", labels=np.array(labels))
    with pytest.raises(DataError, match="by concept_shift needs the labels"):
        Partition(parts, parts, "concept_shift")
    with pytest.raises(DataError, match='labels of 2 classes, but "toy" has 4'):
        Partition(parts, parts, "by hand", labels=np.array([[0, 1], [1, 0]])).check(SMALL)


def test_hold_out_takes_any_class() -> None:
    """Of two samples of two classes one is held out: by chance, not always of the same class."""
    split = Partition((np.array([0, 1]),), (np.array([0]),), "by hand")
    assert {int(hold_out(split, 0.5, SMALL, seed).test[0][0]) for seed in range(20)} == {0, 1}


# --- files


@law
@given(keywords, st.integers(1, 5), st.integers(0, 9), st.booleans())
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    scheme: tuple[str, dict[str, Any]],
    clients: int,
    seed: int,
    validation: bool,
) -> None:
    name, options = scheme
    path = tmp_path_factory.mktemp("partition") / "new folder" / "split.json"
    split = SCHEMES[name](SMALL, clients, seed, **options)
    if validation:
        split = hold_out(split, 0.2, SMALL, seed)
    split.save(path)
    again = Partition.load(path)
    assert again.fingerprint == split.fingerprint
    assert (again.scheme, again.keywords, again.test_from, again.notes) == (
        (split.scheme, split.keywords, split.test_from, split.notes)
    )
    for ours, theirs in zip(split.train + split.test, again.train + again.test, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert theirs.dtype == np.int64
    assert list(path.parent.iterdir()) == [path]  # nothing temporary stays


def test_fingerprints_and_files_are_those_of_version_1(tmp_path: Path) -> None:
    """Stored results are identified by them; `alpha` was called `concentration` there."""
    split = dirichlet(SMALL, 3, 0, alpha=0.3)
    assert split.fingerprint.startswith("68678e16fd6b9440")
    assert classes(SMALL, 3, 0).fingerprint.startswith("8fd81703f6ca88bf")
    split.save(tmp_path / "split.json")
    assert '"concentration":0.3' in (tmp_path / "split.json").read_text()
    assert Partition.load(tmp_path / "split.json").keywords["alpha"] == 0.3


@law
@given(st.data())
def test_damage_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("partition") / "split.json"
    iid(balanced(2, 3, 3), 2, 0).save(path)
    content = path.read_bytes().rstrip()
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(content[:place])
    else:
        byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
        path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
    with pytest.raises(DataError, match=r"split\.json"):
        Partition.load(path)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '"text"', "[" * 100_000, '{"format": "other"}', "1" * 5000]
)
def test_foreign_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "split.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"split\.json"):
        Partition.load(path)


def edit(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.update(changes)


@pytest.mark.parametrize(
    "change",
    [
        dict.clear,
        edit(scheme=3),
        edit(keywords=[]),
        edit(test_from="elsewhere"),
        edit(notes=[1]),
        edit(notes="text"),
        edit(train=3),
        edit(train=[]),
        edit(train=[[0, 1, 2]]),
        edit(train=[[], [1]]),
        edit(train=[[0], [-1]]),
        edit(train=[[0], [1, 1]]),
        edit(train=[[0], [1.5]]),
        edit(train=[[0], [True]]),
        edit(train=[[0], [None]]),
        edit(train=[[0], ["1"]]),
        edit(train=[[0], "1"]),
        edit(train=[[0], 1]),
        edit(train=[[0], [[1]]]),
        edit(train=[[0], [1, [2]]]),
        edit(train=[[0], [2**63]]),
        edit(train=[[0], [2**70]]),
        edit(train=[[0], [4]]),  # valid, but not what was saved
    ],
)
def test_wrong_content(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = tmp_path / "split.json"
    iid(balanced(2, 3, 3), 2, 0).save(path)
    content = json.loads(path.read_text())
    change(content["partition"])
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"split\.json is not a valid partition .*make it again"):
        Partition.load(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        Partition.load(tmp_path / "absent.json")
    with pytest.raises(DataError, match="cannot read"):
        Partition.load(tmp_path)
    with pytest.raises(RunError, match="cannot write"):
        iid(SMALL, 2, 0).save(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        iid(SMALL, 2, 0).save(tmp_path / "file" / "split.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_save_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "split.json"
    before = iid(SMALL, 2, 0)
    before.save(path)
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(RunError, match="No space left"):
        iid(SMALL, 3, 0).save(path)
    assert Partition.load(path).fingerprint == before.fingerprint
    assert list(tmp_path.iterdir()) == [path]


def test_a_partition_of_another_data_set() -> None:
    split = iid(balanced(4, 41, 20), 3, 0)
    with pytest.raises(DataError, match='names sample 163, but "toy" has 160 there'):
        split.label_counts(SMALL)


@pytest.mark.parametrize("scheme", ["dirichlet", "concept_shift"])
def test_a_client_can_draw_its_validation_part_alone(scheme: str) -> None:
    """A node of a federation knows its own samples and labels, its number and the seed, and nothing of the others."""
    dataset = balanced(4, 40, 20)
    options = {"per_client": 3, "train_per_class": 5} if scheme == "concept_shift" else {}
    whole = SCHEMES[scheme](dataset, 3, 3, **options)
    split = with_validation(whole, 0.3, dataset, 5)
    for client, part in enumerate(whole.train):
        labels = dataset.train.y[part]
        labels = labels if whole.labels is None else whole.labels[client][labels]
        kept, held_out = validation_part(dataset.train.take(part), labels, 0.3, 5, client)
        np.testing.assert_array_equal(part[held_out], split.validation[client])
        np.testing.assert_array_equal(part[kept], split.train[client])


def test_a_single_sample_is_for_training() -> None:
    labels = np.zeros(1, np.int64)
    assert validation_part(samples(labels), labels, 0.3, 0, 0).test.tolist() == [False]
