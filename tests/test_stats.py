from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from copfl.stats import (
    Interval,
    Numbers,
    TwoWay,
    agreement,
    averaged,
    correlation,
    difference,
    for_all,
    holm,
    kendall,
    mean_of_known,
    over_clients,
    over_samples,
    over_seeds,
    ranked,
    spearman,
    spread_of,
    successive_agreement,
    t_test,
)


def test_mean_and_spread_by_hand() -> None:
    # (1 + 2 + 6) / 3 = 3; squares 4 + 1 + 9 = 14, over 2 is 7
    assert spread_of([1, 2, 6]) == pytest.approx((3, math.sqrt(7)))


def test_one_value_has_no_spread() -> None:
    mean, spread = spread_of([0.5])
    assert mean == 0.5
    assert math.isnan(spread)


@pytest.mark.parametrize("level", [0.5, 0.95])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_intervals_over_seeds_are_scipys(count: int, level: float) -> None:
    means = np.random.default_rng(count).normal(size=count)
    wanted = stats.t.interval(level, count - 1, means.mean(), stats.sem(means))
    assert over_seeds(means, level) == pytest.approx(wanted, rel=1e-12)


def test_interval_over_seeds_by_hand() -> None:
    # mean 2, s = 1, three seeds: 2 ± 4.3027 / √3 = 2 ± 2.4841
    assert over_seeds(np.array([1.0, 2.0, 3.0])) == pytest.approx((-0.484138, 4.484138), abs=1e-6)


def test_of_one_seed_everything_is_possible() -> None:
    interval = over_seeds(np.array([3.0]))
    assert interval == (-math.inf, math.inf)
    assert not interval.without_zero


def test_difference_pairs_the_same_client_of_the_same_seed() -> None:
    reference = [np.array([0.1, 0.9]), np.array([0.2, 0.4])]
    row = [np.array([0.3, 1.0]), np.array([0.3, 0.4])]
    # gains: (0.2, 0.1) and (0.1, 0): 0.15 and 0.05, mean 0.1, s = 0.0707, half = 12.706 * 0.05
    gain = difference(row, reference)
    assert gain.mean == pytest.approx(0.1)
    assert gain.seeds == pytest.approx((0.1 - 0.635310, 0.1 + 0.635310), abs=1e-5)
    assert gain.verdict == "not distinguishable"
    # the clients' means over the seeds: 0.15 and 0.05, as those of the seeds over the clients
    assert gain.clients == pytest.approx(gain.seeds)


def test_a_client_that_never_took_part_says_nothing() -> None:
    row, reference = np.array([0.5, np.nan, 0.7]), np.array([0.4, np.nan, 0.4])
    assert difference([row, row], [reference, reference]).mean == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.1, "higher"), (-0.1, "lower"), (0.0, "not distinguishable")]
)
def test_verdicts(shift: float, verdict: str) -> None:
    reference = [np.array([0.5, 0.6]), np.array([0.4, 0.5]), np.array([0.3, 0.4])]
    assert difference([values + shift for values in reference], reference).verdict == verdict


def test_two_way_by_hand() -> None:
    # Means of seeds 1 and 3, of clients 1, 2 and 3; nothing is left over.
    gains = np.array([[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]])
    found = TwoWay.of(gains)
    assert (found.mean, found.of_rest) == (2.0, (0.0, 2))
    assert found.of_seeds == pytest.approx((1.0, 1))  # s = √2, two seeds
    assert found.of_clients == pytest.approx((1 / math.sqrt(3), 2))
    half = math.sqrt((12.7062 * 1.0) ** 2 + (4.30265 / math.sqrt(3)) ** 2)
    assert found.interval() == pytest.approx((2 - half, 2 + half), abs=1e-3)
    assert TwoWay.of(gains[:1]).interval() == TwoWay.of(gains[:, :1]).interval() == (-math.inf, math.inf)


def test_two_way_is_the_interval_over_what_alone_varies() -> None:
    effects = np.array([0.1, 0.5, 0.4])
    clients, seeds = np.tile(effects, (4, 1)), np.tile(effects[:, None], (1, 4))
    assert TwoWay.of(clients).interval() == pytest.approx(over_clients(effects))
    assert TwoWay.of(seeds).interval() == pytest.approx(over_seeds(effects))


def test_a_client_without_a_seed_does_not_make_the_interval_narrower() -> None:
    gains = np.random.default_rng(0).normal(size=(4, 5))
    lacking = gains.copy()
    lacking[1, 2] = np.nan
    found = TwoWay.of(lacking)
    assert found.interval().half > max(found.of_seeds.half(0.95), found.of_clients.half(0.95))
    never = np.concatenate([gains, np.full((4, 1), np.nan)], axis=1)
    assert TwoWay.of(never).interval() == pytest.approx(TwoWay.of(gains).interval())


def test_a_difference_says_what_varies() -> None:
    gains = np.random.default_rng(3).normal(0.3, 1, size=(3, 4))
    nothing = [np.zeros(4)] * 3
    of_seeds, same = difference(list(gains), nothing), difference(list(gains), nothing, same_clients=True)
    assert of_seeds.both == of_seeds.seeds == same.seeds
    assert same.both == TwoWay.of(gains).interval()
    assert of_seeds.p == pytest.approx(stats.ttest_1samp(gains.mean(1), 0).pvalue, rel=1e-6)
    assert abs(TwoWay.of(gains).interval(1 - same.p).half - abs(same.mean)) < 1e-6
    assert difference(list(gains[:1]), nothing[:1], same_clients=True).p == 1


def test_verdicts_of_several_rows_are_corrected_by_holm() -> None:
    known = [
        difference([np.array([m]) for m in (mean - 0.1, mean, mean + 0.1)], [np.zeros(1)] * 3)
        for mean in (0.4, 0.3, 0.0)
    ]
    unknown = difference([np.array([math.nan])], [np.zeros(1)])
    found = for_all({"a": known[0], "b": known[1], "c": known[2], "d": unknown})
    assert [one.verdict for one in known] == ["higher", "higher", "not distinguishable"]
    assert found["a"].p == pytest.approx(3 * known[0].p)
    assert found["b"].p == pytest.approx(2 * known[1].p)
    assert [one.verdict for one in found.values()][1:3] == ["not distinguishable"] * 2
    assert found["d"].verdict == unknown.verdict == "not computed: no client has a value under both"


def test_a_value_is_the_mean_of_the_last_third_of_the_evaluations_at_most_five() -> None:
    assert [averaged(count) for count in (1, 2, 5, 6, 12, 14, 15, 200)] == [1, 1, 1, 2, 4, 4, 5, 5]


def test_one_client_has_no_interval() -> None:
    assert over_clients(np.array([-0.022])) == (-math.inf, math.inf)
    assert over_clients(np.array([0.1, np.nan])) == (-math.inf, math.inf)


def test_a_difference_that_has_no_value_says_why() -> None:
    known, nothing = np.array([0.5, 0.6]), np.array([np.nan, np.nan])
    gain = difference([known, nothing, known], [known, known, known])
    assert gain.verdict == "not computed: no client of 1 of 3 seeds has a value under both"
    assert all(map(math.isnan, (gain.mean, *gain.seeds, *gain.clients)))
    # Of values that are infinite under both, the difference is unknown too: the client did take part.
    infinite = np.array([np.inf, 0.6])
    for reference in (known, infinite):
        gain = difference([infinite, known], [reference, known])
        assert gain.verdict == "not computed: 1 of 4 values of clients are infinite"
        assert math.isnan(gain.mean)


def test_interval_over_clients_is_the_normal_one_for_many_clients() -> None:
    gains = [np.random.default_rng(seed).normal(0.1 * seed, 1, 2000) for seed in range(2)]
    error = math.sqrt(sum(gain.var() / len(gain) for gain in gains)) / 2
    mean = np.mean([gain.mean() for gain in gains])
    found = difference(gains, [np.zeros(2000)] * 2).clients
    assert found == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)


@pytest.mark.job
@pytest.mark.parametrize("are_same", [True, False])
def test_clients_without_a_difference_are_seldom_told_apart_in_several_seeds(are_same: bool) -> None:
    """Hospitals are the same in every seed: five seeds of six hospitals are not thirty hospitals."""
    rng, nothing, told = np.random.default_rng(0), [np.zeros(6)] * 5, []
    for _ in range(1000):
        clients = rng.normal(size=6) if are_same else rng.normal(size=(5, 6))
        gains = list(clients + 0.5 * rng.normal(size=(5, 6)))
        told.append(difference(gains, nothing).clients.without_zero)
    assert np.mean(told) < 0.07


def test_a_client_of_some_seeds_counts_with_those() -> None:
    gains = [np.array([0.1, np.nan, 0.3]), np.array([0.3, 0.6])]  # means over the seeds: 0.2, 0.6 and 0.3
    found = difference(gains, [np.zeros(3), np.zeros(2)])
    assert found.mean == pytest.approx((0.2 + 0.45) / 2)
    assert found.clients == over_clients(np.array([0.2, 0.6, 0.3]))


@pytest.mark.parametrize("clients", [2, 3, 5])
def test_few_clients_without_a_difference_are_seldom_told_apart(clients: int) -> None:
    rng = np.random.default_rng(0)
    told = [over_clients(rng.normal(size=clients)).without_zero for _ in range(1000)]
    assert np.mean(told) < 0.07


def test_clients_with_the_same_difference_are_told_apart() -> None:
    assert over_clients(np.full(3, 0.25)) == (0.25, 0.25)


@pytest.mark.parametrize(("low", "high", "clear"), [(0.1, 0.2, True), (-0.2, -0.1, True), (-0.1, 0.1, False)])
def test_zero_inside_or_not(low: float, high: float, clear: bool) -> None:
    assert Interval(low, high).without_zero is clear


def test_means_of_known_numbers() -> None:
    rows = np.array([[1.0, math.nan, math.nan], [3.0, 5.0, math.nan], [math.nan, 7.0, math.nan]])
    np.testing.assert_array_equal(mean_of_known(rows), [2, 6, math.nan])
    np.testing.assert_array_equal(mean_of_known(rows, axis=1), [1, 4, 7])


def of(*values: float) -> Numbers:
    return np.array(values, np.float64)


def test_equal_values_share_their_ranks() -> None:
    assert ranked(of(30, 10, 20, 20)).tolist() == [4, 1, 2.5, 2.5]


def test_by_hand() -> None:
    # Ranks 1 2 3 against 2 1 3: 1 - 6 (1 + 1) / (3 · 8) = 0.5; of three pairs two stand in the same order: 1 / 3.
    assert spearman(of(1, 2, 3), of(20, 10, 30)) == pytest.approx(0.5)
    assert kendall(of(1, 2, 3), of(20, 10, 30)) == pytest.approx(1 / 3)
    for measure in (spearman, kendall):
        assert measure(of(1, 2, 9), of(4, 5, 6)) == pytest.approx(1)
        assert measure(of(1, 2, 9), of(6, 5, 4)) == pytest.approx(-1)
        assert np.isnan(measure(of(1, 1, 1), of(4, 5, 6)))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=12))
def test_as_scipy_does_it(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, np.float64).T
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return
    assert float(spearman(a, b)) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert float(kendall(a, b)) == pytest.approx(stats.kendalltau(a, b).statistic)


def test_the_interval_holds_the_value_and_is_the_same_every_time() -> None:
    rng = np.random.default_rng(3)
    a = [rng.normal(size=10) for _ in range(2)]
    b = [x + rng.normal(size=10) for x in a]
    found = correlation(spearman, a, b)
    assert found.low < found.value < found.high
    assert found == correlation(spearman, a, b)
    assert found.value == pytest.approx(np.mean([spearman(x, y) for x, y in zip(a, b, strict=True)]))
    more = correlation(spearman, [np.tile(x, 5) for x in a], [np.tile(y, 5) for y in b])
    assert more.high - more.low < (found.high - found.low) / 1.5


def test_where_there_is_nothing_to_rank() -> None:
    assert all(math.isnan(number) for number in correlation(spearman, [of(1, 1)], [of(1, 2)]))
    assert math.isnan(agreement(of(1, 2, 3)[None]))
    assert math.isnan(successive_agreement(of(1, 2, 3)[None]))


def test_how_alike_rows_are() -> None:
    rows = np.array([[1, 2, 3], [1, 2, 3], [3, 2, 1]], np.float64)
    assert agreement(rows) == pytest.approx((1 - 1 - 1) / 3)
    missing = np.concatenate([rows, [[math.nan], [9], [9]]], 1)  # a client that took no part in the first
    assert successive_agreement(missing) == pytest.approx(
        (1 + 0.2) / 2
    )  # 1 2 3 4 and 3 2 1 4: 1 - 6 · 8 / 60
    assert successive_agreement(rows) == pytest.approx((1 - 1) / 2)


def test_holms_correction_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04, and none below one before it.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=3, max_size=8), st.floats(-1, 1))
def test_the_t_test_rejects_where_the_interval_excludes(numbers: list[float], centre: float) -> None:
    values = np.array(numbers)
    if values.std() < 1e-6:
        return
    low, high = over_seeds(values)
    if min(abs(low - centre), abs(high - centre)) > 1e-6:
        assert (t_test(values, centre) < 0.05) == (not low <= centre <= high)
    assert t_test(values, centre) == pytest.approx(float(stats.ttest_1samp(values, centre).pvalue), rel=1e-6)


def test_equal_differences_are_certain() -> None:
    assert (t_test(np.ones(3)), t_test(np.ones(3), 1.0)) == (0.0, 1.0)


def test_an_interval_over_the_samples_of_one_client() -> None:
    """Of a mean it is about ±1.96 s / √n; samples that do not define the gain leave it unbounded."""
    rng = np.random.default_rng(1)
    values = rng.normal(0.3, 1.0, 400)
    low, high = over_samples(lambda drawn: float(values[drawn].mean()), 400)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)
    assert over_samples(lambda drawn: 0.1, 1) == (-math.inf, math.inf)
    assert over_samples(lambda drawn: math.nan, 10) == (-math.inf, math.inf)
