from __future__ import annotations

import torch

from copfl import tree
from copfl.algorithms import copfl
from copfl.engine.store import MemoryStore

from ..toys import slopes


def store(clients: int = 4) -> MemoryStore:
    return MemoryStore(copfl(), slopes(1.0, 2.0), clients)


def test_everybody_begins_as_a_client_that_never_took_part() -> None:
    first = copfl().client_init(slopes(1.0, 2.0))
    rows = store().rows(torch.arange(4))
    for (path, expected), (found_path, found) in zip(tree.named(first), tree.named(rows), strict=True):
        assert path == found_path
        assert all(torch.equal(found[n], expected) for n in range(4))


def test_rows_of_some_are_theirs_and_come_back_to_them() -> None:
    it = store()
    some = it.rows(torch.tensor([1, 3]))
    it.put(torch.tensor([1, 3]), some._replace(w=torch.tensor([[10.0, 10.0], [30.0, 30.0]]).double()))
    assert it.rows(torch.arange(4)).w[:, 0].tolist() == [1, 10, 1, 30]
    assert it.rows(torch.tensor([3])).w.tolist() == [[30, 30]]


def test_everybody_at_once_and_then_some() -> None:
    it = store(2)
    everybody = it.rows(torch.arange(2))
    it.put(torch.arange(2), everybody._replace(w=torch.tensor([[5.0, 5.0], [6.0, 6.0]]).double()))
    it.put(torch.tensor([1]), it.rows(torch.tensor([1]))._replace(w=torch.tensor([[7.0, 7.0]]).double()))
    assert it.rows(torch.arange(2)).w[:, 0].tolist() == [5, 7]


def test_the_first_weights_of_the_task_are_not_written_into() -> None:
    task = slopes(1.0, 2.0)
    it = MemoryStore(copfl(), task, 3)
    it.put(torch.tensor([0]), tree.each(torch.zeros_like, it.rows(torch.tensor([0]))))
    assert task.first.tolist() == [1, 2]
    assert it.rows(torch.tensor([2])).w.tolist() == [[1, 2]]
