"""Messages between the server of a federation and its clients: asked, awaited, checked and counted.

A server has one: `rounds` and `statistics` say what is asked (`Uploads`), the exchange whom and how long. A
client whose answer is invalid or late is left out of the round, with the reason in the round's record.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from copfl.errors import CopflError, WireError
from copfl.federation.protocol.events import Event, Log, silent
from copfl.federation.protocol.messages import TRAIN, Transport, printable
from copfl.federation.protocol.proposal import Proposal
from copfl.federation.protocol.secure_sum import Floats
from copfl.federation.protocol.settings import Terms
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.registry import Registry
from copfl.wire import Head, Packet

T = TypeVar("T")
SLOW = 15.0  # seconds after which a phase says whom it waits for


class PhaseTime(NamedTuple):
    """How long a phase of a round took, and for whom it waited longest."""

    seconds: float
    last: int | None  # the client whose answer ended it; None: its deadline did


@dataclass
class ServerRound:
    """A round, or a pass of statistics, as the server knows it while messages come in."""

    number: int  # from 0
    total: Any = None  # the sum of the uploads, in double precision
    half: Any = None  # the sum of the first half alone, where halves are compared
    dtypes: list[torch.dtype] = field(default_factory=list)  # of the total's tensors in the end
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)  # client -> the fields beside its upload
    bytes_up: dict[int, int] = field(default_factory=dict)  # by client
    bytes_down: dict[int, int] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # client -> why it is left out
    retry_at: dict[int, float] = field(default_factory=dict)  # client -> when to ask it again
    pending: dict[str, tuple[int, int]] = field(default_factory=dict)  # message id -> client, node
    phases: dict[str, PhaseTime] = field(default_factory=dict)  # those of a secure sum
    means: dict[str, float | None] = field(default_factory=dict)  # of metrics known by their mean alone
    # What the server itself knows.
    per_client: dict[str, dict[int, float | None]] = field(default_factory=dict)
    secure_sum: dict[str, Any] = field(default_factory=dict)  # for the round's record; empty: there is none
    halves: dict[str, Any] = field(default_factory=dict)  # for it too: of the messages about both halves


class Uploads(Protocol):
    """What a server asks its clients for in a round, and what it does with it."""

    def down(self, client: int, **further: Any) -> Packet:
        """The message to one client, with further fields.

        Args:
            client: The receiver.
            further: Fields that the message has as well.
        """

    def add(self, now: ServerRound, client: int, packet: Packet) -> None:
        """Adds an upload to the round's total; WireError if it is invalid.

        Args:
            now: The round.
            client: The sender.
            packet: Its message.
        """

    def summed(self, now: ServerRound, values: Floats) -> None:
        """Enters the sum of all vectors into the round, where no single upload is seen.

        Args:
            now: The round.
            values: The sum of the vectors of all its clients.
        """

    @property
    def size(self) -> int:
        """The entries of a vector that is added up unseen."""


@dataclass
class Exchange:
    """The server's side of the messages of one run; here it sees each upload."""

    settings: Terms
    transport: Transport
    folder: ServerFolder
    log: Log = silent
    pause: float = 1.0  # at most so many seconds between two polls of the transport
    retry: float = 30.0  # seconds until a client that failed is asked again
    proposal: Proposal | None = None  # the run's; it says which key is which client
    revoked: Callable[[], Collection[str]] = frozenset  # keys of members that are revoked now

    def __post_init__(self) -> None:
        self.federation = self.settings.federation
        clients = self.federation.clients
        self.registry = Registry(self.folder.run, clients, self.log, self.proposal, self.revoked)

    def collect(self, number: int, selected: list[int], uploads: Uploads) -> ServerRound:
        """One round of these clients, when it has the uploads that it needs.

        Args:
            number: Of the round, from 0.
            selected: The clients.
            uploads: What they are asked for.
        """
        now, is_reported = ServerRound(number), False
        started = sent = time.monotonic()
        while True:
            self.registry.refresh(self.transport)
            for client in selected:
                if self._is_due(now, client):
                    self.send(now, client, uploads.down(client))
            self.receive(now, partial(uploads.add, now))
            is_late, is_greeting = self.expired(now, sent), bool(self.registry.pending)
            has_enough = len(now.reports) >= self.federation.minimum
            if is_late:
                sent, is_reported = time.monotonic(), False
            if has_enough and not now.pending and (is_late or not is_greeting):
                break
            if not (has_enough or is_reported or now.pending or is_greeting):
                away = [c for c in selected if c not in self.registry.nodes and c not in now.reports]
                missing = map(self.registry.named, away)
                absent = f"; not connected: {', '.join(missing)}" if away else ""
                count = f"{len(now.reports)} of the {self.federation.minimum} replies it needs"
                reason = f"waits: {count}{absent}"
                self.log(
                    f"round {now.number + 1} {reason}", Event.WAITING, round=now.number + 1, reason=reason
                )
                is_reported = True
            self.sleep(started)
        for client in selected:
            if client not in now.reports:
                now.failures.setdefault(client, "not connected")
        return now

    def _is_due(self, now: ServerRound, client: int) -> bool:
        """Whether to ask this client: for the first time, or again if the round lacks uploads."""
        node = self.registry.nodes.get(client)
        if node is None or client in now.reports or (client, node) in now.pending.values():
            return False
        is_short = len(now.reports) + len(now.pending) < self.federation.minimum
        return client not in now.failures or (is_short and time.monotonic() >= now.retry_at.get(client, 0))

    def head(self, kind: str, round: int, client: int = -1) -> Head:
        """The head of a message of this run.

        Args:
            kind: Of the message.
            round: From 0.
            client: The one that sends or receives; -1: none.
        """
        return Head(kind, self.folder.run, self.settings.layout, round, client)

    def send(self, now: ServerRound, client: int, packet: Packet) -> None:
        """Sends a message to a client; an earlier one that it has not answered is not waited for any more.

        Args:
            now: The round, which notes what is pending and how many bytes were sent.
            client: One that is connected.
            packet: The message.
        """
        node = self.registry.nodes[client]
        now.pending = {i: request for i, request in now.pending.items() if request[0] != client}
        now.pending[self.transport.send(node, TRAIN, packet, self.federation.network.deadline)] = client, node
        now.bytes_down[client] = now.bytes_down.get(client, 0) + packet.nbytes

    def ask(
        self, now: ServerRound, phase: str, packets: dict[int, Packet], read: Callable[[int, Packet], T]
    ) -> dict[int, T]:
        """The answers of a phase by client; the clients without one are left out.

        Args:
            now: The round.
            phase: Its name, for the log.
            packets: The message to each client.
            read: Makes the value of a client's answer; a CopflError leaves the client out.
        """
        answers: dict[int, T] = {}
        for client, packet in packets.items():
            if client in self.registry.nodes:
                self.send(now, client, packet)
            else:
                now.failures[client] = f"disconnected before phase {phase!r}"

        def receive(client: int, packet: Packet) -> None:
            answers[client] = read(client, packet)
            now.bytes_up[client] = now.bytes_up.get(client, 0) + packet.nbytes

        started, is_told = time.monotonic(), False
        while now.pending:
            self.receive(now, receive)
            self.expired(now, started, f" in phase {phase!r}")
            if now.pending:
                if not is_told and time.monotonic() - started > SLOW:
                    self._tell_waiting(now, phase, sorted(client for client, _ in now.pending.values()))
                    is_told = True
                self.registry.refresh(self.transport)
                self.sleep(started)
        last = None if answers.keys() != packets.keys() else next(reversed(answers), None)
        now.phases[phase] = PhaseTime(round(time.monotonic() - started, 3), last)
        if is_told:
            self._tell_waiting(now, phase, [])
        return answers

    def _tell_waiting(self, now: ServerRound, phase: str, clients: list[int]) -> None:
        """Says for whom a phase waits; with no client, that it waits no more."""
        whom = f"client{'s' * (len(clients) != 1)} {', '.join(map(self.registry.named, clients))}"
        reason = (
            f"phase {phase!r} waits for {whom}, for {SLOW:g} s already"
            if clients
            else f"phase {phase!r} has ended"
        )
        self.log(
            f"round {now.number + 1}: {reason}",
            Event.WAITING,
            round=now.number + 1,
            clients=clients,
            reason=reason,
        )

    def receive(self, now: ServerRound, read: Callable[[int, Packet], object]) -> None:
        """Reads the replies that have arrived; a client whose reply is invalid is left out.

        Args:
            now: The round.
            read: Takes a client's answer; a CopflError leaves the client out.
        """
        for reply in self.transport.replies(list(now.pending)):
            client, _ = now.pending.pop(reply.message_id)
            try:
                if refused := self.registry.refusal(client):
                    raise WireError(refused)
                read(client, Packet(*reply.checked()))
            except CopflError as error:
                reason = now.failures[client] = printable(error)
                who = self.registry.named(client)
                text = f"round {now.number + 1}: client {who} is left out: {reason}"
                self.log(text, Event.REJECTED, round=now.number + 1, client=client, reason=reason)
                now.retry_at[client] = time.monotonic() + self.retry

    def expired(self, now: ServerRound, sent: float, where: str = "") -> bool:
        """Whether the messages have reached their deadline; the clients without a reply are left out.

        Args:
            now: The round.
            sent: When the messages were sent, on the monotonic clock.
            where: Said in the reason of clients without a reply.
        """
        if time.monotonic() < sent + self.federation.network.deadline:
            return False
        for client, _ in now.pending.values():
            now.failures[client] = f"no reply within {self.federation.network.deadline:g} s{where}"
        now.pending.clear()
        return True

    def sleep(self, started: float) -> None:
        """A reply is late by a tenth of the round at most; a long round needs few polls."""
        time.sleep(min(self.pause, max(0.05, 0.1 * (time.monotonic() - started))))
