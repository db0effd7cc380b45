"""FedDBE: against torch's own autograd on head(f(x) + bias), and its laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from copfl.algorithms import FedAvg, FedDBE
from copfl.algorithms.feddbe import Server
from copfl.core import Data, Sgd, Task, UsageError, task_of, tree
from copfl.parts.feature_bias import mean_feature, shifted
from tests.algorithms.chain import chain, one_at_a_time
from tests.algorithms.updates import clients_of, three_rounds

LR, KAPPA = 0.1, 2.0


class Net(nn.Module):
    """Three inputs, two features, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(torch.tanh(self.body(x)))
        return answer


def net_and_data() -> tuple[Net, Task, Data]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net().double()
        data = Data(torch.randn(4, 3).double(), torch.tensor([0, 2, 1, 2]), torch.tensor(4))
    return net, task_of(net, 3, dtype=torch.float64), data


def test_steps_are_those_of_autograd_on_biased_features() -> None:
    net, task, data = net_and_data()
    algorithm: Any = FedDBE(Sgd(lr=LR, momentum=0.0, weight_decay=0.0), kappa=KAPPA)
    mean, bias = torch.tensor([0.3, -0.2]).double(), torch.tensor([0.1, 0.4]).double()
    server = Server(task.initial, mean, torch.tensor(True))
    client = algorithm.client_init(task)._replace(bias=bias)
    down = tree.row(algorithm.downlink(server, torch.tensor([0])), 0)
    with torch.no_grad():
        output = algorithm.client_update(task, client, down, data, one_at_a_time([0, 3, 1]))
    own_bias = bias.clone().requires_grad_()
    parameters = [*net.parameters(), own_bias]
    for place in (0, 3, 1):
        features = torch.tanh(net.body(data.x[place : place + 1]))
        loss = nn.functional.cross_entropy(net.head(features + own_bias), data.y[place : place + 1])
        loss = loss + KAPPA * (features.mean(0) - mean).square().mean() / 2
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.data -= LR * grad
    expected = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    torch.testing.assert_close(output.upload.w, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(output.client.bias, own_bias.detach(), rtol=0, atol=1e-12)
    assert not output.upload.mean.any()  # it is known already, and sent once
    with torch.no_grad():
        answers = net.head(torch.tanh(net.body(data.x)) + own_bias)
        torch.testing.assert_close(task.forward(output.trained, data.x)[0], answers, rtol=0, atol=1e-12)


def test_the_first_round_is_fedavg_and_gives_the_mean_feature_once() -> None:
    optimizer = Sgd(lr=0.05)
    plain, dbe = FedAvg(optimizer), FedDBE(optimizer)
    _, task, data = net_and_data()
    plan = one_at_a_time([0, 1, 2, 3])
    with torch.no_grad():
        outputs = [
            a.client_update(
                task,
                a.client_init(task),
                tree.row(a.downlink(a.server_init(task, 1), torch.tensor([0])), 0),
                data,
                plan,
            )
            for a in (plain, dbe)
        ]
        assert torch.equal(outputs[0].upload.w, outputs[1].upload.w)
        assert not outputs[1].client.bias.any()
        features = task.forward(outputs[1].upload.w, data.x)[1]
        torch.testing.assert_close(outputs[1].upload.mean, features.mean(0))
        server = dbe.server_init(task, 2)
        other = outputs[1].upload._replace(
            size=torch.tensor(12.0).double(), mean=torch.tensor([1.0, 1.0]).double()
        )
        total = tree.add(
            *(dbe.summand(task, server, torch.tensor(0), upload) for upload in (outputs[1].upload, other))
        )
        after, _ = dbe.server_update(task, server, total)
        torch.testing.assert_close(after.mean, (4 * features.mean(0) + 12) / 16)
        again, _ = dbe.server_update(task, after, total._replace(mean=total.mean + 5))
        assert torch.equal(again.mean, after.mean)


def test_biases_are_personal_and_grow_from_the_second_round_on() -> None:
    _, state, _ = three_rounds(FedDBE())
    biases = clients_of(state).bias
    assert biases.abs().sum(1).min() > 0
    assert not torch.equal(biases[0], biases[1])


def test_a_bias_of_the_features_is_a_bias_of_the_head() -> None:
    net, task, data = net_and_data()
    bias = torch.tensor([0.5, -1.0]).double()
    with torch.no_grad():
        expected = net.head(torch.tanh(net.body(data.x)) + bias)
        torch.testing.assert_close(task.forward(shifted(task, task.initial, bias), data.x)[0], expected)
        torch.testing.assert_close(
            mean_feature(task, task.initial, data), torch.tanh(net.body(data.x)).mean(0)
        )


def test_a_head_without_a_bias_is_refused() -> None:
    with pytest.raises(UsageError, match="feddbe shifts the features of a Linear head with a bias"):
        FedDBE().server_init(chain(1.0, 0.5), 2)
