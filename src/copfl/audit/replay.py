"""A run repeated with its uploads intercepted.

Every engine gives the server the summand of each client. Interception can replace a summand by zeros, which
is a run without the client. It can also store the summands, from which the server of any subset of clients is
rebuilt. Neither depends on the algorithm, because totals are sums.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.evaluation import evaluate, measured
from copfl.engine import mapping
from copfl.engine.mapping import Mapping, Submission
from copfl.experiment.experiment import Experiment
from copfl.experiment.result import Result
from copfl.experiment.training import OnRound, train_rounds
from copfl.stats import Numbers, mean_of_known


class Received(NamedTuple):
    """The uploads of some clients that trained as one batch: trees of rows."""

    ids: Tensor
    summands: Any
    clients: Any  # their records after training


def intercepted(experiment: Experiment, receive: Callable[[Received], Any]) -> Experiment:
    """The experiment in which the server gets the summands that `receive` returns.

    Args:
        experiment: What runs.
        receive: Gets the summands of a round, and returns those that the server adds.
    """
    engine: Mapping = experiment.engine
    engine = mapping.vmap(engine.chunk) if engine.name == "cuda_graph" else engine  # a graph calls no Python

    def over(f: Callable[[Any], Any], rows: Any) -> Any:
        result = engine.over(f, rows)
        return receive(Received(rows.id, result, rows.client)) if isinstance(rows, Submission) else result

    return dataclasses.replace(experiment, engine=engine._replace(over=over))


def zeroed(summands: Any, keep: Tensor) -> Any:
    """The summands with zeros for all but the clients in `keep`, as for updates that are not finite.

    Args:
        summands: Of a round, a row per client.
        keep: Which clients count, [clients] bool.
    """
    return tree.each(
        lambda t: torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros_like(t)), summands
    )


def without(experiment: Experiment, clients: Sequence[int], on_round: OnRound | None = None) -> Result:
    """The run in which no upload of these clients arrives; same seed, same batches.

    They still receive the global model and train, so they have the metrics of a client that only receives.

    Args:
        experiment: What runs.
        clients: Whose uploads are left out.
        on_round: Is called after every round.
    """
    missing = torch.tensor(list(clients), dtype=torch.int64, device=experiment.task.device)

    def receive(received: Received) -> Any:
        return zeroed(received.summands, ~torch.isin(received.ids, missing))

    return train_rounds(intercepted(experiment, receive), None, on_round)


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
        summands = []
        for received in self.received:
            keep = torch.isin(received.ids, received.ids.new_tensor(sorted(players)))
            summands.append(tree.total(zeroed(received.summands, keep)))
        with torch.no_grad():
            algorithm, task = self.experiment.algorithm, self.experiment.task
            return algorithm.server_update(task, self.server, tree.summed(summands))[0]

    def value(self, sets: Sequence[frozenset[int]]) -> Numbers:
        """The value of each set of clients, [sets, 2]: the mean primary metric over all clients of the set's
        global model, and of the clients' personal models with it; negative where low is better.

        A global model is evaluated with the client's own batch-norm statistics where those are not shared.
        """
        e, algorithm, task = self.experiment, self.experiment.algorithm, self.experiment.training.task
        metric, models = task.metrics[0], ("_global", "")

        def evaluations(client_inputs: tuple[Any, Any, Any]) -> dict[str, Tensor]:
            client, down, test = client_inputs
            personal = algorithm.personal_model(task, client, down)
            return evaluate(algorithm, task, client, down, client, personal, test, models)

        chunk = min(e.engine.chunk, e.clients)
        # Small models are evaluated many at a time, because the call costs more than the arithmetic.
        many = 1 if e.engine.name == "sequential" else max(1, min(256, 2**24 // task.d) // chunk)
        blocks = []
        for start in range(0, len(sets), many):
            servers = [self.server_of(players) for players in sets[start : start + many]]
            columns = []
            for chunk_ids in np.split(np.arange(e.clients), range(chunk, e.clients, chunk)):
                ids = torch.from_numpy(chunk_ids).to(task.device)
                down = tree.concatenate([algorithm.downlink(server, ids) for server in servers])
                samples = tree.rows(self.clients, ids), e.training.federation.test.rows(chunk_ids)
                rows, test = tree.concatenate([samples] * len(servers))
                with torch.no_grad():
                    metrics_of_chunk = e.engine.over(evaluations, (rows, down, test))
                targets = [y[:size] for y, size in zip(test.y, test.size.tolist(), strict=True)]
                values = measured(task, metrics_of_chunk, targets)
                pairs = torch.stack([values[f"{metric.name}{of}"].cpu() for of in models])
                if metric.fraction:  # others have no worst value, and are left out
                    losses = torch.stack([metrics_of_chunk[f"test_loss{of}"].cpu() for of in models])
                    pairs[torch.isnan(losses) & (test.size > 0).cpu()] = metric.worst_value
                columns.append(pairs.reshape(2, len(servers), -1))
            blocks.append(torch.cat(columns, 2).numpy())
        every = np.ascontiguousarray(np.concatenate(blocks, 1))  # [2, sets, clients]
        return (1 if metric.higher_is_better else -1) * mean_of_known(every, 2).T


def observed(experiment: Experiment, observe: Callable[[int, RoundSnapshot], None]) -> tuple[Result, bool]:
    """The run repeated, with `observe` called for every round (from 0) before the next begins; and whether
    the server that was rebuilt round by round is the run's own, bit for bit.

    Args:
        experiment: What is repeated.
        observe: Gets the number of each round, from 0, and what is needed to value it.
    """
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

    result = train_rounds(intercepted(experiment, receive), None, on_round)
    pairs = zip(tree.leaves(server), tree.leaves(result.state.server), strict=True)
    return result, all(torch.equal(a, b) for a, b in pairs)
