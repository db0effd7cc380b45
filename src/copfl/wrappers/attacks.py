"""Hostile clients, simulated: an algorithm of which some clients lie, made out of any algorithm.

label_flip   trains on wrong labels: each class of the client is called by the name of another one of its own
sign_flip    sends its update turned round, `strength` times as long
scaled       sends its update `strength` times as long, and claims `strength` times the weight
noise        sends noise `strength` times as long as its update
free_rider   sends what it received with a little noise, `strength` of the weights' own size; and an honest claim

An attacker does to its upload what it likes, but the wire holds it to the algorithm's format: a lie is finite, of the
right shape, and absent where its mask says so. What it reports of its own loss and accuracy is left honest, so that the
record shows what became of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, ClientOutput, Metrics
from copfl.core.payload import Update, nbytes, update_of, with_update
from copfl.core.random import MALICIOUS, hashed, mixed, normal
from copfl.core.task import Data, Plan, Task
from copfl.errors import UsageError, at_least, unknown
from copfl.wrappers import base

Attack = Callable[[Update, float, Tensor], Update]  # what it would say, the strength, a key for what is drawn


def sign_flip(honest: Update, strength: float, key: Tensor) -> Update:
    return honest._replace(sent=honest.received - strength * honest.change)


def scaled(honest: Update, strength: float, key: Tensor) -> Update:
    reported_weight = None if honest.reported_weight is None else strength * honest.reported_weight
    return honest._replace(sent=honest.received + strength * honest.change, reported_weight=reported_weight)


def noise(honest: Update, strength: float, key: Tensor) -> Update:
    drawn = normal(key, honest.sent)
    length = honest.change.norm() / max(1, len(honest.sent)) ** 0.5
    return honest._replace(sent=honest.received + strength * length * drawn)


def free_rider(honest: Update, strength: float, key: Tensor) -> Update:
    length = honest.received.norm() / max(1, len(honest.sent)) ** 0.5
    return honest._replace(sent=honest.received + strength * length * normal(key, honest.sent))


def label_flip(honest: Update, strength: float, key: Tensor) -> Update:
    return honest  # the lie is in what it learned; see `others`


# By name, with the strength that it has if none is given.
ATTACKS: dict[str, tuple[Attack, float]] = {
    "label_flip": (label_flip, 1.0),
    "sign_flip": (sign_flip, 5.0),
    "scaled": (scaled, 10.0),
    "noise": (noise, 5.0),
    "free_rider": (free_rider, 0.01),
}


def drawn(seed: int, clients: int, share: float) -> tuple[int, ...]:
    """Who is hostile, sorted: this share of the clients, rounded, but at least one."""
    if not 0 < share < 1:
        raise UsageError(f"attackers={share} must be above 0 and below 1: it is a share of the clients")
    count = max(1, round(share * clients))
    if count >= clients:
        raise UsageError(
            f"attackers={share} of {clients} clients leaves no honest one; there must be at least one"
        )
    return tuple(
        sorted(
            int(n) for n in np.argsort(hashed(seed, MALICIOUS, np.arange(clients, dtype=np.uint64)))[:count]
        )
    )


def others(data: Data, classes: int) -> Tensor:
    """The labels, each replaced by the next of the client's own classes, and by the next of all if it has but one."""
    valid = torch.arange(len(data.y), device=data.y.device) < data.size
    every = torch.arange(classes, device=data.y.device)
    held = ((data.y[:, None] == every) & valid[:, None]).any(0)  # [C]
    ahead = (
        every - every[:, None] - 1
    ) % classes + 1  # [C, C], how far on from a class to another; to itself: C
    nearest = torch.where(held, ahead, classes).min(1).values
    nearest = torch.where(nearest == classes, 1, nearest)
    return (data.y + nearest[data.y]) % classes


class Server(NamedTuple):
    server: Any
    malicious: Tensor  # [N] bool
    round: Tensor  # [] int64


class Down(NamedTuple):
    """What a client is sent, and what only the simulation tells it."""

    down: Any
    malicious: Tensor  # [] bool
    key: Tensor  # [] int64, for what is drawn in this turn


@dataclass(frozen=True)
class Attacked:
    """The algorithm, with these clients hostile in one way."""

    algorithm: AnyAlgorithm
    attack: str
    attackers: tuple[int, ...]
    strength: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.attack not in ATTACKS:
            raise unknown("attack", self.attack, ATTACKS)
        at_least(0, strength=self.strength)

    total_epochs = property(base.total_epochs)
    optimizer = property(base.optimizer)
    client_init = base.client_init
    personal_model = base.personal_model_within
    summand = base.summand_within

    def server_init(self, task: Task, clients: int) -> Server:
        malicious = torch.zeros(clients, dtype=torch.bool)
        malicious[[n for n in self.attackers if n < clients]] = True
        start = torch.zeros((), dtype=torch.int64, device=task.device)
        return Server(self.algorithm.server_init(task, clients), malicious.to(task.device), start)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        keys = mixed(self.seed, MALICIOUS, server.round, ids)
        return Down(self.algorithm.downlink(server.server, ids), server.malicious[ids], keys)

    def client_update(
        self, task: Task, client: Any, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Any, Any]:
        """An honest turn, or one over wrong labels; then the lie, if it is an attacker's."""
        if self.attack == "label_flip":
            data = data._replace(y=torch.where(down.malicious, others(data, task.classes), data.y))
        turn = self.algorithm.client_update(task, client, down.down, data, plan)
        honest = update_of(down.down, turn.upload)
        lie = ATTACKS[self.attack][0](honest, self.strength, down.key)
        sent = torch.where(down.malicious, lie.sent, honest.sent)
        reported_weight = tree.each(
            lambda false, true: torch.where(down.malicious, false, true),
            lie.reported_weight,
            honest.reported_weight,
        )
        upload = with_update(turn.upload, honest._replace(sent=sent, reported_weight=reported_weight))
        weight = turn.metrics["weight"]
        if self.attack == "scaled" and honest.reported_weight is not None:
            weight = torch.where(down.malicious, self.strength * weight, weight)
        metrics = {**turn.metrics, "weight": weight, "malicious": down.malicious.to(weight.dtype)}
        metrics.setdefault("bytes_down", weight.new_zeros(()) + nbytes(down.down))  # the rest does not travel
        return turn._replace(upload=upload, metrics=metrics)

    def server_update(self, task: Task, server: Server, total: Any) -> tuple[Server, Metrics]:
        inside, metrics = self.algorithm.server_update(task, server.server, total)
        return server._replace(server=inside, round=server.round + 1), metrics


def attacked(
    algorithm: AnyAlgorithm,
    attack: str,
    clients: int,
    fraction: float = 0.2,
    strength: float = 0.0,
    seed: int = 0,
) -> Attacked:
    """The algorithm with a share of its clients hostile, drawn from the seed; strength=0 is the attack's own."""
    if attack not in ATTACKS:
        raise unknown("attack", attack, ATTACKS)
    return Attacked(algorithm, attack, drawn(seed, clients, fraction), strength or ATTACKS[attack][1], seed)
