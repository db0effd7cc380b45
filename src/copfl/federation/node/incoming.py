"""What a node checks of a message first: whether it was asked for this run, and how many began within a day.

Each answer that is about data begins with `head_of`, or with `decode`, which reads the model too.
"""

import time
from typing import Any

import torch

from copfl import wire
from copfl.core.algorithm import received
from copfl.errors import WireError
from copfl.federation.node.node import Node
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol.files import stored, write_json
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.settings import Terms, TrainingSettings
from copfl.settings.federation import is_plain_name
from copfl.wire import Head, Packet

RUNS = "runs.json"  # in the node's memory: when each run of the last day began, by name
REFUSALS = "refusals.json"  # in the node's memory: when its data could not be used
DAY = 24 * 3600.0


def head_of(settings: Terms, node: Node, packet: Packet) -> Head:
    """The head that the server's message must have; WireError if it names no run, round or client.

    A run that begins on this node is written down: each costs the node time and a folder, whatever its name. It is a
    PolicyError if too many did within a day.

    Args:
        settings: What all members must agree on.
        node: The one that is asked.
        packet: The server's message.
    """
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
    path, now = node.memory / RUNS, time.time()
    begun = stored(path, lambda runs: {str(name): float(at) for name, at in runs.items()}, {})
    if run not in begun and not (node.folder / run).is_dir():
        today = {name: at for name, at in begun.items() if at > now - DAY}
        if len(today) >= node.policy.bounds.runs_per_day:
            why = f"{len(today)} runs have begun on this node within a day"
            raise PolicyError((Refusal("bounds.runs_per_day", why),), "request")
        write_json(path, today | {run: now})
    assigned = node.client_in(run)
    return Head("down", run, settings.layout, round, client if assigned < 0 else assigned)


def refused_today(node: Node) -> list[float]:
    """When requests of the last day could not be answered with the node's data."""
    refusals = stored(node.memory / REFUSALS, lambda times: [float(at) for at in times], [])
    return [at for at in refusals if at > time.time() - DAY]


def count_refusal(node: Node) -> None:
    """Writes down a request that could not be answered with the node's data, before the refusal leaves.

    That there is a refusal, and nothing else of it, depends on the data: a bit for whoever asks.
    """
    write_json(node.memory / REFUSALS, [*refused_today(node), time.time()])


def decode(settings: TrainingSettings, node: Node, packet: Packet) -> tuple[Head, Any, dict[str, Any]]:
    """The head, record and fields of the server's message; WireError if for another model or client.

    Args:
        settings: The federation's.
        node: The one that is asked.
        packet: The server's message.
    """
    head = head_of(settings, node, packet)
    opened = wire.decode(packet, message_like(settings, head.client), head)
    is_int = all(type(opened.about.get(name, 0)) is int for name in (Field.COUNTED, Field.UPDATES))
    if not is_int or not isinstance(opened.about.get(Field.KNOWN_MASKS, {}), dict):
        raise WireError("its fields are not those that a copfl server sends")
    return head, opened.record, opened.about


def message_like(settings: TrainingSettings, client: int) -> Any:
    """The structure of the server's messages to a client.

    Args:
        settings: The federation's.
        client: Its number; a new client has none of the federation's.
    """
    clients = settings.federation.clients
    server = settings.algorithm.server_init(settings.task, clients)
    return received(settings.algorithm, server, torch.tensor(min(max(client, 0), clients - 1)))
