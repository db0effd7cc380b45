"""Potara: lambda and the mixture by hand, in float64, and its laws."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from copfl.algorithms import FedAvg, Local, Potara
from copfl.core import Batch, Data, Sgd, received, task_of, tree
from copfl.parts.fisher import Curvature, curvature, groups_of, merging_weight
from tests.algorithms.chain import PLAIN, chain, numbers, off, one_at_a_time, samples, steps, vector
from tests.algorithms.updates import clients_of, output_of, three_rounds

GLOBAL, OWN = (1.0, 0.5), (-0.4, 0.8)  # body and head
PAIRS = ((2.0, 1), (1.0, 0), (-1.0, 1))
DAMPING = 0.25


def gradients(model: tuple[float, float], pairs: Any = PAIRS) -> list[tuple[float, float]]:
    """Of single samples, by body and head."""
    body, head = model
    return [(off(head * body * x, y) * head * x, off(head * body * x, y) * body * x) for x, y in pairs]


def squares(model: tuple[float, float]) -> list[float]:
    """The diagonal of the Fisher information."""
    return [sum(g[place] ** 2 for g in gradients(model)) / len(PAIRS) for place in (0, 1)]


def means(model: tuple[float, float]) -> list[float]:
    return [sum(g[place] for g in gradients(model)) / len(PAIRS) for place in (0, 1)]


def share_by_hand(first: tuple[float, float], second: tuple[float, float]) -> float:
    scale = (sum(squares(first)) + sum(squares(second))) / 4
    a, b = (sum(1 / (f + DAMPING * scale) for f in squares(model)) for model in (first, second))
    g, h = means(first), means(second)
    cosine = sum(p * q for p, q in zip(g, h, strict=True)) / (math.hypot(*g) * math.hypot(*h))
    c = min(max(cosine, 0.0), 1.0) * math.sqrt(a * b)
    return min(max((b - c) / (a + b - 2 * c), 0.0), 1.0)


def test_an_update_by_hand() -> None:
    algorithm: Any = Potara(PLAIN, together=1, damping=DAMPING)
    task = chain(*GLOBAL)
    client = algorithm.client_init(task)._replace(local=vector(*OWN))
    output = output_of(algorithm, task, samples(*PAIRS), one_at_a_time([0, 1, 2]), client)
    local = steps(OWN, PAIRS)
    share = share_by_hand(GLOBAL, local)
    assert 0 < share < 1
    assert output.upload.w.tolist() == numbers(*steps(GLOBAL, PAIRS))  # as FedAvg
    assert output.client.local.tolist() == numbers(*local)
    assert float(output.client.share) == pytest.approx(share, rel=1e-12)
    mixed = [share * g + (1 - share) * own for g, own in zip(GLOBAL, local, strict=True)]
    assert output.trained.tolist() == numbers(*mixed)
    assert float(output.metrics["global_share"]) == pytest.approx(share, rel=1e-12)


def test_the_weight_minimises_the_variance_of_the_mixture() -> None:
    first = Curvature(vector(4.0, 2.0), vector(1.0, 0.0))
    second = Curvature(vector(1.0, 8.0), vector(0.6, 0.8))
    damping, scale = 0.5, (3.0 + 4.5) / 2
    a, b = (sum(1 / (f + damping * scale) for f in one.fisher.tolist()) for one in (first, second))
    c = 0.6 * math.sqrt(a * b)
    found = float(merging_weight(first, second, damping))

    def variance(share: float) -> float:
        return float(share**2 * a + (1 - share) ** 2 * b + 2 * share * (1 - share) * c)

    assert 0 < found < 1
    assert all(variance(found) <= variance(found + step) for step in (-1e-3, 1e-3))
    assert float(merging_weight(second, first, damping)) == pytest.approx(1 - found, rel=1e-12)


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        (((1.0, 1.0), (1.0, 0.0)), ((1.0, 1.0), (1.0, 0.0)), 0.5),  # the same: nothing to choose
        (((1.0, 1.0), (1.0, 0.0)), ((1.0, 1.0), (-1.0, 0.0)), 0.5),  # a negative correlation counts as none
        (
            ((1e6, 1e6), (1.0, 0.0)),
            ((1.0, 1.0), (1.0, 0.0)),
            1.0,
        ),  # the first is certain, and both move together
        (((1.0, 1.0), (1.0, 0.0)), ((1e6, 1e6), (1.0, 0.0)), 0.0),
        (((0.0, 0.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)), 0.5),  # no gradient at all
    ],
)
def test_limits_of_the_weight(first: Any, second: Any, share: float) -> None:
    one, other = (Curvature(vector(*pair[0]), vector(*pair[1])) for pair in (first, second))
    assert float(merging_weight(one, other, 0.1)) == pytest.approx(share, abs=1e-12)


def test_the_information_of_groups() -> None:
    """Of one sample each, the mean of squares; of several, their number times the square of their mean."""
    task, data = chain(*GLOBAL), samples(*PAIRS)
    plan = one_at_a_time([2, 0, 1])
    with torch.no_grad():
        single = curvature(task, task.initial, data, groups_of(plan[0], 30, 1))
        assert single.fisher.tolist() == numbers(*squares(GLOBAL))
        assert single.gradient.tolist() == numbers(*means(GLOBAL))
        pairs = curvature(task, task.initial, data, groups_of(plan[0], 30, 2))
    g = gradients(GLOBAL)
    both = [(g[2][n] + g[0][n]) / 2 for n in (0, 1)]
    assert pairs.fisher.tolist() == numbers(*((2 * both[n] ** 2 + g[1][n] ** 2) / 2 for n in (0, 1)))
    assert pairs.gradient.tolist() == numbers(*means(GLOBAL))


def test_padding_and_further_samples_do_not_count() -> None:
    task, data = chain(*GLOBAL), samples(*PAIRS)
    epoch = (Batch(torch.tensor([0, 1, 2, 0]), torch.tensor([True, True, True, False]), None, None),)
    with torch.no_grad():
        padded = curvature(task, task.initial, data, groups_of(epoch, 30, 1))
        two = curvature(task, task.initial, data, groups_of(epoch, 2, 1))
    assert padded.fisher.tolist() == numbers(*squares(GLOBAL))
    g = gradients(GLOBAL)
    assert two.fisher.tolist() == numbers(*((g[0][n] ** 2 + g[1][n] ** 2) / 2 for n in (0, 1)))


def test_batch_norm_has_the_statistics_of_the_model_and_not_those_of_a_group() -> None:
    """Groups of two, two and one of five samples: that of one would be normalised to zero."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    for statistics in (module.get_buffer("1.running_mean"), module.get_buffer("1.running_var")):
        nn.init.uniform_(statistics, 1, 2)
    task = task_of(copy.deepcopy(module), 2, dtype=torch.float64)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    expected = torch.zeros(task.d, dtype=torch.float64)
    for group in torch.split(torch.arange(5), 2):
        module.eval().zero_grad()
        nn.functional.cross_entropy(module(x[group]), y[group]).backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        expected += len(group) * gradient.square() / 3
    groups = groups_of((Batch(torch.arange(5), None, None, None),), 30, 2)
    data = Data(x, y, torch.tensor(5))
    with torch.no_grad():
        found = curvature(task, task.initial, data, groups)
        torch.testing.assert_close(found.fisher, expected, rtol=1e-12, atol=0)
        fast = task.with_batching()
        assert fast.batched is not None
        both = tree.each(lambda t: torch.stack([t, t]), (task.initial, data))
        rows = tree.vectorised(lambda given: curvature(fast, *given, groups), both)
        torch.testing.assert_close(rows.fisher, torch.stack([expected] * 2), rtol=1e-9, atol=0)


def test_the_server_is_fedavgs_and_the_local_models_are_those_of_local_training() -> None:
    optimizer = Sgd(lr=0.05)
    _, plain, _ = three_rounds(FedAvg(optimizer))
    task, alone, _ = three_rounds(Local(optimizer))
    _, state, shown = three_rounds(Potara(optimizer))
    torch.testing.assert_close(state.server.w, plain.server.w, rtol=0, atol=1e-12)
    own = clients_of(alone).personal
    torch.testing.assert_close(clients_of(state).local, own, rtol=0, atol=1e-12)
    assert own.shape[1] == len(task.initial)
    shares = shown[-1].clients["global_share"]
    assert ((shares >= 0) & (shares <= 1)).all()


def test_before_training_a_client_mixes_by_its_last_weight_and_a_new_one_has_the_global_model() -> None:
    algorithm: Any = Potara(PLAIN)
    task = chain(*GLOBAL)
    new = algorithm.client_init(task)
    down = received(algorithm, algorithm.server_init(task, 1), torch.tensor(0))
    assert torch.equal(algorithm.personal_model(task, new, down), task.initial)
    known = new._replace(local=vector(*OWN), share=torch.tensor(0.25).double())
    expected = [0.25 * g + 0.75 * own for g, own in zip(GLOBAL, OWN, strict=True)]
    assert algorithm.personal_model(task, known, down).tolist() == numbers(*expected)
