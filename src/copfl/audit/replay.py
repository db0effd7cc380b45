"""A run repeated with its uploads intercepted.

Every engine gives the server the summand of each client. Interception can replace a summand by zeros, which is
a run without the client. It can also store the summands, from which the server of any subset of clients is
rebuilt. Neither depends on the algorithm, because totals are sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.task import with_statistics
from copfl.engine import mapping
from copfl.engine.mapping import Mapping, Submission
from copfl.experiment.run import Experiment, OnRound, Result, execute
from copfl.stats import Numbers


class Received(NamedTuple):
    """The uploads of some clients that trained as one batch: trees of rows."""

    ids: Tensor
    summands: Any
    clients: Any  # their records after training


def intercepted(experiment: Experiment, receive: Callable[[Received], Any]) -> Experiment:
    """The experiment in which the server gets the summands that `receive` returns."""
    engine: Mapping = experiment.engine
    if engine.name == "cuda_graph":  # a recorded graph cannot call Python
        engine = mapping.vmap(engine.chunk)

    def over(f: Callable[[Any], Any], rows: Any) -> Any:
        result = engine.over(f, rows)
        return receive(Received(rows.id, result, rows.client)) if isinstance(rows, Submission) else result

    return dataclasses.replace(experiment, engine=engine._replace(over=over))


def zeroed(summands: Any, keep: Tensor) -> Any:
    """The summands with zeros for all but the clients in `keep`, as for updates that are not finite."""
    return tree.each(
        lambda t: torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros_like(t)), summands
    )


def without(experiment: Experiment, clients: Sequence[int], on_round: OnRound | None = None) -> Result:
    """The run in which no upload of these clients arrives; same seed, same batches.

    They still receive the global model and train, so their metrics are those of a client that only receives.
    """
    missing = torch.tensor(list(clients), dtype=torch.int64, device=experiment.task.device)

    def receive(received: Received) -> Any:
        return zeroed(received.summands, ~torch.isin(received.ids, missing))

    return execute(intercepted(experiment, receive), None, on_round)


@dataclasses.dataclass(frozen=True, eq=False)
class RoundSnapshot:
    """A round between the clients' training and the server's update."""

    experiment: Experiment
    server: Any  # before the round
    received: list[Received]
    clients: Any  # every client's record after the round, a tree of rows

    @property
    def players(self) -> list[int]:
        """The clients that took part."""
        return [int(client) for received in self.received for client in received.ids]

    def server_of(self, players: frozenset[int]) -> Any:
        """The server after the uploads of these clients alone; without any, the server before the round.

        Summands are added as the engine adds them, the others as zeros: with all clients the result is the
        run's own server, bit for bit.
        """
        if not players:
            return self.server
        parts = []
        for received in self.received:
            keep = torch.tensor(
                [int(client) in players for client in received.ids], device=received.ids.device
            )
            parts.append(tree.total(zeroed(received.summands, keep)))
        with torch.no_grad():
            algorithm, task = self.experiment.algorithm, self.experiment.task
            return algorithm.server_update(task, self.server, tree.summed(parts))[0]

    def value(self, sets: Sequence[frozenset[int]]) -> Numbers:
        """The value of each set of clients, [sets, 2]: the mean accuracy over all clients of the set's global
        model, and of the clients' personal models with it.
        """
        servers = [self.server_of(players) for players in sets]
        return np.stack([np.nanmean(one, 1) for one in accuracies(self.experiment, servers, self.clients)], 1)


def accuracies(e: Experiment, servers: Sequence[Any], clients: Any) -> tuple[Numbers, Numbers]:
    """Every client's test accuracy with each server's global model, and with its personal model: two arrays,
    [servers, clients].

    A global model is evaluated with the client's own batch-norm statistics where those are not shared.
    """
    algorithm, task = e.algorithm, e.task

    def evaluate(given: tuple[Any, Any, Any]) -> tuple[Tensor, Tensor]:
        client, down, test = given
        personal = algorithm.personal_model(task, client, down)
        shared = algorithm.personal_model(task, algorithm.client_init(task), down)
        if task.buffers == "local":
            shared = with_statistics(task, shared, personal)
        pair = (task.evaluate(model, test)[1].double() for model in (shared, personal))
        first, second = (torch.where(test.size > 0, accuracy, torch.nan) for accuracy in pair)
        return first, second

    chunk = e.engine.chunk
    # Small models are evaluated many at a time, because the call costs more than the arithmetic.
    many = 1 if e.engine.name == "sequential" else max(1, min(256, 2**24 // task.d) // min(chunk, e.clients))
    blocks = []
    for start in range(0, len(servers), many):
        block = servers[start : start + many]
        columns = []
        for part in np.split(np.arange(e.clients), range(chunk, e.clients, chunk)):
            ids = torch.from_numpy(part).to(task.device)
            down = tree.concatenate([algorithm.downlink(server, ids) for server in block])
            rows, test = (
                tree.concatenate([each] * len(block))
                for each in (tree.rows(clients, ids), e.federation.test.rows(part))
            )
            with torch.no_grad():
                pair = e.engine.over(evaluate, (rows, down, test))
            columns.append(tuple(t.view(len(block), -1) for t in pair))  # [servers, clients of the chunk]
        blocks.append(tuple(torch.cat(parts, 1) for parts in zip(*columns, strict=True)))
    shared, personal = (t.cpu().numpy() for t in tree.concatenate(blocks))
    return shared, personal


class Observed(NamedTuple):
    """A run whose rounds were observed."""

    result: Result
    exact: bool  # whether the server that was rebuilt round by round is the run's own, bit for bit


def observed(experiment: Experiment, observe: Callable[[int, RoundSnapshot], None]) -> Observed:
    """The run repeated, with `observe` called for every round (from 0) before the next begins."""
    algorithm, task = experiment.algorithm, experiment.task
    server, uploads = algorithm.server_init(task, experiment.clients), list[Received]()
    clients = tree.each(torch.clone, tree.repeat(algorithm.client_init(task), experiment.clients))

    def receive(received: Received) -> Any:
        uploads.append(received._replace(clients=None))
        tree.put_rows(clients, received.ids, received.clients)
        return received.summands

    def on_round(round: Any, seconds: float) -> None:
        nonlocal server
        snapshot = RoundSnapshot(experiment, server, list(uploads), clients)
        observe(round.number, snapshot)
        server = snapshot.server_of(frozenset(snapshot.players))
        uploads.clear()

    result = execute(intercepted(experiment, receive), None, on_round)
    pairs = zip(tree.leaves(server), tree.leaves(result.state.server), strict=True)
    return Observed(result, all(torch.equal(a, b) for a, b in pairs))
