from __future__ import annotations

import itertools
import math
from functools import reduce

import numpy as np
import pytest
import torch

from copfl.algorithms import ALGORITHMS
from copfl.audit import replay
from copfl.core import tree
from copfl.experiment.analysis.benefit import (
    Benefit,
    Judgement,
    design,
    group_benefit,
    judged,
    of_sum,
    worth_to_itself,
)
from copfl.stats import Numbers
from tests.audit.small import experiment
from tests.slow import slow


def balanced(rng: np.random.Generator, rounds: int, clients: int) -> Numbers:
    row = np.repeat([1.0, -1.0], clients // 2)
    return np.stack([rng.permutation(row) for _ in range(rounds)])


def scales(membership: Numbers, differences: Numbers) -> Numbers:
    """Of the judges: the root mean square of what their own membership does not explain."""
    found = []
    for own, column in zip(membership.T, differences.T, strict=True):
        judged = ~np.isnan(column)
        own, column = own[judged], column[judged]
        found.append(math.sqrt(np.mean((column - own * np.mean(own * column)) ** 2)))
    return np.array(found)


def true_benefit(effects: Numbers, scale: Numbers) -> Numbers:
    """From effects [client, judge]: the mean over judges j ≠ i of the effect of i minus that of all k ≠ j.

    Each judge counts in units of its scale; the mean is in units of the geometric mean of the scales.
    """
    clients = len(effects)
    others = [[k for k in range(clients) if k != j] for j in range(clients)]
    relative = effects - np.array([effects[others[j], j].mean() for j in range(clients)])
    unit = math.prod(scale) ** (1 / clients)
    return np.array([unit * np.mean(relative[i, o] / scale[o]) for i, o in enumerate(others)])


def test_exact_effects_are_found_whatever_clients_say_of_themselves() -> None:
    rng = np.random.default_rng(0)
    effects, membership = rng.normal(size=(6, 6)), balanced(rng, 20, 6)
    for boast in (0.0, 100.0):
        np.fill_diagonal(effects, boast * np.arange(6))
        found = group_benefit(membership, membership @ effects)
        scale = scales(membership, membership @ effects)
        np.testing.assert_allclose(found.value, true_benefit(effects, scale), atol=1e-9)
        np.testing.assert_allclose(found.error, 0, atol=1e-9)
        assert found.freedom == 20 - 6 + 1


def test_a_judge_that_reports_huge_numbers_counts_as_much_as_another() -> None:
    rng = np.random.default_rng(0)
    membership, effects = balanced(rng, 40, 8), np.repeat(np.linspace(-1, 1, 8)[:, None], 8, 1)
    effects[:, 0] *= -1  # the liar
    differences = membership @ effects + 0.1 * rng.normal(size=(40, 8))
    honest = group_benefit(membership, differences)
    differences[:, 0] *= 1e6
    lied_to = group_benefit(membership, differences)
    np.testing.assert_array_equal(np.argsort(lied_to.value), np.argsort(honest.value))
    assert (lied_to.verdicts[0], lied_to.verdicts[-1]) == ("lower", "higher")


@pytest.mark.parametrize("factor", [1e-6, 1e-2, 1e2, 1e6])
def test_a_judge_that_scales_its_losses_changes_no_rank_and_no_verdict(factor: float) -> None:
    """Its own benefit rests on the other judges, and is in the same unit as those that it judges."""
    rng = np.random.default_rng(5)
    membership, effects = balanced(rng, 60, 10), np.repeat(np.linspace(-1, 1, 10)[:, None], 10, 1)
    differences = membership @ effects + 0.3 * rng.normal(size=(60, 10))
    honest = group_benefit(membership, differences)
    assert honest.ranks[6] == (4, 4)
    differences[:, 6] *= factor
    found = group_benefit(membership, differences)
    assert (found.ranks, found.verdicts) == (honest.ranks, honest.verdicts)
    np.testing.assert_allclose(found.value, factor ** (1 / 10) * honest.value)


def test_with_an_odd_number_of_clients_the_larger_half_is_no_benefit() -> None:
    rng = np.random.default_rng(0)
    membership = np.stack([rng.permutation([1.0, 1, -1, -1, -1]) for _ in range(20)])
    effects = rng.normal(size=(5, 5))
    for of_size in (0.0, 10.0):  # a half of three is better by so much than one of two
        differences = membership @ effects + of_size * membership.sum(1, keepdims=True)
        found = group_benefit(membership, differences)
        truth = true_benefit(effects, scales(membership, differences))
        np.testing.assert_allclose(found.value, truth, atol=1e-9)


def test_clients_that_are_absent_at_times() -> None:
    rng = np.random.default_rng(0)
    membership, effects = np.zeros((60, 6)), rng.normal(size=(6, 6))
    for row in membership:
        row[rng.permutation(6)[:4]] = rng.permutation([1, 1, -1, -1])
    differences = np.where(membership == 0, np.nan, membership @ effects)
    found = group_benefit(membership, differences)
    truth = true_benefit(effects, scales(membership, differences))
    np.testing.assert_allclose(found.value, truth, atol=1e-9)
    assert found.freedom == int((membership != 0).sum(0).min()) - 5


def test_clients_that_never_take_part_change_nothing_for_the_others() -> None:
    rng = np.random.default_rng(1)
    membership, differences = balanced(rng, 20, 6), rng.normal(size=(20, 6))
    without_new, new = group_benefit(membership, differences), [2, 7]  # their places among the eight
    places = [n for n in range(8) if n not in new]
    found = group_benefit(
        np.insert(membership, [2, 6], 0.0, axis=1), np.insert(differences, [2, 6], np.nan, axis=1)
    )
    np.testing.assert_array_equal(found.value[places], without_new.value)
    np.testing.assert_array_equal(found.error[places], without_new.error)
    assert np.isfinite(found.value[places]).all()
    assert [found.verdicts[n] for n in new] == ["not known", "not known"]


def test_worth_to_itself_by_hand() -> None:
    rng = np.random.default_rng(0)
    membership, effects = balanced(rng, 40, 6), rng.normal(size=(6, 6))
    expected = [effects[n, n] - np.delete(effects[:, n], n).mean() for n in range(6)]
    found = worth_to_itself(membership, membership @ effects)
    np.testing.assert_allclose(found.value, expected)
    np.testing.assert_allclose(found.error, 0, atol=1e-9)
    with_new = worth_to_itself(
        np.insert(membership, 2, 0.0, 1), np.insert(membership @ effects, 2, np.nan, 1)
    )
    np.testing.assert_allclose(np.delete(with_new.value, 2), expected)
    assert math.isnan(with_new.value[2])
    few = np.where(np.arange(40)[:, None] < 4, membership @ effects, np.nan)
    assert np.isnan(worth_to_itself(membership, few).value).all()


def test_coverage_of_what_a_client_is_worth_to_itself() -> None:
    rng, hits = np.random.default_rng(0), list[bool]()
    for _ in range(100):
        membership, effects = balanced(rng, 30, 8), rng.normal(size=(8, 8))
        found = worth_to_itself(membership, membership @ effects + rng.normal(size=membership.shape))
        truth = np.array([effects[n, n] - np.delete(effects[:, n], n).mean() for n in range(8)])
        hits += covered(found, truth)
    assert 0.90 <= np.mean(hits) <= 0.99


def test_standard_errors_by_hand() -> None:
    rng = np.random.default_rng(0)
    membership, differences = balanced(rng, 12, 4), rng.normal(size=(12, 4))
    # With a coefficient for all but the last client: the last has the membership minus the sum of theirs.
    free = membership[:, :3] - membership[:, 3:]
    inverse = np.linalg.inv(free.T @ free)
    hat = free @ inverse @ free.T
    residuals = differences - hat @ differences
    corrected = residuals / np.sqrt(1 - np.diag(hat))[:, None]
    linear = np.vstack(
        [inverse @ free.T, -(inverse @ free.T).sum(0)]
    )  # [clients, rounds], coefficients that sum to 0
    value, variance, of_judges = 0.0, np.zeros(12), scales(membership, differences)
    for judge in (1, 2, 3):  # of client 0
        others = [k for k in range(4) if k != judge]
        unit = math.prod(of_judges) ** (1 / 4)
        of_judge = (linear[0] - linear[others].mean(0)) * unit / of_judges[judge] / 3
        value += of_judge @ differences[:, judge]
        variance += of_judge * corrected[:, judge]
    found = group_benefit(membership, differences)
    assert found.value[0] == pytest.approx(value)
    assert found.error[0] == pytest.approx(math.sqrt((variance**2).sum()))


def test_the_sum_of_the_judges_is_all_that_is_needed() -> None:
    rng = np.random.default_rng(0)
    membership, differences = balanced(rng, 15, 6), rng.normal(size=(15, 6))
    regression = design(membership)
    assert regression is not None
    judgements = [judged(regression, differences[:, n], n) for n in range(6)]
    together = of_sum(reduce(Judgement.plus, judgements), regression.freedom)
    at_once = group_benefit(membership, differences)
    np.testing.assert_allclose(together.value, at_once.value)
    np.testing.assert_allclose(together.error, at_once.error)
    assert together.freedom == at_once.freedom


def test_without_an_interval_there_is_no_value() -> None:
    pairs = np.array([[1.0, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]])
    membership = pairs[[0, 0, 0, 0, 1, 1, 1, 2]]  # the last division came once: it is fitted exactly
    found = group_benefit(membership, np.random.default_rng(0).normal(size=(8, 4)))
    assert np.isnan(found.value).all()
    assert found.verdicts == ["not known"] * 4


@pytest.mark.parametrize("rounds", [0, 3, 5])
def test_of_too_few_rounds_nothing_is_known(rounds: int) -> None:
    rng = np.random.default_rng(0)
    membership = balanced(rng, rounds, 6) if rounds else np.zeros((0, 6))
    found = group_benefit(membership, rng.normal(size=membership.shape))
    assert np.isnan(found.value).all()
    assert found.verdicts == ["not known"] * 6
    assert found.ranks == [(1, 6)] * 6


def test_verdicts_and_ranks_only_where_intervals_allow() -> None:
    clear = Benefit(np.array([3.0, 0.1, 0.0, -3.1]), np.array([0.1, 0.5, 0.5, 0.1]), 30)
    assert clear.verdicts == ["higher", "not distinguishable", "not distinguishable", "lower"]
    assert clear.ranks == [(1, 1), (2, 3), (2, 3), (4, 4)]
    low, high = clear.interval(1)
    assert (low, high) == pytest.approx((0.1 - 2.0423 * 0.5, 0.1 + 2.0423 * 0.5), abs=1e-3)
    unclear = Benefit(np.array([0.3, 0.1, 0.0, -0.4]), np.full(4, 0.5), 30)
    assert unclear.verdicts == ["not distinguishable"] * 4
    assert unclear.ranks == [(1, 4)] * 4


def test_a_verdict_allows_for_the_number_of_clients() -> None:
    borderline = np.r_[2.2, np.zeros(9)], np.ones(10), 30  # p = 0.036 by itself
    assert not Benefit(*borderline).interval(0).low < 0
    assert Benefit(*borderline).verdicts[0] == "not distinguishable"


def covered(found: Benefit, truth: Numbers) -> list[bool]:
    bounds = [found.interval(n) for n in range(len(truth))]
    return [low <= value <= high for (low, high), value in zip(bounds, truth, strict=True)]


@pytest.mark.job
@pytest.mark.parametrize(
    ("clients", "rounds", "shrinking"),
    [
        *((6, 20, False), (10, 20, True)),  # COPFL_SLOW=1: the rest of the grid, too
        *(pytest.param(*one, marks=slow) for one in ((6, 20, True), (10, 20, False))),
        *(pytest.param(10, 40, shrinking, marks=slow) for shrinking in (False, True)),
    ],
)
def test_coverage_with_known_benefit(clients: int, rounds: int, shrinking: bool) -> None:
    """Large judgements of oneself, noise that judges share; with `shrinking` all become 20 times smaller."""
    rng, hits = np.random.default_rng(0), list[bool]()
    scale = np.exp(-3 * np.arange(rounds) / rounds) if shrinking else np.ones(rounds)
    for _ in range(100):
        membership, effects = balanced(rng, rounds, clients), rng.normal(size=(clients, clients))
        np.fill_diagonal(effects, 10 * rng.random(clients))
        noise = 2 * rng.normal(size=(rounds, 1)) + rng.normal(size=(rounds, clients))
        found = group_benefit(membership, scale[:, None] * (membership @ effects + noise))
        many = balanced(rng, 500, clients)
        of_judges = scales(many, many @ effects + math.sqrt(5) * rng.normal(size=(500, clients)))
        hits += covered(found, scale.mean() * true_benefit(effects, of_judges))
    assert 0.90 <= np.mean(hits) <= 0.99


@pytest.mark.job
@pytest.mark.parametrize("clients", [6, 10, 20])
def test_coverage_of_the_value_of_retraining(clients: int) -> None:
    """A federation whose losses are linear in the model, so that retraining without a client has a known value.

    Client i adds a_i and noise to the model in each round, and the loss of j is -g_j · model. What k is worth
    to j is the loss of j after training without k, minus that of all; without the uploads of j itself in
    either, as its judgement of its own uploads does not count. A half has weights 2/n, a federation of n - 1
    clients 1/(n - 1).
    """
    rng, hits, rounds = np.random.default_rng(0), list[bool](), 2 * clients + 10

    def loss(uploads: Numbers, taste: Numbers, kept: list[int]) -> float:
        """After training by these clients."""
        return -float(uploads[:, kept].mean(1).sum(0) @ taste)

    for _ in range(300 // clients):
        changes, tastes = rng.normal(size=(clients, 5)), 1 + rng.normal(size=(clients, 5))
        uploads = changes + 2 * rng.normal(size=(rounds, clients, 5))
        membership = balanced(rng, rounds, clients)
        first, second = (
            np.einsum("tn,tnd->td", membership == side, uploads) * 2 / clients for side in (1.0, -1.0)
        )
        differences = (first - second) @ tastes.T
        scale, truth = scales(membership, differences), np.zeros(clients)
        unit = math.exp(np.log(scale).mean())
        for k in range(clients):
            gains, judges = [], [j for j in range(clients) if j != k]
            for j in judges:
                kept = [i for i in range(clients) if i != j]
                gain = loss(uploads, tastes[j], [i for i in kept if i != k]) - loss(uploads, tastes[j], kept)
                gains.append(gain / rounds)
            truth[k] = 2 * (clients - 2) / clients * unit * np.mean(gains / scale[judges])
        hits += covered(group_benefit(membership, differences), truth)
    assert 0.90 <= np.mean(hits) <= 0.99


@pytest.mark.job
def test_coverage_in_a_run_whose_halves_are_drawn_again() -> None:
    """The value that the intervals must cover comes from the models of all halves in every round of a real run."""
    e = experiment(ALGORITHMS["fedavg"](), rounds=24)
    firsts = [frozenset(half) for half in itertools.combinations(range(4), 2)]
    rows = np.array([[1.0 if n in first else -1.0 for n in range(4)] for first in firsts])
    differences = []  # [rounds][halves, clients]

    def observe(number: int, snapshot: replay.RoundSnapshot) -> None:
        losses = {first: losses_of(snapshot, first) for first in firsts}
        everyone = frozenset(range(4))
        differences.append(np.stack([losses[everyone - first] - losses[first] for first in firsts]))

    def losses_of(snapshot: replay.RoundSnapshot, half: frozenset[int]) -> Numbers:
        down = e.algorithm.downlink(snapshot.server_of(half), torch.arange(4))
        with torch.no_grad():
            models = [
                e.algorithm.personal_model(e.task, *tree.row((snapshot.clients, down), n)) for n in range(4)
            ]
            samples = [tree.row(e.federation.train.rows([n]), 0) for n in range(4)]
            return np.array([float(e.task.scores(*pair).loss) for pair in zip(models, samples, strict=True)])

    replay.observed(e, observe)
    table = np.stack(differences)  # [rounds, halves, clients]
    effects = np.linalg.pinv(rows) @ table.mean(0)
    every = table.transpose(1, 0, 2).reshape(-1, 4)  # all halves in all rounds
    scale = scales(np.repeat(rows, len(table), 0), every)
    truth, rng = true_benefit(effects, scale), np.random.default_rng(0)
    hits = list[bool]()
    for _ in range(300):
        drawn = rng.integers(0, len(firsts), len(table))
        hits += covered(group_benefit(rows[drawn], table[np.arange(len(table)), drawn]), truth)
    assert 0.90 <= np.mean(hits) <= 0.99
