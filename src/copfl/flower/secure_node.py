"""A client's part in secure aggregation of local updates: what it adds, and what it remembers of it."""

import hashlib
from functools import partial
from typing import NamedTuple

import torch

from copfl import wire
from copfl.core import tree
from copfl.core.payload import innermost
from copfl.data.contract import Contract
from copfl.flower import node, secure_total
from copfl.flower.keys import own_key
from copfl.flower.known_data import FOLDER
from copfl.flower.node import LoadData, node_data
from copfl.flower.node_message import NodeConfig, head_of
from copfl.flower.private_node import upload_noise
from copfl.flower.proposal import Proposal
from copfl.flower.registry import key_path, state_dir
from copfl.flower.secure_memory import Memory, changes_allowed
from copfl.flower.secure_phases import Asked, Contribution, added_up, identity
from copfl.flower.settings import Settings
from copfl.flower.transport import Field
from copfl.wire import Packet


class Training(NamedTuple):
    """The sum of the local updates of a round."""

    load_data: LoadData

    def contribution(self, asked: Asked, packet: Packet) -> Contribution:
        """A value that is not finite or out of range is refused before it is masked."""
        settings, memory = asked.settings, Memory(asked.folder)
        assert isinstance(settings, Settings)
        data = self.load_data(settings, node.numbered(asked.node_config, asked.head))
        samples = memory.name_of(data.samples)
        invited, allowed = (
            asked.identities(asked.session.cohort.values()),
            changes_allowed(asked.node_config),
        )
        memory.history(samples).expect(invited, rows_of(settings), allowed)  # before it trains
        if (noised := settings.noised) is not None:
            model = innermost(node.decode(settings, asked.node_config, packet)[1]).w
            secure_total.require_room(model, noised.clip, noised.clip * upload_noise(noised), settings.rules)
        trained = node.train(settings, asked.node_config, packet, lambda *_: data)
        clients, rules = settings.federation.clients, settings.rules
        with torch.no_grad():
            total = secure_total.summand_of(settings.algorithm, settings.task, clients, trained.output.upload)
        reported = node.reports_metrics(settings, asked.node_config)
        sums = secure_total.sums_of(total, trained.metrics, rules, reported=reported)
        fingerprints = " ".join(wire.fingerprint(t) for t in tree.leaves(total))
        return Contribution(
            secure_total.words_of(sums, rules, noised=noised is not None),
            samples,
            hashlib.sha256(fingerprints.encode()).hexdigest(),
            {Field.NOTE: trained.note},
            partial(trained.save, asked.node_config),
            trained.noised,
        )

    def enter(self, asked: Asked, cohort: frozenset[str]) -> None:
        """The data are added up with one cohort, see `secure_memory`."""
        memory, session = Memory(asked.folder), asked.session
        assert isinstance(asked.settings, Settings)
        rows, allowed = rows_of(asked.settings), changes_allowed(asked.node_config)
        memory.history(session.samples).admit(cohort, rows, session.upload, allowed)
        memory.remember(session.samples, cohort, rows, session.upload)


def rows_of(settings: Settings) -> str:
    """Which of a node's rows train, by the settings that leave some out; empty: all of them."""
    run, text = settings.run.run, settings.federation.samples.contract
    kept = [f"but {run.validation!r} for validation with seed {run.seed}"] if run.validation else []
    if text and (contract := Contract.read(text)).missing == "drop":
        columns = (*contract.target_names, *(column.name for column in contract.features))
        kept.append(f"complete in {', '.join(sorted(columns))}")
    return "; ".join(kept)


def local_update(
    settings: Settings,
    node_config: NodeConfig,
    packet: Packet,
    load_data: LoadData = node_data,
    proposal: Proposal | None = None,
) -> Packet:
    """The answer to a message of a round: the upload, or that of a phase if aggregation is secure.

    Args:
        settings: those of the accepted proposal.
        node_config: the node's configuration.
        packet: the server's message.
        load_data: reads the node's data.
        proposal: has the members of sums; None if the node's policy allows run configs that nobody signed.
    """
    if not settings.federation.secure.aggregation:
        return _plain_update(settings, node_config, packet, load_data, proposal)
    return added_up(settings, node_config, packet, Training(load_data), proposal)


def _plain_update(
    settings: Settings,
    node_config: NodeConfig,
    packet: Packet,
    load_data: LoadData,
    proposal: Proposal | None,
) -> Packet:
    """An upload without secure aggregation: a sum of one, if the data have been in a secure sum."""
    folder = state_dir(node_config) / FOLDER
    memory = Memory(folder)
    if memory.is_empty:
        return node.local_update(settings, node_config, packet, load_data)
    head = head_of(settings, node_config, packet)
    data = load_data(settings, node.numbered(node_config, head))
    alone = frozenset([identity(proposal, own_key(key_path(node_config)).public)])
    history = memory.history(samples := memory.name_of(data.samples))
    rows = rows_of(settings)
    history.expect(alone, rows, changes_allowed(node_config))  # before it trains
    reply = node.local_update(settings, node_config, packet, lambda *_: data)
    if history:
        memory.remember(samples, alone, rows, hashlib.sha256(reply.body).hexdigest())
    return reply
