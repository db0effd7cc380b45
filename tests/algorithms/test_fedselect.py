"""FedSelect: masks that grow tensor by tensor, and one last average for what turns personal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from copfl.algorithms import COPFL, FedAvg, FedSelect
from copfl.algorithms.fedselect import Growth, Total
from copfl.core import Adam, Optimizer, Sgd, tree
from copfl.core.layout import layout_of
from copfl.errors import UsageError
from copfl.parts import Mamo, Phases
from copfl.parts.averaging import Server
from copfl.testing import small_federation
from tests.algorithms.chain import numbers
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import Vector, federation_of, rounds_of, slopes

# The model answers [0, a.x]; one step with lr 1 on a sample x with label 1 goes from a to a + x sigma(-a.x).
A, B = (2.0, 1.0, 0.5, 0.25), (-0.5, 0.75, 0.25, 1.5)
PLAIN = Sgd(1.0, 0.0, 0.0)


def stepped(a: Vector, x: Vector, active: Vector) -> Vector:
    push = 1 / (1 + math.exp(sum(p * q for p, q in zip(a, x, strict=True))))
    return tuple(p + on * q * push for p, q, on in zip(a, x, active, strict=True))


def mean(a: Vector, b: Vector) -> Vector:
    return tuple((p + q) / 2 for p, q in zip(a, b, strict=True))


def after(rounds: int) -> tuple[Any, Any]:
    """Two clients with one sample each; a quarter of four entries turns personal in the second round, and so on."""
    task, federation = slopes(0.0, 0.0, 0.0, 0.0), federation_of(([A], [1]), ([B], [1]))
    state, _ = rounds_of(FedSelect(PLAIN, interval=1), task, federation, rounds)
    return state.server, state.clients.rows(torch.arange(2))


def test_three_rounds_by_hand() -> None:
    everything, nothing = (1.0,) * 4, (0.0,) * 4
    zero = nothing
    # Nothing is personal in the first two rounds: the first pass moves nothing, the second everything.
    first = mean(stepped(zero, A, everything), stepped(zero, B, everything))
    server, clients = after(1)
    assert server.w.tolist() == numbers(*first)
    assert not clients.mask.any()
    a, b = stepped(first, A, everything), stepped(first, B, everything)
    second = mean(a, b)
    server, clients = after(2)
    assert server.w.tolist() == numbers(*second)
    # Since the start, the first entry moved most at A and the last at B; neither mask was used in the upload.
    assert clients.mask.tolist() == [[True, False, False, False], [False, False, False, True]]
    assert not clients.uploaded.any()
    # The new masks train; both start from the whole average, and the shared pass goes on from the personal
    # one.
    m = (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0)
    a, b = (
        stepped(stepped(second, x, own), x, tuple(1 - i for i in own))
        for x, own in zip((A, B), m, strict=True)
    )
    server, clients = after(3)
    assert clients.w.tolist() == [numbers(*a), numbers(*b)]
    assert server.w.tolist() == numbers(b[0], (a[1] + b[1]) / 2, (a[2] + b[2]) / 2, a[3])
    assert clients.uploaded.tolist() == [[True, False, False, False], [False, False, False, True]]


def test_the_score_spans_the_rounds_since_the_last_growth() -> None:
    _, clients = after(2)
    torch.testing.assert_close(clients.reference, clients.w)
    _, clients = after(1)
    assert not clients.reference.any()


def test_the_score_counts_what_broadcasts_moved() -> None:
    """The first client's own samples push its first entry, but since the start the others moved its last one more."""
    task, federation = (
        slopes(0.0, 0.0, 0.0, 0.0),
        federation_of(([[1, 0, 0, 0]], [1]), ([[0, 0, 0, 10]], [1])),
    )
    state, _ = rounds_of(FedSelect(PLAIN, interval=1), task, federation, 2)
    assert state.clients.rows(torch.arange(1)).mask.tolist() == [[False, False, False, True]]


def test_growth_passes_the_budget_once_as_in_the_released_code() -> None:
    growth, layout = FedSelect(rate=0.25, budget=0.5, interval=2).growth, slopes(*[0.0] * 64).layout
    mask, change, shares = torch.zeros(64, dtype=torch.bool), torch.linspace(1, 2, 64), []
    for round in range(12):
        mask = growth.grow(layout, mask, change, torch.tensor(round))
        shares.append(int(mask.sum()))
    assert shares == [0, 0, 16, 16, 28, 28, 37, 37, 37, 37, 37, 37]


@dataclass(frozen=True)
class EveryOther(FedAvg):
    """FedAvg that is given two passes and trains in the second."""

    @property
    def total_epochs(self) -> int:
        return 2 * self.epochs

    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> Any:
        return super().client_update(task, client, down, data, plan[1::2])


@pytest.mark.job
@pytest.mark.parametrize("optimizer", [Sgd(), Mamo(), Sgd(keep=True)])
def test_at_rate_zero_it_is_fedavg_over_every_other_pass(optimizer: Optimizer) -> None:
    """Without masks the personal pass moves nothing (Adam's step count would move), and equal clients count equally."""
    task, federation = small_federation("none", (6, 6, 6))
    masked, shown = rounds_of(
        FedSelect(optimizer, epochs=2, rate=0.0, interval=1), task, federation, 3, batch=4
    )
    plain, other = rounds_of(EveryOther(optimizer, 2), task, federation, 3, batch=4)
    torch.testing.assert_close(masked.server.w, plain.server.w, rtol=0, atol=1e-12)
    # And what a client predicts is what FedAvg predicts after local training.
    assert shown[-1].clients["test_loss"] == pytest.approx(other[-1].clients["test_loss"], abs=1e-12)


def test_masks_only_grow_and_biases_never_turn_personal() -> None:
    task, state, shown = three_rounds(FedSelect(interval=1, rate=0.5))
    clients = clients_of(state)
    assert (clients.mask | ~clients.uploaded).all(), "an entry that was personal is shared again"
    assert (clients.mask & ~clients.uploaded)[:, : task.d].any()
    biases = torch.cat(
        [
            torch.full((size,), "bias" in name)
            for name, size in zip(task.layout.names, task.layout.sizes, strict=True)
        ]
    )
    assert not clients.mask[:, biases].any()
    shares = [one.clients["personal_fraction"].mean() for one in shown]
    assert shares == sorted(shares)


def test_an_entry_that_nobody_shares_keeps_its_value() -> None:
    task = slopes(0.0, 0.0)
    total = Total(torch.tensor([6.0, 0.0]), torch.tensor([3.0, 0.0]))
    server, metrics = FedSelect().server_update(task, Server(torch.tensor([1.0, 7.0])), total)
    assert server.w.tolist() == [2.0, 7.0]
    assert float(metrics["averaged"]) == 0.5


def test_sharers_count_the_same_whatever_they_hold() -> None:
    """Unlike FedAvg's, the mean is not weighted by samples."""
    task, federation = slopes(0.0), federation_of(([[1.0]] * 3, [1] * 3), ([[-2.0]], [1]))
    state, _ = rounds_of(FedSelect(PLAIN), task, federation, 1)
    assert state.server.w.tolist() == numbers((0.5 - 1.0) / 2)


def test_a_newly_personal_entry_starts_mamo_afresh() -> None:
    task, state, _ = three_rounds(FedSelect(Mamo(), interval=1))
    clients = clients_of(state)
    fresh = (clients.mask & ~clients.uploaded)[:, : task.d]
    steps = clients.moments.t
    assert not steps[fresh].any()
    assert steps[~clients.mask[:, : task.d]].all()
    assert tree.leaves(clients.moments)


def test_with_a_state_per_phase_the_shared_epoch_begins_with_a_whole_adam_step() -> None:
    """Nothing is personal in the first round, so its personal epoch only counts a step."""
    task, federation = slopes(0.0, 0.0), federation_of(([(1.0, 2.0)], [1]))
    for state_per_phase, part in ((True, 1.0), (False, 0.1 / 0.19 * math.sqrt(1.999))):
        algorithm = FedSelect(Adam(0.01, eps=1e-12), state_per_phase=state_per_phase)
        state, _ = rounds_of(algorithm, task, federation, 1)
        assert state.server.w.tolist() == pytest.approx([0.01 * part] * 2, rel=1e-6)


def test_a_state_per_phase_needs_an_optimizer_that_keeps_none() -> None:
    with pytest.raises(UsageError, match="keep=false"):
        FedSelect(Mamo(), state_per_phase=True)
    with pytest.raises(UsageError, match="keep=false"):
        COPFL(Mamo(), phases=Phases(state_per_phase=True))


def test_a_growth_that_begins_within_the_budget_may_exceed_it() -> None:
    def shares(rate: float) -> list[float]:
        layout, mask = layout_of(nn.Linear(64, 1, bias=False), head=""), torch.zeros(64, dtype=torch.bool)
        fractions = []
        for round in range(5):
            mask = Growth(rate, 0.5, candidates="tensor").grow(
                layout, mask, torch.rand(64) + 1, torch.tensor(round)
            )
            fractions.append(float(mask.double().mean()))
        return fractions

    assert shares(0.25) == [0.25, 0.4375, 0.578125, 0.578125, 0.578125]
    assert shares(0.5) == [0.5, 0.75, 0.75, 0.75, 0.75]
