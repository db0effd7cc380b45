"""Uploads that are clipped and noised, with the epsilon they cost: an algorithm made out of any that only needs sums.

A client's change to the broadcast is clipped to the length `clip` and gets normal noise of deviation
`noise * clip / sqrt(n)` on every entry, where n clients take part in a round: their sum then carries noise of deviation
`noise * clip`. Whatever else of an upload depends on data is withheld: the claim (samples, scores) is 1, so everybody
counts the same, and a mask that grew is not sent; an entry that is personal goes out as if it had not changed. So what
is noised is all there is.

What is protected, and from whom: all the data of one client, against replacing them by any other (so the sensitivity is
2 clip; the number of clients is public). `epsilon` holds against whoever sees the broadcasts of all rounds, as other
clients and the users of the shared model do; it needs that the server sees sums alone or is trusted, that everybody who
is asked answers and adds its noise, and, where not everybody takes part, that nobody knows who was drawn.
`epsilon_server` holds against a server that sees each upload: there only the client's own noise counts, and a client is
taken to be in every round. Both count the messages of this run: not the figures that a simulation records, nor what was
tried before on the same data. The noise comes from the run's seed, which must be kept as secret as the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, ClientOutput, Metrics
from copfl.core.payload import (
    VECTOR_FIELDS,
    WEIGHT_FIELDS,
    innermost,
    nbytes,
    update_of,
    with_reported_weight,
    with_update,
)
from copfl.core.random import NOISE, mixed, normal
from copfl.core.task import Data, Plan, Task
from copfl.errors import UsageError
from copfl.wrappers import base

ORDERS = (
    1.1,
    1.25,
    1.5,
    1.75,
    *range(2, 17),
    20,
    24,
    28,
    32,
    48,
    64,
    128,
    256,
)  # of Renyi; any give a true bound


class Server(NamedTuple):
    server: Any
    round: Tensor  # [] int64


class Down(NamedTuple):
    down: Any
    key: Tensor  # [] int64, of this client's noise in this round; it stands for a secret of the client's own


@dataclass(frozen=True)
class Private:
    """The algorithm, with uploads clipped and noised; `taking_part` of the `clients` are in each round."""

    algorithm: AnyAlgorithm
    clients: int
    taking_part: int
    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clip", "noise"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(f"privacy.{name}={getattr(self, name)} must be a number above 0")
        if not 0 < self.delta < 1:
            raise UsageError(
                f"privacy.delta={self.delta} must be above 0 and below 1; below 1 / clients to mean much"
            )

    total_epochs = property(base.total_epochs)
    optimizer = property(base.optimizer)
    client_init = base.client_init
    personal_model = base.personal_model_within
    summand = base.summand_within

    def server_init(self, task: Task, clients: int) -> Server:
        start = torch.zeros((), dtype=torch.int64, device=task.device)
        return Server(self.algorithm.server_init(task, clients), start)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return Down(self.algorithm.downlink(server.server, ids), mixed(self.seed, NOISE, server.round, ids))

    def client_update(
        self, task: Task, client: Any, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Any, Any]:
        """The client's turn, with an upload that says no more than it may.

        A client whose training broke sends noise alone and keeps its record: that it broke must not show either.
        """
        turn = self.algorithm.client_update(task, client, down.down, data, plan)
        _check_sayable(turn)
        found = update_of(down.down, turn.upload)
        whole = tree.finite((turn.client, turn.upload), task.device)
        change = torch.where(whole, found.change, 0)
        change = change * (self.clip / change.norm().clamp(min=self.clip))
        change = change + self.noise * self.clip / self.taking_part**0.5 * normal(down.key, change)
        received, personal = found.received, found.personal
        if personal is not None:
            personal = task.local() | torch.zeros_like(
                personal
            )  # the same for everybody from the start: it tells nothing
            received = torch.where(personal, 0, innermost(down).w)
        reported_weight = None if found.reported_weight is None else torch.ones_like(found.reported_weight)
        upload = with_update(
            turn.upload,
            found._replace(sent=received + change, personal=personal, reported_weight=reported_weight),
        )
        after = tree.each(
            lambda new, old: torch.where(whole, new, old),
            with_reported_weight(turn.client, reported_weight),
            client,
        )
        metrics = {**turn.metrics, "weight": torch.ones_like(turn.metrics["weight"])}
        metrics.setdefault("bytes_down", metrics["weight"].new_zeros(()) + nbytes(down.down))
        return turn._replace(client=after, upload=upload, metrics=metrics)

    def server_update(self, task: Task, server: Server, total: Any) -> tuple[Server, Metrics]:
        inside, metrics = self.algorithm.server_update(task, server.server, total)
        rounds = int(server.round) + 1
        spent = {
            "epsilon": epsilon(self.noise, rounds, self.delta, self.clients, self.taking_part),
            "epsilon_server": epsilon(self.noise / self.taking_part**0.5, rounds, self.delta),
        }
        known = {name: torch.tensor(value, dtype=torch.float64) for name, value in spent.items()}
        return Server(inside, server.round + 1), {**metrics, **known}


def _check_sayable(turn: ClientOutput[Any, Any]) -> None:
    """Nothing, if the upload is an answer and a claim and no message crosses in mid-turn; else a UsageError."""
    sent = [name for name, value in turn.upload._asdict().items() if value is not None]
    others = [name for name in sent if name not in (*VECTOR_FIELDS, *WEIGHT_FIELDS)]
    if "bytes_up" in turn.metrics:
        others.append("messages in the middle of a turn")
    if others:
        raise UsageError(
            f"privacy covers the weights that a client sends; this algorithm also sends {', '.join(others)}, which "
            "depend on its data, so no epsilon could be given; choose another algorithm, or leave privacy out"
        )


def check_sums(algorithm: AnyAlgorithm, task: Task, upload: Any) -> None:
    """Nothing, if what an upload adds does not depend on whose it is, so that totals are sums; else a UsageError."""
    server = algorithm.server_init(task, 2)
    one, two = (algorithm.summand(task, server, torch.tensor(n, device=task.device), upload) for n in (0, 1))
    if not all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(two), strict=True)):
        raise UsageError(
            "privacy needs a server that only sees sums; this algorithm's, or its guard's, keeps clients apart, so the "
            "noise of the others protects nobody; choose another algorithm, or leave the guard or privacy out"
        )


@lru_cache(maxsize=4096)
def epsilon(noise: float, rounds: int, delta: float, clients: int = 1, taking_part: int = 1) -> float:
    """The epsilon of so many rounds at this delta, for replacing one client.

    `noise` is the deviation of what is seen over `clip`. By Renyi divergences, with Google's dp-accounting; where some
    clients take part only, for sets of a fixed size drawn without replacement.
    """
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise UsageError(
            "privacy needs dp-accounting to reckon its epsilon; `pip install 'copfl[privacy]'` brings it"
        ) from error
    event = GaussianDpEvent(
        noise / 2
    )  # one client's change can turn into any other of its length: 2 clip apart
    if taking_part < clients:
        event = SampledWithoutReplacementDpEvent(clients, taking_part, event)
    accountant = RdpAccountant(orders=ORDERS, neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))
