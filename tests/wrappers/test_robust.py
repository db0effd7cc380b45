"""Each robust rule by hand, that few clients cannot move it, and that every engine agrees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from copfl.algorithms import ALGORITHMS, FedAvg
from copfl.algorithms.copfl import COPFL, Upload
from copfl.choosing.run import run
from copfl.core import Masked, Sgd, Task, UsageError, received, tree
from copfl.core.batches import plan
from copfl.engine.mapping import sequential, vmap
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.parts import averaging
from copfl.parts.cowa import Cowa, Reports, bounded, report_of, whole_without
from copfl.settings.components import build, component
from copfl.testing import check_algorithm, small_federation
from copfl.wrappers.robust import ROBUST_RULES, Clipped, Trimmed, median_of, trimmed_mean
from tests.federation.network import CONFIG, digits, farthest, play, simulated, write_nodes
from tests.slow import slow
from tests.toys import rounds_of, slopes

ONES = torch.ones(5, 1, dtype=torch.bool)


def test_a_trimmed_mean_and_a_median_by_hand() -> None:
    column = torch.tensor([[3.0], [1.0], [100.0], [2.0], [-50.0]])
    assert trimmed_mean(column, ONES, 0.0).item() == pytest.approx(56 / 5)
    assert trimmed_mean(column, ONES, 0.2).item() == 2  # of 1, 2, 3
    assert trimmed_mean(column, ONES, 0.5).item() == 2
    four = torch.tensor([[True], [True], [True], [True], [False]])
    assert trimmed_mean(column, four, 0.5).item() == 2.5  # of 1, 2, 3, 100
    assert trimmed_mean(column, ~four, 0.5).item() == -50
    assert trimmed_mean(column, torch.zeros_like(four), 0.5).item() == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=3, max_size=9), st.lists(st.floats(-1e6, 1e6), max_size=8))
def test_a_minority_cannot_move_the_median_out_of_what_the_others_say(
    honest: list[float], lies: list[float]
) -> None:
    lies = lies[: len(honest) - 1]
    column = torch.tensor([*honest, *lies], dtype=torch.float64)[:, None]
    assert (
        min(honest)
        <= trimmed_mean(column, torch.ones_like(column, dtype=torch.bool), 0.5).item()
        <= max(honest)
    )


def test_the_median_of_those_that_count() -> None:
    values, counts = torch.tensor([5.0, 1.0, 9.0, 7.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert median_of(values, counts).item() == 5
    assert median_of(values, torch.ones(4)).item() == 5  # the lower one of two
    assert median_of(values, torch.zeros(4)).item() == 0


def server_after(algorithm: Any, task: Task, rounds: Sequence[Sequence[tuple[list[float], float]]]) -> Any:
    """The server after rounds of uploads, given as weights and sizes."""
    server = algorithm.server_init(task, len(rounds[0]))
    for uploads in rounds:
        parts = [
            algorithm.summand(task, server, torch.tensor(n), averaging.Upload(tensor(w), tensor(size)))
            for n, (w, size) in enumerate(uploads)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = tree.add(total, part)
        server, _ = algorithm.server_update(task, server, total)
    return server


def tensor(values: list[float] | float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_clipping_by_hand() -> None:
    """From (0, 0): the first round only measures lengths 5, 1, 10 and claims 1, 1, 8; the second holds them to it."""
    task, sent = slopes(0.0, 0.0), [([3.0, 4.0], 1.0), ([0.0, 1.0], 1.0), ([10.0, 0.0], 8.0)]
    server = server_after(Clipped(FedAvg()), task, [sent])
    assert server.server.w.tolist() == [0, 0]
    assert (server.bounds.radius.item(), server.bounds.reported_weight.item()) == (5, 2)
    server = server_after(Clipped(FedAvg()), task, [sent, sent])
    # (3, 4) and (0, 1) as they are, (10, 0) cut to (5, 0) and its claim of 8 to 2.
    assert server.server.w.tolist() == pytest.approx([(3 + 2 * 5) / 4, (4 + 1) / 4])
    fixed = server_after(Clipped(FedAvg(), radius=1.0), task, [sent, sent])
    assert fixed.server.w.tolist() == pytest.approx([(0.6 + 2 * 1) / 4, (0.8 + 1) / 4])


def test_a_claim_below_nothing_counts_nothing() -> None:
    sent = [([1.0, 0.0], 1.0), ([0.0, 1.0], 1.0), ([0.0, 1.0], -100.0)]
    server = server_after(Clipped(FedAvg()), slopes(0.0, 0.0), [sent, sent])
    assert server.server.w.tolist() == [0.5, 0.5]


def test_the_median_of_uploads_by_hand() -> None:
    sent = [([1.0, 4.0], 1.0), ([2.0, 5.0], 100.0), ([1000.0, -1000.0], 1.0)]
    assert server_after(Trimmed(FedAvg(), 0.5), slopes(0.0, 0.0), [sent]).w.tolist() == [2, 4]
    assert server_after(Trimmed(FedAvg(), 0.0), slopes(0.0, 0.0), [sent]).w.tolist() == pytest.approx(
        [1003 / 3, -991 / 3]
    )


@pytest.mark.job
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(Clipped(ALGORITHMS["fedselect"]()), marks=slow), Trimmed(ALGORITHMS["copfl"]())],
    ids=["clip", "trimmed"],
)
def test_it_is_an_algorithm_like_any_other(algorithm: Any) -> None:
    check_algorithm(algorithm, rounds=2, batch=6, norm="none")


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match='did you mean "median"'):
        component("robust", {"name": "medan"})
    with pytest.raises(UsageError, match=r'robust\.radus=1\.0 is no setting; did you mean "radius"'):
        component("robust", {"name": "clip", "radus": 1.0})
    with pytest.raises(UsageError, match=r"robust\.trim=0\.7"):
        build("robust", component("robust", {"name": "trimmed_mean", "trim": 0.7}), algorithm=FedAvg())
    table = component("robust", {"name": "clip", "radius": 2})
    assert build("robust", table, algorithm=FedAvg()) == Clipped(FedAvg(), radius=2.0)
    assert ROBUST_RULES.keys() == {"clip", "evidence", "median", "trimmed_mean"}


def test_robust_aggregation_saves_the_shared_model_from_a_loud_malicious_client() -> None:
    """FedAvg under `scaled`: without a robust rule the global model is worth nothing, with the median it learns."""
    common: dict[str, Any] = {
        "rounds": 8, "model": "mlp", "engine": "vmap", "eval_every": 8, "attack": {"name": "scaled"}
    }  # fmt: skip
    plain = run("fedavg", **common)
    saved = run("fedavg", robust={"name": "median"}, **common)
    assert saved.accuracy_global[-1].mean() > plain.accuracy_global[-1].mean() + 0.2


@pytest.mark.parametrize("robust", ["clip", "median"])
def test_nodes_aggregate_robustly_as_in_the_simulation(robust: str, tmp_path: Path) -> None:
    federation = digits()
    config = CONFIG | {"robust.name": robust, "run.rounds": 2}
    if robust == "clip":
        config |= {"robust.norm_factor": 0.5}
    server = play(config, write_nodes(federation, tmp_path / "n"), tmp_path / "runs").server
    from copfl.federation.protocol.settings import settings_of

    assert farthest(server, simulated(settings_of(config), federation).server) <= 1e-5


@pytest.mark.parametrize("name", ["copfl", "fedce"])
def test_leave_one_out_removes_what_the_server_counted(name: str) -> None:
    """Without one client, the mean is what the server would have had without its clipped upload."""
    task, federation = small_federation("none", (5, 9, 12))
    algorithm = Clipped(ALGORITHMS[name](Sgd(lr=0.1)), radius=0.01, weight_factor=0.8)
    state = begin(algorithm, task, 3)
    *_, last = simulate(Simulation(algorithm, task, federation, sequential(), batch=4), state, rounds=3)
    assert last.federation["clipped"] == 1
    before, _ = rounds_of(algorithm, task, federation, 2, batch=4)
    clients = state.clients.rows(torch.arange(3))
    for n in range(3):
        parts = []
        with torch.no_grad():
            for other in {0, 1, 2} - {n}:
                order = plan(0, 2, [other], federation.train.sizes[[other]], batch=4, augment=True,
                             epochs=algorithm.total_epochs)  # fmt: skip
                old = tree.row(before.clients.rows(torch.arange(3)), other)
                down = received(algorithm, before.server, torch.tensor(other))
                data = tree.row(federation.train.rows([other]), 0)
                upload = algorithm.client_update(task, old, down, data, tree.row(order, 0)).upload
                parts.append(algorithm.summand(task, before.server, torch.tensor(other), upload))
            without, _ = algorithm.server_update(task, before.server, reduce(tree.add, parts))
        client, down = (
            tree.row(clients, n),
            received(algorithm.algorithm, state.server.server, torch.tensor(n)),
        )
        if name == "copfl":
            others = Cowa().others(client, down, torch.zeros(task.d)).model
        else:
            alpha = (client.weight / down.weight).mean()
            others = whole_without(down.w, client.seen, client.sent, down.w, alpha, torch.tensor(True)).model
        # Where nobody else shares an entry there is no such mean.
        shared = without.server.weights > 0 if name == "copfl" else torch.ones_like(others, dtype=torch.bool)
        torch.testing.assert_close(others[shared], without.server.w[shared], rtol=1e-9, atol=1e-9)


# -- CO-PFL's bound on shares --------------------------------------------------------------------------------


def next_bounds(max_weight: float, scores: Sequence[float], before: Sequence[float] = (1.0, 1.0)) -> Tensor:
    """The bounds after a round with these reports."""
    total = Reports(tensor(0.0), tensor(0.0))
    for score in scores:
        report = report_of(tensor(score), tensor([1.0, 1.0]))
        assert report is not None
        total = tree.add(total, report)
    bounds = Cowa(max_weight=max_weight).next_bounds(total, tensor(list(before)))
    assert bounds is not None
    return bounds


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-10, 1e9), min_size=2, max_size=12), st.floats(0.01, 1e6), st.floats(0.05, 0.99))
def test_nobody_gets_more_than_most(claims: list[float], mean: float, most: float) -> None:
    """Whatever is claimed, as long as as many take part as in the round before and claim anything."""
    count = len(claims)
    most = max(most, 1 / count)
    bounds = next_bounds(most, [mean] * count)
    scores = torch.stack([bounded(tensor(max(reported_weight, 1e-6)), bounds) for reported_weight in claims])
    assert float((scores / scores.sum()).max()) <= most + 1e-9


def test_bounds_by_hand() -> None:
    # Around a mean of (1/2 · 1 · 2 · 4 · 8)^(1/5) = 2; one at 4 beside four at 1 has one half. Nothing does
    # not count.
    assert next_bounds(0.5, [0.5, 1.0, 2.0, 4.0, 8.0, 0.0]).tolist() == pytest.approx([1, 4])
    assert next_bounds(0.5, [], (3.0, 4.0)).tolist() == [3, 4]
    assert torch.isfinite(next_bounds(0.5, [1.0, 1e308])).all()
    assert [bounded(tensor(s), tensor([1.0, 4.0])).item() for s in (-1.0, 0.0, 0.5, 2.0, 9.0)] == [
        0,
        0,
        1,
        2,
        4,
    ]
    assert bounded(tensor(9.0), None).item() == 9


def test_scores_within_the_bound_are_the_weights_from_the_second_round_on() -> None:
    """The scores 22, 30 and 38 make weights of 0.24, 0.33 and 0.42, all below one half."""
    task, algorithm = slopes(0.0, 0.0), COPFL(contribution=Cowa(max_weight=0.5))
    server, weights = algorithm.server_init(task, 3), []
    client = algorithm.client_init(task)
    for _ in range(3):
        shared = Masked(task.initial, client.mask)
        parts = [
            algorithm.summand(task, server, torch.tensor(n), Upload(shared, tensor(score)))
            for n, score in enumerate((22.0, 30.0, 38.0))
        ]
        weights.append([float(part.score / sum(p.score for p in parts)) for part in parts])
        server, _ = algorithm.server_update(task, server, reduce(tree.add, parts))
    assert weights[0] == pytest.approx([1 / 3] * 3)  # nothing to compare with
    assert weights[1] == weights[2] == pytest.approx([22 / 90, 30 / 90, 38 / 90])


def test_a_malicious_client_gets_its_share_and_no_more() -> None:
    options: dict[str, Any] = {"rounds": 3, "model": "mlp", "engine": "vmap", "attack": {"name": "scaled"}}
    result = run("copfl", algorithm_options={"max_weight": 0.2}, **options)
    server = result.state.server.server
    low, high = server.bounds.tolist()
    assert high / (high + 9 * low) == pytest.approx(0.2)
    assert float(server.score) <= 10 * high


def test_most_must_leave_room_for_everybody() -> None:
    with pytest.raises(UsageError, match=r"max_weight=1.5"):
        Cowa(max_weight=1.5)
    with pytest.raises(UsageError, match=r"at least 0.333"):
        COPFL(contribution=Cowa(max_weight=0.2)).server_init(slopes(0.0, 0.0), 3)


def test_without_a_bound_nothing_is_added_to_the_messages() -> None:
    task = slopes(0.0, 0.0)
    assert COPFL().server_init(task, 3).bounds is None
    assert len(tree.leaves(COPFL().downlink(COPFL().server_init(task, 3), torch.arange(3)))) == 5


def test_engines_agree_with_a_bound() -> None:
    from copfl.testing import small_federation

    task, federation = small_federation("none", (5, 9, 3, 12))
    states = []
    for mapping in (sequential(), vmap(3)):
        algorithm = COPFL(contribution=Cowa(max_weight=0.3))
        state = begin(algorithm, task, 4)
        list(simulate(Simulation(algorithm, task, federation, mapping, batch=4), state, rounds=3))
        states.append(state)
    assert farthest(states[0].server, states[1].server) < 1e-9
