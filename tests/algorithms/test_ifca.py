"""IFCA: the choice of a cluster and the means of the clusters by hand, and its laws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms import IFCA, FedAvg
from copfl.algorithms.ifca import Server
from copfl.core import Sgd, UsageError, tree
from copfl.core.algorithm import message_to_new_client
from copfl.engine.mapping import vmap
from copfl.testing import SIZES, small_federation
from tests.algorithms.chain import PLAIN, chain, numbers, one_at_a_time, samples, steps, vector
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import divided, rounds_of, slopes

MODELS = ((1.0, 0.5), (-2.0, 0.25))  # theta_1 and theta_2: body and head
CLIENTS = (  # samples and labels
    ((2.0, 1), (1.0, 1)),
    ((2.0, 0), (3.0, 0)),
    ((1.0, 1),),
)


def loss(model: tuple[float, float], pairs: tuple[tuple[float, int], ...]) -> float:
    """The mean over the samples of -log p(y), where class 1 has the logit head * body * x and class 0 has 0."""
    outputs = [(model[0] * model[1] * x, y) for x, y in pairs]
    return sum(math.log(1 + math.exp(-s if y else s)) for s, y in outputs) / len(pairs)


def outputs_of(algorithm: Any, server: Server) -> list[Any]:
    task = chain(*MODELS[0])
    down = tree.row(algorithm.downlink(server, torch.tensor([0])), 0)
    with torch.no_grad():
        return [
            algorithm.client_update(
                task, algorithm.client_init(task), down, samples(*pairs), one_at_a_time(range(len(pairs)))
            )
            for pairs in CLIENTS
        ]


def after(algorithm: Any, server: Server, outputs: list[Any]) -> Server:
    task = chain(*MODELS[0])
    summands = [algorithm.summand(task, server, torch.tensor(0), output.upload) for output in outputs]
    found: Server = algorithm.server_update(task, server, tree.summed(summands))[0]
    return found


def test_each_client_trains_the_model_with_its_lowest_loss_and_clusters_are_averaged() -> None:
    algorithm = IFCA(PLAIN)
    server = Server(torch.stack([vector(*model) for model in MODELS]), vector(), vector(0, 0))
    outputs = outputs_of(algorithm, server)
    chosen = [min((0, 1), key=lambda k: loss(MODELS[k], pairs)) for pairs in CLIENTS]
    assert chosen == [0, 1, 0]
    trained = [steps(MODELS[k], pairs) for k, pairs in zip(chosen, CLIENTS, strict=True)]
    for k, pairs, output, w in zip(chosen, CLIENTS, outputs, trained, strict=True):
        assert output.upload.w.tolist() == numbers(*w)
        assert output.upload.cluster.tolist() == [float(k == 0), float(k == 1)]
        assert int(output.client.cluster) == k
        assert float(output.metrics["cluster_loss"]) == pytest.approx(loss(MODELS[k], pairs), rel=1e-12)
    found = after(algorithm, server, outputs)
    mean = [(2 * trained[0][place] + trained[2][place]) / 3 for place in (0, 1)]
    assert found.models[0].tolist() == numbers(*mean)
    assert found.models[1].tolist() == numbers(*trained[1])
    assert found.members.tolist() == [3.0, 2.0]


def test_a_cluster_that_no_client_chose_stays_as_it_is() -> None:
    algorithm, task = IFCA(PLAIN), chain(*MODELS[0])
    server = Server(torch.stack([vector(1.0, 0.5), vector(50.0, -9.0)]), vector(), vector(0, 0))
    outputs = [outputs_of(algorithm, server)[place] for place in (0, 2)]
    found = after(algorithm, server, outputs)
    assert found.models[1].tolist() == [50.0, -9.0]
    assert found.members.tolist() == [3.0, 0.0]
    nothing = algorithm.summand(task, server, torch.tensor(0), outputs[0].upload)
    again = algorithm.server_update(task, found, tree.each(torch.zeros_like, nothing))[0]
    assert torch.equal(again.models, found.models)
    assert torch.equal(again.members, found.members)  # as in the last round that had clients


def test_a_shared_body_is_averaged_over_all_clusters() -> None:
    """With clustered=("head",) the body is one, and each cluster has its head."""
    algorithm = IFCA(PLAIN, clustered=("head",))
    server = Server(vector(0.5, -0.25)[:, None], vector(1.0), vector(0, 0))
    outputs = outputs_of(algorithm, server)
    heads = [0.5 if int(output.client.cluster) == 0 else -0.25 for output in outputs]
    trained = [steps((1.0, head), pairs) for head, pairs in zip(heads, CLIENTS, strict=True)]
    found = after(algorithm, server, outputs)
    assert heads == [0.5, -0.25, 0.5]
    assert found.common.tolist() == numbers((2 * trained[0][0] + 2 * trained[1][0] + trained[2][0]) / 5)
    assert found.models[:, 0].tolist() == numbers((2 * trained[0][1] + trained[2][1]) / 3, trained[1][1])


def test_one_cluster_is_fedavg() -> None:
    optimizer = Sgd(lr=0.05)
    for buffers in ("local", "average"):
        _, plain, _ = three_rounds(FedAvg(optimizer), buffers=buffers)
        for clustered in (("body", "head"), ("head",)):
            task, state, _ = three_rounds(IFCA(optimizer, clusters=1, clustered=clustered), buffers=buffers)
            algorithm = IFCA(clusters=1, clustered=clustered)
            down = message_to_new_client(algorithm, state.server, torch.arange(2))
            w = algorithm.personal_model(task, algorithm.client_init(task), down)
            shared = w[: task.d] if buffers == "local" else w
            torch.testing.assert_close(shared, plain.server.w, rtol=0, atol=1e-12)


def test_clients_with_other_labels_find_their_clusters() -> None:
    """Half of the clients have every label exchanged: no one model fits, two do."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8 * 12, 4))
    y = (x @ [3.0, -1.0, 0.5, 1.0] > 0).astype(np.int64)
    is_other = np.arange(len(y)) // 12 % 2 == 1
    federation = divided(x, np.where(is_other, 1 - y, y), (12,) * 8)
    algorithm = IFCA(Sgd(lr=0.3), clusters=2)
    state, shown = rounds_of(algorithm, slopes(1.0, -0.5, -1.0, 0.5), federation, 20, vmap(8), batch=4)
    clusters = shown[-1].clients["cluster"].astype(int).tolist()
    assert clusters in ([0, 1] * 4, [1, 0] * 4)
    assert state.clients.rows(torch.arange(8)).cluster.tolist() == clusters
    assert shown[-1].clients["accuracy"].mean() > 0.9
    plain = rounds_of(FedAvg(Sgd(lr=0.3)), slopes(1.0, -0.5, -1.0, 0.5), federation, 20, vmap(8), batch=4)[1]
    assert plain[-1].clients["accuracy_global"].mean() < 0.6


def test_starts_differ_and_keep_the_values_of_every_parameter() -> None:
    task, _ = small_federation("batch", SIZES)
    models = IFCA(clusters=3).server_init(task, 4).models
    assert not torch.equal(models[1], models[2])
    pieces = [torch.split(model, list(task.layout.sizes[: task.layout.trained])) for model in models]
    for first, second, third in zip(*pieces, strict=True):
        assert first.sort().values.tolist() == second.sort().values.tolist() == third.sort().values.tolist()
    heads = IFCA(clusters=2, starts=("head",)).server_init(task, 4).models
    differs = heads[0] != heads[1]
    assert not differs[task.where("body")[: task.d]].any()
    assert differs[task.where("head")[: task.d]].any()


def test_models_that_are_the_same_at_the_start_are_refused() -> None:
    with pytest.raises(UsageError, match="ifca's 2 models are the same at the start"):
        IFCA().server_init(slopes(0.0, 0.0), 3)
    task, _ = small_federation("batch", SIZES)
    with pytest.raises(UsageError, match="body has no entries that differ"):
        IFCA(clustered=("head",), starts=("body",)).server_init(task, 3)


def test_a_client_that_never_trained_predicts_with_the_largest_cluster() -> None:
    algorithm, task = IFCA(), chain(*MODELS[0])
    server = Server(torch.stack([vector(*model) for model in MODELS]), vector(), vector(2, 5))
    down = tree.row(algorithm.downlink(server, torch.tensor([0])), 0)
    new = algorithm.client_init(task)
    assert algorithm.personal_model(task, new, down).tolist() == list(MODELS[1])
    known = new._replace(cluster=torch.tensor(0))
    assert algorithm.personal_model(task, known, down).tolist() == list(MODELS[0])


def test_a_new_client_continues_in_the_place_of_its_cluster() -> None:
    algorithm = IFCA(PLAIN)
    server = Server(torch.stack([vector(*model) for model in MODELS]), vector(), vector(1, 1))
    output = outputs_of(algorithm, server)[1]
    down = tree.row(algorithm.downlink(server, torch.tensor([0])), 0)
    then = algorithm.next_message(chain(*MODELS[0]), down, output.upload)
    assert then.models[0].tolist() == list(MODELS[0])
    assert torch.equal(then.models[1], output.upload.w)


def test_statistics_stay_and_every_record_is_finite() -> None:
    task, state, _ = three_rounds(IFCA())
    assert clients_of(state).personal.shape == (len(SIZES), len(task.initial) - task.d)
    assert tree.finite((state.server, clients_of(state)))
