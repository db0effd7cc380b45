"""PLayer-FL: sensitivities, the transition and two rounds by hand, and its laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from copfl.algorithms import FedAvg, FedPer, PLayerFL
from copfl.algorithms.player_fl import transition_of
from copfl.core import Sgd, UsageError, task_of, tree
from copfl.engine.mapping import sequential
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.parts.layers import layer_count, layer_of_each, means_of_layers
from copfl.testing import SIZES, LoRALinear, small_federation
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, steps, vector
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import slopes

START = (1.0, 0.5)
CLIENTS = (((2.0, 1), (1.0, 0)), ((-1.0, 1),))


def by_hand(start: tuple[float, float], pairs: Any) -> tuple[tuple[float, float], list[float]]:
    """Body and head after an epoch, and (theta * mean gradient)^2 of both."""
    body, head = start
    gradients = []
    for x, y in pairs:
        miss = off(head * body * x, y)
        gradients.append((miss * head * x, miss * body * x))
        body, head = body - LR * gradients[-1][0], head - LR * gradients[-1][1]
    means = [sum(g[place] for g in gradients) / len(gradients) for place in (0, 1)]
    return (body, head), [(body * means[0]) ** 2, (head * means[1]) ** 2]


def turn(algorithm: Any, server: Any, clients: list[Any]) -> tuple[Any, list[Any]]:
    """The server and the outputs after one round of these clients."""
    task = chain(*START)
    down = tree.row(algorithm.downlink(server, torch.tensor([0])), 0)
    with torch.no_grad():
        outputs = [
            algorithm.client_update(task, client, down, samples(*pairs), one_at_a_time(range(len(pairs))))
            for client, pairs in zip(clients, CLIENTS, strict=True)
        ]
    summands = [algorithm.summand(task, server, torch.tensor(0), output.upload) for output in outputs]
    return algorithm.server_update(task, server, tree.summed(summands))[0], outputs


def test_two_rounds_by_hand() -> None:
    algorithm, task = PLayerFL(PLAIN), chain(*START)
    first, outputs = turn(algorithm, algorithm.server_init(task, 2), [algorithm.client_init(task)] * 2)
    trained, measured = zip(*(by_hand(START, pairs) for pairs in CLIENTS), strict=True)
    for output, w, sensitivity in zip(outputs, trained, measured, strict=True):
        assert output.upload.shared.values.tolist() == numbers(*w)  # the first round shares all layers
        assert not output.upload.shared.personal.any()
        assert output.upload.sensitivity.tolist() == numbers(*sensitivity)
    assert first.w.tolist() == numbers(*((2 * trained[0][n] + trained[1][n]) / 3 for n in (0, 1)))
    assert (int(first.transition), bool(first.known)) == (1, True)  # two layers: the head is personal
    second, again = turn(algorithm, first, [output.client for output in outputs])
    starts = [(float(first.w[0]), w[1]) for w in trained]  # the mean body, its own head
    moved = [steps(start, pairs) for start, pairs in zip(starts, CLIENTS, strict=True)]
    for output, w in zip(again, moved, strict=True):
        assert output.trained.tolist() == numbers(*w)
        assert output.upload.shared.values.tolist() == numbers(w[0], 0.0)
        assert output.upload.shared.personal.tolist() == [False, True]
        assert not output.upload.sensitivity.any()
    assert second.w.tolist() == numbers((2 * moved[0][0] + moved[1][0]) / 3, float(first.w[1]))


@pytest.mark.parametrize(
    ("sensitivity", "jump", "layer"),
    [
        ((1.0, 1.0, 6.0, 2.0), 0.0, 2),  # F: 1, 2, 8, 10; factors 2, 4, 1.25
        ((1.0, 1.0, 6.0, 2.0), 1.5, 1),  # the first above 1.5
        ((1.0, 1.0, 6.0, 2.0), 9.0, 2),  # none is: the largest
        ((0.0, 0.0, 0.0), 0.0, 1),  # nothing was measured: the first is shared
        ((0.0, 3.0, 3.0), 0.0, 1),
    ],
)
def test_the_transition(sensitivity: tuple[float, ...], jump: float, layer: int) -> None:
    assert int(transition_of(vector(*sensitivity), jump)) == layer


def test_layers_of_a_model() -> None:
    """A normalisation counts with the layer before it, both matrices of an adapter and its base as one."""
    task, _ = small_federation("batch", SIZES, needs=("*.lora_A", "*.base_layer.weight"))
    names = task.layout.names
    numbers_by_name = dict(zip(names, layer_of_each(task.layout), strict=True))
    of_adapter = {
        number for name, number in numbers_by_name.items() if "lora" in name or "base_layer" in name
    }
    assert len(of_adapter) == 1
    for norm in task.layout.norms:
        place = names.index(f"{norm}.weight")
        assert numbers_by_name[f"{norm}.weight"] == numbers_by_name[names[place - 1]]
        assert numbers_by_name[f"{norm}.running_mean"] == numbers_by_name[f"{norm}.weight"]
    assert numbers_by_name["head.weight"] == layer_count(task.layout) - 1
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1, bias=False))
    layout = task_of(model, 1).layout
    means = means_of_layers(layout, vector(1, 2, 3, 4, 10, 20))
    assert means.tolist() == [2.5, 15.0]
    adapted = task_of(nn.Sequential(LoRALinear(nn.Linear(2, 2), r=1, scaling=1.0), nn.Linear(2, 2)), 2)
    assert layer_count(adapted.layout) == 2


def test_from_the_second_round_on_it_is_fedper_of_the_layers_after_the_transition() -> None:
    """FedPer that starts where the first round ended has the same shared layers."""
    optimizer = Sgd(lr=0.05)
    task, state, rounds = three_rounds(PLayerFL(optimizer))
    shared = rounds[-1].federation["shared"]
    assert 0 < shared < 1
    assert [r.federation["transition"] for r in rounds] == [float(state.server.transition)] * 3
    after_one, _ = one_round(PLayerFL(optimizer))
    plain, _ = one_round(FedAvg(optimizer))
    sent = ~task.local()
    assert torch.equal(after_one.server.w[sent], plain.server.w)  # the first round is FedAvg's
    personal = layers_after(task, int(state.server.transition))
    assert personal.any()
    unchanged = torch.where(personal, state.server.w == after_one.server.w, True)
    assert unchanged.all()
    rows = clients_of(state)
    assert not torch.equal(rows.w[0][personal], rows.w[1][personal])


def one_round(algorithm: Any) -> tuple[Any, Any]:
    task, federation = small_federation("batch", SIZES)
    state = begin(algorithm, task, federation.clients)
    return state, list(
        simulate(Simulation(algorithm, task, federation, sequential(), batch=6), state, rounds=1)
    )


def layers_after(task: Any, transition: int) -> torch.Tensor:
    numbers = torch.tensor(layer_of_each(task.layout)).repeat_interleave(torch.tensor(task.layout.sizes))
    found: torch.Tensor = (numbers >= transition) & (torch.arange(len(numbers)) < task.d)
    return found


def test_a_new_client_starts_from_the_first_rounds_mean_and_then_has_its_own_layers() -> None:
    algorithm, task = PLayerFL(PLAIN), chain(*START)
    first, outputs = turn(algorithm, algorithm.server_init(task, 2), [algorithm.client_init(task)] * 2)
    down = tree.row(algorithm.downlink(first, torch.tensor([0])), 0)
    assert torch.equal(algorithm.personal_model(task, algorithm.client_init(task), down), first.w)
    known = algorithm.personal_model(task, outputs[0].client, down)
    assert known.tolist() == [float(first.w[0]), float(outputs[0].trained[1])]


def test_a_model_of_one_layer_is_refused() -> None:
    with pytest.raises(UsageError, match="player_fl divides a model between two of its layers"):
        PLayerFL().server_init(slopes(0.1, 0.2), 2)


def test_the_head_is_personal_as_in_fedper_where_it_alone_is_after_the_transition() -> None:
    """The chain of two layers, over three rounds: FedPer from the second round's start has the same body."""
    algorithm, task = PLayerFL(PLAIN), chain(*START)
    first, outputs = turn(algorithm, algorithm.server_init(task, 2), [algorithm.client_init(task)] * 2)
    second, _ = turn(algorithm, first, [output.client for output in outputs])
    per: Any = FedPer(PLAIN)
    down = per.downlink(per.server_init(task, 2)._replace(w=first.w[:1]), torch.tensor([0]))
    with torch.no_grad():
        uploads = [
            per.client_update(
                task,
                per.client_init(task)._replace(personal=output.trained[1:]),
                tree.row(down, 0),
                samples(*pairs),
                one_at_a_time(range(len(pairs))),
            ).upload
            for output, pairs in zip(outputs, CLIENTS, strict=True)
        ]
    mean = (2 * uploads[0].w + uploads[1].w) / 3
    torch.testing.assert_close(second.w[:1], mean, rtol=0, atol=1e-12)
