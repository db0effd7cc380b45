"""A client's part in secure aggregation of local updates: what it adds, and what it remembers of it."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from copfl import wire
from copfl.core import tree
from copfl.core.evaluation import is_evaluated
from copfl.core.payload import innermost
from copfl.errors import WireError
from copfl.federation.node import update
from copfl.federation.node.data import LoadData, node_data
from copfl.federation.node.halves import compare_halves
from copfl.federation.node.message import decode, head_of
from copfl.federation.node.node import Node
from copfl.federation.node.secure_memory import Added, Memory, rows_of
from copfl.federation.node.secure_phases import KINDS, Asked, Contribution, added_up
from copfl.federation.protocol import secure_total
from copfl.federation.protocol.halves import HALVES
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.noise import upload_noise
from copfl.federation.protocol.settings import Settings
from copfl.wire import Packet

_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Training:
    """The sum of the local updates of a round."""

    load_data: LoadData

    def contribution(self, asked: Asked, packet: Packet) -> Contribution:
        """Nothing that leaves says whether the training failed or a value is out of range: only the owner learns it."""
        settings, memory = asked.settings, Memory(asked.node.memory)
        assert isinstance(settings, Settings)
        data = self.load_data(settings, asked.node.numbered(asked.head.client))
        samples = memory.name_of(data.samples)
        invited = asked.identities(asked.session.cohort.values())
        rows = rows_of(settings.federation, asked.head.client)
        asked_for = Added(samples, invited, rows, frozenset())
        memory.history(samples).expect(asked_for, asked.node.config.cohort_changes)  # before it trains
        if (noised := settings.noised) is not None:
            model = innermost(decode(settings, asked.node, packet)[1]).w
            secure_total.require_room(model, noised.clip, noised.clip * upload_noise(noised), settings.rules)
        trained = update.train(settings, asked.node, packet, lambda *_: data)
        if trained.output is None:
            sums = self.nothing(settings, asked.head.round)
            _log.warning(
                "copfl: this node adds nothing to round %d: %s", asked.head.round + 1, trained.failure
            )
        else:
            with torch.no_grad():
                what = settings.algorithm, settings.task, settings.federation.clients, trained.output.upload
                total = secure_total.summand_of(*what)
            reported = update.reports_metrics(settings, asked.node)
            sums = secure_total.sums_of(total, trained.metrics, settings.rules, reported=reported)
            if problem := secure_total.problem_of(sums, settings.rules):
                _log.warning("copfl: what this node adds to round %d: %s", asked.head.round + 1, problem)
        fingerprints = " ".join(wire.fingerprint(t) for t in tree.leaves(sums.total))
        return Contribution(
            secure_total.words_of(sums, settings.rules),
            samples,
            hashlib.sha256(fingerprints.encode()).hexdigest(),
            {Field.NOTE: trained.note},
            partial(trained.save, asked.node),
            trained.noised,
        )

    def nothing(self, settings: Settings, round: int) -> secure_total.Sums:
        """What a node adds whose training failed: zeros, also of the weight."""
        run, federation = settings.run.run, settings.federation
        evaluated = is_evaluated(round, federation.rounds, run.eval_every)
        what = settings.algorithm, settings.task, settings.shape, settings.rules, federation.augment
        return tree.each(torch.zeros_like, secure_total.example(*what, evaluated))

    def enter(self, asked: Asked, cohort: frozenset[str]) -> None:
        """The data are added up with one cohort, see `secure_memory`."""
        memory, session = Memory(asked.node.memory), asked.session
        assert isinstance(asked.settings, Settings)
        uploads = frozenset([session.upload])
        rows = rows_of(asked.settings.federation, asked.head.client)
        added = Added(session.samples, cohort, rows, uploads)
        memory.history(session.samples).admit(added, asked.node.config.cohort_changes)
        memory.remember(added)


def _plain_update(settings: Settings, node: Node, packet: Packet, load_data: LoadData) -> Packet:
    """An upload without secure aggregation: a sum of one, if the data have been in a secure sum."""
    memory = Memory(node.memory)
    if memory.is_empty:
        return update.local_update(settings, node, packet, load_data)
    head = head_of(settings, node, packet)
    data = load_data(settings, node.numbered(head.client))
    alone = frozenset([node.identity(node.key.public)])
    history = memory.history(samples := memory.name_of(data.samples))
    plain = Added(samples, alone, rows_of(settings.federation, head.client), frozenset())
    history.expect(plain, node.config.cohort_changes)  # before it trains
    reply = update.local_update(settings, node, packet, lambda *_: data)
    if history:
        memory.remember(plain._replace(uploads=frozenset([hashlib.sha256(reply.body).hexdigest()])))
    return reply


def _in_sum(settings: Settings, node: Node, packet: Packet, load_data: LoadData) -> Packet:
    """The answer to a message of a phase of a secure sum."""
    return added_up(settings, node, packet, Training(load_data))


# By whether aggregation is secure, and the kind of the message: all that a node answers in a round.
UPDATES: dict[tuple[bool, str], Callable[[Settings, Node, Packet, LoadData], Packet]] = {
    (False, "down"): _plain_update,
    (False, HALVES): compare_halves,
    **{(True, kind): _in_sum for kind in KINDS},
}


def local_update(settings: Settings, node: Node, packet: Packet, load_data: LoadData = node_data) -> Packet:
    """The answer to a message of a round: the upload, or that of a phase if aggregation is secure.

    Args:
        settings: those of the accepted proposal.
        node: the one that is asked; its proposal has the members of sums.
        packet: the server's message.
        load_data: reads the node's data.
    """
    asked = settings.federation.secure.aggregation, str(wire.opened_head(packet).get("kind"))
    if asked not in UPDATES:
        how = "with" if asked[0] else "without"
        raise WireError(f"a node does not answer {asked[1][:40]!r} in a run {how} secure aggregation")
    return UPDATES[asked](settings, node, packet, load_data)
