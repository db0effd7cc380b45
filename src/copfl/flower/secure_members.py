"""Who takes part in a secure sum: the members' long-term keys, and what they sign.

A member is a node's own signing key, made on first use. Its signature of the fresh keys of a sum shows the
others that the server did not replace them. Its signature of the cohort and of the context, which has the model
and the settings, shows that all members were asked for the same sum.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from copfl.errors import RunError, raised_as
from copfl.files import write_bytes
from copfl.flower.secure_sum import Keys, Rules
from copfl.flower.settings import Settings

FOLDER, KEY, PUBLIC = (
    ".secure",
    "member.key",
    "member.pub",
)  # in the state-dir, beside the folders of the runs
NOT_SHARED = {"run", "resume", "rollback", "join", "public"}  # keys that may differ between machines
TRAINING = ("algorithm", "optimizer", "model", "adapter", "task")  # tables of the settings
# Options whose values may be paths of a machine. The layout has the hash of a base.
PLACES = {("model", key) for key in ("name", "code", "tokenizer", "weights")} | {("task", "code")}


class Subject(NamedTuple):
    """Which sum a signature is about."""

    run: str
    round: int
    session: str


class Member:
    """This node as a member of sums."""

    def __init__(self, folder: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        path = folder / KEY
        unusable = f"{path.name} cannot be used: {{}}; restore the node's state-dir"
        with raised_as(RunError, unusable, OSError, ValueError):
            if not path.exists():
                write_bytes(path, Ed25519PrivateKey.generate().private_bytes_raw(), private=True)
            self._key = Ed25519PrivateKey.from_private_bytes(path.read_bytes())
        self.name = self._key.public_key().public_bytes_raw().hex()
        if not (folder / PUBLIC).exists():
            write_bytes(folder / PUBLIC, f"{self.name}\n".encode())

    def sign(self, statement: bytes) -> str:
        return self._key.sign(statement).hex()


def is_signed(member: str, statement: bytes, signature: str) -> bool:
    """Whether the member signed the statement."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(member))
        key.verify(bytes.fromhex(signature), statement)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def keys_statement(subject: Subject, client: int, rules: Rules, keys: Keys) -> bytes:
    """What a member signs in the first phase: these are its fresh keys of this sum."""
    return _statement("keys", subject, client, asdict(rules), [key.hex() for key in keys])


def sum_statement(subject: Subject, context: bytes, members: Collection[str]) -> bytes:
    """What a member signs before it reveals shares: the sum is of these members' vectors."""
    return _statement("sum", subject, context.hex(), sorted(members))


def context_of(settings: Settings, subject: Subject, cohort: Mapping[int, str], model: bytes) -> bytes:
    """A digest of all that every member must have been shown alike: the model, the settings and the cohort.

    The masks of two members cancel out only if both have the same one.
    """
    config = {key: value for key, value in asdict(settings.config).items() if key not in NOT_SHARED}
    if settings.config.model.startswith("hf:"):  # the base's folder
        del config["model"]
    # The layout does not have all options of a model or an adapter, such as the scale of an adapter.
    tables = {
        kind: {key: value for key, value in table.items() if (kind, key) not in PLACES}
        for kind, table in settings.run.tables().items()
        if kind in TRAINING
    }
    shown = settings.layout, config, tables, sorted(cohort.items()), hashlib.sha256(model).hexdigest()
    return hashlib.sha256(_statement("context", subject, *shown)).digest()


def _statement(kind: str, subject: Subject, *parts: Any) -> bytes:
    return json.dumps([f"copfl secure {kind}", *subject, *parts], sort_keys=True, default=str).encode()
