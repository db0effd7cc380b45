"""Who takes part in a secure sum: the members' long-term keys, and what they sign.

A member is a node's own key; the signed proposal lists the keys of all members. Its signature of the fresh keys
of a sum shows the others that the server did not replace them. Its signature of the cohort and of the
context, which has the model and the settings, shows that all members were asked for the same sum.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from copfl.federation.protocol.keys import statement
from copfl.federation.protocol.secure_sum import Keys, Rules
from copfl.federation.protocol.settings import Terms

# Settings whose values may be paths of a machine: of a base, or of code. The layout has the hash of a base,
# and of the public samples.
PLACES = {("model", key) for key in ("name", "code", "tokenizer", "weights")}
PLACES |= {(kind, "code") for kind in ("task", "algorithm", "optimizer", "adapter", "server", "robust")}
PLACES |= {("samples", "public")}


class Subject(NamedTuple):
    """Which sum a signature is about."""

    run: str
    round: int
    session: str


def keys_statement(subject: Subject, client: int, rules: Rules, keys: Keys) -> bytes:
    """What a member signs in the first phase: these are its fresh keys of this sum.

    Args:
        subject: Which sum it is.
        client: The number of the member's client.
        rules: What all clients of the sum agree on.
        keys: The client's fresh public keys.
    """
    return _statement("keys", subject, client, asdict(rules), [key.hex() for key in keys])


def sum_statement(subject: Subject, context: bytes, members: Collection[str]) -> bytes:
    """What a member signs before it reveals shares: the sum is of these members' vectors.

    Args:
        subject: Which sum it is.
        context: What `context_of` gives.
        members: The public keys of all whose vectors are in the sum.
    """
    return _statement("sum", subject, context.hex(), sorted(members))


def context_of(settings: Terms, subject: Subject, cohort: Mapping[int, str], model: bytes) -> bytes:
    """A digest of all that every member must have been shown alike: the model, the settings and the cohort.

    The masks of two members cancel out only if both have the same one.

    Args:
        settings: The terms of the sum.
        subject: Which sum it is.
        cohort: The public key of each client that sent keys.
        model: The body of the server's message, which asks for the vector.
    """
    # The layout does not have all options of a model or an adapter, such as the scale of an adapter.
    is_base = settings.run.model.name.startswith("hf:")
    tables = {
        title: {
            key: value
            for key, value in table.items()
            if (title, key) not in PLACES or ((title, key) == ("model", "name") and not is_base)
        }
        for title, table in settings.federation.tables().items()
        if title != "session"
    }
    agreed = settings.layout, tables, sorted(cohort.items()), hashlib.sha256(model).hexdigest()
    return hashlib.sha256(_statement("context", subject, *agreed)).digest()


def _statement(kind: str, subject: Subject, *parts: Any) -> bytes:
    return statement(f"secure {kind}", *subject, *parts)
