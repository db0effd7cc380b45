"""The server's part in the encoders of a federation: it adds up the nodes' sums, and freezes the contract.

`machines.server_app` runs it instead of `rounds` when the run config says session.agree=true.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from copfl import wire
from copfl.data.contract.contract import LONGEST_NAME, Contract
from copfl.data.contract.statistics import PASSES, Vector, centres_of, frozen
from copfl.data.tables.encoders import MOST_CATEGORIES
from copfl.errors import RunError, WireError
from copfl.federation.protocol.events import Event
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.statistics import KIND, StatisticsTerms, like_centres, vector_of
from copfl.federation.server.exchange import Exchange, ServerRound
from copfl.federation.server.secure_exchange import SecureExchange, SumQuestion
from copfl.wire import Packet


@dataclass
class StatisticsServer:
    """The server of the statistics phase: it sees the sums of each node, or only the sum over all members."""

    settings: StatisticsTerms
    exchange: Exchange

    def __post_init__(self) -> None:
        self.federation, self.log = self.settings.federation, self.exchange.log
        self.round = 0  # the pass

    def agreed(self) -> Contract:
        """The frozen contract, when all members have answered; RunError if one declines."""
        self.centres = like_centres(self.settings.question)
        self.names: dict[int, dict[str, list[str]]] = {}
        self.members, totals = list(range(self.federation.clients)), list[Vector]()
        secure = self.federation.secure.aggregation
        self.log("", Event.STARTED, round=1, rounds=PASSES, clients=len(self.members), secure=secure)
        for self.round in range(PASSES):
            if self.round and not self.settings.question.numbers:
                totals.append(np.zeros(0))
                continue
            now = ServerRound(self.round)
            is_secure = isinstance(self.exchange, SecureExchange)
            total = self._sum_of_all if is_secure else self._sum_of_each
            totals.append(total(now, self.members))
            self.members = sorted(now.reports)
            self.log(
                f"statistics, pass {self.round + 1} of {PASSES}: {len(self.members)} members",
                Event.STATISTICS,
                round=self.round + 1,
                clients=self.members,
                bytes={"up": sum(now.bytes_up.values()), "down": sum(now.bytes_down.values())},
            )
            if self.settings.question.numbers and not self.round:
                self.centres = torch.from_numpy(centres_of(self.settings.question, totals[0]))
        return frozen(self.settings.contract, totals[0], totals[1], self.names.values())

    @property
    def needed(self) -> int:
        """Members that must answer: all, unless the settings say how many; in the second pass, all of the first."""
        first = self.federation.network.min_replies or self.federation.clients
        needed = len(self.members) if self.round else first
        is_secure = self.federation.secure.aggregation
        return max(needed, self.settings.rules.threshold) if is_secure else needed

    def down(self, client: int, **further: Any) -> Packet:
        """The message to one client: the means of the columns, in the second pass.

        Args:
            client: The receiver.
            further: Fields that the message has as well.
        """
        return wire.encode(self.centres, self.exchange.head("down", self.round, client), about=further)

    def _sum_of_each(self, now: ServerRound, members: list[int]) -> Vector:
        """The sum of the members' vectors, in their order, so that it is the same again."""
        vectors: dict[int, Vector] = {}
        size, started = self.settings.question.sizes[self.round], time.monotonic()
        sent = started

        def read(client: int, packet: Packet) -> None:
            like = torch.zeros(size, dtype=torch.float64)
            opened = wire.decode(packet, like, self.exchange.head(KIND, now.number, client))
            vectors[client] = vector_of(opened.record)
            if not now.number:
                self.names[client] = _names(opened.about.get(Field.CATEGORIES))
            now.reports[client], now.bytes_up[client] = {}, packet.nbytes
            now.failures.pop(client, None)
            self.log("", Event.ACCEPTED, round=now.number + 1, client=client, bytes=packet.nbytes)

        while len(vectors) < self.needed or now.pending:
            self.exchange.registry.refresh(self.exchange.transport)
            pending_clients = {client for client, _ in now.pending.values()}
            for client in members:
                is_due = client not in vectors and client not in pending_clients
                is_due &= time.monotonic() >= now.retry_at.get(client, 0.0)
                if is_due and client in self.exchange.registry.nodes:
                    self.exchange.send(now, client, self.down(client))
            self.exchange.receive(now, read)
            self._require_willing(now, members, self.needed)
            if self.exchange.expired(now, sent):
                sent = time.monotonic()
            self.exchange.sleep(started)
        total: Vector = np.sum([vectors[client] for client in sorted(vectors)], axis=0)
        return total

    def _sum_of_all(self, now: ServerRound, members: list[int]) -> Vector:
        """The sum of the members' vectors; the server sees none of them."""
        exchange = self.exchange
        assert isinstance(exchange, SecureExchange)
        question = SumQuestion(self.down, self.settings.question.sizes[self.round], self.needed)
        while True:
            if exchange.was_revealing(self.round):
                raise RunError("the server ended while it added up; start another run")
            connected = exchange.connected(self.round, members, self.needed)
            now.failures = {}
            try:
                total = exchange.added_up(now, connected, question)
            except WireError as error:
                self._require_willing(now, members, self.needed)
                reason = f"statistics begin again with fresh keys: {error}"
                self.log(reason, Event.WAITING, round=now.number + 1, reason=reason)
                time.sleep(exchange.retry)
                continue
            if total is None:
                raise RunError(
                    "too few members revealed their shares; start another run with the same members"
                )
            self._require_possible(total)
            return total

    def _require_possible(self, total: Vector) -> None:
        """RunError if no tables give the sum of a pass: a member whose values do not fit adds random words."""
        pairs = 2 * len(self.settings.question.numbers)
        counted = np.concatenate([total[:pairs:2], total[pairs:]])
        rounding = self.federation.clients * self.settings.rules.step
        is_possible = (
            (total[1:pairs:2] >= -rounding)  # squares
            if self.round
            else (counted >= -rounding) & (np.abs(counted - np.rint(counted)) <= rounding)
        )
        if not is_possible.all():
            raise RunError(
                "no tables give the sums of the members: the values of one are far out of the contract's minimum and "
                "maximum, which its own log says, or it added other numbers"
            )

    def _require_willing(self, now: ServerRound, members: list[int], needed: int) -> None:
        """RunError if so many members declined that the others are too few."""
        declined = {n: why for n, why in now.failures.items() if why.startswith("it declined")}
        if len(members) - len(declined) < needed:
            reasons = "; ".join(f"client {n}: {why}" for n, why in sorted(declined.items()))
            raise RunError(f"the members do not agree on the encoders: {reasons}")


def _names(content: object) -> dict[str, list[str]]:
    """The categories that a node names; WireError if they are no lists of short texts in one line.

    Nodes accept no others in a run config: one member could make the frozen contract useless for all.
    """
    if not isinstance(content, Mapping):
        raise WireError("it names no categories")
    for names in content.values():
        is_list = isinstance(names, list) and len(names) <= MOST_CATEGORIES
        if not is_list or not all(
            isinstance(name, str) and len(name) <= LONGEST_NAME and name.isprintable() for name in names
        ):
            raise WireError(
                f"its categories are no lists of at most {MOST_CATEGORIES:,} texts in one line, "
                f"of at most {LONGEST_NAME} characters"
            )
    return {str(column): list(names) for column, names in content.items()}
