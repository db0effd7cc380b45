"""pFedMe: inner steps towards the proximal point, an outer step towards what they found, and a mixing server."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import PFedMe
from copfl.parts.averaging import Server, Total
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector
from tests.algorithms.updates import clients_of, down_of, output_of, three_rounds


def test_theta_takes_the_inner_steps_and_w_follows_it() -> None:
    task, data = chain(2.0, 0.5), samples((1.0, 1), (3.0, 0))
    algorithm = PFedMe(PLAIN, rate=0.1, lam=0.4, inner_steps=2)
    output = output_of(algorithm, task, data, one_at_a_time([0, 1]))
    theta, w = [2.0, 0.5], [2.0, 0.5]
    for x, y in ((1.0, 1), (3.0, 0)):
        for _ in range(2):
            body, head = theta
            miss = off(head * body * x, y)
            theta = [
                body - LR * (miss * head * x + 0.4 * (body - w[0])),
                head - LR * (miss * body * x + 0.4 * (head - w[1])),
            ]
        w = [a - 0.1 * 0.4 * (a - b) for a, b in zip(w, theta, strict=True)]
    assert output.trained.tolist() == numbers(*theta)
    assert output.client.theta.tolist() == numbers(*theta)
    assert output.upload.w.tolist() == numbers(*w)


def test_a_step_without_samples_moves_neither() -> None:
    task, data = chain(2.0, 0.5), samples((1.0, 1))
    some, more = (output_of(PFedMe(PLAIN), task, data, one_at_a_time(steps)) for steps in ([0], [0, -1]))
    assert torch.equal(some.upload.w, more.upload.w)
    assert torch.equal(some.trained, more.trained)
    assert some.metrics["loss"] == more.metrics["loss"]


@pytest.mark.parametrize(("server_rate", "expected"), [(0.0, 1.0), (0.5, 3.0), (1.0, 5.0), (2.0, 9.0)])
def test_the_server_mixes_the_mean_in(server_rate: float, expected: float) -> None:
    task, server = chain(1.0, 1.0), Server(vector(1.0, 1.0))
    total = Total(vector(20.0, 20.0), torch.tensor(4.0))  # a mean of 5
    after, _ = PFedMe(server_rate=server_rate).server_update(task, server, total)
    assert after.w.tolist() == [expected, expected]


def test_without_outer_steps_the_server_stays_and_theta_is_personal() -> None:
    task, state, _ = three_rounds(PFedMe(rate=0.0), norm="none")
    torch.testing.assert_close(state.server.w, task.initial, rtol=0, atol=1e-15)
    assert (clients_of(state).theta[:, : task.d].std(0) > 0).any()


def test_every_round_starts_from_the_broadcast() -> None:
    task, data = chain(0.0, 0.0), samples((1.0, 1))
    algorithm = PFedMe(PLAIN)
    old = algorithm.client_init(task)._replace(theta=vector(9.0, 9.0), started=torch.tensor(True))
    new, before = (
        output_of(algorithm, task, data, one_at_a_time([0]), c, w=vector(2.0, 0.5)) for c in (None, old)
    )
    assert torch.equal(new.upload.w, before.upload.w)
    down = down_of(algorithm, task, vector(2.0, 0.5))
    assert algorithm.personal_model(task, old, down).tolist() == [9.0, 9.0]
    assert algorithm.personal_model(task, algorithm.client_init(task), down).tolist() == [2.0, 0.5]


def test_shared_statistics_are_never_extrapolated() -> None:
    task, state, _ = three_rounds(PFedMe(), buffers="average")
    nothing = Total(torch.zeros_like(state.server.w), torch.tensor(1.0))  # a mean of 0
    far = PFedMe(server_rate=9.0).server_update(task, state.server, nothing)[0].w
    assert torch.equal(far[: task.d], -8 * state.server.w[: task.d])
    assert not far[task.d :].any()
