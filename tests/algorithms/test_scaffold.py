"""SCAFFOLD: corrected gradients and control variates, by hand, and against the paper's option II."""

from __future__ import annotations

import torch

from copfl.algorithms import FedAvg, Scaffold
from copfl.core import tree
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import federation_of, rounds_of


def test_one_update_is_option_two_of_the_paper() -> None:
    """c_i+ = c_i - c + (x - y_i) / (K η), with K = 2 steps, and one batch without a sample that changes nothing."""
    task, algorithm = chain(1.0, 0.5), Scaffold(PLAIN)
    server = algorithm.server_init(task, 3)._replace(control=vector(0.2, -0.1))
    down = tree.row(algorithm.downlink(server, torch.tensor([0])), 0)
    client = algorithm.client_init(task)._replace(control=vector(-0.3, 0.05))
    data, plan = samples((1.5, 1), (-0.5, 0)), one_at_a_time([0, -1, 1])
    with torch.no_grad():
        output = algorithm.client_update(task, client, down, data, plan)
    body, head = 1.0, 0.5
    for x, y in ((1.5, 1), (-0.5, 0)):
        miss = off(head * body * x, y)
        body, head = body - LR * (miss * head * x + 0.5), head - LR * (miss * body * x - 0.15)
    assert output.upload.w.tolist() == numbers(body, head)
    control = [-0.3 - 0.2 + (1.0 - body) / (2 * LR), 0.05 + 0.1 + (0.5 - head) / (2 * LR)]
    assert output.client.control.tolist() == numbers(*control)
    assert output.upload.control.tolist() == numbers(control[0] + 0.3, control[1] - 0.05)


def test_the_servers_control_moves_by_the_sum_over_all_clients() -> None:
    """Two of four clients take part: c moves by their sum over four, w to the mean of the two."""
    task, algorithm = chain(1.0, 0.5), Scaffold(PLAIN)
    server = algorithm.server_init(task, 4)
    federation = federation_of(([[1.0]], [1]), ([[2.0]], [0]), ([[1.0]], [0]), ([[3.0]], [1]))
    state, shown = rounds_of(algorithm, task, federation, 1, participation=0.5)
    controls = state.clients.rows(torch.arange(4)).control
    assert (controls.abs().sum(1) > 0).sum() == 2
    torch.testing.assert_close(state.server.control, controls.sum(0) / 4)
    assert server.clients == state.server.clients == 4
    assert shown[0].clients["weight"].shape == (2,)


def test_after_full_rounds_c_is_the_mean_of_the_clients() -> None:
    _, state, _ = three_rounds(Scaffold())
    torch.testing.assert_close(state.server.control, clients_of(state).control.mean(0))


def test_a_new_client_learns_its_own_samples() -> None:
    """After its first update it descends its own loss: with c - c_i its gradients of the update before would cancel."""
    task, algorithm, data = chain(1.0, 0.5), Scaffold(PLAIN), samples((1.5, 0), (-0.5, 1))
    server = algorithm.server_init(task, 3)._replace(control=vector(0.2, -0.1))
    down = tree.row(algorithm.downlink(server, torch.tensor([0])), 0)
    client, plan = algorithm.client_init(task), one_at_a_time([0, 1])
    with torch.no_grad():
        first = algorithm.client_update(task, client, down, data, plan)
        down = algorithm.next_message(task, down, first.upload)
        second = algorithm.client_update(task, first.client, down, data, plan)
    body, head = first.upload.w.tolist()
    for x, y in ((1.5, 0), (-0.5, 1)):
        miss = off(head * body * x, y)
        body, head = body - LR * miss * head * x, head - LR * miss * body * x
    assert second.upload.w.tolist() == numbers(body, head)


def test_the_first_round_is_fedavg() -> None:
    """Every control variate is zero."""
    task = chain(1.0, 0.5)
    federation = federation_of(([[1.0]], [1]), ([[2.0]] * 3, [0] * 3))
    one, other = (
        rounds_of(a, task, federation, 1)[0] for a in (Scaffold(PLAIN), FedAvg(PLAIN, weights="equal"))
    )
    assert torch.equal(one.server.w, other.server.w)
