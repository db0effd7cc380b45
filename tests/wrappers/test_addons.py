"""The training add-ons, by hand and by the laws that every algorithm obeys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from copfl.algorithms import ALGORITHMS, APFL, COPFL, FedAvg, Local
from copfl.core import Adam, Scaled, Sgd, UsageError, faster, received, tree
from copfl.core.batches import plan
from copfl.core.evaluation import vectors_of
from copfl.engine.mapping import sequential, vmap
from copfl.kernels.modules import BatchNorm
from copfl.parts.server_steps import Momentum
from copfl.testing import check_algorithm, small_federation
from copfl.wrappers.addons import with_addons
from copfl.wrappers.bn_stats import LocalBnStats
from copfl.wrappers.ema import Ema
from copfl.wrappers.lr_schedule import LrSchedule
from copfl.wrappers.server_optimizer import ServerOptimizer
from tests.kinds import quick
from tests.toys import rounds_of, slopes


def test_at_its_defaults_nothing_is_added() -> None:
    algorithm = FedAvg()
    assert with_addons(algorithm) is algorithm


def test_average_by_hand() -> None:
    """Decay 1/2 over models a, b: (a / 4 + b / 2) / (3 / 4) = (a + 2 b) / 3."""
    task, federation = small_federation("none", (4, 6))
    plain, ends = Local(Sgd(lr=0.1)), []
    for rounds in (1, 2):
        state, _ = rounds_of(plain, task, federation, rounds, sequential())
        down = plain.downlink(state.server, torch.arange(2))
        ends.append(
            plain.personal_model(task, tree.row(state.clients.rows(torch.arange(2)), 1), tree.row(down, 1))
        )
    algorithm = Ema(plain, 0.5)
    state, _ = rounds_of(algorithm, task, federation, 2, sequential())
    client = tree.row(state.clients.rows(torch.arange(2)), 1)
    found: Any = algorithm.personal_model(
        task, client, tree.row(algorithm.downlink(state.server, torch.arange(2)), 1)
    )
    torch.testing.assert_close(found, (ends[0] + 2 * ends[1]) / 3)
    torch.testing.assert_close(client.weight, torch.tensor(0.75, dtype=torch.float64))


def test_paces_by_hand() -> None:
    task = slopes(1.0)
    for schedule, wanted in (
        ("linear", [1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [1, (1 + math.sqrt(0.5)) / 2, 0.5]),
        ("steps", [1, 1, 0.1, 0.01, 0.01]),
    ):
        algorithm = LrSchedule(FedAvg(), schedule, 4)
        server = algorithm.server_init(task, 1)
        for round, lr_factor in enumerate(wanted):
            down = algorithm.downlink(server._replace(round=torch.tensor(round)), torch.tensor([0]))
            assert float(down.lr_factor[0]) == pytest.approx(lr_factor)


@pytest.mark.parametrize(
    "optimizer", [Sgd(lr=0.1, momentum=0.5, weight_decay=0.01), Adam(lr=0.1)], ids=["sgd", "adam"]
)
def test_scaled_steps_are_those_of_a_smaller_learning_rate(optimizer: Any) -> None:
    w, active = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), torch.tensor([True, False, True])
    half, scaled = faster(optimizer, 0.5), Scaled(optimizer, torch.tensor(0.5, dtype=torch.float64))
    wanted, found = (w, half.init(w)), (w, scaled.init(w))
    for grad in (torch.tensor([1.0, 2.0, -1.0]).double(), torch.tensor([0.5, 0.1, 2.0]).double()):
        wanted = half.step(wanted[0], grad, wanted[1], active)
        found = scaled.step(found[0], grad, found[1], active)
        torch.testing.assert_close(found[0], wanted[0])
    assert faster(scaled, 2.0).optimizer == faster(optimizer, 2.0)  # type: ignore[attr-defined]


def test_own_statistics_are_those_of_all_own_samples() -> None:
    """The first batch norm's: mean and unbiased variance, over all samples and pixels, of what it sees."""
    task, federation = small_federation("batch", (5, 9))
    rows, w = federation.train.rows([0, 1]), task.initial
    norm = next(name for name, m in task.module.named_modules() if isinstance(m, BatchNorm))
    for client, size in enumerate((5, 9)):
        data = tree.row(rows, client)
        seen: list[torch.Tensor] = []
        hook = task.module.get_submodule(norm).register_forward_pre_hook(
            lambda _, x, seen=seen: seen.append(x[0])
        )
        task.forward(w, task.numbers(data.x[:size]))
        hook.remove()
        for one in (task, task.with_batching()):
            found = one.with_local_statistics(w, data)
            statistics = task.layout.split(found[task.d :], buffers=True)
            torch.testing.assert_close(statistics[f"{norm}.running_mean"], seen[0].mean((0, 2, 3)))
            torch.testing.assert_close(statistics[f"{norm}.running_var"], seen[0].var((0, 2, 3)))
            assert torch.equal(found[: task.d], w[: task.d])


# A plain mean, in which every add-on is tried with another method too: experiment/test_repeatable.py.
@pytest.mark.job
@pytest.mark.parametrize("name", quick(["copfl", "fedavg", "fedpoe"], ["fedavg"]))
def test_all_addons_together_breaks_no_law(name: str) -> None:
    algorithm = ALGORITHMS[name](optimizer=Adam(lr=1e-2))
    every: dict[str, Any] = {
        "ema": 0.8,
        "lr_schedule": "cosine",
        "lr_rounds": 5,
        "bn_stats": "local",
    }
    check_algorithm(with_addons(ServerOptimizer(algorithm, Momentum()), **every), rounds=2, batch=6)


def test_training_knows_nothing_of_what_a_client_predicts_with() -> None:
    task, federation = small_federation("batch", (5, 9, 3))
    plain, shown = rounds_of(COPFL(), task, federation, 3, vmap(64))
    other, shown_too = rounds_of(LocalBnStats(Ema(COPFL(), 0.9)), task, federation, 3, vmap(64))
    torch.testing.assert_close(plain.server.w, other.server.w)
    assert shown[-1].federation == shown_too[-1].federation


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ema": 1.0}, "below 1"),
        ({"ema": -0.1}, "at least 0"),
        ({"lr_schedule": "step"}, "cosine"),
        ({"lr_schedule": "cosine"}, "addons.lr_rounds"),
        ({"bn_stats": "mine"}, "running"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_addons(FedAvg(), **options)


def test_without_batch_norm_there_is_nothing_to_state_again() -> None:
    task, federation = small_federation("none", (4, 6))
    plain, with_local_statistics = (
        rounds_of(a, task, federation, 2, vmap(64))[1] for a in (FedAvg(), LocalBnStats(FedAvg()))
    )
    assert plain[-1].clients["accuracy"].tolist() == with_local_statistics[-1].clients["accuracy"].tolist()


def test_each_model_of_a_mixture_has_its_own_local_statistics() -> None:
    task, federation = small_federation("batch", (9, 6))
    algorithm = LocalBnStats(APFL(Sgd(lr=0.1)))
    state, _ = rounds_of(algorithm, task, federation, 2, batch=4)
    client: Any = tree.row(state.clients.rows(torch.arange(2)), 0)
    data, down = tree.row(federation.train.rows([0]), 0), received(algorithm, state.server, torch.tensor(0))
    order = tree.row(plan(0, 2, [0], [9], batch=4, epochs=1), 0)
    with torch.no_grad():
        output = algorithm.client_update(task, client, down, data, order)
        inside = algorithm.algorithm.client_update(task, client.client, down, data, order)
        found, models = vectors_of(output.trained), vectors_of(inside.trained)
        for with_statistics, model in zip(found, models, strict=True):
            assert torch.equal(with_statistics, task.with_local_statistics(model, data))
        assert not torch.allclose(found[0, task.d :], found[1, task.d :])
        before = vectors_of(algorithm.personal_model(task, output.client, down))
    assert torch.equal(before[:, task.d :], found[:, task.d :])  # until it trains again


def test_a_message_cannot_raise_the_learning_rate() -> None:
    """A node accepted the rate of the run; the factor of a schedule is in every message of the server."""
    task, federation = small_federation("none", (4, 6))
    algorithm, data = LrSchedule(FedAvg(Sgd(lr=0.1)), "linear", 4), tree.row(federation.train.rows([0]), 0)
    down = received(algorithm, algorithm.server_init(task, 1), torch.tensor(0))
    batches = tree.row(plan(0, 0, [0], [int(data.size)], batch=4, epochs=1), 0)

    def trained(factor: float) -> torch.Tensor:
        message = down._replace(lr_factor=torch.tensor(factor, dtype=torch.float64))
        model = algorithm.client_update(task, algorithm.client_init(task), message, data, batches).trained
        assert isinstance(model, torch.Tensor)
        return model

    assert torch.equal(trained(1000.0), trained(1.0))
    assert not torch.equal(trained(0.5), trained(1.0))
