"""SecAgg+: the sum of the clients' vectors; the server can read no single one. Without messages.

    keys        each client makes two key pairs and sends the public keys, signed
    shares      each client draws a seed; it sends others encrypted shares of the seed and of its masking key
    masked      each client sends its vector plus a mask from its seed and masks per pair, which cancel out
    consistent  each client signs the list of clients that sent their vectors
    revealed    each client that sees enough signatures of the same list sends a share of the seed of every
                client in it, and a share of the masking key of every other client: never both

The protocol is by Bell et al., 2020, with the consistency check of Bonawitz et al., 2017. Signatures are
in `secure_members`; key agreement, Shamir's shares and encryption in `secret_sharing`. Flower's generator of
masks is not used: it reduces the 32 bytes of a key to 32 bits, which can all be tried. The masks here are a
stream of AES-256. Nor is its quantisation, which clips in silence and rounds at random.
"""

import hashlib
import hmac
import math
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.errors import UsageError, WireError, above
from copfl.federation.policy.record import SMALLEST_SUM
from copfl.federation.protocol import secret_sharing, secure_graph

Words = NDArray[np.uint64]  # entries of a vector, modulo 2**64
Floats = NDArray[np.float64]

PHASES = ("keys", "shares", "masked", "consistent", "revealed")
SEED = 32  # bytes
HEAD = struct.Struct("<QQI")  # of sealed shares: who sends them, who receives them, bytes of the first
SMALLEST_COHORT = SMALLEST_SUM
LARGEST_ERROR = 0.01  # of rounding to steps, relative to the length of the vector, that needs no remark
MOST_BITS = 48  # so that a double holds every value, and 64 bits hold the sum of 2**15 clients


# -- numbers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What all clients of a sum must agree on."""

    clients: int  # the most that take part
    threshold: int = 0  # shares that reveal a secret: holders that must answer in a phase; 0: the smallest
    range: float = 65536.0  # the largest absolute value of an entry
    bits: int = 36  # of an entry, with its sign
    neighbours: int = 0  # clients that get shares of a client's secrets; 0: all

    def __post_init__(self) -> None:
        if self.clients < SMALLEST_COHORT:
            raise UsageError(f"secure aggregation needs at least {SMALLEST_COHORT} clients in a round")
        if self.neighbours < 0:
            raise UsageError(f"secure.neighbours={self.neighbours} must be 0 (all) or a number of clients")
        low, high = self._thresholds()
        object.__setattr__(self, "threshold", self.threshold or low)
        if not low <= self.threshold <= high:
            raise UsageError(
                f"secure.threshold={self.threshold} must be {low} to {high}: with fewer, the server and a "
                "third of the clients could collect both secrets of another client; leave it out"
            )
        above(0, **{"secure.range": self.range})
        if not math.isfinite(self.range) or not 2 <= self.bits <= MOST_BITS:
            bits = f"secure.bits={self.bits} 2 to {MOST_BITS}"
            raise UsageError(f"secure.range={self.range} must be finite, and {bits}")

    @property
    def holders(self) -> int:
        """Clients that have a share of a client's secrets: its neighbours and itself."""
        return 1 + len(neighbours(range(self.clients), self.neighbours)[0])

    def _thresholds(self) -> tuple[int, int]:
        """The smallest and the largest threshold; UsageError if there are too few neighbours."""
        linked = self.holders - 1
        if linked == self.clients - 1:
            return secure_graph.complete_threshold(self.clients), self.clients
        if self.clients < secure_graph.SMALLEST_RING:
            raise UsageError(
                f"secure.neighbours={self.neighbours} needs at least {secure_graph.SMALLEST_RING} clients; "
                f"with {self.clients} all must be neighbours: leave it out"
            )
        smallest = secure_graph.smallest_degree(self.clients)
        if linked < smallest.neighbours:
            raise UsageError(
                f"secure.neighbours={self.neighbours} is not secure for {self.clients} clients: at least "
                f"{smallest.neighbours} neighbours, with secure.threshold="
                f"{secure_graph.ring_threshold(smallest)}, or 0 for all"
            )
        degree = secure_graph.degree_of(self.clients, linked)
        return secure_graph.ring_threshold(degree), degree.staying

    @property
    def step(self) -> float:
        """The distance between two values of an entry. A power of two keeps whole numbers exact."""
        return float(self.range / 2 ** (self.bits - 1))

    @property
    def width(self) -> int:
        """Bytes of an entry, enough for the sum over all clients."""
        return -(-(self.bits + self.clients.bit_length()) // 8)


def quantised(values: Floats, rules: Rules) -> Words:
    """The nearest multiples of the step; above the range its end, and zero for what is no number.

    No value is refused: a refusal would tell the server about it. `problem_of` tells the node's owner.

    Args:
        values: The entries of a vector.
        rules: What all clients of the sum agree on.
    """
    within = np.nan_to_num(values, nan=0.0).clip(-rules.range, rules.range)
    return np.rint(within / rules.step).astype(np.int64).view(np.uint64)


def fits(values: Floats, rules: Rules) -> bool:
    """Whether a sum can have all these values as they are.

    Args:
        values: The entries of a vector.
        rules: What all clients of the sum agree on.
    """
    return bool((np.abs(values) <= rules.range).all())


def problem_of(values: Floats, rules: Rules) -> str:
    """How a sum changes these values by more than its rounding should; empty: it does not.

    Args:
        values: The entries of a vector.
        rules: What all clients of the sum agree on.
    """
    if not np.isfinite(values).all():
        return "a value is not finite, so the sum has no result; lower the learning rate"
    if not fits(values, rules):
        remedy = "raise secure.range, lower the learning rate, or set algorithm.weights=equal"
        return f"a value is above {rules.range:g}, so the sum has no result; {remedy}"
    rounding = np.rint(values / rules.step) * rules.step - values
    if np.linalg.norm(rounding) > LARGEST_ERROR * np.linalg.norm(values):
        coarse = f"the values are too small for steps of {rules.step:.2g}"
        return f"{coarse}; raise secure.bits, at most to {MOST_BITS}, or lower secure.range"
    return ""


def dequantised(total: Words, rules: Rules) -> Floats:
    """The values of a sum modulo 2**(8 width).

    Args:
        total: The sum of the clients' words, without masks.
        rules: What all clients of the sum agree on.
    """
    unused = np.int64(64 - 8 * rules.width)
    signed = (total.view(np.int64) << unused) >> unused
    return np.asarray(signed, np.float64) * rules.step


def to_bytes(words: Words, rules: Rules) -> bytes:
    """The lowest bytes of every entry.

    Args:
        words: The entries of a vector.
        rules: What all clients of the sum agree on.
    """
    return words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : rules.width].tobytes()


def from_bytes(content: bytes, rules: Rules) -> Words:
    """The entries that `to_bytes` wrote.

    Args:
        content: Another machine's.
        rules: What all clients of the sum agree on.
    """
    if len(content) % rules.width:
        raise WireError(f"its masked vector has {len(content):,} bytes, no multiple of {rules.width}")
    words = np.zeros((len(content) // rules.width, 8), np.uint8)
    words[:, : rules.width] = np.frombuffer(content, np.uint8).reshape(-1, rules.width)
    return words.reshape(-1).view("<u8").astype(np.uint64)


def stream(key: bytes, size: int, rules: Rules) -> Words:
    """A mask: so many pseudo-random entries. A key is used once, so the counter starts at zero.

    Args:
        key: 32 bytes, which only those know who may remove the mask.
        size: Entries of the vector.
        rules: What all clients of the sum agree on.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return from_bytes(encryptor.update(bytes(size * rules.width)), rules)


# -- who shares secrets with whom ----------------------------------------------------------------------------


def neighbours(order: Sequence[int], count: int) -> dict[int, list[int]]:
    """The clients that get shares of each client's secrets: the nearest in a ring; all if count is 0.

    Args:
        order: The clients, around the ring.
        count: How many neighbours each has, rounded up to an even number; 0: all.
    """
    n, half = len(order), (count + 1) // 2
    if not count or 2 * half >= n - 1:
        return {client: [other for other in order if other != client] for client in order}
    steps = [step for step in range(-half, half + 1) if step]
    return {client: [order[(position + step) % n] for step in steps] for position, client in enumerate(order)}


# -- the client ----------------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """The public keys of a client."""

    masking: bytes
    encryption: bytes


class Shares(NamedTuple):
    """One client's shares of another's secrets."""

    seed: bytes
    key: bytes


class Secrets(NamedTuple):
    """What a client keeps during one sum."""

    client: int
    masking: bytes  # private keys
    encryption: bytes
    seed: bytes
    keys: dict[int, Keys]  # of the neighbours
    shares: dict[int, Shares]  # by owner; this client's own among them


def begin(client: int) -> tuple[Secrets, Keys]:
    """Phase 1: a client's fresh secrets, and its public keys."""
    private = secret_sharing.new_key(), secret_sharing.new_key()
    public = Keys(*map(secret_sharing.public_key, private))
    return Secrets(client, *private, os.urandom(SEED), {}, {}), public


def commitment(seed: bytes) -> bytes:
    """What the server compares with a reconstructed seed; it does not reveal it."""
    return hashlib.sha256(b"copfl seed" + seed).digest()


def share(secrets: Secrets, keys: Mapping[int, Keys], rules: Rules) -> tuple[Secrets, dict[int, bytes]]:
    """Phase 2: the encrypted shares of this client's secrets, for every neighbour.

    Args:
        secrets: This client's.
        keys: The public keys of its neighbours, and its own.
        rules: What all clients of the sum agree on.
    """
    peers = sorted(set(keys) - {secrets.client})
    holders = [secrets.client, *peers]
    if not rules.threshold <= len(holders) <= rules.holders:
        raise WireError(f"{len(holders)} clients would hold shares; the threshold is {rules.threshold}")
    # With one key for two clients, what is sealed for one could be opened by the other.
    if len({key for pair in keys.values() for key in pair}) < 2 * len(keys):
        raise WireError("two clients have the same key")
    # Two secrets per client: the seed removes the mask of one that stayed, the key the pair masks of one that is
    # lost. Whoever had both could read the vector, so `reveal` gives a share of one of them.
    shared = secrets.seed, secret_sharing.scalar_of(secrets.masking)
    seeds, private = (secret_sharing.split_secret(secret, rules.threshold, len(holders)) for secret in shared)
    sealed = {}
    for peer, seed, key in zip(peers, seeds[1:], private[1:], strict=True):
        agreed = secret_sharing.agreed_key(secrets.encryption, keys[peer].encryption)
        lengths = HEAD.pack(secrets.client, peer, len(seed))
        sealed[peer] = secret_sharing.seal(agreed, lengths + seed + key)
    own_shares = {secrets.client: Shares(seeds[0], private[0])}
    return secrets._replace(keys={peer: keys[peer] for peer in peers}, shares=own_shares), sealed


def mask(
    secrets: Secrets, sealed: Mapping[int, bytes], words: Words, rules: Rules, context: bytes
) -> tuple[Secrets, bytes]:
    """Phase 3: the masked vector.

    Args:
        secrets: This client's.
        sealed: The shares of the neighbours that take part further, encrypted.
        words: What this client adds.
        rules: What all clients of the sum agree on.
        context: What `secure_members.context_of` gives; masks of pairs with different contexts do not cancel
            out.
    """
    shares = secrets.shares | {peer: _opened(secrets, peer, text) for peer, text in sealed.items()}
    if len(shares) < rules.threshold:
        raise WireError(f"{len(shares)} clients are left; the threshold is {rules.threshold}")
    # The pair masks cancel out in the sum. The mask of the seed is for a vector that arrives late: by then the server
    # may have revealed the pair masks of a client that it took for lost.
    total = words + stream(secrets.seed, len(words), rules)
    for peer in sealed:
        keys = secrets.masking, secrets.keys[peer].masking
        total += _pair_mask(*keys, context, secrets.client, peer, (len(words), rules))
    return secrets._replace(shares=shares), to_bytes(total, rules)


def reveal(secrets: Secrets, survivors: Collection[int], rules: Rules) -> dict[int, bytes]:
    """Phase 5: a share of the seed of each neighbour that survived, and of the masking key of the others.

    Args:
        secrets: This client's.
        survivors: The clients whose vectors are in the sum.
        rules: What all clients of the sum agree on.
    """
    # One secret of each neighbour, never both: the seed if it survived, else its key.
    alive = set(survivors) & set(secrets.shares)
    if secrets.client not in alive or len(alive) < rules.threshold:
        raise WireError(f"{len(alive)} clients sent a vector; the threshold is {rules.threshold}")
    return {n: shares.seed if n in alive else shares.key for n, shares in secrets.shares.items()}


def _opened(secrets: Secrets, peer: int, text: bytes) -> Shares:
    """The shares that a neighbour encrypted for this client."""
    if peer not in secrets.keys:
        raise WireError(f"there are shares of client {peer}, which is not a neighbour")
    plain = secret_sharing.unseal(
        secret_sharing.agreed_key(secrets.encryption, secrets.keys[peer].encryption), text
    )
    if plain is None or len(plain) < HEAD.size:
        raise WireError(f"the shares of client {peer} were changed on their way")
    source, target, length = HEAD.unpack_from(plain)
    if (source, target) != (peer, secrets.client):
        raise WireError(f"the shares of client {peer} are for another client")
    return Shares(plain[HEAD.size : HEAD.size + length], plain[HEAD.size + length :])


def _pair_mask(
    private: bytes, public: bytes, context: bytes, client: int, peer: int, shape: tuple[int, Rules]
) -> Words:
    """The mask that a client adds for a neighbour, which adds its negative if it has the same context."""
    agreed = secret_sharing.agreed_key(private, public)
    words = stream(hmac.digest(agreed, b"copfl mask" + context, "sha256"), *shape)
    return words if client < peer else -words


# -- the server ----------------------------------------------------------------------------------------------


@dataclass
class MaskedSum:
    """What the server has received of one sum, by client."""

    rules: Rules
    keys: dict[int, Keys]
    linked: dict[int, list[int]]  # the neighbours of each client
    sealed: dict[int, dict[int, bytes]]  # the shares that each client sent, by receiver
    commitments: dict[int, bytes]
    survivors: set[int] = field(default_factory=set)  # the clients whose masked vectors are added
    masked: Words | None = None  # their sum
    context: bytes = b""  # of the masks, see `secure_members`

    def keys_for(self, client: int) -> dict[int, Keys]:
        """The keys that a client receives: its neighbours' and its own."""
        return {n: self.keys[n] for n in (client, *self.linked[client]) if n in self.keys}

    def sealed_for(self, client: int) -> dict[int, bytes]:
        """The shares that a client receives."""
        return {n: self.sealed[n][client] for n in self.linked[client] if client in self.sealed.get(n, {})}

    def add(self, client: int, content: bytes, size: int) -> None:
        """Adds a masked vector of so many entries.

        Args:
            client: The sender.
            content: Its vector; another machine's.
            size: Entries of a vector.
        """
        expected = size * self.rules.width
        if len(content) != expected:
            raise WireError(f"its masked vector has {len(content):,} bytes; expected {expected:,}")
        words = from_bytes(content, self.rules)
        self.masked = words if self.masked is None else self.masked + words
        self.survivors.add(client)

    def total(self, revealed: Mapping[int, Mapping[int, bytes]]) -> Floats:
        """The sum, from the revealed shares by sender and owner; WireError if they are too few."""
        if self.masked is None:
            raise WireError("no client sent a vector, so there is no sum")
        total, size = self.masked.copy(), len(self.masked)
        # Of a client that stayed, the mask of its seed is in the sum; of one that was lost after it shared its secrets,
        # the pair masks that its neighbours added and that nothing cancels out.
        for client in sorted(self.sealed):
            lost = client not in self.survivors
            affected = [n for n in self.linked[client] if n in self.survivors and n in self.sealed]
            if lost and not affected:
                continue
            shares = [of_sender[client] for of_sender in revealed.values() if client in of_sender]
            if len(shares) < self.rules.threshold:
                raise WireError(
                    f"{len(shares)} clients revealed their shares; {self.rules.threshold} are needed"
                )
            secret = secret_sharing.combine_shares(shares[: self.rules.threshold])
            if not lost:
                if commitment(secret) != self.commitments[client]:
                    raise WireError(f"the shares of client {client}'s seed do not fit together")
                total -= stream(secret, size, self.rules)
                continue
            private = secret_sharing.key_of_scalar(secret)
            if secret_sharing.public_key(private) != self.keys[client].masking:
                raise WireError(f"the shares of client {client}'s key do not fit together")
            for other in affected:
                key = self.keys[other].masking
                total -= _pair_mask(private, key, self.context, other, client, (size, self.rules))
        return dequantised(total, self.rules)


# -- files and messages --------------------------------------------------------------------------------------


def as_json(secrets: Secrets) -> dict[str, Any]:
    """The secrets for a file of the client."""
    tables = {
        name: {str(n): [piece.hex() for piece in row] for n, row in getattr(secrets, name).items()}
        for name in ("keys", "shares")
    }
    single = {name: getattr(secrets, name).hex() for name in ("masking", "encryption", "seed")}
    return {"client": secrets.client, **single, **tables}


def from_json(fields: Mapping[str, Any]) -> Secrets:
    masking, encryption, seed = (bytes.fromhex(fields[name]) for name in ("masking", "encryption", "seed"))
    keys = {int(n): Keys(*map(bytes.fromhex, row)) for n, row in fields["keys"].items()}
    shares = {int(n): Shares(*map(bytes.fromhex, row)) for n, row in fields["shares"].items()}
    return Secrets(fields["client"], masking, encryption, seed, keys, shares)
