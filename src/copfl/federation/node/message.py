"""What a node checks of a message first: its owner's policy, and whether it was asked for this run."""

from typing import Any

import torch

from copfl import wire
from copfl.core.algorithm import received
from copfl.errors import WireError
from copfl.federation.node.run_limit import admit_run
from copfl.federation.policy.file import policy_of
from copfl.federation.policy.record import Policy
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.node_config import NodeConfig, known_client, state_dir
from copfl.federation.protocol.settings import Settings, Terms
from copfl.settings.federation import is_plain_name
from copfl.wire import Head, Packet


def node_policy(node_config: NodeConfig) -> Policy:
    """The policy of the node's owner."""
    return policy_of(node_config, state_dir(node_config))


def head_of(settings: Terms, node_config: NodeConfig, packet: Packet) -> Head:
    """The head that the server's message must have; WireError if it names no run, round or client."""
    fields = wire.opened_head(packet)
    run, round, client = (fields.get(name) for name in ("run", "round", "client"))
    if type(run) is not str or type(round) is not int or type(client) is not int:
        raise WireError("its head lacks the run, the round or the client")
    if not is_plain_name(run):  # the name of a folder on this node
        raise WireError(f"its run {run[:40]!r} is not a plain name")
    session, rounds = settings.federation.session, settings.federation.rounds
    if session.run and run != session.run:  # the policy allowed this one
        raise WireError(f"it is of run {run}, and the run config of {session.run}")
    if not 0 <= round <= rounds:  # a new client is asked after the last one
        raise WireError(f"it is of round {round}, and the run has {rounds} rounds")
    admit_run(node_policy(node_config), state_dir(node_config), run)
    known = known_client(node_config, run)
    return Head("down", run, settings.layout, round, client if known < 0 else known)


def numbered(node_config: NodeConfig, head: Head) -> NodeConfig:
    """The node's configuration with the number that the client has in this run."""
    return {**node_config, "client": head.client}


def decode(settings: Settings, node_config: NodeConfig, packet: Packet) -> tuple[Head, Any, dict[str, Any]]:
    """The head, record and fields of the server's message; WireError if for another model or client."""
    head = head_of(settings, node_config, packet)
    opened = wire.decode(packet, message_like(settings, head.client), head)
    is_int = all(type(opened.about.get(name, 0)) is int for name in (Field.COUNTED, Field.UPDATES))
    if not is_int or not isinstance(opened.about.get(Field.KNOWN_MASKS, {}), dict):
        raise WireError("its fields are not those that a copfl server sends")
    return head, opened.record, opened.about


def message_like(settings: Settings, client: int) -> Any:
    """The structure of the server's messages to a client."""
    clients = settings.federation.clients
    server = settings.algorithm.server_init(settings.task, clients)
    return received(settings.algorithm, server, torch.tensor(min(max(client, 0), clients - 1)))
