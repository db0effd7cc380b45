"""Which rows of a node count: by hand, and that no combination of a sum's vectors is of fewer rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from copfl.core.criteria import CRITERIA, Criterion
from copfl.core.task import Data
from copfl.federation.node.few_rows import CountedRows, _groups, _known, counted_rows


def counted(kind: str, y: object, least: int = 3, **options: object) -> tuple[list[int], CountedRows]:
    """The rows that count, by their number, and all that is known of them."""
    targets = torch.tensor(np.asarray(y))
    found = counted_rows(
        criterion(kind, **options),
        Data(torch.arange(len(targets)), targets, torch.tensor(len(targets))),
        least,
    )
    assert int(found.train.size) == len(found.train.y) == len(targets) - found.left_out
    return found.train.x.tolist(), found


def criterion(kind: str, **options: object) -> Criterion:
    return CRITERIA[kind](**options)


def test_a_class_of_few_rows_does_not_count() -> None:
    assert counted("classification", [0, 0, 0, 1, 1, 2, 2, 2])[0] == [0, 1, 2, 5, 6, 7]
    assert counted("classification", [0, 0, 0, 1, 1], least=1)[0] == [0, 1, 2, 3, 4]
    assert counted("classification", [0, 1, 2, 0])[0] == []


def test_a_value_that_few_rows_have_does_not_count() -> None:
    """Of a label, and of a number that is nearly always the same."""
    assert counted("multilabel", [[0, 1], [1, 1], [1, 0], [1, 0], [1, 1], [1, 1]])[0] == [1, 4, 5]
    rows = [[0, 1]] + [[1, 0]] * 4 + [[1, 1]] * 3
    assert counted("multilabel", rows)[0] == [1, 2, 3, 4, 5, 6, 7]
    assert counted("regression", [0.0, 0.0, 0.0, 0.0, 7.5, 3.0])[0] == [0, 1, 2, 3]
    assert counted("regression", [1.0, 2.0, 3.0, 4.0])[0] == [0, 1, 2, 3]
    assert counted("regression", [[1.0, 0.0], [2.0, 0.0], [3.0, 9.0], [4.0, 0.0], [5.0, 0.0]])[0] == [
        0,
        1,
        3,
        4,
    ]
    rows = [[0, 0], [1, 1], [0, 0], [1, 1], [0, 1], [1, 1], [0, 0]]  # two labels that differ in one row
    assert counted("multilabel", rows)[0] == [0, 1, 2, 3, 5, 6]
    values = [[1.0, 11.0], [2.0, 12.0], [3.0, 13.0], [4.0, 44.0], [5.0, 15.0]]
    assert counted("regression", values, mean=(0.0, 10.0), std=(1.0, 1.0))[0] == [0, 1, 2, 4]


def test_a_value_of_a_column_counts_where_products_are_added_up() -> None:
    x = torch.tensor([[0.0, n] for n in range(6)] + [[1.0, 9.0]])
    train = Data(x, torch.tensor([0, 0, 0, 1, 1, 1, 1]), torch.tensor(7))
    assert counted_rows(criterion("classification"), train, 3).left_out == 0
    found = counted_rows(criterion("classification"), train, 3, has_products=True)
    assert (found.left_out, found.train.x.tolist()) == (1, x[:6].tolist())
    found = counted_rows(criterion("classification"), train._replace(y=train.y.flip(0)), 3, has_products=True)
    assert found.train.x.tolist() == x[:4].tolist()  # the class of which two are left does not count either


def test_few_events_do_not_count() -> None:
    y = [[float(n), n in (2, 5)] for n in range(1, 9)]
    assert counted("survival", y)[0] == [0, 2, 3, 5, 6, 7]


def test_neighbouring_intervals_become_one() -> None:
    """Three events in each group, which end it; three censored rows begin theirs."""
    y = [[t, 1.0] for t in (0.5, 1.5, 2.5, 3.5, 3.6, 3.7)] + [[t, 0.0] for t in (2.2, 2.4, 9.0, 9.0, 9.0)]
    rows, found = counted("survival", y, loss="discrete_time", cuts=(1.0, 2.0, 3.0, 4.0))
    assert (rows, found.left_out, found.merged) == (list(range(11)), 0, 4)
    assert found.train.y.tolist() == [[4.0, 1.0]] * 6 + [[0.0, 0.0]] * 2 + [[0.0, 0.0]] * 3
    y[6:8] = [[2.2, 0.0], [2.4, 0.0], [2.6, 0.0]]
    rows, found = counted("survival", y, loss="discrete_time", cuts=(1.0, 2.0, 3.0, 4.0))
    assert (len(rows), found.merged) == (12, 2)
    assert found.train.y.tolist() == [[3.0, 1.0]] * 3 + [[4.0, 1.0]] * 3 + [[0.0, 0.0]] * 3 + [[4.0, 0.0]] * 3


def test_intervals_with_enough_rows_stay() -> None:
    y = [[t + 0.25 * n, float(n % 2)] for t in (0.1, 1.1, 2.1) for n in range(2)] * 3
    _, found = counted("survival", y, loss="discrete_time", cuts=(1.0, 2.0))
    assert (found.left_out, found.merged) == (0, 0)
    assert found.train.y.tolist() == torch.tensor(np.asarray(y)).tolist()


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_no_combination_of_outputs_is_of_fewer_rows(columns: int, seed: int) -> None:
    """The losses' gradients by the outputs are equal for all rows of a target, of which there are enough."""
    draw, least = np.random.default_rng(seed), 4
    cuts = tuple(np.sort(draw.uniform(0.1, 30, 12)).round(2))
    time = draw.uniform(0.5, 40, 90).round(1)
    y = np.stack([time, draw.integers(0, 2, 90), draw.uniform(0, 1, 90) * (time - 0.1)], 1)[:, :columns]
    discrete = criterion("survival", loss="discrete_time", cuts=cuts)
    found = counted_rows(
        discrete, Data(torch.zeros(90), torch.tensor(y, dtype=torch.float32), torch.tensor(90)), least
    )
    logits = torch.zeros(len(found.train.y), len(cuts), requires_grad=True)
    discrete.losses(logits, found.train.y).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    _, counts = np.unique(logits.grad.numpy().round(4), axis=0, return_counts=True)
    assert counts.min() >= least
    assert len(found.train.y) > (60 if columns == 2 else 20)


def test_merging_nothing_changes_no_loss() -> None:
    """With groups of one interval, what they tell of a row is all that the objective uses."""
    draw = np.random.default_rng(0)
    cuts = (0.1, 0.7, 2.3)
    time = np.concatenate([draw.uniform(0.05, 3, 200), np.repeat(cuts, 20)])
    y = torch.tensor(np.stack([time, draw.integers(0, 2, 260)], 1), dtype=torch.float32)
    discrete = criterion("survival", loss="discrete_time", cuts=cuts)
    logits = torch.tensor(draw.normal(size=(260, 3)), dtype=torch.float32)
    ends = torch.tensor(cuts).double().numpy()
    groups = _groups(y.double().numpy(), ends, 2)
    assert len(groups) == 4
    known = torch.from_numpy(_known(y.double().numpy(), ends, groups)).float()
    assert torch.equal(discrete.losses(logits, known), discrete.losses(logits, y))
