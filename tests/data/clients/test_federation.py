from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from copfl.algorithms import FedAvg
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.clients.schemes import SCHEMES
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError
from tests.toys import rounds_of, slopes


def dataset() -> Dataset:
    """Ten train samples n -> (n, 100 n) of class n % 3, six test samples with negative numbers."""
    x = np.arange(10.0)[:, None] * np.array([1.0, 100.0])
    train = Samples(x, np.arange(10, dtype=np.int64) % 3)
    test = Samples(-x[:6], np.arange(6, dtype=np.int64) % 3)
    return Dataset("numbers", train, test, ("a", "b", "c"))


def federation(
    train: Sequence[list[int]], test: Sequence[list[int]], test_from: str = "test"
) -> FederatedData:
    mine, theirs = (tuple(np.array(part, np.int64) for part in side) for side in (train, test))
    return FederatedData(dataset(), Partition(mine, theirs, "by hand", test_from=test_from))


TRAIN, TEST = [[9, 2], [4], [7, 0, 5]], [[0], [1, 2], [5, 3]]


def test_rows_are_the_clients_samples_padded_to_the_largest() -> None:
    made = federation(TRAIN, TEST)
    data = made.train.rows([0, 2])
    assert data.size.tolist() == [2, 3]
    assert data.x.shape == (2, 3, 2)
    assert data.x[0, :2, 0].tolist() == [9, 2]
    assert data.x[1, :, 0].tolist() == [7, 0, 5]
    assert data.y[1].tolist() == [1, 0, 2]
    assert made.train.rows([1]).x.shape == (1, 1, 2)
    assert (made.clients, made.shape) == (3, (2,))


def test_rows_come_in_the_order_asked_for() -> None:
    made = federation(TRAIN, TEST)
    assert made.train.rows([2, 1, 0]).size.tolist() == [3, 1, 2]
    assert made.train.rows([2, 1, 0]).x[2, :2, 0].tolist() == [9, 2]
    assert made.train.rows([0, 1, 2]).size.tolist() == [2, 1, 3]


def test_the_pool_has_assigned_samples_only() -> None:
    made = federation(TRAIN, TEST)
    assert sorted(made.train.x[:, 0].tolist()) == [0, 2, 4, 5, 7, 9]
    assert sorted(made.test.x[:, 0].tolist()) == [-5, -3, -2, -1, 0]


def test_clients_may_share_test_samples() -> None:
    made = federation(TRAIN, [[1], [1, 0], [0]])
    assert made.test.x.shape == (2, 2)
    assert made.test.rows([1]).x[0, :, 0].tolist() == [-1, 0]


def test_a_validation_part_comes_from_the_train_samples() -> None:
    made = federation([[0], [1]], [[8], [9]], test_from="train")
    assert made.test.rows([0, 1]).x[:, 0, 0].tolist() == [8, 9]


def test_a_client_or_all_clients_without_test_samples() -> None:
    some: list[list[int]] = [[0, 1], []]
    for test in (some, [some[1], some[1]]):
        made = federation([[0, 1], [3, 4]], test)
        assert made.test.rows([0, 1]).size.tolist() == [len(part) for part in test]
        _, shown = rounds_of(FedAvg(), slopes(0.0, 0.0), made, 1)
        accuracy = shown[0].clients["accuracy"]
        assert np.isnan(accuracy).tolist() == [not part for part in test]  # unknown, not wrong
        assert np.isfinite(shown[0].clients["loss"]).all()


def test_samples_of_several_arrays_and_targets_of_any_shape() -> None:
    x = {"ids": np.arange(12).reshape(6, 2), "mask": np.ones((6, 3), bool)}
    y = np.arange(12, dtype=np.float32).reshape(6, 2)
    data = Dataset("several", Samples(x, y), Samples(x, y), ("a", "b"), kind="regression")
    parts = (np.array([4, 1]), np.array([0]))
    made = FederatedData(data, Partition(parts, (np.array([5]), np.array([], np.int64)), "by hand"))
    rows = made.train.rows([1, 0])
    inputs: Any = rows.x
    assert inputs["ids"].tolist()[1] == [[8, 9], [2, 3]]
    assert inputs["mask"].shape == (2, 2, 3)
    assert rows.y[1].tolist() == [[8, 9], [2, 3]]
    assert made.shape == {"ids": (2,), "mask": (3,)}
    assert made.unassigned(3)["ids"].tolist() == [[4, 5], [6, 7], [10, 11]]
    empty = FederatedData(data, Partition(parts, (np.array([], np.int64),) * 2, "by hand"))
    assert empty.test.rows([0]).y.shape == (1, 1, 2)
    assert made.partition.label_counts(data).shape == (2, 0)


def test_a_partition_of_other_data_is_refused() -> None:
    with pytest.raises(DataError, match='names sample 10, but "numbers" has 10'):
        federation([[10]], [[0]])
    with pytest.raises(DataError, match="client 1 has no train samples"):
        federation([[0], []], [[0], [1]])


def test_under_concept_shift_each_client_permutes_the_labels_of_its_classes() -> None:
    data = dataset()
    plain, shifted = (
        FederatedData(data, SCHEMES[name](data, 2, 5, per_client=3, train_per_class=1, test_per_class=1))
        for name in ("classes", "concept_shift")
    )
    labels = shifted.partition.labels
    assert labels is not None
    assert [sorted(own) for own in labels.tolist()] == [[0, 1, 2]] * 2
    assert labels[0].tolist() != labels[1].tolist()
    for before, after in ((plain.train, shifted.train), (plain.test, shifted.test)):
        for client in (0, 1):
            old, new = before.rows([client]), after.rows([client])
            assert old.x.tolist() == new.x.tolist()
            assert new.y[0].tolist() == [labels[client, y] for y in old.y[0].tolist()]
            assert after.targets(client).tolist() == new.y[0].tolist()
            assert before.targets(client).tolist() == old.y[0].tolist()
    assert plain.partition.labels is None
