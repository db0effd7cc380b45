from __future__ import annotations

import torch

from copfl.algorithms.local import Local
from copfl.core import Data, Sgd, train, tree
from copfl.core.batches import plan
from copfl.testing import small_federation
from tests.toys import federation_of, rounds_of, slopes


def test_nothing_travels_and_everybody_trains_alone() -> None:
    task = slopes(0.0, 0.0)
    both = federation_of(([[2.0, 0.0]], [1]), ([[0.0, 4.0]], [1]))
    together, shown = rounds_of(Local(), task, both, 3)
    assert together.server.w.numel() == 0
    assert shown[-1].federation["shared"] == 0
    for n, client in enumerate((([[2.0, 0.0]], [1]), ([[0.0, 4.0]], [1]))):
        alone, _ = rounds_of(Local(), task, federation_of(client), 3)
        assert torch.equal(
            together.clients.rows(torch.arange(2)).personal[n],
            alone.clients.rows(torch.arange(1)).personal[0],
        )


def test_it_is_plain_training_with_the_statistics_running_on() -> None:
    task, federation = small_federation("batch", (7,))
    state, _ = rounds_of(Local(), task, federation, 3, batch=4)
    w, sgd = task.initial, Sgd()
    data = Data(federation.train.x, federation.train.y, torch.tensor(7))
    for k in range(3):
        order = plan(0, k, [0], [7], batch=4, epochs=1, augment=True)
        w = train(task, sgd, w, sgd.init(w[: task.d]), data, tree.row(order, 0)).w
    assert torch.equal(state.clients.rows(torch.arange(1)).personal[0], w)


def test_the_only_thing_in_an_upload_is_how_many_samples_there_are() -> None:
    _, shown = rounds_of(Local(), slopes(0.0, 0.0), federation_of(([[2.0, 0.0]], [1])), 1)
    assert shown[0].clients["bytes_up"].tolist() == [8]
    assert shown[0].clients["bytes_down"].tolist() == [0]
