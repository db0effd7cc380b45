from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from copfl.errors import UsageError
from copfl.parts.mamo import CHANGES, Mamo

D, STEPS, ROUNDS = 12, 3, 5
ETA, BETA1, BETA2, EPS = 0.01, 0.9, 0.999, 1e-8


def scenery() -> tuple[Tensor, list[Tensor], Callable[[Tensor, int, int, int], Tensor]]:
    """First weights, a mask per round that only grows, and a gradient that depends on the weights and the step."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(D, generator=generator, dtype=torch.float64)
    entry = torch.randperm(D, generator=generator)
    masks = [entry < count for count in (0, 3, 3, 7, 12)]
    pull = torch.randn(ROUNDS, 2, STEPS, D, generator=generator, dtype=torch.float64)
    mix = torch.randn(D, D, generator=generator, dtype=torch.float64) / D
    return w, masks, lambda w, k, phase, t: mix @ w.tanh() + pull[k, phase, t]


def by_the_paper(restart: bool) -> list[Tensor]:
    """Algorithm 2's lines 1-9 with two pairs of moments, Eqs. (3)-(5); beta2 in v and exponent kT + t + 1 (A-1, A-2).

    With `restart`, the exponent of an entry counts from when it joined its half instead of from the first
    round.
    """
    w, masks, gradient = scenery()
    u = [torch.zeros(D, dtype=torch.float64) for _ in range(2)]  # [personal, shared]
    v = [torch.zeros(D, dtype=torch.float64) for _ in range(2)]
    steps = [torch.zeros(D, dtype=torch.float64) for _ in range(2)]
    trace = []
    for k, m in enumerate(masks):
        result = torch.zeros(D, dtype=torch.float64)
        for phase, mask in enumerate((m, ~m)):
            h, local = mask.double(), w.clone()
            for t in range(STEPS):
                q = gradient(local, k, phase, t)
                u[phase] = BETA1 * u[phase] + (1 - BETA1) * h * q
                v[phase] = BETA2 * v[phase] + (1 - BETA2) * h * q * q
                steps[phase] = steps[phase] + h
                exponent = (
                    steps[phase].clamp(min=1) if restart else torch.tensor(float(k * STEPS + t + 1)).double()
                )
                u_hat, v_hat = u[phase] / (1 - BETA1**exponent), v[phase] / (1 - BETA2**exponent)
                local = local - ETA * h * u_hat / (v_hat.sqrt() + EPS)
            result = result + local * h
        w = result
        trace.append(w)
    return trace


def by_the_code(change: str) -> list[Tensor]:
    """The same rounds with one pair of moments and `forget`."""
    w, masks, gradient = scenery()
    optimizer = Mamo(ETA, BETA1, BETA2, EPS, change=change)
    state, before = optimizer.init(w), masks[0]
    trace = []
    for k, m in enumerate(masks):
        state = optimizer.forget(state, m & ~before)
        before, halves = m, []
        for phase, active in enumerate((m, ~m)):
            local = w
            for t in range(STEPS):
                local, state = optimizer.step(local, gradient(local, k, phase, t), state, active)
            halves.append(local)
        w = torch.where(m, halves[0], halves[1])
        trace.append(w)
    return trace


@pytest.mark.parametrize(("change", "restart"), [("restart", True), ("zero", False)])
def test_one_pair_of_moments_and_forget_equal_the_papers_two_pairs(change: str, restart: bool) -> None:
    for found, expected in zip(by_the_code(change), by_the_paper(restart), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_the_readings_differ_where_masks_change() -> None:
    restarted, zeroed = (by_the_code(change)[-1] for change in CHANGES)
    assert not torch.allclose(restarted, zeroed, atol=1e-6)


def after_a_change(change: str, more: int) -> list[float]:
    """The size of an entry's steps, in units of lr, after 2000 steps of noise on one side and a change to the other."""
    optimizer = Mamo(1.0, change=change)
    w = torch.zeros(1, dtype=torch.float64)
    state = optimizer.init(w)
    noise = torch.randn(2000, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for grad in noise:
        w, state = optimizer.step(w, grad, state, None)
    state = optimizer.forget(state, torch.tensor([True]))
    sizes = []
    for _ in range(more):
        before = w
        w, state = optimizer.step(w, torch.ones(1, dtype=torch.float64), state, None)
        sizes.append((before - w).item())
    return sizes


def test_the_first_step_of_a_fresh_entry_has_the_size_of_the_learning_rate() -> None:
    for grad in (1e-3, -5.0, 700.0):
        w, _ = Mamo(0.01).step(torch.zeros(1), torch.tensor([grad]), Mamo().init(torch.zeros(1)), None)
        assert w.item() == pytest.approx(-0.01 if grad > 0 else 0.01, rel=1e-4)
    assert after_a_change("restart", 5) == pytest.approx(
        [1.0] * 5, rel=1e-6
    )  # and so has one that changed sides


def test_zeroed_moments_with_an_old_count_overshoot_as_the_readings_predict() -> None:
    # After 2000 steps .9^t and, nearly, .999^t are gone: (1 - .9) / sqrt((1 - .999) / (1 - .999^2001)) = 2.94
    # of lr in the first step, and (1 - .9^10) / sqrt((1 - .999^10) / (1 - .999^2010)) = 6.1 in the tenth.
    sizes = after_a_change("zero", 10)
    left = (1 - 0.999**2001, 1 - 0.999**2010)
    assert sizes[0] == pytest.approx(0.1 / (0.001 / left[0]) ** 0.5, rel=1e-6)
    assert sizes[9] == pytest.approx((1 - 0.9**10) / ((1 - 0.999**10) / left[1]) ** 0.5, rel=1e-6)
    assert 2.9 < sizes[0] < 3.2
    assert 6.0 < sizes[9] < 6.6


def test_forget_touches_only_the_entries_that_changed_sides() -> None:
    optimizer = Mamo()
    _, state = optimizer.step(
        torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), optimizer.init(torch.zeros(3)), None
    )
    changed = torch.tensor([False, True, False])
    after = optimizer.forget(state, changed)
    for new, old in zip(after, state, strict=True):
        assert torch.equal(new[~changed], old[~changed])
        assert not new[changed].any()
    zeroed = Mamo(change="zero").forget(state, changed)
    assert zeroed.t.tolist() == [1, 1, 1]
    assert zeroed.u[1] == 0 == zeroed.v[1]


def test_an_entry_that_never_gets_a_gradient_never_moves() -> None:
    w, state = torch.ones(2), Mamo().init(torch.ones(2))
    for _ in range(5):
        w, state = Mamo().step(w, torch.tensor([0.0, 1.0]), state, None)
    assert w[0] == 1
    assert torch.isfinite(w).all()


def test_side_by_side_is_the_same_as_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    w, grad = (torch.randn(4, D, generator=generator, dtype=torch.float64) for _ in range(2))
    active = torch.rand(4, D, generator=generator) < 0.5
    optimizer = Mamo()
    state = torch.func.vmap(optimizer.init)(w)
    together, _ = torch.func.vmap(optimizer.step)(w, grad, state, active)
    for n in range(4):
        assert torch.equal(together[n], optimizer.step(w[n], grad[n], optimizer.init(w[n]), active[n])[0])


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(UsageError, match='no change "reset"; did you mean "restart"'):
        Mamo(change="reset")
    for wrong in ({"lr": 0.0}, {"lr": float("nan")}, {"eps": 0.0}, {"beta1": 1.0}, {"beta2": -0.1}):
        with pytest.raises(UsageError, match="must be"):
            Mamo(**wrong)  # type: ignore[arg-type]
