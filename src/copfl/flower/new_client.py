"""A node that comes after the training: it gets the shared model and makes it its own."""

from __future__ import annotations

import time
from typing import Any

import torch

from copfl import wire
from copfl.core import tree
from copfl.errors import CopflError, UsageError, WireError
from copfl.flower.folder import Folder
from copfl.flower.registry import Say
from copfl.flower.server import begin, head_of, numbers, refusal
from copfl.flower.settings import Settings
from copfl.flower.transport import JOIN, Transport
from copfl.wire import Packet


def welcome(
    settings: Settings,
    transport: Transport,
    folder: Folder,
    say: Say = print,
    *,
    pause: float = 1.0,
    patience: float = 600,
) -> list[dict[str, Any]]:
    """What every connected newcomer gained from the trained model: its accuracy before and after its own turns."""
    state = begin(settings, folder)
    rows = settings.algorithm.downlink(state.server, torch.arange(settings.clients))
    first = tree.leaves(tree.row(rows, 0))
    if not all(
        torch.equal(a, b)
        for n in range(settings.clients)
        for a, b in zip(first, tree.leaves(tree.row(rows, n)), strict=True)
    ):
        raise UsageError("this algorithm's server has a model for each client and none for a newcomer")
    new_client = settings.clients  # nobody's number: its batches are nobody else's
    head = head_of(settings, folder, "down", state.round, new_client)
    packet = wire.encode(tree.row(rows, 0), head, settings.wire, about={"turns": settings.join})
    waiting: dict[str, int] = {}
    results: list[dict[str, Any]] = []
    asked: set[int] = set()
    until = time.monotonic() + patience
    while time.monotonic() < until and (not asked or waiting):
        for node in transport.nodes():
            if node not in asked:
                waiting[transport.send(node, JOIN, packet.head, packet.body, patience)] = node
                asked.add(node)
        for reply in transport.replies(list(waiting)):
            node = waiting.pop(reply.message_id)
            try:
                if reply.error or reply.head.startswith('{"refused"'):
                    raise WireError(reply.error or refusal(reply.head))
                about = wire.decode(Packet(reply.head, reply.body), (), head._replace(kind="newcomer")).about
                found = numbers(about)
                before, after = found.get("accuracy_before"), found.get("accuracy_after")
                if before is None or after is None:
                    raise WireError("it does not say its accuracy before and after")
                results.append({"node": node, **found})
                say(f"node {node}: accuracy {before:.4f} before, {after:.4f} after")
            except CopflError as error:
                say(f"node {node}: {error}")
                results.append({"node": node, "why": str(error)})
        time.sleep(pause)
    return results
