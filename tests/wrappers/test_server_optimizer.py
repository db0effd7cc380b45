"""Server optimizers around algorithms: by hand, with masks, with averaged statistics, under secure aggregation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms import ALGORITHMS, COPFL, FedAvg, FedExLoRA, FedPer, FedSelect, FlexLoRA, Local
from copfl.algorithms.fedselect import Upload
from copfl.core import Adam, Sgd, UsageError, received, tree
from copfl.core.batches import plan
from copfl.core.tree import Masked
from copfl.engine.mapping import sequential
from copfl.federation.protocol import secure_total
from copfl.parts.averaging import Total
from copfl.parts.cowa import Cowa
from copfl.parts.pwpm import Pwpm
from copfl.parts.server_steps import SERVER_STEPS, FedExP, Mean, Momentum
from copfl.testing import check_algorithm, small_federation
from copfl.wrappers.server_optimizer import OptimizedTotal, ServerOptimizer, with_server_optimizer
from tests.slow import slow
from tests.toys import rounds_of, slopes


def uploads_of(algorithm: Any, task: Any, federation: Any, server: Any, clients: Any = None) -> list[Any]:
    """Every client's upload, from its record or as a client that never took part."""
    ids, uploads = list(range(federation.clients)), []
    orders = plan(
        0, 0, ids, federation.train.sizes[ids], batch=4, epochs=algorithm.total_epochs, augment=True
    )
    with torch.no_grad():
        for n in ids:
            data, order = tree.row(federation.train.rows([n]), 0), tree.row(orders, n)
            down = received(algorithm, server, torch.tensor(n))
            client = algorithm.client_init(task) if clients is None else tree.row(clients, n)
            uploads.append(algorithm.client_update(task, client, down, data, order).upload)
    return uploads


def server_after(algorithm: Any, task: Any, server: Any, uploads: list[Any]) -> Any:
    summands = [algorithm.summand(task, server, torch.tensor(n), upload) for n, upload in enumerate(uploads)]
    total = summands[0]
    for summand in summands[1:]:
        total = tree.add(total, summand)
    return algorithm.server_update(task, server, total)[0]


def test_momentum_by_hand() -> None:
    """w = 1; the mean says 3, then 3 again: steps of 2, then 0.5 * 2 + (3 - 3) = 1."""
    task, algorithm = slopes(1.0), ServerOptimizer(FedAvg(), Momentum(momentum=0.5))
    server: Any = algorithm.server_init(task, 2)
    server = server._replace(server=server.server._replace(w=torch.tensor([1.0])))
    one = torch.ones((), dtype=torch.float64)
    total = OptimizedTotal(Total(torch.tensor([6.0]), torch.tensor(2.0)), 2 * one, 2 * one, (), ())
    server, _ = algorithm.server_update(task, server, total)
    assert server.server.w.tolist() == [3.0]
    server, _ = algorithm.server_update(task, server, total)
    assert server.server.w.tolist() == [4.0]
    assert server.moments.m.tolist() == [1.0]


def test_the_plain_mean_adds_nothing() -> None:
    algorithm = FedAvg()
    assert with_server_optimizer(algorithm, Mean()) is algorithm


@pytest.mark.parametrize("algorithm", [FedExLoRA(), FlexLoRA()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("rule", [FedExP(), Momentum(), Mean(lr=0.5)])
def test_an_algorithm_whose_server_does_more_than_average_refuses_another_step(
    algorithm: Any, rule: Any
) -> None:
    """FedEx-LoRA adds the residual of the mean to the layers; FlexLoRA's factors have any signs and order."""
    task, _ = small_federation("none", (4, 9), needs=algorithm.needs)
    with pytest.raises(UsageError, match=r"takes no step of the server but the mean: .*\(server='mean'\)"):
        with_server_optimizer(algorithm, rule).server_init(task, 2)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "ditto"])
def test_fedexp_equals_a_loop_over_the_updates(name: str) -> None:
    """From the second round on too, where the server is no longer at the initial weights."""
    task, federation = small_federation("none", (4, 9, 6, 5))
    algorithm = ServerOptimizer(ALGORITHMS[name](optimizer=Sgd(lr=0.05)), FedExP(1e-3))
    server = algorithm.server_init(task, 4)
    for _ in range(3):
        uploads = uploads_of(algorithm, task, federation, server)
        before = server.server.w.numpy()
        updates = [upload.w.numpy() - before for upload in uploads]
        shares = np.array([upload.size for upload in uploads], dtype=np.float64)
        shares /= shares.sum()
        mean = sum(share * update for share, update in zip(shares, updates, strict=True))
        squares = sum(share * (update**2).sum() for share, update in zip(shares, updates, strict=True))
        eta = min(max(1.0, squares / (2 * ((mean**2).sum() + 1e-3))), 2.0)
        server = server_after(algorithm, task, server, uploads)
        np.testing.assert_allclose(server.server.w.numpy(), before + eta * mean, atol=1e-12)


MASKED: dict[str, Any] = {
    "fedselect": FedSelect(Sgd(lr=0.05), interval=1),
    "copfl": COPFL(Sgd(lr=0.05), Pwpm(rate=0.2), Cowa(score="none")),
}


@pytest.mark.parametrize("name", MASKED)
def test_fedexp_with_masks_counts_only_the_clients_that_share_an_entry(name: str) -> None:
    task, federation = small_federation("none", (4, 9, 6, 5))
    algorithm = ServerOptimizer(MASKED[name])
    state, _ = rounds_of(algorithm, task, federation, 3, sequential())
    server, clients = state.server, state.clients.rows(torch.arange(4))
    uploads = uploads_of(algorithm, task, federation, server, clients)
    before = server.server.w.numpy()
    shared = np.stack([~upload.shared.personal.numpy() for upload in uploads])
    assert 0 < (~shared).sum() < shared.size, "nothing is personal, so this shows nothing"
    values = np.stack([upload.shared.values.numpy() for upload in uploads])
    changes = np.where(shared, values - before, 0)
    sharers = shared.sum(0)
    mean = changes.sum(0) / np.maximum(sharers, 1)
    squares, square = (changes**2).sum() / 4, (sharers / 4 * mean**2).sum()
    eta = min(max(1.0, squares / (2 * (square + 1e-3))), 2.0)
    after = server_after(algorithm, task, server, uploads)
    np.testing.assert_allclose(after.server.w.numpy(), before + eta * mean, atol=1e-12)


@pytest.mark.parametrize("name", SERVER_STEPS)
def test_averaged_statistics_stay_a_plain_mean(name: str) -> None:
    task, federation = small_federation("batch", (4, 9, 6))
    task = dataclasses.replace(task, buffers="average")
    plain, algorithm = FedAvg(Sgd(lr=0.05)), ServerOptimizer(FedAvg(Sgd(lr=0.05)), SERVER_STEPS[name]())
    server, plain_server = algorithm.server_init(task, 3), plain.server_init(task, 3)
    uploads = uploads_of(algorithm, task, federation, server)
    after = server_after(algorithm, task, server, uploads)
    means = server_after(plain, task, plain_server, uploads)
    torch.testing.assert_close(after.server.w[task.d :], means.w[task.d :], rtol=0, atol=1e-15)
    if name not in ("mean", "momentum"):  # whose first step is the mean's
        assert not torch.equal(after.server.w[: task.d], means.w[: task.d])


def test_an_entry_that_nobody_shares_keeps_its_value_and_its_moments() -> None:
    """Two clients; every mean is w + 1, and in the second round the first entry is personal for both."""
    task = small_federation("none", (4, 9))[0]
    algorithm = ServerOptimizer(FedSelect(), Momentum(1.0, 0.5))
    server = algorithm.server_init(task, 2)
    personal = torch.zeros_like(task.initial, dtype=torch.bool)
    for first in (False, True):
        before, personal = server, personal.clone()
        personal[0] = first
        upload = Upload(Masked(torch.where(personal, 0, server.server.w + 1), personal))
        server = server_after(algorithm, task, server, [upload, upload])
    assert server.server.w[0] == before.server.w[0]
    assert before.moments.m[0] == server.moments.m[0] == 1.0
    torch.testing.assert_close(server.server.w[1:], before.server.w[1:] + 1.5)


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param("fedavg", FedExP(), marks=slow),  # which counts the sharers of an entry: all
        ("copfl", FedExP()),  # or some
        pytest.param("fedper", SERVER_STEPS["adam"](), marks=slow),
        ("fedpac", Momentum(0.5, 0.8)),  # beside the heads of the clients
    ],
    ids=["fedavg-fedexp", "copfl-fedexp", "fedper-adam", "fedpac-momentum"],
)
def test_no_law_is_broken(name: str, rule: Any) -> None:
    algorithm = ServerOptimizer(ALGORITHMS[name](optimizer=Adam(lr=1e-2)), rule)
    check_algorithm(algorithm, rounds=2, batch=6)


@pytest.mark.parametrize("name", SERVER_STEPS)
def test_sums_suffice_for_secure_aggregation(name: str) -> None:
    task, _ = small_federation("batch", (4, 9))
    secure_total.check(ServerOptimizer(FedPer(), SERVER_STEPS[name]()), task, (1, 8, 8), 4, False)


def test_a_server_without_weights_is_refused() -> None:
    task, _ = small_federation("none", (4,))
    with pytest.raises(UsageError, match="local has no one vector of weights"):
        ServerOptimizer(Local()).server_init(task, 1)
