from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from copfl.core import optim, tree
from copfl.core.optim import Adam, Moments, Optimizer, Sgd, Velocity, begin, kept
from copfl.errors import UsageError
from copfl.kernels.fused import LONG
from copfl.parts.mamo import Mamo

OPTIMIZERS: list[Optimizer] = [Sgd(), Sgd(momentum=0.0), Adam(), Mamo()]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def gradients(steps: int, d: int = 5) -> Tensor:
    return torch.randn(steps, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def steps_of(
    optimizer: Optimizer, w: Tensor, grads: Tensor, active: Tensor | None = None
) -> tuple[Tensor, Any]:
    state = optimizer.init(w)
    for grad in grads:
        w, state = optimizer.step(w, grad, state, active)
    return w, state


def torchs(kind: Any, w: Tensor, grads: Tensor, **how: float) -> Tensor:
    parameter = torch.nn.Parameter(w.clone())
    optimizer = kind([parameter], **how)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_is_torchs(momentum: float, weight_decay: float) -> None:
    w, grads = torch.arange(5.0, dtype=torch.float64), gradients(6)
    found, _ = steps_of(Sgd(0.1, momentum, weight_decay), w, grads)
    close(found, torchs(torch.optim.SGD, w, grads, lr=0.1, momentum=momentum, weight_decay=weight_decay))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs(weight_decay: float) -> None:
    w, grads = torch.arange(5.0, dtype=torch.float64), gradients(6)
    found, _ = steps_of(Adam(0.1, weight_decay=weight_decay), w, grads)
    close(found, torchs(torch.optim.Adam, w, grads, lr=0.1, weight_decay=weight_decay))


def test_sgd_with_momentum_by_hand() -> None:
    # speed: 1, then .5 * 1 + 3 = 3.5; w: 10 - .1 * 1 = 9.9, then 9.9 - .1 * 3.5 = 9.55
    w, state = steps_of(Sgd(0.1, 0.5, 0.0), torch.tensor([10.0]), torch.tensor([[1.0], [3.0]]))
    assert w.item() == pytest.approx(9.55)
    assert state.speed.item() == 3.5


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_what_is_not_active_does_not_move(optimizer: Optimizer) -> None:
    w, active = torch.arange(1.0, 6.0, dtype=torch.float64), torch.tensor([True, False, True, False, False])
    after, _ = steps_of(optimizer, w, gradients(3), active)
    assert torch.equal(after[~active], w[~active])
    assert (after[active] != w[active]).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_everything_active_is_the_same_as_no_mask(optimizer: Optimizer) -> None:
    w = torch.ones(5, dtype=torch.float64)
    masked, unmasked = (
        steps_of(optimizer, w, gradients(3), torch.ones(5).bool()),
        steps_of(optimizer, w, gradients(3)),
    )
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(masked), tree.leaves(unmasked), strict=True))


def test_the_speed_of_a_resting_entry_waits_for_it() -> None:
    optimizer, active = Sgd(0.1, 0.5, 0.0), torch.tensor([True, False])
    state = Velocity(torch.tensor([2.0, 2.0]))
    _, after = optimizer.step(torch.zeros(2), torch.ones(2), state, active)
    assert isinstance(after.speed, Tensor)
    assert after.speed.tolist() == [2.0, 2.0]  # .5 * 2 + 1, and untouched
    forgotten = optimizer.forget(after, active).speed
    assert isinstance(forgotten, Tensor)
    assert forgotten.tolist() == [0.0, 2.0]
    assert Sgd(momentum=0.0).forget(Velocity(()), active) == Velocity(())


def test_one_pair_of_moments_leaks_between_the_halves() -> None:
    # Adam's moments decay where it does not move, and nothing is forgotten: what MAMO is held against.
    state = Moments(torch.ones(2), torch.ones(2), torch.tensor(1.0))
    _, after = Adam().step(torch.zeros(2), torch.ones(2), state, torch.tensor([True, False]))
    assert after.u.tolist() == pytest.approx([0.9 + 0.1, 0.9])
    assert after.v.tolist() == pytest.approx([0.999 + 0.001, 0.999])
    assert after.t == 2
    assert Adam().forget(after, torch.tensor([True, True])) is after


def test_a_state_is_kept_over_the_rounds_or_not() -> None:
    w = torch.ones(3)
    old = Moments(torch.ones(3), torch.ones(3), torch.tensor(7.0))
    assert begin(Adam(keep=True), old, w) is old
    assert begin(Adam(keep=False), (), w).t == 0
    assert kept(Adam(keep=True), old) is old
    assert kept(Adam(keep=False), old) == ()


@pytest.mark.parametrize("keep", [True, False])
def test_the_record_of_a_client_has_one_shape_whether_or_not_it_is_kept(keep: bool) -> None:
    optimizers: list[Optimizer] = [Sgd(keep=keep), Adam(keep=keep), Mamo(keep=keep)]
    for optimizer in optimizers:
        first = kept(optimizer, optimizer.init(torch.ones(3)))
        again = kept(
            optimizer, optimizer.step(torch.ones(3), torch.ones(3), optimizer.init(torch.ones(3)), None)[1]
        )
        assert [t.shape for t in tree.leaves(first)] == [t.shape for t in tree.leaves(again)]
        assert len(tree.leaves(first)) > 0 or not keep


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sgd(lr=0.0), "lr=0.0 must be a number above 0"),
        (lambda: Sgd(lr=float("nan")), "lr=nan must be a number above 0"),
        (lambda: Sgd(momentum=1.0), "momentum=1.0 must be at least 0 and below 1"),
        (lambda: Adam(lr=float("inf")), "lr=inf must be"),
        (lambda: Adam(eps=0.0), "eps=0.0 must be"),
        (lambda: Sgd(weight_decay=-0.1), "weight_decay=-0.1 must be a number of at least 0"),
        (lambda: Adam(weight_decay=-0.1), "weight_decay=-0.1 must be"),
        (lambda: Adam(beta2=1.0), "beta2=1.0 must be"),
    ],
)
def test_numbers_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_optimizers_are_values() -> None:
    assert Adam(1e-3) == Adam(lr=1e-3)
    assert repr(Adam(1e-3)).startswith("Adam(lr=0.001, beta1=0.9, beta2=0.999")
    assert copy.copy(Sgd()) == Sgd() != Sgd(lr=0.5)


@pytest.mark.parametrize("masked", [False, True])
def test_a_long_vector_takes_the_same_steps_in_one_pass(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    optimizer = Adam(lr=0.01, weight_decay=0.1)
    start, grad = torch.randn(2, LONG + 9, dtype=torch.float64)
    ends = []
    for longest in (LONG, 2 * LONG):
        monkeypatch.setattr(optim, "LONG", longest)
        w, state = start, optimizer.init(start)
        for scale in (1.0, -2.0, 0.5):
            w, state = optimizer.step(w, scale * grad, state, None)
        ends.append((w, *state))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-15)
