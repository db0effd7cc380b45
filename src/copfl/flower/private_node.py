"""Clipped and noised uploads in a deployment: noise is a node's secret, epsilon counts who answered.

A node answers one message per round. Asked again for the same, it adds the same noise; asked for a round with
another model, it refuses: two noised uploads of a round reveal more than the epsilon states.
"""

import hashlib
import hmac
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from copfl import wire
from copfl.core import tree
from copfl.errors import RunError, WireError, raised_as
from copfl.files import write_bytes
from copfl.flower.state import write_json
from copfl.wrappers.privacy import Down, Private, epsilon_of

SECRET, ANSWERED = "noise.key", "noised.json"  # in the state-dir; in its folder of the run


@dataclass(frozen=True)
class SecretNoise(Private):
    """Private uploads whose noise comes from a key of the node alone, by AES-256."""

    key: bytes = b""

    def downlink(self, server: Any, ids: Tensor) -> Down:
        """The server sends no key."""
        return super().downlink(server, ids)._replace(key=torch.zeros_like(ids))

    def draw(self, key: Tensor, like: Tensor) -> Tensor:
        """Standard normal numbers by the Box-Muller transform; a probe without a key has none."""
        if not self.key:
            return torch.zeros_like(like)
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        encryptor = Cipher(algorithms.AES(self.key), modes.CTR(bytes(16))).encryptor()
        bits = np.frombuffer(encryptor.update(bytes(16 * like.numel())), "<u8").reshape(2, -1)
        first, second = ((bits >> np.uint64(11)) + 0.5) / 2**53
        drawn = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
        return torch.from_numpy(drawn).to(like).view(like.shape)


def with_key(algorithm: SecretNoise, folder: Path, round: int, received: object) -> SecretNoise:
    """The algorithm with this node's noise of the round; WireError if another message used it."""
    digest = hashlib.sha256(" ".join(wire.fingerprint(t) for t in tree.leaves(received)).encode()).hexdigest()
    path = folder / ANSWERED
    damaged = f"{path.name} cannot be used; restore the node's state-dir"
    with raised_as(RunError, damaged, OSError, ValueError, KeyError, TypeError):
        stored = path.read_text() if path.exists() else '{"round": -1, "message": ""}'
        answered = json.loads(stored)
        last, message = int(answered["round"]), str(answered["message"])
    if round < last or (round == last and digest != message):
        raise WireError(
            f"this node has sent a noised upload of round {last + 1}, and is asked for another one of round "
            f"{round + 1}: epsilon counts one upload per round"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(path, {"round": round, "message": digest})
    text = f"{folder.name} {round} {digest}".encode()
    return replace(algorithm, key=hmac.digest(_secret(folder.parent / SECRET), text, "sha256"))


def _secret(path: Path) -> bytes:
    """The node's secret; made on first use."""
    with raised_as(RunError, f"{path.name} cannot be used: {{}}; check the node's state-dir", OSError):
        if not path.exists():
            write_bytes(path, os.urandom(32), private=True)
        return path.read_bytes()


def epsilons(algorithm: Private, answers: Iterable[int], *, secure: bool) -> dict[str, float]:
    """The epsilons after rounds with so many answers each.

    A client that does not answer adds no noise. With secure aggregation the server sees the sum alone, but it
    knows who took part.
    """
    n = algorithm.taking_part
    sums = Counter(algorithm.noise * (count / n) ** 0.5 for count in answers if count)
    single = {algorithm.noise / n**0.5: sum(sums.values())}
    return {
        "epsilon": epsilon_of(sums, algorithm.delta, algorithm.clients, n),
        "epsilon_server": epsilon_of(sums if secure else single, algorithm.delta),
    }
