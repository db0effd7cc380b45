"""Differential privacy around any algorithm that needs only sums: clipped and noised uploads.

A client's update is clipped to the norm `clip` and gets normal noise of deviation `noise * clip / sqrt(n)` on
every entry, where n clients take part in a round: their sum then carries noise of deviation `noise * clip`.
Everything else in an upload that depends on data is withheld. The reported weight (samples, scores) is 1, so
all clients weigh the same. A mask that grew is not sent: a personal entry is sent as if it had not changed.

Protected are all the data of one client, against replacing them by any other (so the sensitivity is 2 clip;
the number of clients is public). `epsilon` holds against everybody who sees the global models of all rounds,
such as users of the shared model and other clients. A client knows its own noise, so only the noise of the
others counts: (n - 1) / n of its variance. It requires that the server sees only sums or is trusted,
that every chosen client answers and adds its noise, and, with partial participation, that the choice is
secret. `epsilon_server` holds against a server that sees each upload: there only the client's own noise
counts, and a client is assumed to be in every round. Both cover the messages of this run: not the metrics
that a simulation records, nor earlier runs on the same data. The noise comes from the run's seed, which must
be kept as secret as the data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core import AnyAlgorithm, ClientOutput, Data, Metrics, Plan, Task, UsageError, above, tree
from copfl.core.payload import innermost, nbytes, other_fields, update_of, with_update
from copfl.core.random import NOISE, normal
from copfl.core.sums import total_is_one_sum
from copfl.errors import raised_as
from copfl.kernels.draws import mixed
from copfl.wrappers.base import RoundWrapper

# Of Renyi divergences; any give a true bound.
ORDERS = (1.1, 1.25, 1.5, 1.75, *range(2, 17), 20, 24, 28, 32, 48, 64, 128, 256)


class Down(NamedTuple):
    down: Any
    key: Tensor  # [] int64, of this client's noise in this round; in a deployment a secret of the client


@dataclass(frozen=True)
class Private(RoundWrapper):
    """The algorithm with clipped and noised uploads; `taking_part` of the `clients` are in each round."""

    clients: int
    taking_part: int
    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5
    seed: int = 0

    def __post_init__(self) -> None:
        above(0, **{"privacy.clip": self.clip, "privacy.noise": self.noise})
        if not 0 < self.delta < 1:
            allowed = "must be above 0 and below 1; below 1 / clients to mean much"
            raise UsageError(f"privacy.delta={self.delta} {allowed}")

    def downlink(self, server: Any, ids: Tensor) -> Down:
        return Down(super().downlink(server, ids), mixed(self.seed, NOISE, server.round, ids))

    def client_update(self, task: Task, client: Any, down: Down, data: Data, plan: Plan) -> ClientOutput:
        """The local update with a private upload.

        A client whose training failed sends only noise and keeps its record: the failure must not be visible
        either.
        """
        output = super().client_update(task, client, down, data, plan)
        _check_upload(output)
        update = update_of(down.down, output.upload)
        # The difference of two large numbers may overflow where both are finite.
        finite = tree.finite((output.client, output.upload, update.change), task.device)
        change = torch.where(finite, update.change, 0)
        # In double precision: squares of small numbers are 0 in single precision, and long sums are inexact,
        # so a norm would be too small, and the update larger than the clip. The one rounding is after the
        # noise.
        exact = change.double()
        exact = exact * (self.clip / exact.norm().clamp(min=self.clip))
        deviation = self.noise * self.clip / self.taking_part**0.5
        change = (exact + deviation * self.draw(down.key, change).double()).to(change.dtype)
        received, personal = update.received, update.personal
        if personal is not None:
            # The initial mask is the same for all clients.
            personal = task.local() | torch.zeros_like(personal)
            received = torch.where(personal, 0, innermost(down).w)
        weight = None if update.reported_weight is None else torch.ones_like(update.reported_weight)
        private = update._replace(sent=received + change, personal=personal, reported_weight=weight)
        after = self.counted(output.client, down, private)
        after = tree.each(partial(torch.where, finite), after, client)
        metrics = {**output.metrics, "weight": torch.ones_like(output.metrics["weight"])}
        metrics.setdefault("bytes_down", metrics["weight"].new_zeros(()) + nbytes(down.down))
        return output._replace(client=after, upload=with_update(output.upload, private), metrics=metrics)

    def next_message(self, task: Task, down: Down, upload: Any) -> Down:
        return down  # an upload with noise is no model to continue from

    def draw(self, key: Tensor, like: Tensor) -> Tensor:
        """Standard normal numbers in the shape of the vector `like`."""
        return normal(key, like)

    def server_update(self, task: Task, server: Any, total: Any) -> tuple[Any, Metrics]:
        after, metrics = super().server_update(task, server, total)
        rounds = int(after.round)
        unknown = noise_of_others(self.noise, self.taking_part)
        outside = epsilon(unknown, rounds, self.delta, self.clients, self.taking_part)
        server_alone = epsilon(self.noise / self.taking_part**0.5, rounds, self.delta)
        spent = torch.tensor([outside, server_alone], dtype=torch.float64)
        return after, {**metrics, "epsilon": spent[0], "epsilon_server": spent[1]}


def _check_upload(output: ClientOutput) -> None:
    """Raises a UsageError if the client sends more than one vector and one weight."""
    others = other_fields(output.upload)
    if "bytes_up" in output.metrics:
        others.append("messages during local training")
    if others:
        raise UsageError(
            f"privacy covers the weights that a client sends; this algorithm also sends {', '.join(others)}, "
            "which depend on its data, so no epsilon could be given; choose another algorithm, or leave "
            "privacy out"
        )


def check_sums(algorithm: AnyAlgorithm, task: Task, upload: Any) -> None:
    """Raises a UsageError if the server's total is no function of the sum of noised uploads.

    The noise of the others protects a client only in that sum. A total with a place for every client, or with
    another function of each upload, shows single uploads with their own small noise.
    """
    server = algorithm.server_init(task, 2)
    one, two = (algorithm.summand(task, server, torch.tensor(n, device=task.device), upload) for n in (0, 1))
    if not all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(two), strict=True)):
        raise UsageError(
            "privacy needs a server that only sees sums; this algorithm, or its robust aggregation, needs "
            "single uploads, so the noise of the others protects nobody; choose another algorithm, or leave "
            "robust or privacy out"
        )
    if not other_fields(upload) and not total_is_one_sum(algorithm, task, server, upload, private=True):
        raise UsageError(
            "privacy counts the noise in the sum of the uploads; this algorithm's server needs another "
            "function of each upload (such as a product of two of its parts), about which no epsilon can be "
            "given; choose another algorithm, or leave privacy out"
        )


def noise_of_others(noise: float, answers: int) -> float:
    """The noise of a sum that a client in it does not know: it can subtract its own part.

    Args:
        noise: The deviation of the sum's noise over `clip`, of which each upload has an equal part.
        answers: The uploads in the sum. The sum of a single one has nobody else in it.
    """
    return noise * ((answers - 1) / answers) ** 0.5 if answers > 1 else noise


@lru_cache(maxsize=4096)
def epsilon(noise: float, rounds: int, delta: float, clients: int = 1, taking_part: int = 1) -> float:
    """The epsilon of so many rounds at this delta, for replacing one client; for `noise` see `epsilon_of`."""
    return epsilon_of({noise: rounds}, delta, clients, taking_part)


def epsilon_of(rounds: Mapping[float, int], delta: float, clients: int = 1, taking_part: int = 1) -> float:
    """The epsilon of rounds with different noise, at this delta, for replacing one client.

    `rounds` has the number of rounds by their noise: the deviation of the observed noise over `clip`. By
    Renyi divergences, with Google's dp-accounting; with partial participation, for sets of a fixed size
    sampled without replacement.
    """
    missing = "privacy needs dp-accounting to compute its epsilon; `pip install 'copfl[privacy]'` brings it"
    with raised_as(UsageError, missing, ImportError):
        from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
        from dp_accounting.rdp import RdpAccountant
    accountant = RdpAccountant(orders=ORDERS, neighboring_relation=NeighboringRelation.REPLACE_ONE)
    for noise, count in rounds.items():
        event = GaussianDpEvent(noise / 2)  # replacing one client changes the sum by at most 2 clip
        if taking_part < clients:
            event = SampledWithoutReplacementDpEvent(clients, taking_part, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))
