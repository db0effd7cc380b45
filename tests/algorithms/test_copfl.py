from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from copfl.algorithms.copfl import COPFL, Client, Down, Server, Upload
from copfl.algorithms.fedavg import FedAvg
from copfl.algorithms.fedper import FedPer
from copfl.core import Data, Sgd, UsageError, tree
from copfl.core.batches import plan
from copfl.engine.mapping import vmap
from copfl.parts.cowa import Cowa, Others
from copfl.parts.mamo import Mamo
from copfl.parts.phases import Phases
from copfl.parts.pwpm import Pwpm
from copfl.settings.checking import with_options
from copfl.testing import small_federation
from tests.toys import dot, everything, federation_of, loss, rounds_of, sigma, slopes

# Three coordinates, two clients with one sample each, plain gradient descent with step 1.
#
# The model answers [0, a.x]; the loss of a sample with label 1 is log(1 + exp(-a.x)), its gradient -x
# sigma(-a.x), sigma(z) = 1 / (1 + exp(-z)). So one step from a ends in a + x sigma(-a.x). A third of the
# parameters turns personal in a round, and a third is the budget: one entry, the one with the largest |x|, in
# the first round.
A, B = (2.0, 1.0, 0.5), (-0.5, 0.75, 1.5)


GROWING = COPFL(growth=Pwpm(), phases=Phases())  # masks that grow, and two phases


def build(**options: Any) -> COPFL:
    made: COPFL = with_options(GROWING, options)
    return made


ONE_THIRD = Pwpm(1 / 3, 1 / 3)
BY_HAND = replace(GROWING, optimizer=Sgd(1.0, 0.0, 0.0), growth=ONE_THIRD)


def cos(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def two_rounds(algorithm: COPFL, rounds: int = 2) -> tuple[Any, Any, list[Any]]:
    """The server, the clients, and what each round showed."""
    state, shown = rounds_of(algorithm, slopes(0.0, 0.0, 0.0), federation_of(([A], [1]), ([B], [1])), rounds)
    return state.server, state.clients.rows(torch.arange(2)), shown


def without(algorithm: COPFL, client: Client, down: Down, update: Tensor) -> Others:
    return algorithm.contribution.others(client, down, update)


def test_the_first_round_by_hand() -> None:
    server, clients, shown = two_rounds(BY_HAND, rounds=1)
    # From 0, sigma(0) = 1/2: A ends in A / 2 = (1, .5, .25), B in B / 2 = (-.25, .375, .75).
    assert clients.w.tolist() == [[1.0, 0.5, 0.25], [-0.25, 0.375, 0.75]]
    # The largest change turns personal: entry 0 of A, entry 2 of B.
    assert clients.mask.tolist() == [[True, False, False], [False, False, True]]
    # No step of the server yet: cos := 0, gradient score 1. Without A or B the model is still 0: loss log 2.
    gamma = 1 + math.log(2)
    assert shown[0].clients["gradient_score"].tolist() == [1, 1]
    assert shown[0].clients["prediction_score"] == pytest.approx([math.log(2)] * 2)
    # Entry 0 is B's alone, entry 1 the mean of .5 and .375, entry 2 is A's alone.
    assert server.w.tolist() == pytest.approx([-0.25, 0.4375, 0.25], abs=1e-15)
    assert server.weights.tolist() == pytest.approx([gamma, 2 * gamma, gamma])
    assert float(server.score) == pytest.approx(2 * gamma)
    assert server.union.tolist() == [True, False, True]
    assert int(server.round) == 1


def test_the_second_round_by_hand() -> None:
    server, clients, shown = two_rounds(BY_HAND)
    # A starts from its own entry 0 and the global model: (1, .4375, .25). Both halves start there, so every
    # entry of it moves by x times the same sigma. B starts from (-.25, .4375, .75).
    q_a = sigma(-dot((1, 0.4375, 0.25), A))
    q_b = sigma(-dot((-0.25, 0.4375, 0.75), B))
    w_a = (1 + 2 * q_a, 0.4375 + q_a, 0.25 + 0.5 * q_a)
    w_b = (-0.25 - 0.5 * q_b, 0.4375 + 0.75 * q_b, 0.75 + 1.5 * q_b)
    np.testing.assert_allclose(clients.w, [w_a, w_b], atol=1e-12)
    assert clients.mask.tolist() == [[True, False, False], [False, False, True]]  # the budget is used up
    # The server's step was w^0 - w^1 = (.25, -.4375, -.25).
    # Without A: entry 0 is B's as it is; entry 1 is B's .375; entry 2 was A's alone, so it would not have
    # moved.
    step_without_a, model_without_a = (0.25, -0.375, 0.0), (-0.25, 0.375, 0.0)
    # Without B: entry 0 was B's alone; entry 1 is A's .5; entry 2 is A's as it is.
    step_without_b, model_without_b = (0.0, -0.5, -0.25), (0.0, 0.5, 0.25)
    # The updates delta_n = w_n^k - w_n^{k+1} are -x times sigma; the sigma does not matter to a cosine.
    gradient_a = 1 - cos((-2.0, -1.0, -0.5), step_without_a)
    gradient_b = 1 - cos((0.5, -0.75, -1.5), step_without_b)
    gamma_a, gamma_b = gradient_a + loss(model_without_a, A), gradient_b + loss(model_without_b, B)
    metrics = shown[1].clients
    np.testing.assert_allclose(metrics["gradient_score"], [gradient_a, gradient_b], atol=1e-12)
    np.testing.assert_allclose(clients.score, [gamma_a, gamma_b], atol=1e-12)
    # Entry 1 is shared by both and gets the mean by contribution; Eq. (11) and Algorithm 1, line 5.
    alpha_a = gamma_a / (gamma_a + gamma_b)
    np.testing.assert_allclose(metrics["weight"], [alpha_a, 1 - alpha_a], atol=1e-12)
    assert 0.6 < alpha_a < 0.8
    np.testing.assert_allclose(
        server.w, [w_b[0], alpha_a * w_a[1] + (1 - alpha_a) * w_b[1], w_a[2]], atol=1e-12
    )


def test_what_is_held_out_is_not_trained_on() -> None:
    # Five samples: four copies of A, and B, the fifth, held out. One pass of gradient descent over each half;
    # no half sees B, so its score is judged by B with what four samples of A leave.
    algorithm = replace(BY_HAND, contribution=Cowa(trust="held_out"))
    state, _ = rounds_of(
        algorithm, slopes(0.0, 0.0, 0.0), federation_of(([A, A, A, A, B], [1] * 5)), 1, batch=5
    )
    client = tree.row(state.clients.rows(torch.arange(1)), 0)
    assert client.w.tolist() == pytest.approx([x / 2 for x in A])
    half = tuple(x / 2 for x in A)
    assert float(client.score) == pytest.approx((1 + math.log(2)) * sigma(dot(half, B)))


def test_what_turns_personal_is_what_helps_on_samples_that_were_held_out() -> None:
    # The first round holds out the first of five samples, B. w is A / 2 and was 0. Half-way, at A / 4, the
    # gradient on B is -B times a sigma; times the change -A / 2 that is A o B / 2 = (-1, .75, .75) / 2 times
    # it: entry 0 changed most and does harm, 1 is the first that helps.
    held_out = federation_of(([B, A, A, A, A], [1] * 5))
    for by, chosen in (("change", 0), ("benefit", 1)):
        algorithm = replace(BY_HAND, growth=Pwpm(1 / 3, 1 / 3, criterion=by))
        state, _ = rounds_of(algorithm, slopes(0.0, 0.0, 0.0), held_out, 1, batch=5)
        client = tree.row(state.clients.rows(torch.arange(1)), 0)
        assert client.mask.nonzero().flatten().tolist() == [chosen]
    assert client.w.tolist() == pytest.approx([x / 2 for x in A])


def test_the_letter_takes_whole_vectors_and_the_current_update() -> None:
    _, _, shown = two_rounds(replace(BY_HAND, contribution=Cowa(leave_one_out="paper")))
    # alpha = 1/2 for both in the first round, so x_{-n} = 2 x - x_n for the step and for the model.
    broadcast, step = (-0.25, 0.4375, 0.25), (0.25, -0.4375, -0.25)
    for n, (x, start, own) in enumerate(
        [(A, (1, 0.4375, 0.25), (1, 0.5, 0.25)), (B, (-0.25, 0.4375, 0.75), (-0.25, 0.375, 0.75))]
    ):
        update = tuple(-entry * sigma(-dot(start, x)) for entry in x)
        others = tuple(2 * s - u for s, u in zip(step, update, strict=True))
        model = tuple(2 * w - o for w, o in zip(broadcast, own, strict=True))
        assert shown[1].clients["gradient_score"][n] == pytest.approx(1 - cos(update, others), abs=1e-12)
        assert shown[1].clients["prediction_score"][n] == pytest.approx(loss(model, x), abs=1e-12)


def test_union_never_averages_what_anybody_holds_as_personal() -> None:
    server, _, _ = two_rounds(replace(BY_HAND, merge="union"), rounds=1)
    assert server.w.tolist() == [
        0.0,
        0.4375,
        0.0,
    ]  # entries 0 and 2 stay where they were: at the initial weights
    server, _, shown = two_rounds(replace(BY_HAND, merge="union"))
    assert server.w[0] == 0 == server.w[2]
    assert shown[1].federation["averaged"] == pytest.approx(1 / 3)
    # What was not averaged holds nobody, so nobody is taken out of it. A starts from (1, .4375, 0).
    gradient = 1 - cos((-2.0, -1.0, -0.5), (0.0, -0.375, 0.0))
    assert shown[1].clients["gradient_score"][0] == pytest.approx(gradient, abs=1e-12)
    assert shown[1].clients["prediction_score"][0] == pytest.approx(loss((0.0, 0.375, 0.0), A), abs=1e-12)


def test_a_common_mask_by_hand() -> None:
    common = replace(BY_HAND, merge="common")
    server, _, _ = two_rounds(common, rounds=1)
    # Both scores are 1 + log 2. The mean of A / 2 and B / 2 is (.375, .4375, .5), and changed most at entry
    # 2.
    assert server.w.tolist() == pytest.approx([0.375, 0.4375, 0.5])
    assert server.union.tolist() == [False, False, True]
    assert server.weights.tolist() == pytest.approx([2 * (1 + math.log(2))] * 3)

    server, clients, shown = two_rounds(common)
    # Entry 2 starts from each client's own value and is not averaged again.
    starts = (0.375, 0.4375, 0.25), (0.375, 0.4375, 0.75)
    ends = [
        tuple(a + v * sigma(-dot(start, x)) for a, v in zip(start, x, strict=True))
        for start, x in zip(starts, (A, B), strict=True)
    ]
    assert clients.w.tolist() == [pytest.approx(end) for end in ends]
    scores = shown[1].clients["gradient_score"] + shown[1].clients["prediction_score"]
    mean = [float(np.average([end[entry] for end in ends], weights=scores)) for entry in range(2)]
    assert server.w.tolist() == pytest.approx([*mean, 0.5])
    assert server.weights.tolist() == pytest.approx([scores.sum(), scores.sum(), 0])
    assert shown[1].federation["averaged"] == pytest.approx(2 / 3) == shown[1].federation["shared"]


def test_a_new_client_starts_from_the_global_model_under_a_common_mask() -> None:
    task, common = slopes(0.0, 0.0, 0.0), replace(BY_HAND, merge="common")
    server, clients, _ = two_rounds(common)
    down = tree.row(common.downlink(server, torch.tensor([0])), 0)
    assert torch.equal(common.personal_model(task, common.client_init(task), down), server.w)
    known = common.personal_model(task, tree.row(clients, 0), down)
    assert known.tolist() == [*server.w[:2].tolist(), float(clients.w[0, 2])]


def test_nobody_is_taken_out_of_what_the_union_froze() -> None:
    # Entry 0 is shared by two of three clients, with 4 and 8, and personal at the third: frozen at 1, not
    # averaged.
    task, algorithm = slopes(1.0, 1.0), replace(BY_HAND, merge="union")
    server = algorithm.server_init(task, 3)
    total: Any = None
    for value, mask in ((4.0, False), (8.0, False), (0.0, True)):
        shared = tree.Masked(torch.tensor([value, 2.0]).double(), torch.tensor([mask, False]))
        part = algorithm.summand(task, server, torch.tensor(0), Upload(shared, torch.tensor(1.0).double()))
        total = part if total is None else tree.add(total, part)
    server, _ = algorithm.server_update(task, server, total)
    assert server.w.tolist() == [1, 2]
    assert server.weights.tolist() == [0, 3]
    client = algorithm.client_init(task)._replace(
        w=torch.tensor([4.0, 2.0]).double(), score=torch.tensor(1.0).double(), round=torch.tensor(0)
    )
    down = tree.row(algorithm.downlink(server, torch.tensor([0])), 0)
    step, model = without(algorithm, client, down, torch.ones(2).double())
    assert model.tolist() == [1, 2]
    assert step.tolist() == [0, -1]


def test_the_union_remembers_clients_that_are_absent() -> None:
    task, algorithm = slopes(0.0, 0.0), replace(BY_HAND, merge="union")
    server = algorithm.server_init(task, 2)
    for mask, value in (
        ([True, False], [0.0, 5.0]),
        ([False, False], [7.0, 6.0]),
    ):  # the second is another client's
        upload = Upload(
            tree.Masked(torch.tensor(value, dtype=torch.float64), torch.tensor(mask)),
            torch.tensor(1.0).double(),
        )
        server, _ = algorithm.server_update(
            task, server, algorithm.summand(task, server, torch.tensor(0), upload)
        )
    assert server.w.tolist() == [0.0, 6.0]
    assert server.union.tolist() == [True, False]


def test_a_client_that_was_away_is_not_taken_out_of_means_it_is_not_in() -> None:
    w = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    ones, gamma = torch.ones(3, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    away = Client(9 * ones, torch.zeros(3).bool(), (), 0.5 * ones, gamma, torch.tensor(3))
    down = Down(w, 4 * ones, torch.tensor(4.0).double(), torch.zeros(3).bool(), torch.tensor(6))
    step, model = without(BY_HAND, away, down, ones)
    assert step.tolist() == (0.5 - w).tolist()  # all that happened since it last saw the global model
    assert model.tolist() == w.tolist()
    there = away._replace(round=torch.tensor(5))  # in the last round: weight 2 of 4, holding 9
    step, model = without(BY_HAND, there, down, ones)
    assert model.tolist() == (2 * w - 9).tolist()
    assert step.tolist() == (0.5 - model).tolist()


# -- laws ----------------------------------------------------------------------------------------------------


def test_without_masks_and_scores_it_is_fedavg() -> None:
    task, federation = small_federation(
        "batch", (8, 8, 8)
    )  # equal sizes, and a power of two: the means are exact
    sgd = Sgd()
    mine, theirs = COPFL(sgd, Pwpm(rate=0.0), Cowa(score="none"), Phases()), FedAvg(sgd)
    server, other = mine.server_init(task, 3), theirs.server_init(task, 3)
    clients, others = [mine.client_init(task)] * 3, [theirs.client_init(task)] * 3
    for k in range(3):
        ids = torch.arange(3)
        order = plan(0, k, [0, 1, 2], [8, 8, 8], batch=4, epochs=2, augment=True)
        data = federation.train.rows([0, 1, 2])
        totals: list[Any] = [None, None]
        for n in range(3):
            row = tree.row((data, order, mine.downlink(server, ids), theirs.downlink(other, ids)), n)
            output = mine.client_update(task, clients[n], row[2], row[0], row[1])
            other_output = theirs.client_update(
                task, others[n], row[3], row[0], row[1][1:]
            )  # the shared phase's pass
            assert isinstance(output.trained, Tensor)
            assert isinstance(other_output.trained, Tensor)
            assert torch.equal(output.trained, other_output.trained)
            clients[n], others[n] = output.client, other_output.client
            summands = [
                mine.summand(task, server, ids[n], output.upload),
                theirs.summand(task, other, ids[n], other_output.upload),
            ]
            totals = [s if t is None else tree.add(t, s) for t, s in zip(totals, summands, strict=True)]
        server, other = (
            mine.server_update(task, server, totals[0])[0],
            theirs.server_update(task, other, totals[1])[0],
        )
        assert torch.equal(server.w[: task.d], other.w)  # local statistics travel in neither
    assert not torch.equal(server.w, task.initial)


@pytest.mark.parametrize("norm", ["batch", "none"])
@pytest.mark.parametrize("merge", ["sharers", "union", "common"])
def test_uploads_hold_nothing_at_personal_coordinates(norm: str, merge: str) -> None:
    task, federation = small_federation(norm, (5, 9))
    algorithm = replace(GROWING, merge=merge)
    server, client = algorithm.server_init(task, 2), algorithm.client_init(task)
    data = tree.row(federation.train.rows([1]), 0)
    masks = [client.mask]
    for k in range(4):
        down = tree.row(algorithm.downlink(server, torch.tensor([1])), 0)
        order = tree.row(plan(0, k, [1], [9], batch=4, epochs=2), 0)
        output = algorithm.client_update(task, client, down, data, order)
        client, upload = output.client, output.upload
        assert not upload.shared.values[client.mask].any()
        assert torch.equal(upload.shared.personal, client.mask)
        assert torch.equal(upload.shared.values[~client.mask], client.w[~client.mask])
        assert set(upload._fields) == {"shared", "score"}
        server, _ = algorithm.server_update(
            task, server, algorithm.summand(task, server, torch.tensor(1), upload)
        )
        masks.append(client.mask)
    assert all(not (before & ~after).any() for before, after in pairwise(masks))
    first = 2 if merge == "common" else 1  # a common mask comes with the next message
    assert masks[-1][: task.d].sum() > masks[first][: task.d].sum() > 0
    assert masks[0][task.d :].all()  # local statistics are personal from the start


def test_weights_add_up_to_one() -> None:
    task, federation = small_federation("none", (5, 9, 3, 12))
    state, shown = rounds_of(replace(GROWING, growth=Pwpm(budget=0.3)), task, federation, 3, vmap())
    for each in shown:
        assert (each.clients["weight"] > 0).all()
        assert each.clients["weight"].sum() == pytest.approx(1)
    clients = state.clients.rows(torch.arange(4))
    alpha = clients.score / state.server.score  # what each client works out for itself in the next round
    np.testing.assert_allclose(alpha, shown[-1].clients["weight"], rtol=1e-12)
    everywhere = clients.mask.sum(0) == 0  # shared by all: the weights there add up to all
    assert everywhere.any()
    torch.testing.assert_close(
        state.server.weights[everywhere], state.server.score.expand(int(everywhere.sum()))
    )


def test_a_clients_start_is_its_own_where_personal_and_the_broadcast_elsewhere() -> None:
    task = slopes(0.0, 0.0, 0.0)
    mask = torch.tensor([True, False, True])
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    client = BY_HAND.client_init(task)._replace(w=w, mask=mask)
    down = Down(*BY_HAND.server_init(task, 1))._replace(w=-w)
    assert BY_HAND.personal_model(task, client, down).tolist() == [1, -2, 3]


def test_one_client_alone_learns_and_stays_finite() -> None:
    for without in ("exact", "paper"):
        algorithm = replace(BY_HAND, contribution=Cowa(leave_one_out=without))
        state, shown = rounds_of(algorithm, slopes(0.0, 0.0, 0.0), federation_of(([A], [1])), 5)
        assert all(torch.isfinite(t).all() for t in tree.leaves(state.server) if t.is_floating_point())
        assert all(
            each.clients["gradient_score"] == [1] for each in shown
        )  # nobody else: no direction, no opinion
        losses = [each.clients["loss"][0] for each in shown]
        assert losses == sorted(losses, reverse=True)


def test_moments_of_an_entry_that_turned_personal_start_again() -> None:
    task = slopes(0.0, 0.0, 0.0)
    algorithm = replace(GROWING, growth=ONE_THIRD)
    data = Data(torch.tensor([A], dtype=torch.float64), torch.tensor([1]), torch.tensor(1))
    down = tree.row(algorithm.downlink(algorithm.server_init(task, 1), torch.tensor([0])), 0)
    client = algorithm.client_update(
        task, algorithm.client_init(task), down, data, everything(data, 2)
    ).client
    assert client.mask.tolist() == [
        True,
        False,
        False,
    ]  # one Adam step: all changes tie, the first entry wins
    assert client.moments.t.tolist() == [0, 1, 1]
    assert client.moments.u[0] == 0 != client.moments.u[1]


def test_an_entry_that_returns_is_shared_again_and_its_moments_start_again() -> None:
    task, algorithm = (
        slopes(0.0, 0.0, 0.0),
        replace(GROWING, growth=replace(ONE_THIRD, candidates="reselect")),
    )
    data = Data(torch.tensor([A], dtype=torch.float64), torch.tensor([1]), torch.tensor(1))
    down = tree.row(algorithm.downlink(algorithm.server_init(task, 1), torch.tensor([0])), 0)
    client = algorithm.client_update(
        task, algorithm.client_init(task), down, data, everything(data, 2)
    ).client
    assert client.mask.tolist() == [True, False, False]
    later = data._replace(
        x=torch.tensor([[0.0, 0.2, 5.0]], dtype=torch.float64)
    )  # nothing moves entry 0 any more
    output = algorithm.client_update(task, client, down, later, everything(later, 2))
    assert output.client.mask.tolist() == [False, False, True]
    assert output.client.moments.t.tolist() == [0, 2, 0]
    assert output.upload.shared.values.tolist() == [*output.client.w.tolist()[:2], 0]


def test_averaged_statistics_are_shared_like_weights() -> None:
    task, federation = small_federation("batch", (5, 9))
    average = replace(task, buffers="average")
    state, _ = rounds_of(COPFL(), average, federation, 2)
    statistics = state.server.w[task.d :]
    assert not torch.equal(statistics, task.initial[task.d :])
    assert not state.clients.rows(torch.arange(2)).mask[:, task.d :].any()
    state, _ = rounds_of(COPFL(), task, federation, 2)
    assert torch.equal(state.server.w[task.d :], task.initial[task.d :])
    own = state.clients.rows(torch.arange(2)).w[:, task.d :]
    assert not torch.equal(own[0], own[1])


def test_nobody_answered() -> None:
    task = slopes(1.0, 2.0)
    server = BY_HAND.server_init(task, 2)
    upload = Upload(tree.Masked(torch.ones(2).double(), torch.zeros(2).bool()), torch.tensor(1.0).double())
    nothing = tree.each(torch.zeros_like, BY_HAND.summand(task, server, torch.tensor(0), upload))
    after, metrics = BY_HAND.server_update(task, server, nothing)
    assert isinstance(after, Server)
    assert after.w.tolist() == [1, 2]
    assert all(math.isfinite(float(metric)) for metric in metrics.values())


def test_the_options_of_the_parts_are_options_of_the_algorithm() -> None:
    growth: dict[str, Any] = {
        "rate": 0.1,
        "budget": 0.2,
        "candidates": "all",
        "count": "all",
    }
    growth |= {"warmup": 3, "interval": 4, "criterion": "benefit", "head": "personal"}
    contribution: dict[str, Any] = {"score": "gradient", "leave_one_out": "paper"}
    contribution |= {"trust": "held_out", "max_weight": 0.5}
    phases: dict[str, Any] = {"epochs": 2, "training": "in_turn"}
    others: dict[str, Any] = {"optimizer": Mamo(lr=1e-3), "merge": "union"}
    made = build(**growth, **contribution, **phases, **others)
    assert made == COPFL(
        growth=Pwpm(**growth), contribution=Cowa(**contribution), phases=Phases(**phases), **others
    )
    assert made.total_epochs == 4
    assert with_options(COPFL(), {}) == COPFL()


# -- the default: a personal head ----------------------------------------------------------------------------


def test_by_default_the_head_is_personal_and_nothing_else_becomes_so() -> None:
    task, federation = small_federation("batch", (5, 9, 7))
    state, shown = rounds_of(COPFL(), task, federation, 3)
    clients = state.clients.rows(torch.arange(3))
    head = task.where("head", "buffers")
    assert all(torch.equal(mask, head) for mask in clients.mask)
    assert torch.equal(state.server.w[head], task.initial[head])  # nobody sends a head
    assert not torch.equal(clients.w[0][head], clients.w[1][head])
    assert shown[-1].federation["averaged"] == pytest.approx(1 - task.where("head").sum() / task.d)


def test_with_equal_weights_the_default_is_fedper() -> None:
    task, federation = small_federation("batch", (8, 8, 8))
    sgd = Sgd(lr=0.1)
    mine, _ = rounds_of(COPFL(sgd, contribution=Cowa(score="none")), task, federation, 3)
    theirs, _ = rounds_of(FedPer(sgd), task, federation, 3)
    body = task.where("body")
    assert torch.allclose(mine.server.w[body], theirs.server.w, rtol=0, atol=1e-6)


@pytest.mark.parametrize("candidates", ["shared", "all", "tensor", "reselect"])
@pytest.mark.parametrize("count", ["moving", "all"])
def test_rate_and_budget_count_the_body_beside_a_personal_head(candidates: str, count: str) -> None:
    task, federation = small_federation("none", (6, 9))
    growth = Pwpm(0.1, 0.3, candidates, count, head="personal")
    state, _ = rounds_of(COPFL(growth=growth), task, federation, 6)
    masks, head = state.clients.rows(torch.arange(2)).mask, task.where("head")
    body = task.where("body")
    for mask in masks:
        assert mask[head].all()
        assert 0 < mask[body].sum() <= 0.3 * body.sum()


@pytest.mark.parametrize("merge", ["union", "common"])
def test_a_personal_head_is_never_averaged(merge: str) -> None:
    task, federation = small_federation("none", (6, 9))
    state, _ = rounds_of(COPFL(growth=Pwpm(head="personal"), merge=merge), task, federation, 3)
    head = task.where("head")
    assert torch.equal(state.server.w[head], task.initial[head])
    assert state.server.union[head].all()


def test_held_out_samples_decide_about_the_blocks_beside_a_personal_head() -> None:
    task, federation = small_federation("none", (20, 20))
    state, _ = rounds_of(COPFL(growth=Pwpm(criterion="held_out", head="personal")), task, federation, 3)
    assert state.clients.rows(torch.arange(2)).mask[:, task.where("head")].all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"merge": "unions"}, 'no merge "unions"; did you mean "union"'),
        ({"epochs": 0}, "epochs=0 must be a number of at least 1"),
        ({"rate": 2.0}, "rate=2.0 must lie between"),
        ({"score": "all"}, 'no score "all"'),
        ({"candidates": "reselect", "merge": "union"}, 'again, merge="union" does not; use "sharers"'),
        ({"criterion": "held_out", "merge": "union"}, 'again, merge="union" does not; use "sharers"'),
        (
            {"candidates": "reselect", "merge": "common"},
            'merge="common" chooses the mask from the mean alone',
        ),
        ({"criterion": "benefit", "merge": "common"}, 'merge="common" chooses the mask from the mean alone'),
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(**wrong)


def test_two_epochs_go_twice_over_each_half() -> None:
    algorithm = replace(BY_HAND, phases=Phases(epochs=2))
    _, clients, _ = two_rounds(algorithm, rounds=1)
    once = 0.5
    twice = once + sigma(-once * dot(A, A))  # a = A / 2 after the first pass; a.A = |A|^2 / 2
    expected = torch.tensor(A, dtype=torch.float64) * twice
    torch.testing.assert_close(clients.w[0], expected, rtol=0, atol=1e-12)
