"""Survival: concordance against brute force, curves and scores by hand, objectives by hand and under padding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from statsmodels.duration.hazard_regression import PHReg
from torch import Tensor, nn

from copfl.core.criteria import Criterion, survival
from copfl.core.task import Data, task_of
from copfl.errors import UsageError
from copfl.measures.metrics import metric
from copfl.measures.survival import (
    Curve,
    baseline_hazard,
    brier_scores,
    concordance,
    integrated_brier,
    kaplan_meier,
    medians,
    survival_at,
    uncensored,
    uno_concordance,
)

Floats = NDArray[np.float64]
FIVE = torch.tensor([[1.0, 1.0], [2.0, 1.0], [2.0, 1.0], [3.0, 0.0], [4.0, 1.0]])  # hazards 1 to 5
HAZARDS = torch.arange(1.0, 6.0)
# Times, events and starts: the third begins to be at risk when the first has its event.
LATE = torch.tensor([[1.0, 1.0, 0.0], [2.0, 1.0, 0.0], [2.0, 1.0, 1.0], [3.0, 0.0, 1.5], [4.0, 1.0, 2.0]])


def rows(*pairs: tuple[float, float]) -> Floats:
    return np.array(pairs, np.float64)


# Concordance


def by_pairs(risk: Floats, targets: Floats) -> float:
    """Harrell's C from its definition, pair by pair, as exact fractions."""
    comparable, right = 0, Fraction(0)
    for i in range(len(risk)):
        for j in range(len(risk)):
            (ti, ei), (tj, ej) = targets[i], targets[j]
            if ei and (ti < tj or (ti == tj and not ej)):
                comparable += 1
                right += Fraction(int(risk[i] > risk[j])) + Fraction(int(risk[i] == risk[j]), 2)
    return float(right / comparable) if comparable else math.nan


def test_the_c_index_equals_brute_force_with_ties_and_censoring() -> None:
    rng, undefined = np.random.default_rng(0), 0
    for case in range(1000):
        n = int(rng.integers(1, 12))
        time = rng.integers(1, 6, n) if case % 2 else rng.random(n) + 0.1
        targets = np.stack([time, rng.random(n) < rng.random()], 1).astype(np.float64)
        risk = rng.integers(0, 4, n).astype(np.float64)
        expected, found = by_pairs(risk, targets), metric("c_index", "survival").of(risk[:, None], targets)
        assert (math.isnan(expected) and math.isnan(found)) or found == pytest.approx(expected, abs=1e-12)
        undefined += math.isnan(expected)
    assert undefined > 20


def test_the_c_index_by_hand() -> None:
    targets = rows((1, 1), (2, 0), (3, 1), (3, 0))
    # Comparable: the first with the three others, and the third with the fourth, which lived on.
    assert concordance(np.array([4.0, 1.0, 2.0, 3.0]), targets) == 3 / 4
    assert concordance(np.array([4.0, 1.0, 2.0, 2.0]), targets) == 3.5 / 4
    assert concordance(-np.array([4.0, 1.0, 2.0, 2.0]), targets) == 0.5 / 4


def test_without_a_comparable_pair_the_c_index_is_not_defined() -> None:
    for targets in (rows((1, 0), (2, 0)), rows((5, 1)), rows((3, 1), (3, 1)), rows((3, 1), (2, 0))):
        with pytest.raises(ValueError, match="comparable"):
            concordance(np.arange(len(targets), dtype=float), targets)
        assert math.isnan(metric("c_index", "survival").of(np.zeros((len(targets), 1)), targets))


def unos_by_pairs(risk: Floats, targets: Floats) -> float:
    """Uno's C from its definition, pair by pair, as exact fractions."""

    def uncensored_before(until: float) -> Fraction:
        share = Fraction(1)
        for at in {time for time, event in targets if not event and time < until}:
            censored = sum(time == at and not event for time, event in targets)
            # Those who had their event at this time had it before anybody was censored.
            share *= 1 - Fraction(
                censored, sum(time > at or (time == at and not event) for time, event in targets)
            )
        return share

    comparable, right = Fraction(0), Fraction(0)
    for (ti, ei), own in zip(targets, risk, strict=True):
        for (tj, ej), other in zip(targets, risk, strict=True):
            if ei and (ti < tj or (ti == tj and not ej)):
                weight = 1 / uncensored_before(ti) ** 2
                comparable += weight
                right += weight * (Fraction(int(own > other)) + Fraction(int(own == other), 2))
    return float(right / comparable) if comparable else math.nan


def test_unos_c_index_equals_brute_force_with_ties_and_censoring() -> None:
    rng, undefined, others = np.random.default_rng(1), 0, 0
    for case in range(200):
        n = int(rng.integers(1, 9))
        time = rng.integers(1, 6, n) if case % 2 else rng.random(n) + 0.1
        targets = np.stack([time, rng.random(n) < rng.random()], 1).astype(np.float64)
        risk = rng.integers(0, 4, n).astype(np.float64)
        expected, found = (
            unos_by_pairs(risk, targets),
            metric("uno_c_index", "survival").of(risk[:, None], targets),
        )
        assert (math.isnan(expected) and math.isnan(found)) or found == pytest.approx(expected, abs=1e-12)
        undefined += math.isnan(expected)
        others += not math.isnan(expected) and found != by_pairs(risk, targets)
    assert undefined > 5
    assert others > 30  # Harrell's is another number


def test_unos_c_index_by_hand() -> None:
    targets = rows((1, 1), (2, 0), (3, 1), (4, 0))
    np.testing.assert_allclose(uncensored(targets).values, [2 / 3, 0])
    # The first has three pairs that count 1, the third one that counts (3 / 2)².
    assert uno_concordance(np.array([4.0, 1.0, 2.0, 3.0]), targets) == pytest.approx(3 / (3 + 9 / 4))
    assert uno_concordance(np.array([1.0, 4.0, 3.0, 2.0]), targets) == pytest.approx(9 / 4 / (3 + 9 / 4))
    assert uno_concordance(np.arange(4.0), targets[[0, 2]][[0, 1, 0, 1]]) == concordance(
        np.arange(4.0), targets[[0, 2]][[0, 1, 0, 1]]
    )


def test_with_starts_unos_c_index_is_not_defined() -> None:
    assert math.isnan(metric("uno_c_index", "survival").of(np.arange(5.0)[:, None], LATE.numpy()))


def test_unos_c_index_depends_less_on_censoring_than_harrells() -> None:
    """Risks order early events and not late ones, which censoring hides."""
    rng = np.random.default_rng(0)
    time = rng.exponential(size=3000)
    risk = np.where(time < 0.5, -time, -0.5) + rng.normal(size=3000) / 4
    everything = concordance(risk, np.stack([time, np.ones(3000)], 1))
    censored = rng.exponential(size=3000)
    targets = np.stack([np.minimum(time, censored), time <= censored], 1)
    assert abs(concordance(risk, targets) - everything) > 0.03
    assert abs(uno_concordance(risk, targets) - everything) < 0.01


# Rows with a start


def test_the_c_index_compares_those_at_risk_at_each_event() -> None:
    # The first with the second; then the second and the third, each with the fourth; the last is alone.
    targets = LATE.numpy()
    assert concordance(np.array([5.0, 4.0, 1.0, 2.0, 9.0]), targets) == 2 / 3
    assert concordance(np.array([5.0, 5.0, 2.0, 2.0, 0.0]), targets) == 2 / 3


def test_curves_of_those_at_risk_by_hand() -> None:
    found = kaplan_meier(LATE.numpy())
    np.testing.assert_array_equal(found.at_risk, [2, 3, 1])
    np.testing.assert_allclose(found.survival.values, [1 / 2, 1 / 2 * 1 / 3, 0])
    hazard = baseline_hazard(HAZARDS.log().double().numpy(), LATE.numpy())
    np.testing.assert_array_equal(hazard.times, [1, 2, 4])
    np.testing.assert_allclose(hazard.values, np.cumsum([1 / 3, 2 / 9, 1 / 5]))


def test_coxs_loss_and_gradient_with_starts_by_hand() -> None:
    risk = HAZARDS.log()[:, None].requires_grad_()
    losses = survival().losses(risk, LATE)
    torch.testing.assert_close(losses, torch.tensor([math.log(3), math.log(9 / 2), math.log(6.5 / 3), 0, 0]))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    slopes = [
        1 / 3 - 1,
        2 / 3 + 2 / 9 + 1 / 6.5 - 1,
        3 / 9 + 1.5 / 6.5 - 1,
        4 / 9 + 4 / 6.5,
        0,
    ]
    assert risk.grad is not None
    torch.testing.assert_close(risk.grad[:, 0], torch.tensor(slopes))


def stretches(rng: np.random.Generator, rows: int) -> Floats:
    """Times in tenths, with ties, and starts between them: a row is at risk after its start, for others from it on."""
    start = np.maximum(rng.integers(-20, 10, rows), 0) / 10 + 0.05
    start = np.where(start == 0.05, 0, start)
    time = np.ceil(10 * (start + rng.exponential(size=rows) + 0.01)) / 10
    return np.stack([time, rng.random(rows) < 0.7, start], 1)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_coxs_likelihood_with_starts_is_that_of_statsmodels(ties: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        targets, x = stretches(rng, 80), rng.normal(size=(80, 3))
        model = PHReg(targets[:, 0], x, status=targets[:, 1], entry=targets[:, 2], ties=ties)
        at = rng.normal(size=3)
        beta = torch.tensor(at, requires_grad=True)
        total = (
            survival(ties=ties).losses((torch.from_numpy(x) @ beta)[:, None], torch.from_numpy(targets)).sum()
        )
        total.backward()  # type: ignore[no-untyped-call]
        assert beta.grad is not None
        assert float(total.detach()) == pytest.approx(-model.loglike(at), abs=1e-6)
        np.testing.assert_allclose(beta.grad.numpy(), -model.score(at), atol=1e-6)


def split(targets: Floats, rng: np.random.Generator) -> tuple[Floats, NDArray[np.int64]]:
    """Each row [time, event] in one to three stretches, and whose they are."""
    parts, whose = [], []
    for number, (time, event) in enumerate(targets):
        cuts = sorted({*rng.integers(1, max(2, math.ceil(time)), rng.integers(0, 3)).tolist()} - {time})
        ends = [float(cut) for cut in cuts if cut < time] + [time]
        for begin, end in zip([0.0, *ends[:-1]], ends, strict=True):
            parts.append([end, event if end == time else 0.0, begin])
            whose.append(number)
    return np.array(parts), np.array(whose)


def test_cutting_rows_into_stretches_changes_nothing() -> None:
    """Objectives, the C-index and the curves: a patient counts once at each time."""
    rng = np.random.default_rng(1)
    targets = np.stack([rng.integers(1, 9, 60), rng.random(60) < 0.6], 1).astype(np.float64)
    cut, whose = split(targets, rng)
    assert len(cut) > 90
    outputs = torch.from_numpy(rng.normal(size=(60, 3)))
    for criterion, chosen in [
        (survival(), outputs[:, :1]),
        (survival(ties="breslow"), outputs[:, :1]),
        (survival("discrete_time", cuts=(2, 4.5, 8)), outputs),
    ]:
        whole = criterion.losses(chosen, torch.from_numpy(targets)).sum()
        torch.testing.assert_close(criterion.losses(chosen[whose], torch.from_numpy(cut)).sum(), whole)
        predicted = criterion.predictions(chosen)
        whole = criterion.test_losses(predicted, torch.from_numpy(targets)).sum()
        found = criterion.test_losses(predicted[whose], torch.from_numpy(cut)).sum()
        torch.testing.assert_close(found, whole)
    risk = outputs[:, 0].numpy()
    assert concordance(risk[whose], cut) == concordance(risk, targets)
    for one, other in zip(kaplan_meier(cut)[1:], kaplan_meier(targets)[1:], strict=True):
        np.testing.assert_allclose(one, other)
    np.testing.assert_allclose(
        baseline_hazard(risk[whose], cut).values, baseline_hazard(risk, targets).values
    )


# Curves


def test_kaplan_meier_by_hand() -> None:
    found = kaplan_meier(rows((1, 1), (2, 0), (3, 1), (3, 1), (4, 0)))
    np.testing.assert_array_equal(found.survival.times, [1, 3])
    np.testing.assert_allclose(found.survival.values, [4 / 5, 4 / 5 * 1 / 3])
    np.testing.assert_array_equal(found.at_risk, [5, 3])
    np.testing.assert_allclose(
        found.survival.at(np.array([0.5, 1.0, 2.9, 3.0, 9.0])), [1, 0.8, 0.8, 4 / 15, 4 / 15]
    )
    np.testing.assert_allclose(found.survival.just_before(np.array([1.0, 3.0])), [1, 0.8])
    spread = 1.959964 * math.sqrt(1 / (5 * 4)) / -math.log(0.8)
    assert found.low[0] == pytest.approx(0.8 ** math.exp(spread))
    assert found.high[0] == pytest.approx(0.8 ** math.exp(-spread))


def test_kaplan_meier_without_an_event_and_with_events_alone() -> None:
    assert kaplan_meier(rows((1, 0), (2, 0))).survival.at(np.array([9.0])) == [1]
    assert kaplan_meier(rows((1, 1), (2, 1))).survival.values.tolist() == [0.5, 0]


def test_the_baseline_hazard_by_hand() -> None:
    targets, risk = rows((1, 1), (2, 0), (3, 1)), np.log([1.0, 2.0, 3.0])
    hazard = baseline_hazard(risk, targets)
    np.testing.assert_allclose(hazard.values, [1 / 6, 1 / 6 + 1 / 3])
    survival_of_two = survival_at(np.array([0.5, 1.0, 3.0]), np.array([0.0, np.log(2)]), hazard)
    np.testing.assert_allclose(survival_of_two, np.exp([[0, -1 / 6, -1 / 2], [0, -1 / 3, -1]]))
    # Of risk 0 half are left at a cumulative hazard of log 2, which the curve does not reach.
    np.testing.assert_array_equal(medians(np.array([0.0, np.log(2), 3.0]), hazard), [np.inf, 3, 1])


def test_of_equal_risks_the_baseline_hazard_is_that_of_nelson_and_aalen() -> None:
    rng = np.random.default_rng(0)
    targets = np.stack([rng.integers(1, 9, 50), rng.random(50) < 0.6], 1).astype(np.float64)
    hazard, curve = baseline_hazard(np.full(50, 700.0), targets), kaplan_meier(targets)
    steps = 1 - curve.survival.values / np.concatenate([[1], curve.survival.values[:-1]])
    # A constant in all risks moves into the baseline, also where exp(700) is nearly infinite.
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(hazard.values * np.exp(700.0), np.cumsum(steps))


def test_the_brier_score_by_hand() -> None:
    targets = rows((1, 1), (2, 0), (3, 1))
    survival = np.array([[0.9, 0.5], [0.8, 0.6], [0.7, 0.4]])
    # Nobody was censored before 1.5. Before 2.5 one of the two at risk was: what remains counts twice.
    expected = [(0.9**2 + 0.2**2 + 0.3**2) / 3, (0.5**2 + 2 * 0.6**2) / 3]
    times = np.array([1.5, 2.5])
    np.testing.assert_allclose(brier_scores(survival, times, targets, targets), expected)
    assert integrated_brier(survival, times, targets, targets) == pytest.approx(np.mean(expected))
    assert integrated_brier(survival[:, :1], times[:1], targets, targets) == pytest.approx(expected[0])


def test_without_censoring_the_brier_score_is_the_squared_error() -> None:
    rng = np.random.default_rng(0)
    targets = np.stack([rng.random(40), np.ones(40)], 1)
    survival, times = rng.random((40, 3)), np.array([0.2, 0.5, 0.8])
    squared = ((survival - (targets[:, :1] > times)) ** 2).mean(0)
    np.testing.assert_allclose(brier_scores(survival, times, targets, targets), squared)


def test_the_truth_has_a_lower_brier_score_than_half() -> None:
    targets, times = rows((1, 1), (2, 1), (3, 1)), np.array([1.5, 2.5])
    truth = (targets[:, :1] > times).astype(np.float64)
    assert integrated_brier(truth, times, targets, targets) == 0
    assert integrated_brier(np.full((3, 2), 0.5), times, targets, targets) == pytest.approx(0.25)


# Objectives


def test_coxs_loss_and_gradient_by_hand() -> None:
    risk = HAZARDS.log()[:, None].requires_grad_()
    losses = survival().losses(risk, FIVE)
    expected = [math.log(15), math.log(14 / 2), math.log(11.5 / 3), 0, 0]
    torch.testing.assert_close(losses, torch.tensor(expected))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    slopes = [
        1 / 15 - 1,
        2 / 15 + 2 / 14 + 1 / 11.5 - 1,
        3 / 15 + 3 / 14 + 1.5 / 11.5 - 1,
        4 / 15 + 4 / 14 + 4 / 11.5,
        5 / 15 + 5 / 14 + 5 / 11.5,
    ]
    assert risk.grad is not None
    torch.testing.assert_close(risk.grad[:, 0], torch.tensor(slopes))


def test_breslows_rule_for_ties_by_hand() -> None:
    losses = survival(ties="breslow").losses(HAZARDS.log()[:, None], FIVE)
    torch.testing.assert_close(losses, torch.tensor([math.log(15), math.log(14 / 2), math.log(14 / 3), 0, 0]))


def test_coxs_likelihood_does_not_depend_on_the_order_or_a_constant() -> None:
    risk, order = HAZARDS.log()[:, None], torch.tensor([3, 1, 4, 0, 2])
    for ties in ("efron", "breslow"):
        losses = survival(ties=ties).losses
        total = losses(risk, FIVE).sum()
        torch.testing.assert_close(losses(risk[order], FIVE[order]).sum(), total)
        torch.testing.assert_close(losses(risk + 50, FIVE).sum(), total, rtol=1e-4, atol=1e-4)


def test_discrete_time_by_hand() -> None:
    criterion = survival("discrete_time", cuts=(1, 3))
    y = torch.tensor([[1.0, 1.0], [1.0, 0.0], [2.0, 1.0], [2.0, 0.0], [3.0, 0.0], [9.0, 1.0]])
    logits = torch.tensor([[0.0, 1.0]]).repeat(len(y), 1)
    first, second = 0.5, 1 / (1 + math.exp(-1))  # hazards
    whole = (1 - first) * (1 - second)
    likelihoods = [first, 1 - first, (1 - first) * second, 1 - first, whole, whole]
    torch.testing.assert_close(criterion.losses(logits, y), -torch.tensor(likelihoods).log())
    predicted = criterion.predictions(logits)
    torch.testing.assert_close(predicted[0], torch.tensor([first, 1 - whole]))
    torch.testing.assert_close(criterion.test_losses(predicted, y), criterion.losses(logits, y))


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "squared"},
        {"ties": "exact"},
        {"loss": "discrete_time"},
        {"loss": "discrete_time", "cuts": (2, 1)},
        {"loss": "discrete_time", "cuts": (0, 1)},
        {"cuts": (1, 2)},
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        survival(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outputs", "criterion"),
    [(1, survival()), (2, survival("discrete_time", cuts=(2, 3)))],
    ids=["cox", "discrete time"],
)
@pytest.mark.parametrize("targets", [FIVE, LATE], ids=["from 0", "with starts"])
def test_padding_changes_neither_loss_nor_gradient(
    outputs: int, criterion: Criterion, targets: Tensor
) -> None:
    """Padding is a copy of the first sample, whose event would be at risk twice."""
    task = task_of(nn.Linear(3, outputs), outputs, criterion=criterion, dtype=torch.float64)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    more_x, more_y = torch.cat([x, x[:1], x[:1]]), torch.cat([targets, targets[:1], targets[:1]])
    valid = torch.arange(7) < 5

    def result(x: Tensor, y: Tensor, valid: Tensor | None) -> tuple[Tensor, ...]:
        return task.gradient(task.initial, task.initial[:0], x, y, valid)[:2]

    for padded, plain in zip(result(more_x, more_y, valid), result(x, targets, None), strict=True):
        torch.testing.assert_close(padded, plain)
    padded, plain = (
        task.scores(task.initial, Data(a, b, torch.tensor(5))).loss
        for a, b in ((more_x, more_y), (x, targets))
    )
    torch.testing.assert_close(padded, plain)


def test_a_batch_without_an_event_has_no_gradient() -> None:
    risk = torch.randn(4, 1, requires_grad=True)
    losses = survival().losses(risk, torch.tensor([[1.0, 0.0]] * 4))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert risk.grad is not None
    assert not losses.any()
    assert not risk.grad.any()


def test_a_curve_before_its_first_time() -> None:
    assert Curve(np.array([2.0]), np.array([0.7])).at(np.array([1.0, 2.0])).tolist() == [0, 0.7]
