from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from copfl.algorithms import COPFL, FedAvg, FedPer, Local
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.optim import Adam
from copfl.core.tree import vectorised
from copfl.engine.mapping import NotBatchable, sequential, vmap
from copfl.parts import Cowa, Pwpm
from copfl.testing import small_federation
from tests.toys import federation_of, rounds_of, slopes

SIZES = (5, 9, 3, 12, 1)


class Row(NamedTuple):
    a: Tensor
    none: None
    more: tuple[Tensor, ...]


def test_vectorised_accepts_records_and_none() -> None:
    rows = Row(torch.arange(3.0), None, (torch.ones(3, 2),))
    found: Any = vectorised(lambda row: {"twice": 2 * row.a, "rest": (None, row.more[0].sum() + row.a)}, rows)
    assert found["twice"].tolist() == [0, 2, 4]
    assert found["rest"][0] is None
    assert found["rest"][1].tolist() == [2, 3, 4]


def test_vectorised_repeats_a_value_that_all_rows_share() -> None:
    found = vectorised(lambda row: torch.tensor(7.0), torch.arange(3.0))
    assert found.tolist() == [7, 7, 7]


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "if": (lambda t: 1 if t > 0 else 2, "Python branch on a tensor; write torch.where"),
    "item": (lambda t: t.item(), r"reads a tensor's value"),
    "float": (lambda t: float(t), r"reads a tensor's value"),
    "numpy": (lambda t: t.numpy(), r"reads a tensor's value"),
    "asarray": (lambda t: np.asarray(t), r"reads a tensor's value"),
    "tolist": (lambda t: t.tolist(), r"reads a tensor's value"),
    "mask": (lambda t: t.view(1)[t.view(1) > 0], "shape of its result depends on a tensor's values"),
    "add_": (lambda t: torch.zeros(()).add_(t), "into one tensor; write torch.stack"),
    "[0] =": (lambda t: torch.zeros(3).__setitem__(0, t), "into one tensor; write torch.stack"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_code_that_runs_for_one_client_alone_is_named_with_its_line(what: str) -> None:
    written, rule = REFUSED[what]

    def update(row: Tensor) -> Tensor:
        written(row)
        return row

    assert sequential().over(update, torch.ones(1)).tolist() == [1]
    line = f"{__file__}:{written.__code__.co_firstlineno} cannot be computed for many clients at once"
    with pytest.raises(NotBatchable, match=f"{re.escape(line)}: .*{rule}.*; or use engine='sequential'"):
        vmap(3).over(update, torch.ones(3))


def test_random_numbers_of_ones_own_get_no_advice_to_train_one_by_one() -> None:
    with pytest.raises(NotBatchable, match=r"draws random numbers of its own; only .* can be repeated$"):
        vmap(3).over(lambda row: row + torch.rand(()), torch.ones(3))


def test_an_error_that_has_nothing_to_do_with_batching_stays() -> None:
    with pytest.raises(RuntimeError, match="matmul"):
        vmap(3).over(lambda row: row @ row, torch.ones(3))


def test_sequential_takes_one_at_a_time() -> None:
    assert sequential().chunk == 1
    assert sequential().over(lambda x: x + 1, torch.tensor([4.0])).tolist() == [5]


@pytest.mark.parametrize(
    "algorithm",
    [
        COPFL(),
        COPFL(growth=Pwpm(count="all"), contribution=Cowa(leave_one_out="paper"), merge="union"),
        FedPer(Adam(keep=True), personal=("norms",)),
    ],
    ids=["copfl", "copfl as published", "kept Adam, personal norms"],
)
@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_the_engines_agree_on_every_record_and_metric(algorithm: AnyAlgorithm, participation: float) -> None:
    task, federation = small_federation("batch", SIZES)
    how: dict[str, Any] = {"batch": 4, "participation": participation, "eval_every": 1}
    state, shown = rounds_of(algorithm, task, federation, 2, sequential(), **how)
    everybody = torch.arange(len(SIZES))
    for chunk in (64, 2):
        other, shown_too = rounds_of(algorithm, task, federation, 2, vmap(chunk), **how)
        records = (state.server, state.clients.rows(everybody)), (other.server, other.clients.rows(everybody))
        for (path, expected), (_, found) in zip(*map(tree.named, records), strict=True):
            difference = (found.double() - expected.double()).abs().max()
            assert float(difference) < 1e-9, path
        for expected_round, found_round in zip(shown, shown_too, strict=True):
            assert expected_round.ids.tolist() == found_round.ids.tolist()
            assert expected_round.clients.keys() == found_round.clients.keys()
            for name, values in expected_round.clients.items():
                np.testing.assert_allclose(
                    found_round.clients[name], values, rtol=1e-9, atol=1e-9, err_msg=name
                )
            for name, value in expected_round.federation.items():
                assert found_round.federation[name] == pytest.approx(value)


def test_the_three_accuracies() -> None:
    task, federation = small_federation("batch", (6, 6))
    state, shown = rounds_of(FedAvg(), task, federation, 1)
    metrics = shown[0].clients
    # Before the first round every client has the initial weights. The global model is evaluated with the
    # statistics of the client after its training.
    before, _ = task.evaluate(task.initial, tree.row(federation.test.rows([0]), 0))
    assert metrics["test_loss_before"][0] == pytest.approx(float(before))
    statistics = state.clients.rows(torch.arange(2)).personal[0]
    everybody, _ = task.evaluate(
        torch.cat([task.initial[: task.d], statistics]), tree.row(federation.test.rows([0]), 0)
    )
    assert metrics["test_loss_global"][0] == pytest.approx(float(everybody))
    assert metrics["test_loss"][0] != pytest.approx(metrics["test_loss_before"][0])


def test_bytes_are_counted_client_by_client() -> None:
    task, federation = small_federation("none", (8, 8))
    _, shown = rounds_of(COPFL(growth=Pwpm(rate=0.25, budget=0.25, count="all")), task, federation, 1, vmap())
    shared = task.d - round(0.25 * task.d)
    # The shared values, the score as it is, eight bytes in double precision, and of the mask what is new in
    # it.
    for found in shown[0].clients["bytes_up"].tolist():
        assert (
            0.5 < (found - 4 * shared - 8) / ((task.d + 7) // 8) < 0.82
        )  # a quarter is new: 0.811 bits an entry


def test_nothing_of_a_local_client_is_counted() -> None:
    task, federation = small_federation("none", (4,))
    _, shown = rounds_of(Local(), task, federation, 1, vmap())
    assert shown[0].clients["bytes_down"].tolist() == [0]


def test_metrics_are_in_double_precision() -> None:
    _, shown = rounds_of(
        COPFL(), slopes(0.0, 0.0), federation_of(([[1.0, 2.0]], [1]), ([[2.0, 1.0]], [0])), 2
    )
    assert {values.dtype for values in shown[0].clients.values()} == {np.dtype(np.float64)}
