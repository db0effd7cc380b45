"""The server's rounds with secure aggregation: it receives masked vectors and learns their sum.

A client may be lost in every phase. If too few are left before they reveal their shares, the round begins
again with fresh keys. If too few reveal theirs, the round ends without a result: nodes refuse to add it up
again with other clients, because two sums of the same uploads over different clients differ by single
uploads.
"""

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from copfl import wire
from copfl.errors import RunError, WireError, raised_as
from copfl.federation.protocol.events import Event, Log, silent
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.keys import is_signed
from copfl.federation.protocol.messages import Field, Transport, printable, read_json
from copfl.federation.protocol.secure_members import Subject, context_of, keys_statement, sum_statement
from copfl.federation.protocol.secure_sum import PHASES, Floats, Keys, MaskedSum, Rules, neighbours
from copfl.federation.protocol.settings import Terms
from copfl.federation.server.exchange import Exchange, ServerRound, Uploads
from copfl.federation.server.folder import ServerFolder
from copfl.wire import Packet

T = TypeVar("T")
KEYS, SHARES, MASKED, CONSISTENT, REVEALED = PHASES
REVEALING = "revealing.json"  # in the run's folder: the round whose shares were asked for


class SumQuestion(NamedTuple):
    """What is added up."""

    down: Callable[..., Packet]  # the message that asks a client for its vector; its body is the same for all
    size: int  # entries of a vector
    needed: int  # clients that must send their vectors


@dataclass
class SecureExchange(Exchange):
    """An exchange in which the server learns the sum of the clients' vectors alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = self.settings.rules

    def collect(self, number: int, selected: list[int], uploads: Uploads) -> ServerRound:
        """One round of these clients; it has no total if the sum was lost while shares were revealed.

        Args:
            number: Of the round, from 0.
            selected: The clients.
            uploads: What they are asked for.
        """
        now, needed = ServerRound(number), max(self.federation.minimum, self.rules.threshold)
        if self.was_revealing(number):
            why = "the server ended while it added up"
            now.failures = dict.fromkeys(selected, why)
            return self._without_result(now, why)
        question = SumQuestion(uploads.down, uploads.size, needed)
        while True:
            connected = self.connected(number, selected, needed)
            now.failures = {n: "not connected" for n in selected if n not in connected}
            try:
                values = self.added_up(now, connected, question)
            except WireError as error:
                reason = f"begins again with fresh keys: {error}"
                self.log(
                    f"round {now.number + 1} {reason}", Event.WAITING, round=now.number + 1, reason=reason
                )
                time.sleep(self.retry)
                continue
            try:
                if values is not None:
                    uploads.summed(now, values)
            except WireError as error:  # a member may add any numbers, which nobody sees
                return self._without_result(now, str(error))
            return now

    def added_up(self, now: ServerRound, clients: list[int], question: SumQuestion) -> Floats | None:
        """The sum of the clients' vectors after all phases; None if it was lost while shares were revealed.

        WireError if too few clients are left before they reveal shares.

        Args:
            now: The round; the bytes and the fields beside the vectors are entered into it.
            clients: Who is asked.
            question: What is added up.
        """
        session = secrets.token_hex(16)
        stayed: dict[str, list[int]] = {}

        def ask(phase: str, fields: Callable[[int], dict[str, Any]], read: Callable[..., T]) -> dict[int, T]:
            clients_of_phase = clients if phase == KEYS else stayed[PHASES[PHASES.index(phase) - 1]]
            packets = {}
            for n in clients_of_phase:
                about = {Field.SESSION: session, **fields(n)}
                is_masked, head = phase == MASKED, self.head(phase, now.number, n)
                packets[n] = question.down(n, **about) if is_masked else wire.encode((), head, about=about)
            if phase == MASKED and len({packet.body for packet in packets.values()}) > 1:
                raise RunError(
                    "the server's message differs between clients, so their masks do not cancel out"
                )
            answers = self.ask(now, phase, packets, read)
            stayed[phase] = sorted(answers)
            needed = self.rules.threshold if phase in (CONSISTENT, REVEALED) else question.needed
            if len(answers) < needed:
                raise WireError(f"{len(answers)} clients answered in phase {phase!r}; {needed} are needed")
            return answers

        subject = Subject(self.folder.run, now.number, session)
        signed = ask(KEYS, lambda n: {}, self._reader(now, KEYS, partial(_signed_keys, self.rules, subject)))
        order = sorted(signed)
        cohort = {n: signed[n].member for n in order}
        if len(set(cohort.values())) < len(cohort):
            raise WireError("two clients have the same member key; a node's state-dir was copied")
        secrets.SystemRandom().shuffle(order)
        keys = {n: answer.keys for n, answer in signed.items()}
        total = MaskedSum(self.rules, keys, neighbours(order, self.rules.neighbours), {}, {})

        def others(client: int) -> dict[str, Any]:
            visible = total.keys_for(client)
            return {
                Field.COHORT: {str(n): member for n, member in cohort.items()},
                Field.KEYS: {str(n): [key.hex() for key in pair] for n, pair in visible.items()},
                Field.SIGNATURE: {str(n): signed[n].signature for n in visible},
            }

        for n, (sealed, commitment) in ask(SHARES, others, self._reader(now, SHARES, _shares)).items():
            total.sealed[n], total.commitments[n] = sealed, commitment
        total.context = context_of(self.settings, subject, cohort, question.down(order[0]).body)

        def holders(client: int) -> set[int]:
            return {client, *total.linked[client]}

        def add(client: int, packet: Packet) -> dict[str, Any]:
            like = torch.zeros(question.size * self.rules.width, dtype=torch.uint8)
            opened = wire.decode(packet, like, self.head(MASKED, now.number, client))
            total.add(client, opened.record.numpy().tobytes(), question.size)
            # Metrics are in the sum, and are checked there.
            return {Field.NOTE: opened.about.get(Field.NOTE)}

        texts = {n: {str(m): t.decode() for m, t in total.sealed_for(n).items()} for n in total.sealed}
        now.reports = ask(MASKED, lambda n: {Field.SHARES: texts[n]}, add)
        survivors = sorted(total.survivors)
        statement = sum_statement(subject, total.context, [cohort[n] for n in survivors])
        signatures = ask(
            CONSISTENT,
            lambda n: {Field.SURVIVORS: survivors},
            self._reader(now, CONSISTENT, partial(_signature, cohort, statement)),
        )
        for client in now.reports:
            self.log("", Event.ACCEPTED, round=now.number + 1, client=client, bytes=now.bytes_up[client])
        # From here the round is not repeated, not even by a server that is started again.
        write_json(self.folder.path / REVEALING, {"round": now.number})
        try:
            revealed = ask(
                REVEALED,
                lambda n: {Field.SIGNATURE: {str(m): s for m, s in signatures.items() if m in holders(n)}},
                self._reader(now, REVEALED, _revealed),
            )
            values = total.total(revealed)
        except WireError as error:
            self._without_result(now, str(error))
            return None
        for client in now.reports:  # a client that was lost after it sent its vector counts
            now.failures.pop(client, None)
        phases = {phase: time._asdict() for phase, time in now.phases.items()}
        now.secure_sum = {**stayed, "step": self.rules.step, "phases": phases}
        return values

    def _without_result(self, now: ServerRound, why: str) -> ServerRound:
        text = f"round {now.number + 1} has no result: {why}"
        self.log(text, Event.NO_RESULT, round=now.number + 1, reason=printable(why))
        now.reports, now.total = {}, None
        now.secure_sum = {"failed": why}
        return now

    def connected(self, number: int, chosen: list[int], needed: int, until: float = math.inf) -> list[int]:
        """The connected clients among these, when so many as needed are, or at a time of the monotonic clock.

        Args:
            number: Of the round, from 0.
            chosen: The clients.
            needed: How many must be connected.
            until: The time.
        """
        is_reported = False
        while True:
            self.registry.refresh(self.transport)
            online = [n for n in chosen if n in self.registry.nodes]
            if (len(online) >= needed and not self.registry.pending) or time.monotonic() > until:
                return online
            if not (is_reported or self.registry.pending):
                missing = ", ".join(self.registry.named(n) for n in chosen if n not in online)
                count = f"{len(online)} of the {needed} clients it needs"
                reason = f"waits: {count}; not connected: {missing}"
                self.log(f"round {number + 1} {reason}", Event.WAITING, round=number + 1, reason=reason)
                is_reported = True
            time.sleep(min(self.pause, 0.2))

    def _reader(
        self, now: ServerRound, phase: str, read: Callable[[int, dict[str, Any]], T]
    ) -> Callable[[int, Packet], T]:
        """A function that reads the fields of an answer."""

        def reader(client: int, packet: Packet) -> T:
            fields = wire.decode(packet, (), self.head(phase, now.number, client)).about
            unreadable = f"its answer in phase {phase!r} cannot be read"
            with raised_as(WireError, unreadable, KeyError, TypeError, ValueError, AttributeError):
                return read(client, fields)

        return reader

    def was_revealing(self, number: int) -> bool:
        """Whether a server that was killed had asked for the shares of this round."""
        revealing = read_json(self.folder.path / REVEALING).get("round")
        return revealing == number and not self.federation.session.rollback


def exchange_of(
    settings: Terms, transport: Transport, folder: ServerFolder, log: Log = silent, **options: Any
) -> Exchange:
    """The exchange of a run: secure if its settings say so.

    Args:
        settings: What the machines agreed on.
        transport: The network.
        folder: The server's, of this run.
        log: What is told to people, and to the audit log.
        options: The other fields of `Exchange`.
    """
    kind = SecureExchange if settings.federation.secure.aggregation else Exchange
    return kind(settings, transport, folder, log, **options)


class SignedKeys(NamedTuple):
    """A client's answer in the first phase."""

    keys: Keys
    member: str
    signature: str


def _signed_keys(rules: Rules, subject: Subject, client: int, fields: dict[str, Any]) -> SignedKeys:
    keys = Keys(*map(bytes.fromhex, fields[Field.KEYS]))
    answer = SignedKeys(keys, str(fields[Field.MEMBER]), str(fields[Field.SIGNATURE]))
    if not is_signed(answer.member, keys_statement(subject, client, rules, keys), answer.signature):
        raise WireError("its keys are not signed by its member key")
    return answer


def _signature(cohort: dict[int, str], statement: bytes, client: int, fields: dict[str, Any]) -> str:
    signature = str(fields[Field.SIGNATURE])
    if not is_signed(cohort[client], statement, signature):
        raise WireError("it signed another sum")
    return signature


def _shares(_client: int, fields: dict[str, Any]) -> tuple[dict[int, bytes], bytes]:
    sealed = {int(n): str(text).encode() for n, text in fields[Field.SHARES].items()}
    return sealed, bytes.fromhex(fields[Field.COMMITMENT])


def _revealed(_client: int, fields: dict[str, Any]) -> dict[int, bytes]:
    return {int(n): bytes.fromhex(share) for n, share in fields[Field.SHARES].items()}
