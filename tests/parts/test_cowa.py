from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from copfl.algorithms.copfl import Client, Down
from copfl.errors import UsageError
from copfl.parts.cowa import (
    SCORES,
    Cowa,
    Others,
    Scores,
    cosine,
    leave_one_out,
    whole_without,
)
from tests.algorithms.chain import chain, samples, vector

EAST, NORTH, WEST = (torch.tensor(v, dtype=torch.float64) for v in ([2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]))
LOSS = torch.tensor(0.7, dtype=torch.float64)


def numbers(scores: Scores) -> list[float]:
    return [float(score) for score in scores]


# -- scores --------------------------------------------------------------------------------------------------


def test_cosines_by_hand() -> None:
    assert cosine(EAST, EAST) == 1
    assert cosine(EAST, NORTH) == 0
    assert cosine(EAST, WEST) == -1
    assert float(cosine(EAST, EAST + NORTH)) == pytest.approx(2 / math.sqrt(13))


def test_a_vector_without_direction_has_no_opinion() -> None:
    zero = torch.zeros(2)
    assert cosine(zero, torch.ones(2)) == cosine(torch.ones(2), zero) == cosine(zero, zero) == 0


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8), st.floats(1e-6, 1e6))
def test_cosines_stay_between_minus_one_and_one(values: list[float], scale: float) -> None:
    a = torch.tensor(values)
    for b in (a * scale, -a * scale, a + 1):
        assert -1 <= float(cosine(a, b)) <= 1


@pytest.mark.parametrize(("others", "gradient"), [(EAST, 0.0), (NORTH, 1.0), (WEST, 2.0)])
def test_a_client_counts_for_its_deviation_and_for_what_the_others_lack(
    others: Tensor, gradient: float
) -> None:
    # Eq. (9): 1 - cos. Eq. (10): the loss. Their sum is the weight before it is normalised.
    assert numbers(Cowa().weigh(EAST, others, LOSS)) == pytest.approx([gradient, 0.7, gradient + 0.7])


def test_one_score_alone_or_none() -> None:
    totals = {score: float(Cowa(score).weigh(EAST, NORTH, LOSS).total) for score in SCORES}
    assert totals == pytest.approx({"both": 1.7, "gradient": 1.0, "prediction": 0.7, "none": 1.0})


def test_where_all_scores_are_zero_the_clients_count_the_same() -> None:
    totals = [float(Cowa("gradient").weigh(EAST * n, EAST, LOSS).total) for n in (1, 2, 3)]
    assert totals[0] > 0
    assert totals == [totals[0]] * 3
    assert Cowa("prediction").weigh(EAST, EAST, torch.zeros_like(LOSS)).total > 0


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_client_whose_loss_is_not_finite_is_left_out_where_the_loss_counts(broken: float) -> None:
    for score, weight in (("both", 0.0), ("prediction", 0.0), ("gradient", 1.0), ("none", 1.0)):
        scores = Cowa(score).weigh(EAST, NORTH, torch.full_like(LOSS, broken))
        assert float(scores.total) == weight, score
        assert all(math.isfinite(number) for number in numbers(scores))


@pytest.mark.parametrize("score", SCORES)
def test_a_client_whose_update_is_not_finite_is_left_out(score: str) -> None:
    assert Cowa(score).weigh(torch.tensor([1.0, math.nan]), torch.ones(2), torch.tensor(0.7)).total == 0


def test_side_by_side_is_the_same_as_alone() -> None:
    updates = torch.stack([EAST, NORTH, WEST])
    losses = torch.tensor([0.1, math.inf, 0.3], dtype=torch.float64)
    together = torch.func.vmap(lambda u, loss: Cowa().weigh(u, EAST + NORTH, loss))(updates, losses)
    for n in range(3):
        alone = Cowa().weigh(updates[n], EAST + NORTH, losses[n])
        assert [float(field[n]) for field in together] == pytest.approx(numbers(alone))


def test_what_cannot_work_is_refused() -> None:
    for name, wrong in {
        "score": "grad",
        "leave_one_out": "me",
        "trust": "learned",
    }.items():
        given: dict[str, Any] = {name: wrong}
        with pytest.raises(UsageError, match=f'no {name} "'):
            Cowa(**given)


# -- leaving one out -----------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 2**31 - 1))
def test_leaving_one_out_is_the_mean_of_the_others_entry_by_entry(members: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    d = 12
    values = torch.randn(members, d, generator=generator, dtype=torch.float64)
    shares = torch.rand(members, d, generator=generator) < 0.6
    gamma = torch.rand(members, generator=generator, dtype=torch.float64) + 0.1
    weight = torch.where(shares, gamma[:, None], 0)  # [N, d]
    weights = weight.sum(0)
    mean = torch.where(weights > 0, (weight * values).sum(0) / weights.clamp(min=1e-9), 7.0)
    fallback = torch.full((d,), -99.0, dtype=torch.float64)
    for n in range(members):
        others = [i for i in range(members) if i != n]
        rest = weight[others].sum(0)
        expected = torch.where(
            rest > 0, (weight[others] * values[others]).sum(0) / rest.clamp(min=1e-9), fallback
        )
        found = leave_one_out(mean, values[n], weights, weight[n], fallback)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_leaving_out_a_client_that_does_not_share_changes_nothing() -> None:
    mean, weights = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert torch.equal(
        leave_one_out(mean, torch.full((2,), 50.0), weights, torch.zeros(2), torch.zeros(2)), mean
    )


def test_by_hand() -> None:
    # Two members with weights 1 and 3 hold 10 and 2: the mean is 4. Without the second 10 is left, without
    # the first 2.
    mean, total = torch.tensor([4.0]), torch.tensor([4.0])
    assert leave_one_out(mean, torch.tensor([2.0]), total, torch.tensor([3.0]), torch.zeros(1)).item() == 10
    assert leave_one_out(mean, torch.tensor([10.0]), total, torch.tensor([1.0]), torch.zeros(1)).item() == 2


def test_one_client_alone_falls_back_and_stays_finite() -> None:
    mean, fallback = torch.tensor([4.0, 5.0]), torch.tensor([-1.0, -2.0])
    weights = torch.tensor([0.3, 0.3])
    found = leave_one_out(
        mean, mean, weights, weights * (1 + 1e-7), fallback
    )  # rounding may put a little above W
    assert torch.equal(found, fallback)


def test_where_nobody_shared_the_fallback_stands() -> None:
    zero = torch.zeros(2)
    assert leave_one_out(torch.ones(2), torch.ones(2), zero, zero, torch.tensor([8.0, 9.0])).tolist() == [
        8,
        9,
    ]


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_a_weight_that_a_message_rounded_is_no_weight_of_others(narrow: torch.dtype) -> None:
    weight = torch.linspace(0.3, 9, 200)  # of the only member
    rounded = weight.to(narrow).float()
    assert (rounded > weight).any()
    own, fallback = torch.full((200,), 5.0), torch.full((200,), -1.0)
    assert torch.equal(leave_one_out(own, own, rounded, weight, fallback), fallback)


# -- trust ---------------------------------------------------------------------------------------------------


def test_trust_is_the_probability_that_the_clients_model_gives_its_labels() -> None:
    # The score is 1 + 0.7; a model that gives every label the probability 1/4 has a loss of log 4.
    own_loss = torch.tensor(math.log(4), dtype=torch.float64)
    scores = Cowa(trust="held_out").weigh(EAST, NORTH, LOSS, own_loss)
    assert numbers(scores) == pytest.approx([1, 0.7, 1.7 / 4])  # the two scores are reported as they are
    assert float(Cowa(trust="held_out").weigh(EAST, NORTH, LOSS, 0 * LOSS).total) == pytest.approx(1.7)
    assert float(Cowa("none", trust="held_out").weigh(EAST, NORTH, LOSS, own_loss).total) == pytest.approx(
        1 / 4
    )


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_that_is_broken_earns_no_trust(broken: float) -> None:
    total = Cowa(trust="held_out").weigh(EAST, NORTH, LOSS, torch.full_like(LOSS, broken)).total
    assert float(total) == pytest.approx(1e-6)


@pytest.mark.parametrize("trust", ["all", "held_out"])
def test_a_client_is_judged_by_the_others_model_and_trusted_by_its_own(trust: str) -> None:
    """Four samples of label 1 and a fifth of label 0: the answers of b, h to x are [0, h b x]."""
    task, data = chain(1.0, 1.0), samples((1.0, 1), (1.0, 1), (1.0, 1), (1.0, 1), (2.0, 0))
    step, model, own = vector(0.0, 1.0), vector(1.0, -1.0), vector(1.0, 3.0)
    scores = Cowa(trust=trust).judge(task, own, vector(0.0, 2.0), Others(step, model), data)
    loss = (4 * math.log(1 + math.e) + math.log(1 + math.exp(-2))) / 5  # of the model, which answers [0, -x]
    fifth = math.log(1 + math.exp(6))  # of the client's own, which answers [0, 3 x], on the sample held out
    own_loss = {"all": 0.0, "held_out": fifth}[trust]
    assert numbers(scores) == pytest.approx([0, loss, loss * math.exp(-own_loss)])


# -- the others ----------------------------------------------------------------------------------------------


def test_whole_vectors_without_one_by_hand() -> None:
    # The server went from 4 to 2, half of it was this client, which went from 4 to 1: the others are at 3.
    broadcast, seen, own, ever = vector(2.0), vector(4.0), vector(1.0), torch.tensor(True)
    step, model = whole_without(broadcast, seen, own, seen - own, vector(0.5)[0], ever)
    assert (float(step), float(model)) == (1, 3)
    step, model = whole_without(
        broadcast, seen, own, seen - own, vector(1.0)[0], ever
    )  # there were no others
    assert (float(step), float(model)) == (0, 4)
    step, model = whole_without(
        broadcast, seen, own, seen - own, vector(0.0)[0], torch.tensor(False)
    )  # a new client
    assert (float(step), float(model)) == (0, 2)


def test_entries_without_one_by_hand() -> None:
    # As above in entry 0; entry 1 is personal here, so all of the mean is the others'; nobody shared entry 2.
    mask, weights = torch.tensor([False, True, True]), vector(4.0, 4.0, 0.0)
    broadcast, seen, own = vector(2.0, 2.0, 2.0), vector(4.0, 4.0, 4.0), vector(1.0, 9.0, 9.0)
    total, number = vector(2.0)[0], torch.tensor(1)
    client = Client(own, mask, (), seen, total, number - 1)
    down = Down(broadcast, weights, 2 * total, mask, number)
    step, model = Cowa().others(client, down, seen - own)
    assert step.tolist() == [1, 2, 2]
    assert model.tolist() == [3, 2, 2]


def test_the_initial_bounds() -> None:
    assert Cowa(max_weight=1.0).initial_bounds(3, EAST) is None
    bounds = Cowa(max_weight=0.5).initial_bounds(3, EAST)
    assert bounds is not None
    assert bounds.tolist() == [1, 1]
    with pytest.raises(UsageError, match=r"must be at least 0\.333"):
        Cowa(max_weight=0.3).initial_bounds(3, EAST)
