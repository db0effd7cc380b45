"""The server's rounds over any network: send, add up what comes back, name what does not, write it all down.

A round ends when everybody it asked has answered or failed, or at its deadline, but never with fewer replies than its
minimum: then it says so, and waits for nodes to come back. The server keeps sums, its checkpoint, and a mask per client
on disk, so that a mask need not travel again until it changes.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import example_upload
from copfl.core.batches import choose
from copfl.errors import CopflError, WireError
from copfl.flower.folder import Folder
from copfl.flower.registry import Registry, Say
from copfl.flower.settings import Settings
from copfl.flower.transport import TRAIN, Transport
from copfl.wire import Head, Packet

LONGEST, MOST_FIGURES = 500, 100  # letters and figures of what a node says that are written down


@dataclass
class State:
    """Everything the server is between two rounds; what the checkpoint holds."""

    server: Any
    round: int = 0  # the next one
    counted: dict[int, int] = field(default_factory=dict)  # client -> the last round that counted its upload
    record: dict[str, Any] | None = None  # of the round before


@dataclass
class Round:
    """A round as it goes on."""

    number: int
    total: Any = None  # of what has arrived
    kinds: list[torch.dtype] = field(
        default_factory=list
    )  # the dtypes that its tensors are to have in the end
    told: dict[int, dict[str, Any]] = field(
        default_factory=dict
    )  # client -> what it said along with its upload
    up: dict[int, int] = field(default_factory=dict)  # client -> bytes
    down: dict[int, int] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)  # client -> why it is left out
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)  # ticket -> client, node
    again: dict[int, float] = field(default_factory=dict)  # client -> when to ask it again after it failed


def upload_like(settings: Settings) -> Any:
    """An upload as this algorithm makes them, from a turn over two made-up samples: what the server expects."""
    return example_upload(
        settings.algorithm, settings.task, settings.shape, settings.augment, settings.clients
    )


def federate(
    settings: Settings,
    transport: Transport,
    folder: Folder,
    say: Say = print,
    *,
    pause: float = 1.0,
    retry: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """The record of each round as it ends, with the checkpoint already on disk."""
    torch.set_num_threads(1)
    state = begin(settings, folder)
    like, registry = upload_like(settings), Registry(folder.run, settings.clients, say)
    for round in range(state.round, settings.rounds):
        begun = time.time()
        now = _play(settings, transport, folder, registry, state, like, say, pause, retry, clock)
        with torch.no_grad():
            total = tree.narrow(now.total, now.kinds)
            state.server, metrics = settings.algorithm.server_update(settings.task, state.server, total)
        state.counted |= dict.fromkeys(now.told, round)
        state.round, state.record = round + 1, _record(now, metrics, time.time() - begun)
        about = {"counted": {str(c): r for c, r in state.counted.items()}, "record": state.record}
        folder.save(
            wire.encode(state.server, head_of(settings, folder, "server", state.round), about=about),
            state.record,
        )
        yield state.record


def begin(settings: Settings, folder: Folder) -> State:
    state = State(settings.algorithm.server_init(settings.task, settings.clients))
    if settings.resume or settings.join:
        opened, round = folder.load(state.server, lambda round: head_of(settings, folder, "server", round))
        counted = {int(c): int(r) for c, r in opened.about["counted"].items()}
        return State(opened.record, round, counted, opened.about["record"])
    return state


def head_of(settings: Settings, folder: Folder, kind: str, round: int, client: int = -1) -> Head:
    return Head(kind, folder.run, settings.layout, round, client)


def _play(
    settings: Settings, transport: Transport, folder: Folder, registry: Registry, state: State, like: Any, say: Say,
    pause: float, retry: float, clock: Callable[[], float],
) -> Round:  # fmt: skip
    """One round, until it has what it needs."""
    now = Round(state.round)
    chosen = [int(n) for n in choose(settings.seed, state.round, settings.clients, settings.asked)]
    deadline, waits = clock() + settings.deadline, False
    while True:
        registry.refresh(transport)
        for client in chosen:
            if _is_due(settings, registry, now, client, clock()):
                packet = _down(settings, folder, state, client)
                node = registry.nodes[client]
                now.waiting = {
                    t: who for t, who in now.waiting.items() if who[0] != client
                }  # its node before this one
                now.waiting[transport.send(node, TRAIN, packet.head, packet.body, settings.deadline)] = (
                    client,
                    node,
                )
                now.down[client] = now.down.get(client, 0) + packet.nbytes
        for reply in transport.replies(list(now.waiting)):
            client, _ = now.waiting.pop(reply.message_id)
            try:
                _take(settings, folder, state, now, like, client, Packet(reply.head, reply.body), reply.error)
                now.why.pop(client, None)
            except CopflError as error:
                say(f"round {now.number + 1}: client {client} is left out: {error}")
                now.why[client], now.again[client] = str(error)[:LONGEST], clock() + retry
        enough, late, meeting = len(now.told) >= settings.minimum, clock() >= deadline, bool(registry.greeted)
        if late:
            for client, _ in now.waiting.values():
                now.why[client] = f"no reply within {settings.deadline:g} s"
            now.waiting.clear()  # the messages are void by now
            deadline, waits = clock() + settings.deadline, False
        if enough and not now.waiting and (late or not meeting):
            break
        if not (enough or waits or now.waiting or meeting):
            missing = [str(c) for c in chosen if c not in registry.nodes and c not in now.told]
            absent = f"; not connected: {', '.join(missing)}" if missing else ""
            say(
                f"round {now.number + 1} waits: {len(now.told)} of the {settings.minimum} replies it needs{absent}"
            )
            waits = True
        time.sleep(pause)
    for client in chosen:
        if client not in now.told:
            now.why.setdefault(client, "not connected")
    return now


def _is_due(settings: Settings, registry: Registry, now: Round, client: int, time: float) -> bool:
    """Whether to ask this client: it is here and was not asked; or it failed, and the round is short of replies."""
    node = registry.nodes.get(client)
    if node is None or client in now.told or (client, node) in now.waiting.values():
        return False
    short = len(now.told) + len(now.waiting) < settings.minimum
    return client not in now.why or (short and time >= now.again.get(client, 0))


def _down(settings: Settings, folder: Folder, state: State, client: int) -> Packet:
    """The message for one client: its row of the broadcast, what was counted last, and which masks need not come."""
    down = tree.row(settings.algorithm.downlink(state.server, torch.tensor([client])), 0)
    about = {"counted": state.counted.get(client, -1), "holds": folder.holds(client), "look": True}
    return wire.encode(
        down, head_of(settings, folder, "down", state.round, client), settings.wire, about=about
    )


def _take(
    settings: Settings,
    folder: Folder,
    state: State,
    now: Round,
    like: Any,
    client: int,
    packet: Packet,
    error: str,
) -> None:
    """Adds an upload to the round's total, or raises what is wrong with it."""
    if error:
        raise WireError(error)
    if packet.head.startswith('{"refused"'):
        raise WireError(f"it declined: {refusal(packet.head)}")
    if client in now.told:
        raise WireError("its upload was counted in this round already")
    expected = head_of(settings, folder, "upload", now.number, client)
    opened = wire.decode(packet, like, expected, masks=folder.masks(client, like))
    with torch.no_grad():
        summand = settings.algorithm.summand(settings.task, state.server, torch.tensor(client), opened.record)
    if not all(bool(torch.isfinite(t).all()) for t in tree.leaves(summand) if t.is_floating_point()):
        raise WireError("what it adds to the total is not finite")
    folder.keep_masks(client, opened.masks)
    now.kinds = [t.dtype for t in tree.leaves(summand)]
    now.total = (
        tree.wide(summand) if now.total is None else tree.add(now.total, summand)
    )  # as `tree.summed` does
    now.told[client], now.up[client] = opened.about, packet.nbytes


def _record(now: Round, metrics: dict[str, torch.Tensor], seconds: float) -> dict[str, Any]:
    """The round as one line of JSON, in the form that a simulation's rounds have."""
    ids = sorted(now.told)
    reported = {client: numbers(now.told[client].get("figures")) for client in ids}
    names = sorted({name for client in ids for name in reported[client]})
    per_client: dict[str, list[float | None]] = {n: [reported[c].get(n) for c in ids] for n in names}
    per_client["bytes_up"] = [float(now.up[client]) for client in ids]
    per_client["bytes_down"] = [float(now.down.get(client, 0)) for client in ids]
    present = {name: [v for v in values if v is not None] for name, values in per_client.items()}
    return {
        "round": now.number + 1,
        "clients": ids,
        "federation": {name: wire.plain(float(value)) for name, value in sorted(metrics.items())},
        # Nodes may say 1e308, and a mean that is not finite could not be written down.
        "mean": {
            name: wire.plain(sum(values) / len(values)) for name, values in sorted(present.items()) if values
        },
        "left_out": sorted(now.why),
        "why": {str(client): now.why[client] for client in sorted(now.why)},
        "notes": {str(c): str(now.told[c]["note"])[:LONGEST] for c in ids if now.told[c].get("note")},
        "per_client": dict(sorted(per_client.items())),
        "bytes": {"up": sum(now.up.values()), "down": sum(now.down.values())},
        "seconds": round(seconds, 3),
    }


def refusal(head: str) -> str:
    """Why a node declined, in its own words."""
    try:
        said = json.loads(head)["refused"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "what it says cannot be read"
    return str(said)[:LONGEST]


def numbers(metrics: object) -> dict[str, float | None]:
    """What a node said about itself, as far as it is finite numbers, and no more of it than a record can bear."""
    if not isinstance(metrics, dict):
        return {}
    found = itertools.islice(metrics.items(), MOST_FIGURES)
    return {str(k)[:LONGEST]: _number(v) for k, v in found if v is None or isinstance(v, int | float)}


def _number(value: float | None) -> float | None:
    try:
        return None if value is None else wire.plain(float(value))
    except OverflowError:  # a whole number of hundreds of digits
        return None
