"""Clipped and noised uploads in a deployment: noise is a node's secret, epsilon counts who answered.

A node answers one message per round. Asked again for the same, it adds the same noise; asked for a round with
another model, it refuses: two noised uploads of a round reveal more than the epsilon states. So does the same
noise on another upload, as the settings of another run config or changed data would give: the difference of
both has no noise. A node that would send one refuses too.
"""

import hashlib
import hmac
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl import wire
from copfl.core import tree
from copfl.errors import RunError, WireError, raised_as
from copfl.federation.policy.record import Policy
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol.files import stored, write_json
from copfl.files import write_bytes
from copfl.wrappers.privacy import Down, Private, epsilon_of, noise_of_others

SECRET, ANSWERED = "noise.key", "noised.json"  # in the state-dir; in its folder of the run
ROUNDING = 1e-9  # of a noise that is computed


@dataclass(frozen=True)
class SecretNoise(Private):
    """Private uploads whose noise comes from a key of the node alone, by AES-256."""

    key: bytes = b""

    def downlink(self, server: Any, ids: Tensor) -> Down:
        """The server sends no key.

        Args:
            server: The server's record.
            ids: The clients that receive the message.
        """
        return super().downlink(server, ids)._replace(key=torch.zeros_like(ids))

    def draw(self, _: Tensor, like: Tensor) -> Tensor:
        """Standard normal numbers by the Box-Muller transform; a probe without a key has none.

        They depend on the change `like` that they hide, and on their scale. So two uploads have the same
        noise only if they are the same, also on a node that has forgotten the first: one whose state-dir was
        restored.
        """
        if not self.key:
            return torch.zeros_like(like)
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        scale = f"{self.clip!r} {self.noise!r} {self.taking_part} ".encode()
        key = hmac.digest(self.key, scale + like.detach().cpu().numpy().tobytes(), "sha256")
        encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        bits = np.frombuffer(encryptor.update(bytes(16 * like.numel())), "<u8").reshape(2, -1)
        first, second = ((bits >> np.uint64(11)) + 0.5) / 2**53
        drawn = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
        return torch.from_numpy(drawn).to(like).view(like.shape)


def with_key(algorithm: SecretNoise, folder: Path, round: int, received: object) -> SecretNoise:
    """The algorithm with this node's noise of the round; WireError if another message used it.

    Args:
        algorithm: The one that noises uploads, without a key.
        folder: The folder of the run, in the node's state-dir.
        round: From 0.
        received: The server's message: its model, and the last round that it counted.
    """
    message, answered = _digest(received), _answered(folder)
    if round < answered.round or (round == answered.round and message != answered.message):
        raise WireError(
            f"this node has sent a noised upload of round {answered.round + 1}, and is asked for another one "
            f"of round {round + 1}: epsilon counts one upload per round"
        )
    if round > answered.round:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(folder / ANSWERED, NoisedRound(round, message)._asdict())
    text = f"{folder.name} {round} {message}".encode()
    return replace(algorithm, key=own_key_for(folder.parent, text))


def own_key_for(state: Path, text: bytes) -> bytes:
    """A key that nobody else can compute: for the same text always the same one.

    Args:
        state: The node's state-dir.
        text: What the key is for.
    """
    return hmac.digest(_secret(state / SECRET), text, "sha256")


def enter_upload(folder: Path, upload: object) -> str:
    """The digest of the round's noised upload, noted before it is sent; WireError if another one was.

    Args:
        folder: The folder of the run, in the node's state-dir.
        upload: What would leave.
    """
    digest, answered = _digest(upload), _answered(folder)
    if answered.upload not in ("", digest):
        raise WireError(
            f"this node has sent a noised upload of round {answered.round + 1}, and its settings or its data "
            "have changed since: the difference of two uploads with the same noise would have none"
        )
    write_json(folder / ANSWERED, answered._replace(upload=digest)._asdict())
    return digest


class NoisedRound(NamedTuple):
    """The last round in which this node noised an upload."""

    round: int = -1
    message: str = ""  # digest of what the server sent
    upload: str = ""  # digest of what the node sent; empty: nothing yet


def _answered(folder: Path) -> NoisedRound:
    return stored(
        folder / ANSWERED,
        lambda answer: NoisedRound(int(answer["round"]), str(answer["message"]), str(answer["upload"])),
        NoisedRound()._asdict(),
        "{name} cannot be used; restore the node's state-dir",
    )


def _digest(record: object) -> str:
    return hashlib.sha256(" ".join(map(wire.fingerprint, tree.leaves(record))).encode()).hexdigest()


def _secret(path: Path) -> bytes:
    """The node's secret; made on first use."""
    with raised_as(RunError, f"{path.name} cannot be used: {{}}; check the node's state-dir", OSError):
        if not path.exists():
            write_bytes(path, os.urandom(32), private=True)
        return path.read_bytes()


def epsilon_of_upload(algorithm: object, *, secure: bool) -> float | None:
    """The epsilon of one answer of a node, towards the server; None if uploads have no noise.

    In a secure sum it is the sum's, if every member adds its part of the noise.

    Args:
        algorithm: The one that trains; only one that adds noise has an epsilon.
        secure: Whether the upload leaves in a secure sum alone.
    """
    if not isinstance(algorithm, Private):
        return None
    noise = algorithm.noise if secure else algorithm.noise / algorithm.taking_part**0.5
    return epsilon_of({noise: 1}, algorithm.delta)


def upload_noise(algorithm: Private) -> float:
    """The noise of one upload, over the clip."""
    return float(algorithm.noise / algorithm.taking_part**0.5)


def sum_noise(algorithm: Any, answers: int) -> float:
    """The noise of a sum of so many uploads, over the clip: a client that does not answer adds none.

    Args:
        algorithm: The one that noises uploads.
        answers: How many uploads are in the sum.
    """
    return float(algorithm.noise * (answers / algorithm.taking_part) ** 0.5)


def require_noise(policy: Policy, algorithm: Any, answers: int) -> None:
    """PolicyError if the sum of so many uploads has less noise than the owner wants.

    Args:
        policy: The policy of this node's owner.
        algorithm: The one that trains; one without noise has none.
        answers: How many uploads are in the sum.
    """
    least = policy.privacy.noise
    noise = sum_noise(algorithm, answers) if isinstance(algorithm, Private) else 0.0
    if noise < least * (1 - ROUNDING):
        why = f"a sum of {answers} uploads has noise {noise:.4g}, and {least:g} is the least"
        raise PolicyError((Refusal("privacy.noise", why),), "request")


def epsilons(algorithm: Private, answers: Iterable[int], *, secure: bool) -> dict[str, float]:
    """The epsilons after rounds with so many answers each.

    A client that does not answer adds no noise, and one that does knows its own part. With secure aggregation
    the server sees the sum alone, but it knows who took part.

    Args:
        algorithm: The one that noises uploads.
        answers: How many clients answered, by round.
        secure: Whether the server sees sums alone.
    """
    n = algorithm.taking_part
    rounds = Counter(count for count in answers if count)
    sums = {sum_noise(algorithm, count): often for count, often in rounds.items()}
    unknown = {noise_of_others(sum_noise(algorithm, count), count): often for count, often in rounds.items()}
    single = {upload_noise(algorithm): sum(sums.values())}
    return {
        "epsilon": epsilon_of(unknown, algorithm.delta, algorithm.clients, n),
        "epsilon_server": epsilon_of(sums if secure else single, algorithm.delta),
    }
