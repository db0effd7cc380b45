"""A proposal: a run's settings, its members and who is revoked, as one document that the coordinator signs.

A run config carries the signed document as text, so every message has it. A node trains on the settings of
the document that it accepted (see `acceptance`): a run config that says anything else is refused. Without
torch.
"""

import base64
import binascii
import datetime
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from copfl import foreign
from copfl.errors import CopflError, UsageError, raised_as
from copfl.federation.protocol.keys import PUBLIC, SigningKey, fingerprint, is_signed, statement
from copfl.settings.federation import is_plain_name
from copfl.settings.flat import flattened, nested
from copfl.settings.schema import RunSettings

KEY = "proposal"  # of a run config
SERVERS_OWN = ("session.resume",)  # keys of a run config that the server sets as it needs them
FORMAT = 1
CHALLENGE = "challenge"  # in the greeting of the server: what a node signs
MOST_BYTES = 2**22  # of a document
MOST_TEXT = 120_000  # characters in a run config: the system's limit of a word on the command line is 131,072
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # of a member
MOST_ROTATIONS = 50


class Rotation(NamedTuple):
    """A key that a member has replaced, and its signature of the key after it."""

    key: str
    signature: str


class Member(NamedTuple):
    """A member of a federation: its client's number, a name for people, and its public key."""

    number: int
    name: str
    key: str
    rotations: tuple[Rotation, ...] = ()  # the keys before, in order

    @property
    def identity(self) -> str:
        """The member's first key: it stays the same member if it rotates its key."""
        return self.rotations[0].key if self.rotations else self.key


def rotation_statement(key: str) -> bytes:
    """What a member signs with its old key: that this is its new one."""
    return statement("rotation", key)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What the coordinator proposes to the members."""

    settings: dict[str, Any]  # the run config, without the proposal itself
    members: tuple[Member, ...]
    revoked: tuple[str, ...]  # public keys that are members no more
    coordinator: str  # public key
    issued: str  # when it was written

    @property
    def content(self) -> bytes:
        """The document in the one form that is signed."""
        members = [
            member._asdict() | {"rotations": [rotation._asdict() for rotation in member.rotations]}
            for member in self.members
        ]
        fields = {"format": FORMAT, **vars(self), "members": members}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def digest(self) -> str:
        """The name of the document: its SHA-256."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def run(self) -> str:
        return str(self.settings["session.run"])

    @property
    def numbers(self) -> dict[int, Member]:
        """The members by the number of their client."""
        return {member.number: member for member in self.members}

    def by_key(self, key: str) -> Member | None:
        """The member with this public key."""
        return next((member for member in self.members if member.key == key), None)


class SignedProposal(NamedTuple):
    """A proposal, and the coordinator's signature of it."""

    proposal: Proposal
    signature: str

    @property
    def document(self) -> bytes:
        """The content of a file, for people: JSON."""
        fields = json.loads(self.proposal.content) | {"signature": self.signature}
        return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"

    @property
    def text(self) -> str:
        """The document in a run config, where Flower's command line takes no quotes."""
        return base64.urlsafe_b64encode(zlib.compress(self.document, 9)).decode()


def members_fingerprint(members: tuple[Member, ...]) -> str:
    """A short name of a list of members: all nodes have the same one."""
    identities = sorted((member.number, member.name, member.key) for member in members)
    return fingerprint(json.dumps(identities))


# -- writing -------------------------------------------------------------------------------------------------


def settings_in(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run config as a document has them: flat keys, lists as JSON."""
    flat = flattened(nested({key: value for key, value in run_config.items() if key != KEY}))
    return {path: value for path, value in flat.items() if path not in SERVERS_OWN}


def sign(
    run_config: Mapping[str, Any], members: tuple[Member, ...], revoked: tuple[str, ...], key: SigningKey
) -> SignedProposal:
    """The proposal of a run, signed with the coordinator's key; UsageError if it would not be one.

    Args:
        run_config: The settings of the run, flat or as tables.
        members: Who takes part.
        revoked: Public keys that are members no more.
        key: The coordinator's.
    """
    issued = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    proposal = Proposal(
        settings=settings_in(run_config),
        members=members,
        revoked=revoked,
        coordinator=key.public,
        issued=issued,
    )
    signed = SignedProposal(proposal, key.sign(_statement(proposal)))
    read(signed.document)  # what a node would refuse is an error here
    if len(signed.text) > MOST_TEXT:
        raise UsageError(f"{len(members)} members are too many for Flower's command line")
    return signed


def is_same_proposal(first: Proposal, second: Proposal) -> bool:
    """Whether two proposals differ in nothing but the time.

    Args:
        first: A proposal.
        second: Another one.
    """
    return {**vars(first), "issued": ""} == {**vars(second), "issued": ""}


def hello_statement(proposal: Proposal, challenge: str, client: int) -> bytes:
    """What a node signs when the server greets it: that it is this client of the proposal.

    Args:
        proposal: The one that the node accepted.
        challenge: A fresh text of the server's, so that an old signature is none.
        client: The number of the node's client.
    """
    return statement("hello", proposal.digest, challenge, client)


def _statement(proposal: Proposal) -> bytes:
    return statement("proposal", proposal.digest)


# -- reading -------------------------------------------------------------------------------------------------


def from_text(text: object) -> SignedProposal:
    """The signed proposal in a run config; UsageError if it is none, or not signed by the key it names."""
    with raised_as(UsageError, "the proposal cannot be read: {}", ValueError, zlib.error, binascii.Error):
        if not isinstance(text, str):
            raise ValueError("it is no text")
        unpacked = zlib.decompressobj()
        content = unpacked.decompress(base64.urlsafe_b64decode(text.encode()), MOST_BYTES)
        if unpacked.unconsumed_tail:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return read(content)


def read(content: bytes) -> SignedProposal:
    """The signed proposal in a file's content; UsageError if it is none, or not signed by its key."""
    with raised_as(UsageError, "the proposal cannot be read: {}", *foreign.DAMAGE, CopflError):
        fields = json.loads(content)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {str(fields['format'])[:20]}, and this version reads {FORMAT}")
        proposal = from_fields(fields)
        if not is_signed(proposal.coordinator, _statement(proposal), str(fields["signature"])):
            raise ValueError("it is not signed by the coordinator that it names, or was changed after that")
        for problem in _problems(proposal):
            raise ValueError(problem)
    return SignedProposal(proposal, str(fields["signature"]))


def from_fields(fields: Mapping[str, Any]) -> Proposal:
    """The proposal in the fields of `Proposal.content`; its signature is not looked at."""
    return Proposal(
        settings=dict(fields["settings"]),
        members=tuple(_member(entry) for entry in fields["members"]),
        revoked=tuple(_public(key) for key in fields["revoked"]),
        coordinator=_public(fields["coordinator"]),
        issued=datetime.datetime.fromisoformat(fields["issued"]).isoformat(timespec="seconds"),
    )


def _public(key: Any) -> str:
    if not isinstance(key, str) or not PUBLIC.fullmatch(key):
        raise ValueError("a public key in it is none")
    return key


def _member(entry: Any) -> Member:
    number, name = entry["number"], entry["name"]
    if type(number) is not int or not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError("a member in it has no number, or a name that is not plain")
    rotations = (Rotation(_public(old["key"]), str(old["signature"])) for old in entry["rotations"])
    return Member(number, name, _public(entry["key"]), tuple(rotations))


def member_problem(member: Member) -> str:
    """What is wrong with a member's chain of keys; empty if nothing is."""
    if len(member.rotations) > MOST_ROTATIONS:
        return f"{member.name} has rotated its key more than {MOST_ROTATIONS} times"
    following = [rotation.key for rotation in member.rotations[1:]] + [member.key]
    for rotation, key in zip(member.rotations, following, strict=bool(member.rotations)):
        if not is_signed(rotation.key, rotation_statement(key), rotation.signature):
            return f"{member.name}'s new key is not signed with its old one"
    return ""


def _problems(proposal: Proposal) -> Iterator[str]:
    """What a coordinator's own document may not say."""
    settings, members = proposal.settings, proposal.members
    if settings_in(settings) != settings or not is_plain_name(str(settings.get("session.run", ""))):
        yield "its settings are not those of a run with a name"
    clients = settings.get("run.clients", RunSettings.clients)
    if type(clients) is not int or any(not 0 <= member.number < clients for member in members):
        yield f"its members are not clients 0 to {str(clients)[:20]}-1"
    for values in zip(*((m.number, m.name, m.key, m.identity) for m in members), strict=True):
        if len(set(values)) < len(values):
            yield f"two of its members have the same number, name or key: {str(values[0])[:20]}"
    old_keys = {rotation.key for member in members for rotation in member.rotations}
    if revoked := [member.name for member in members if member.key in proposal.revoked]:
        yield f"{revoked[0]} is a member of it, and revoked"
    if old_keys & {member.key for member in members}:
        yield "a member of it has a key that another one replaced"
    for member in members:
        if problem := member_problem(member):
            yield problem


# -- comparing -----------------------------------------------------------------------------------------------


def differences(proposal: Proposal, run_config: Mapping[str, Any]) -> list[str]:
    """How a run config differs from the settings of a proposal: a sentence each.

    Args:
        proposal: What the coordinator signed.
        run_config: What the server says that the run is.
    """
    asked, agreed = settings_in(run_config), proposal.settings
    lines = []
    for key in sorted(asked.keys() | agreed.keys()):
        if key not in agreed:
            lines.append(f"{key}={_shown(asked[key])} is not in the proposal")
        elif key not in asked:
            lines.append(f"{key}={_shown(agreed[key])} of the proposal is missing")
        elif not is_same_setting(asked[key], agreed[key]):
            lines.append(f"{key} is {_shown(asked[key])}, and {_shown(agreed[key])} in the proposal")
    return lines


def is_same_setting(first: Any, second: Any) -> bool:
    """Whether two values of a setting are the same; in Python 1 is equal to True, and here it is not.

    Args:
        first: A value.
        second: Another one.
    """
    return bool(first == second) and isinstance(first, bool) == isinstance(second, bool)


def _shown(value: object) -> str:
    text = repr(value)[:60]
    return "".join(c if c.isprintable() else "?" for c in text)
