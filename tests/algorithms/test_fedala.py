"""FedALA: how much of the global model each entry of the last tensors takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from copfl.algorithms import FedALA, FedAvg
from copfl.algorithms.fedala import Client
from copfl.core.optim import Adam, Optimizer, Sgd
from copfl.parts import Mamo
from copfl.parts.averaging import Down
from copfl.testing import small_federation
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector
from tests.algorithms.updates import clients_of, output_of, three_rounds
from tests.toys import rounds_of


def client(w: Tensor, mix: float = 1.0, turns: int = 1) -> Client:
    return Client(w, vector(mix), (), torch.tensor(turns))


def test_a_turn_by_hand() -> None:
    """Own weights (5, 0.5), broadcast (2, 1.5): only the head is mixed, the body is the global model's."""
    task, data = chain(0.0, 0.0), samples((1.0, 1), (3.0, 0))
    algorithm = FedALA(PLAIN, tensors=1, step=0.5, fraction=1.0)
    output = output_of(
        algorithm, task, data, one_at_a_time([1, 0], [0]), client(vector(5.0, 0.5)), vector(2.0, 1.5)
    )
    mix = 1.0
    for x, y in ((3.0, 0), (1.0, 1)):
        head = 0.5 + (1.5 - 0.5) * mix
        slope = off(head * 2.0 * x, y) * 2.0 * x
        mix = min(1.0, max(0.0, mix - 0.5 * slope * (1.5 - 0.5)))
    head = 0.5 + mix
    push = off(head * 2.0 * 1.0, 1)
    assert output.client.mix.tolist() == numbers(mix)
    assert output.trained.tolist() == numbers(2.0 - LR * push * head, head - LR * push * 2.0)
    assert output.client.w.tolist() == output.trained.tolist()


def test_a_new_client_takes_the_whole_broadcast() -> None:
    task, data = chain(5.0, 0.5), samples((3.0, 0))
    output = output_of(FedALA(PLAIN), task, data, one_at_a_time([0], []), w=vector(2.0, 1.5))
    assert output.client.mix.tolist() == [1.0, 1.0]
    assert output.trained.tolist() == numbers(2.0, 1.5)
    assert int(output.client.rounds) == 1


def test_before_training_it_predicts_with_its_own_mixture() -> None:
    task, algorithm = chain(0.0, 0.0), FedALA(tensors=1)
    personal = algorithm.personal_model(task, client(vector(5.0, 0.5), mix=0.25), Down(vector(2.0, 1.5)))
    assert personal.tolist() == numbers(2.0, 0.75)


def test_only_a_fraction_of_the_samples_trains_the_mixture() -> None:
    """With 5 samples and a fraction of 0.4, the first two of the shuffled epoch."""
    task, order = chain(0.0, 0.0), one_at_a_time([3, 1, 0, 2, 4], [])
    algorithm, own, w = (
        FedALA(PLAIN, fraction=0.4, step=0.1),
        Client(vector(5.0, 0.5), vector(1.0, 1.0), (), torch.tensor(1)),
        vector(2.0, 1.5),
    )
    pairs = [(0.3, 0), (0.5, 0), (0.7, 1), (0.2, 0), (0.9, 1)]
    mix = output_of(algorithm, task, samples(*pairs), order, own, w).client.mix
    for changed, matters in ((0, False), (1, True), (2, False), (3, True), (4, False)):
        others = [(x + 0.1, y) if place == changed else (x, y) for place, (x, y) in enumerate(pairs)]
        same = torch.equal(output_of(algorithm, task, samples(*others), order, own, w).client.mix, mix)
        assert same is not matters


@dataclass(frozen=True)
class LaterPasses(FedAvg):
    """FedAvg that is given one pass more, and leaves the first alone."""

    @property
    def total_epochs(self) -> int:
        return 1 + self.epochs

    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> Any:
        return super().client_update(task, client, down, data, plan[1:])


@pytest.mark.parametrize("optimizer", [Sgd(), Adam(), Mamo()])
def test_with_the_whole_broadcast_it_is_fedavg(optimizer: Optimizer) -> None:
    """step=0 leaves W at 1."""
    task, federation = small_federation("batch", (5, 9, 3))
    mixed, _ = rounds_of(FedALA(optimizer, step=0.0), task, federation, 3, batch=4)
    plain, _ = rounds_of(LaterPasses(optimizer), task, federation, 3, batch=4)
    torch.testing.assert_close(mixed.server.w, plain.server.w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("step", [1.0, 1e6])
def test_the_mixture_stays_between_own_and_broadcast(step: float) -> None:
    _, state, _ = three_rounds(FedALA(Sgd(lr=0.1), step=step, tensors=3))
    mix = clients_of(state).mix
    assert ((mix >= 0) & (mix <= 1)).all()
    assert (mix < 1).any(), "nothing was learnt"
