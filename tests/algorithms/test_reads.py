"""Reads: clusters of similar layers, by hand."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from copfl.algorithms import FedAvg, Local, Reads
from copfl.algorithms.reads import Server, similar
from copfl.core import UsageError, tree
from copfl.parts.averaging import Upload
from tests.algorithms.chain import chain, vector
from tests.algorithms.updates import clients_of, three_rounds


def after(algorithm: Reads, server: Server, task: Any, *uploads: tuple[int, Tensor, float]) -> Server:
    totals = [
        algorithm.summand(task, server, torch.tensor(id), Upload(w, torch.tensor(size, dtype=torch.float64)))
        for id, w, size in uploads
    ]
    return algorithm.server_update(task, server, reduce(tree.add, totals))[0]


def test_who_is_similar_by_hand() -> None:
    """Angles 0, 60 and 120 degrees, and no change at all; cos 60 degrees is a half."""
    changes = torch.tensor([[1.0, 0.0], [1.0, 3**0.5], [-2.0, 12**0.5], [0.0, 0.0]], dtype=torch.float64)
    near = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert similar(changes, 0.499).long().tolist() == near
    assert similar(changes, 0.501).long().tolist() == torch.eye(4).long().tolist()
    assert similar(changes, -1.0).all()


def test_each_layer_has_clusters_of_its_own() -> None:
    """Two layers of one number each, body and head, which start at 1 and 2. Up or down is all that is similar."""
    task, algorithm = chain(1.0, 2.0), Reads()
    uploads = (0, vector(2.0, 3.0), 1.0), (2, vector(4.0, 1.0), 3.0), (3, vector(0.0, 5.0), 1.0)
    server = after(algorithm, algorithm.server_init(task, 4), task, *uploads)
    # Body: clients 0 and 2 went up, 3 down. Head: 0 and 3 went up, 2 down. Client 1 gets the mean of all.
    body, head, mean = (1 * 2.0 + 3 * 4.0) / 4, (3.0 + 5.0) / 2, [14 / 5, 11 / 5]
    expected = torch.tensor([[body, head], mean, [body, 1.0], [0.0, head]], dtype=torch.float64)
    torch.testing.assert_close(server.models, expected)
    assert server.known.tolist() == [True, False, True, True]
    # Who does not take part keeps its model.
    later = after(algorithm, server, task, (1, vector(7.0, 7.0), 1.0))
    assert later.models[[0, 2, 3]].tolist() == server.models[[0, 2, 3]].tolist()
    assert later.models[1].tolist() == [7.0, 7.0]


def test_one_cluster_is_fedavg_and_none_is_local_training() -> None:
    _, one, _ = three_rounds(Reads(threshold=-1.0))
    _, mean, _ = three_rounds(FedAvg())
    torch.testing.assert_close(one.server.models, mean.server.w.expand(4, -1), rtol=0, atol=1e-12)
    _, none, shown = three_rounds(Reads(threshold=1.0))
    task, alone, _ = three_rounds(Local())
    torch.testing.assert_close(
        none.server.models, clients_of(alone).personal[:, : task.d], rtol=0, atol=1e-12
    )
    assert shown[-1].federation["cluster_size"] == 1


def test_a_threshold_is_a_cosine() -> None:
    with pytest.raises(UsageError, match=r"threshold=1\.5"):
        Reads(threshold=1.5)
