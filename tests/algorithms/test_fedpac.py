"""FedPAC: statistics, phases and combined heads, by hand and by the conditions that a best mixture meets."""

from __future__ import annotations

import dataclasses
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from copfl.algorithms.fedpac import FedPAC, Server, Upload
from copfl.core import Adam, Sgd, Task, UsageError, faster, task_of, tree
from copfl.parts import Mamo
from copfl.parts.quadratic import combination
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector
from tests.algorithms.updates import clients_of, down_of, output_of, three_rounds


def test_the_statistics_are_those_before_training_and_the_centroids_those_after() -> None:
    """Features 2, 6 (class 0) and 4 (class 1); prior times mean is their sum over all three samples."""
    task, data = chain(2.0, 0.5), samples((1.0, 0), (3.0, 0), (2.0, 1))
    output = output_of(FedPAC(PLAIN, head_epochs=0), task, data, one_at_a_time([0]))
    assert output.upload.means.tolist() == [numbers(8 / 3), numbers(4 / 3)]
    assert float(output.upload.spread) == pytest.approx((56 / 3 - 64 / 9 - 16 / 9) / 3)
    body = 2.0 - LR * off(0.5 * 2.0, 0) * 0.5
    assert output.upload.w.tolist() == numbers(body)
    assert output.upload.features.tolist() == [numbers(4 * body), numbers(2 * body)]
    assert output.upload.counts.tolist() == [2.0, 1.0]


def test_the_head_goes_first_and_ten_times_as_fast() -> None:
    task, data = chain(2.0, 0.5), samples((1.0, 1), (3.0, 0))
    output = output_of(FedPAC(PLAIN), task, data, one_at_a_time([0], [1]))
    head = 0.5 - 10 * LR * off(0.5 * 2.0, 1) * 2.0
    body = 2.0 - LR * off(head * 2.0 * 3.0, 0) * head * 3.0  # no centroids in the first round: nothing pulls
    assert output.upload.head.tolist() == numbers(head)
    assert output.upload.w.tolist() == numbers(body)


def aligned(known: tuple[bool, bool]) -> float:
    """The body after one step on the sample (3, class 0), when the centroids are 1 and -1."""
    task, data = chain(2.0, 0.5), samples((1.0, 0), (3.0, 0))
    algorithm = FedPAC(PLAIN, head_epochs=0, alignment=0.25)
    down = down_of(algorithm, task)._replace(centroids=vector(1.0, -1.0)[:, None], known=torch.tensor(known))
    with torch.no_grad():
        output = algorithm.client_update(task, algorithm.client_init(task), down, data, one_at_a_time([1]))
    return float(output.upload.w)


def test_the_body_is_pulled_to_the_centroid_of_the_class() -> None:
    """d/db of lambda (3 b - c)^2 is 6 lambda (3 b - c), at b = 2."""
    plain = 2.0 - LR * off(0.5 * 2.0 * 3.0, 0) * 0.5 * 3.0
    assert aligned((True, True)) == pytest.approx(plain - LR * 6 * 0.25 * (6 - 1))
    assert aligned((False, True)) == pytest.approx(plain - LR * 6 * 0.25 * (6 - 4)), (
        "not the own mean, (2 + 6) / 2"
    )
    assert aligned((False, False)) == pytest.approx(plain)


def uploads(task: Task, clients: int) -> list[Upload]:
    draw = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=draw)

    h = int(task.where("head").sum())
    s, c, f = task.d - h, task.classes, 5
    return [Upload(some(s), some(), some(h), some(c, f), some(), some(c, f), some(c)) for _ in range(clients)]


def small() -> Task:
    return three_rounds(FedPAC(), norm="none")[0]


def server_after(algorithm: FedPAC, task: Task, ids: list[int], given: list[Upload]) -> Server:
    server = algorithm.server_init(task, 4)
    parts = [algorithm.summand(task, server, torch.tensor(i), u) for i, u in zip(ids, given, strict=True)]
    return algorithm.server_update(task, server, reduce(tree.add, parts))[0]


def test_heads_are_matched_by_id() -> None:
    task = small()
    given, ids = uploads(task, 4), [2, 0, 3, 1]
    straight, mixed = (server_after(FedPAC(), task, order, given) for order in ([0, 1, 2, 3], ids))
    torch.testing.assert_close(mixed.heads[ids], straight.heads)
    torch.testing.assert_close(mixed.w, straight.w)
    torch.testing.assert_close(FedPAC().downlink(mixed, torch.tensor([3, 1])).head, straight.heads[[2, 3]])


def test_only_those_who_took_part_are_combined() -> None:
    task = small()
    given = uploads(task, 2)
    server, first = server_after(FedPAC(), task, [3, 1], given), FedPAC().server_init(task, 4)
    assert torch.equal(server.heads[[0, 2]], first.heads[[0, 2]])
    rows = torch.stack([u.means.flatten() for u in given])
    weights = combination(rows, torch.stack([u.spread for u in given]))
    torch.testing.assert_close(server.heads[[3, 1]], weights @ torch.stack([u.head for u in given]))


def test_centroids_are_weighted_by_the_samples_of_the_class() -> None:
    task, algorithm = chain(1.0, 1.0), FedPAC()
    first = algorithm.server_init(task, 2)._replace(centroids=vector(7.0, 7.0)[:, None])
    one = Upload(
        vector(0),
        vector(4)[0],
        vector(0),
        vector(0, 0)[:, None],
        vector(1)[0],
        vector(6, 0)[:, None],
        vector(3, 0),
    )
    two = one._replace(features=vector(10, 0)[:, None], counts=vector(1, 0))
    parts = [algorithm.summand(task, first, torch.tensor(i), u) for i, u in enumerate((one, two))]
    server, _ = algorithm.server_update(task, first, reduce(tree.add, parts))
    assert server.centroids.tolist() == [[4.0], [7.0]], "16 / 4, and a class that nobody holds keeps its own"
    assert server.known.tolist() == [True, False]


def test_one_client_alone_keeps_its_head() -> None:
    task = small()
    given = uploads(task, 1)
    torch.testing.assert_close(server_after(FedPAC(), task, [2], given).heads[2], given[0].head)


def test_each_phase_keeps_moments_of_its_own() -> None:
    task, state, _ = three_rounds(FedPAC(Adam(keep=True)))
    clients, head = clients_of(state), task.where("head")[: task.d]
    assert clients.head_moments.u.shape[1] == int(head.sum())
    assert not clients.body_moments.u[:, head].any()
    assert clients.body_moments.u[:, ~head].any()


def test_faster_multiplies_the_rate_of_any_optimizer() -> None:
    for optimizer in (Sgd(lr=0.5), Adam(lr=0.5), Mamo(lr=0.5)):
        assert faster(optimizer, 3) == dataclasses.replace(optimizer, lr=1.5)
    nameless: Any = object()
    with pytest.raises(UsageError, match="no learning rate"):
        faster(nameless, 3)


def test_a_head_must_be_linear() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 4, 6), nn.Flatten())
    with pytest.raises(UsageError, match="Linear head"):
        FedPAC().server_init(task_of(model, 4, head="1"), 2)
