"""A client's part in secure aggregation of local updates: what it adds, and what it remembers of it."""

import hashlib
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from copfl import wire
from copfl.core import tree
from copfl.core.payload import innermost
from copfl.data.contract.contract import Contract
from copfl.errors import WireError
from copfl.experiment.analysis.benefit import design, judged
from copfl.federation.node import halves_memory, update
from copfl.federation.node.data import LoadData, node_data
from copfl.federation.node.halves import NO_HALVES, compare_halves
from copfl.federation.node.message import decode, head_of
from copfl.federation.node.node import Node
from copfl.federation.node.records import ClientRecords
from copfl.federation.node.secure_memory import Added, Memory, Upload, fingerprint
from copfl.federation.node.secure_phases import Asked, Contribution, added_up
from copfl.federation.policy.request import require_half
from copfl.federation.protocol import halves, secure_total
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.noise import upload_noise
from copfl.federation.protocol.settings import Settings, Terms
from copfl.wire import Packet


@dataclass(frozen=True)
class Training:
    """The sum of the local updates of a round."""

    load_data: LoadData

    def contribution(self, asked: Asked, packet: Packet) -> Contribution:
        """A value that is not finite or out of range is refused before it is masked."""
        settings, memory = asked.settings, Memory(asked.node.memory)
        assert isinstance(settings, Settings)
        data = self.load_data(settings, asked.node.numbered(asked.head.client))
        samples = memory.name_of(data.samples)
        invited = asked.identities(asked.session.cohort.values())
        divided = division_of(settings, asked.head.client)
        asked_for = Added(samples, invited, rows_of(settings), divided, frozenset())
        memory.history(samples).expect(asked_for, asked.node.config.cohort_changes)  # before it trains
        if divided:
            questions = asked.node.policy.statistics.questions
            halves_memory.Concluded(asked.node.memory).expect(samples, asked.head.run, questions)
        if (noised := settings.noised) is not None:
            model = innermost(decode(settings, asked.node, packet)[1]).w
            secure_total.require_room(model, noised.clip, noised.clip * upload_noise(noised), settings.rules)
        trained = update.train(settings, asked.node, packet, lambda *_: data)
        clients, rules = settings.federation.clients, settings.rules
        with torch.no_grad():
            total = secure_total.summand_of(settings.algorithm, settings.task, clients, trained.output.upload)
        half = ()
        if settings.run.run.benefit:
            is_first = asked.head.client in halves.first_clients(settings.federation, asked.head.round)
            half = total if is_first else tree.each(torch.zeros_like, total)
        reported = update.reports_metrics(settings, asked.node)
        sums = secure_total.sums_of(total, trained.metrics, rules, reported=reported, half=half)
        fingerprints = " ".join(wire.fingerprint(t) for t in tree.leaves(total))
        return Contribution(
            secure_total.words_of(sums, rules, noised=noised is not None),
            samples,
            hashlib.sha256(fingerprints.encode()).hexdigest(),
            {Field.NOTE: trained.note},
            partial(trained.save, asked.node),
            trained.noised,
        )

    def enter(self, asked: Asked, cohort: frozenset[str]) -> None:
        """The data are added up with one cohort, see `secure_memory`."""
        memory, session = Memory(asked.node.memory), asked.session
        assert isinstance(asked.settings, Settings)
        added = Added(session.samples, cohort, rows_of(asked.settings), *self.division(asked))
        memory.history(session.samples).admit(added, asked.node.config.cohort_changes)
        memory.remember(added)

    def division(self, asked: Asked) -> tuple[str, frozenset[Upload]]:
        """How the members are divided into halves, and the upload with this node's half."""
        settings, upload = asked.settings, asked.session.upload
        if not settings.run.run.benefit:
            return "", frozenset([Upload(upload)])
        survivors = {int(client) for client in asked.about[Field.SURVIVORS]}
        first = survivors & halves.first_clients(settings.federation, asked.head.round)
        for half in (first, survivors - first):
            require_half(asked.node.policy, len(half))
        own = first if asked.head.client in first else survivors - first
        members = asked.identities(asked.session.cohort[client] for client in own)
        return division_of(settings, asked.head.client), frozenset([Upload(upload, fingerprint(members))])


class Judging(Training):
    """The secure sum, after the last round, of what each client concludes from its losses.

    A node answers one question in a run, and of its data in as many runs as its owner allows: from several,
    the differences of each judge could be solved for. Every judge must have been shown the same models: else
    the conclusions of all but one could be made zero, and the sum would be that of a single client.
    """

    def contribution(self, asked: Asked, packet: Packet) -> Contribution:
        settings, federation = asked.settings, asked.settings.federation
        assert isinstance(settings, Settings)
        if not settings.run.run.benefit:
            raise WireError(NO_HALVES)
        count = asked.about.get(Field.ROUNDS)
        if type(count) is not int or not 0 < count <= federation.rounds:
            raise WireError("it does not say how many rounds its question is about")
        question = wire.decode(packet, halves.like_question(count), asked.head).record
        folder = ClientRecords(asked.node.folder, asked.head.run).folder
        rounds: list[int] = question.rounds.tolist()
        digest = hashlib.sha256(packet.body).hexdigest()
        known = halves_memory.read(folder)
        for round, message in zip(rounds, question.messages, strict=True):
            if round not in known or known[round].message != bytes(message.tolist()).hex():
                raise WireError(f"this node has not compared these halves in round {round + 1}")
        if halves_memory.answered(folder) not in ("", digest):
            raise WireError("this node has concluded what the others are worth, and does so once in a run")
        regression = design(halves.memberships(federation, rounds))
        differences = np.array([known[round].difference for round in rounds])
        is_repeated = len(set(rounds)) < len(rounds)
        if regression is None or is_repeated or not np.isfinite(differences).all():
            raise WireError("the rounds that it names do not determine the benefit")
        words = halves.words_of(judged(regression, differences, asked.head.client), settings.rules)
        data = self.load_data(settings, asked.node.numbered(asked.head.client))
        samples = Memory(asked.node.memory).name_of(data.samples)

        def note() -> None:
            questions = asked.node.policy.statistics.questions
            halves_memory.Concluded(asked.node.memory).enter(samples, asked.head.run, digest, questions)
            halves_memory.answer(folder, digest)

        upload = hashlib.sha256(words.tobytes()).hexdigest()
        return Contribution(words, samples, upload, {Field.JUDGEMENT: True}, note)

    def division(self, asked: Asked) -> tuple[str, frozenset[Upload]]:
        """It is of all judges together."""
        return "", frozenset([Upload(asked.session.upload)])


def division_of(settings: Terms, client: int) -> str:
    """What the halves follow from: the seed, the number of clients, and this node's; empty: no halves.

    Where members exchange their numbers, these have other ones, and refuse; without them no other adds up.
    """
    run = settings.run.run
    return f"{run.seed}, client {client} of {settings.federation.clients}" if run.benefit else ""


def rows_of(settings: Settings) -> str:
    """Which of a node's rows train, by the settings that leave some out; empty: all of them."""
    run, text = settings.run.run, settings.federation.samples.contract
    kept = [f"but {run.validation!r} for validation with seed {run.seed}"] if run.validation else []
    if text and (contract := Contract.read(text)).missing == "drop":
        columns = (*contract.target_names, *(column.name for column in contract.features))
        kept.append(f"complete in {', '.join(sorted(columns))}")
    return "; ".join(kept)


def local_update(settings: Settings, node: Node, packet: Packet, load_data: LoadData = node_data) -> Packet:
    """The answer to a message of a round: the upload, or that of a phase if aggregation is secure.

    Args:
        settings: those of the accepted proposal.
        node: the one that is asked; its proposal has the members of sums.
        packet: the server's message.
        load_data: reads the node's data.
    """
    if wire.opened_head(packet).get("kind") == halves.HALVES:
        return compare_halves(settings, node, packet, load_data)
    if not settings.federation.secure.aggregation:
        return _plain_update(settings, node, packet, load_data)
    is_last = wire.opened_head(packet).get("round") == settings.federation.rounds
    summand = Judging(load_data) if is_last else Training(load_data)
    return added_up(settings, node, packet, summand)


def _plain_update(settings: Settings, node: Node, packet: Packet, load_data: LoadData) -> Packet:
    """An upload without secure aggregation: a sum of one, if the data have been in a secure sum."""
    memory = Memory(node.memory)
    if memory.is_empty:
        return update.local_update(settings, node, packet, load_data)
    head = head_of(settings, node, packet)
    data = load_data(settings, node.numbered(head.client))
    alone = frozenset([node.identity(node.key.public)])
    history = memory.history(samples := memory.name_of(data.samples))
    plain = Added(samples, alone, rows_of(settings), "", frozenset())
    history.expect(plain, node.config.cohort_changes)  # before it trains
    reply = update.local_update(settings, node, packet, lambda *_: data)
    if history:
        memory.remember(plain._replace(uploads=frozenset([Upload(hashlib.sha256(reply.body).hexdigest())])))
    return reply
