"""Malicious clients, simulated: any algorithm with some clients that attack.

label_flip   trains on wrong labels: each class of the client is replaced by another one of its classes
sign_flip    uploads its update reversed, `strength` times as long
scaled       uploads its update `strength` times as long, and reports `strength` times the weight
noise        uploads noise `strength` times as long as its update
free_rider   uploads what it received with noise, `strength` of the weights' length; and the honest weight

An attacker may upload anything that the wire accepts: finite numbers of the right shape, absent where the
mask is personal. Its reported loss and accuracy are honest, so that the record shows the effect of the
attack.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import AnyAlgorithm, ClientOutput, Data, Plan, Task, UsageError, at_least, one_of, tree
from copfl.core.payload import Update, nbytes, update_of, with_update
from copfl.core.random import MALICIOUS, hashed, normal
from copfl.kernels.draws import mixed
from copfl.wrappers.base import RoundWrapper

# From the honest update, the strength and a key for random numbers.
Attack = Callable[[Update, float, Tensor], Update]


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
    return honest  # its labels are wrong, see `flipped_labels`


# By name, with the default strength.
ATTACKS: dict[str, tuple[Attack, float]] = {
    "label_flip": (label_flip, 1.0),
    "sign_flip": (sign_flip, 5.0),
    "scaled": (scaled, 10.0),
    "noise": (noise, 5.0),
    "free_rider": (free_rider, 0.01),
}


def choose_attackers(seed: int, clients: int | NDArray[np.int64], fraction: float) -> tuple[int, ...]:
    """The malicious clients, sorted: this fraction of the clients, rounded, but at least one.

    `clients` is their number, or their numbers where some never train.
    """
    ids = np.arange(clients) if isinstance(clients, int) else clients
    if not 0 < fraction < 1:
        raise UsageError(f"attackers={fraction} must be above 0 and below 1: it is a fraction of the clients")
    count = max(1, round(fraction * len(ids)))
    if count >= len(ids):
        given = f"attackers={fraction} of {len(ids)} clients"
        raise UsageError(f"{given} leaves no honest one; there must be at least one")
    keys = hashed(seed, MALICIOUS, ids.astype(np.uint64))
    return tuple(sorted(int(n) for n in ids[np.argsort(keys)[:count]]))


def flipped_labels(data: Data, classes: int) -> Tensor:
    """Each label replaced by the next of the client's classes, or by the next of all if it has only one."""
    valid = torch.arange(len(data.y), device=data.y.device) < data.size
    every = torch.arange(classes, device=data.y.device)
    present = ((data.y[:, None] == every) & valid[:, None]).any(0)  # [C]
    distance = (every - every[:, None] - 1) % classes + 1  # [C, C], from a class on to another; to itself: C
    nearest = torch.where(present, distance, classes).min(1).values
    nearest = torch.where(nearest == classes, 1, nearest)
    return (data.y + nearest[data.y]) % classes


class Down(NamedTuple):
    """The message of the algorithm inside, and what only the simulation knows."""

    down: Any
    malicious: Tensor  # [] bool
    key: Tensor  # [] int64, of the random numbers of this client in this round


@cache
def _on_device(attackers: tuple[int, ...], device: torch.device) -> Tensor:
    """Their numbers, kept on the device: a CUDA graph cannot copy them from the host."""
    return torch.tensor(attackers, device=device)


@dataclass(frozen=True)
class Attacked(RoundWrapper):
    """The algorithm with some malicious clients."""

    attack: str
    attackers: tuple[int, ...]
    strength: float
    seed: int = 0

    def __post_init__(self) -> None:
        one_of(ATTACKS, attack=self.attack)
        at_least(0, strength=self.strength)

    def downlink(self, server: Any, ids: Tensor) -> Down:
        malicious = (ids[:, None] == _on_device(self.attackers, ids.device)).any(1)
        keys = mixed(self.seed, MALICIOUS, server.round, ids)
        return Down(super().downlink(server, ids), malicious, keys)

    def client_update(self, task: Task, client: Any, down: Down, data: Data, plan: Plan) -> ClientOutput:
        """The local update, with wrong labels or with a changed upload if the client is malicious."""
        malicious = down.malicious
        if self.attack == "label_flip":
            if task.criterion.kind != "classification":
                raise UsageError(f"label_flip changes classes; this task is {task.criterion.kind}")
            data = data._replace(y=torch.where(malicious, flipped_labels(data, task.classes), data.y))
        output = super().client_update(task, client, down, data, plan)
        honest = update_of(down.down, output.upload)
        attack = ATTACKS[self.attack][0](honest, self.strength, down.key)
        sent = tree.each(partial(torch.where, malicious), attack, honest)
        upload = with_update(output.upload, sent._replace(personal=honest.personal))
        weight = output.metrics["weight"]
        if self.attack == "scaled" and honest.reported_weight is not None:
            weight = torch.where(malicious, self.strength * weight, weight)
        metrics = {**output.metrics, "weight": weight, "malicious": malicious.to(weight.dtype)}
        # The other fields of the message exist in the simulation only.
        metrics.setdefault("bytes_down", weight.new_zeros(()) + nbytes(down.down))
        return output._replace(upload=upload, metrics=metrics)


def attacked(
    algorithm: AnyAlgorithm,
    attack: str,
    clients: int | NDArray[np.int64],
    fraction: float = 0.2,
    strength: float = 0.0,
    seed: int = 0,
) -> Attacked:
    """The algorithm with a fraction of its clients malicious; strength=0 is the attack's default."""
    one_of(ATTACKS, attack=attack)
    attackers = choose_attackers(seed, clients, fraction)
    return Attacked(algorithm, attack, attackers, strength or ATTACKS[attack][1], seed)
