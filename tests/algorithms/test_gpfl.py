"""GPFL: against torch's own autograd on modules, in float64, and its laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from copfl.algorithms import GPFL
from copfl.core import Batch, Data, Experts, Sgd, UsageError, tree
from copfl.core.task import opened
from copfl.experiment.models.client_models import joined, named_tensors, network_of
from copfl.parts.valve import initial, parts_of, size_of
from copfl.testing import SIZES, other_federation, small_federation
from tests.algorithms.chain import chain
from tests.algorithms.test_feddbe import Net, net_and_data
from tests.algorithms.updates import clients_of, three_rounds

LR, LAMBDA, MU = 0.1, 0.3, 0.2
SHARES = torch.tensor([0.25, 0.25, 0.5]).double()  # of the labels 0, 2, 1, 2
BATCHES = (
    Batch(torch.tensor([0, 3]), None, None, None),
    Batch(torch.tensor([1, 2, 0]), torch.tensor([True, True, False]), None, None),
)


class Valve(nn.Module):
    """As the authors' program has it."""

    def __init__(self, vector: Tensor, f: int = 2) -> None:
        super().__init__()
        self.gamma, self.beta = (nn.Sequential(nn.Linear(f, f), nn.ReLU(), nn.LayerNorm(f)) for _ in range(2))
        self.double()
        nn.utils.vector_to_parameters(vector, self.parameters())

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return torch.relu(x * (self.gamma(condition) + 1) + self.beta(condition))


def by_autograd(net: Net, data: Data, own: Tensor) -> tuple[nn.Parameter, Valve]:
    """The net trained in place, and the embeddings and the valve after it."""
    embeddings, valve = nn.Parameter(own[:6].view(3, 2).clone()), Valve(own[6:].clone())
    frozen = embeddings.detach().clone()
    g, q = frozen.mean(0), SHARES @ frozen
    parameters = [*net.parameters(), embeddings, *valve.parameters()]
    decays = [0.0] * 4 + [MU] * (1 + len(list(valve.parameters())))
    for batch in BATCHES:
        index = batch.index if batch.valid is None else batch.index[batch.valid]
        x, y = data.x[index], data.y[index]
        features = torch.tanh(net.body(x))
        common = valve(features, g)
        cosines = nn.functional.cosine_similarity(common[:, None], embeddings[None], dim=2)
        loss = nn.functional.cross_entropy(net.head(valve(features, q)), y)
        loss = loss + nn.functional.cross_entropy(cosines, y) + LAMBDA * (common - frozen[y]).norm()
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, grad, decay in zip(parameters, gradients, decays, strict=True):
            parameter.data -= LR * (grad + decay * parameter.data)
    return embeddings, valve


def test_steps_are_those_of_autograd_on_modules() -> None:
    net, task, data = net_and_data()
    algorithm: Any = GPFL(Sgd(lr=LR, momentum=0.0, weight_decay=0.0), strength=LAMBDA, decay=MU)
    server = algorithm.server_init(task, 1)
    own = server.w[-size_of(task) :]
    down = tree.row(algorithm.downlink(server, torch.tensor([0])), 0)
    with torch.no_grad():
        output = algorithm.client_update(task, algorithm.client_init(task), down, data, (BATCHES,))
    embeddings, valve = by_autograd(net, data, own)
    body = nn.utils.parameters_to_vector(net.body.parameters())
    parts = torch.cat([embeddings.flatten(), nn.utils.parameters_to_vector(valve.parameters())])
    expected = torch.cat([body, parts]).detach()
    torch.testing.assert_close(output.upload.w, expected, rtol=0, atol=1e-12)
    head = nn.utils.parameters_to_vector(net.head.parameters()).detach()
    torch.testing.assert_close(output.client.personal, head, rtol=0, atol=1e-12)
    assert output.client.shares.tolist() == SHARES.tolist()
    with torch.no_grad():
        q = SHARES @ own[:6].view(3, 2)
        answers = net.head(valve(torch.tanh(net.body(data.x)), q)).log_softmax(1)
        torch.testing.assert_close(task.predict(output.trained, data.x), answers, rtol=0, atol=1e-12)


def test_a_new_client_has_even_shares() -> None:
    _, task, data = net_and_data()
    algorithm: Any = GPFL()
    down = tree.row(algorithm.downlink(algorithm.server_init(task, 1), torch.tensor([0])), 0)
    with torch.no_grad():
        model = algorithm.personal_model(task, algorithm.client_init(task), down)
        parts = parts_of(task, down.w[-size_of(task) :])
        torch.testing.assert_close(model.valve, parts.valve(parts.embeddings.mean(0)))
        features = task.forward(task.initial, data.x)[1]
        seen = opened(features, model.valve)
    assert (seen >= 0).all()


def test_heads_and_shares_stay_and_the_rest_is_averaged() -> None:
    task, state, _ = three_rounds(GPFL())
    rows = clients_of(state)
    head = int(task.where("head").sum())
    assert state.server.w.shape == (task.d - head + size_of(task),)
    assert not torch.equal(rows.personal[0], rows.personal[1])
    torch.testing.assert_close(rows.shares.sum(1), torch.ones(len(SIZES)).double())


def test_embeddings_are_normal_and_follow_from_the_models_initial_weights() -> None:
    task, _ = small_federation("batch", SIZES)
    drawn = initial(task)
    assert len(drawn) == size_of(task)
    assert torch.equal(drawn, initial(task))
    parts = parts_of(task, drawn)
    assert 0.5 < float(parts.embeddings.std()) < 1.5
    assert set(parts.gamma.scale.tolist()) == {1.0}
    assert not parts.beta.shift.any()


def test_a_valve_is_kept_with_the_model() -> None:
    """In the files of a client's model, and in the network that a result returns."""
    _, task, data = net_and_data()
    valve = torch.tensor([[1.5, 0.5], [-0.1, 0.2]]).double()
    model = Experts(task.initial[None], torch.ones(1).double(), valve=valve)
    again = joined(task.layout, named_tensors(task.layout, model))
    assert isinstance(again, Experts)
    assert again.valve is not None
    assert torch.equal(again.valve, valve)
    with torch.no_grad():
        outputs = network_of(task, model)(data.x).log_softmax(1)
        torch.testing.assert_close(outputs, task.predict(model, data.x))


def test_other_tasks_and_heads_are_refused() -> None:
    for task in (chain(1.0, 0.5), other_federation("regression")[0]):
        with pytest.raises(UsageError, match="gpfl has an embedding for each class and a Linear head"):
            GPFL().server_init(task, 2)
