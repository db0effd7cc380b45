from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from copfl.algorithms import FedAvg, FedPer
from copfl.core import Adam, Sgd, Task, UsageError, tree
from copfl.parts.averaging import Upload
from copfl.testing import small_federation
from tests.toys import federation_of, rounds_of, slopes

PLAIN = Sgd(1.0, 0.0, 0.0)


def test_a_round_by_hand() -> None:
    # The model answers [0, a.x] and starts at 0, where the gradient of a sample with label 1 is -x / 2.
    # Client 0 holds (2, 0) once, client 1 holds (0, 4) three times: they end in (1, 0) and (0, 2).
    # Weighted by their samples: (1 * (1, 0) + 3 * (0, 2)) / 4 = (.25, 1.5).
    federation = federation_of(([[2.0, 0.0]], [1]), ([[0.0, 4.0]] * 3, [1, 1, 1]))
    state, shown = rounds_of(FedAvg(PLAIN), slopes(0.0, 0.0), federation, 1)
    assert state.server.w.tolist() == pytest.approx([0.25, 1.5], abs=1e-15)
    assert shown[0].clients["weight"].tolist() == [0.25, 0.75]
    assert shown[0].clients["loss"] == pytest.approx([0.6931471805599453] * 2)
    assert shown[0].federation == {"shared": 1.0}


def test_what_it_keeps_stays_with_each_client() -> None:
    task, federation = small_federation("batch", (5, 9))
    algorithm = FedPer(Sgd(), personal=("head",))
    state, shown = rounds_of(algorithm, task, federation, 2)
    head, statistics = task.where("head"), task.where("buffers")
    assert len(state.server.w) == int((~head & ~statistics).sum())
    own = state.clients.rows(torch.arange(2)).personal
    assert own.shape == (2, int((head | statistics).sum()))
    assert not torch.equal(own[0], own[1])
    assert shown[-1].federation["shared"] == pytest.approx(1 - int(head.sum()) / task.d)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_statistics_stay_home_or_are_averaged_by_size(buffers: str) -> None:
    task, federation = small_federation("batch", (4, 12))
    task = replace(task, buffers=buffers)
    state, _ = rounds_of(FedAvg(), task, federation, 1)
    kept = state.clients.rows(torch.arange(2)).personal
    if buffers == "local":
        assert len(state.server.w) == task.d
        assert kept.shape == (2, task.layout.size - task.d)
        return
    assert len(state.server.w) == task.layout.size
    assert kept.shape == (2, 0)
    # What each client's statistics became in the round: what the clients keep under the other policy.
    other, _ = rounds_of(FedAvg(), replace(task, buffers="local"), federation, 1)
    own = other.clients.rows(torch.arange(2)).personal
    torch.testing.assert_close(
        state.server.w[task.d :], (4 * own[0] + 12 * own[1]) / 16, rtol=1e-12, atol=1e-12
    )


def test_an_optimizer_state_is_kept_only_where_asked() -> None:
    task, federation = small_federation("none", (4, 4))
    kept, _ = rounds_of(FedAvg(Adam(keep=True)), task, federation, 3, batch=4)
    fresh, _ = rounds_of(FedAvg(Adam(keep=False)), task, federation, 3, batch=4)
    assert kept.clients.rows(torch.arange(2)).moments.t.tolist() == [3, 3]
    assert fresh.clients.rows(torch.arange(2)).moments == ()


def test_a_round_that_nobody_answered_changes_nothing() -> None:
    task = slopes(1.0, 2.0)
    algorithm = FedAvg()
    server = algorithm.server_init(task, 2)
    upload = Upload(torch.ones(2).double(), torch.tensor(3.0).double())
    nothing = tree.each(torch.zeros_like, algorithm.summand(task, server, torch.tensor(0), upload))
    assert algorithm.server_update(task, server, nothing)[0].w.tolist() == [1, 2]


def test_the_order_of_uploads_does_not_matter() -> None:
    task: Task = slopes(0.0)
    algorithm, server = FedAvg(), FedAvg().server_init(slopes(0.0), 3)
    sizes, values = (1.0, 2.0, 5.0), (10.0, 20.0, 40.0)  # (10 + 40 + 200) / 8 = 31.25
    summands = [
        algorithm.summand(
            task, server, torch.tensor(n), Upload(torch.tensor([v]).double(), torch.tensor(s).double())
        )
        for n, (s, v) in enumerate(zip(sizes, values, strict=True))
    ]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        total = tree.add(tree.add(summands[order[0]], summands[order[1]]), summands[order[2]])
        assert algorithm.server_update(task, server, total)[0].w.item() == 31.25


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(UsageError, match="epochs=0 must be a number of at least 1"):
        FedAvg(epochs=0)
    with pytest.raises(UsageError, match='no part "tail" in the trained part of the model'):
        FedPer(personal=("tail",)).server_init(slopes(0.0), 1)
