"""An invitation: one signed file with all that a site needs to take part, and the answer that it sends back.

The signature shows that nobody changed the file after the coordinator wrote it. Who wrote it, the words show, which
the coordinator reads out by telephone; in the same call the site reads out the words of its answer. Without torch.
"""

import datetime
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from copfl import foreign
from copfl.data.contract.contract import Contract
from copfl.errors import CopflError, UsageError, raised_as
from copfl.federation.protocol.agreed_samples import completes, samples_of
from copfl.federation.protocol.keys import PUBLIC, SigningKey, is_signed, statement
from copfl.federation.protocol.messages import printable
from copfl.federation.protocol.proposal import NAME, Proposal, is_same_setting, settings_in
from copfl.federation.protocol.words import in_words
from copfl.settings.flat import flattened

FORMAT = 1
SUFFIX = ".invite"  # of its file
DAYS = 14  # until an invitation expires
MOST_BYTES = 2**22
MOST_ANSWER = 2**16
NO_ANSWER = "it is no answer to an invitation: {}"
JOINS, MISFITS, LEAVES = STATES = ("joins", "has data that do not fit", "leaves")
# Keys of a run config that the coordinator may change without asking again: which run it is, and whether the
# members first agree on what the contract leaves open.
FREE = ("session.run", "session.agree", "session.choose", "session.taken")
CONTRACT = "samples.contract"
# What `copfl.data.contract.check` finds, for the coordinator: words that hold for any data.
MISFIT_TEXTS = {
    "missing_column": "the column is missing",
    "missing_columns": "more columns are missing",
    "renamed_column": "the column is missing, and another may be meant",
    "missing_values": "values are missing where the contract allows none",
    "type": "the values are of another type",
    "decimal_commas": "numbers have decimal commas",
    "dates": "dates are written in another way",
    "unit": "the numbers seem to be in another unit",
    "range": "numbers are out of the range",
    "categories": "there are categories that the contract does not have",
    "classes": "there are classes that the contract does not have",
    "shape": "samples have another shape",
    "task": "the targets are for another task",
    "more": "other columns differ, too",
}
# Of a server: a name or an IPv4 address, or an IPv6 address in brackets, and a port.
ADDRESS = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
DIGEST, WHAT = re.compile("[0-9a-f]{64}"), re.compile("[a-z_]{1,40}")


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What a coordinator asks a site to take part in."""

    federation: str
    site: str  # the name of the member
    number: int  # of its client
    address: str  # HOST:PORT
    authority: str  # the certificate by which the site knows the server, as PEM
    settings: dict[str, Any]  # the run config
    coordinator: str  # public key
    issued: str
    expires: str
    nonce: str  # nobody knows the file's SHA-256 who has not got the file

    @property
    def content(self) -> bytes:
        """The document in the one form that is signed."""
        return json.dumps({"format": FORMAT, **vars(self)}, sort_keys=True, allow_nan=False).encode()

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def words(self) -> str:
        """What the coordinator reads out."""
        return in_words(self.content)

    @property
    def contract(self) -> Contract | None:
        text = self.settings.get(CONTRACT)
        return Contract.read(str(text)) if text else None

    def is_over(self, now: datetime.datetime) -> bool:
        return now > datetime.datetime.fromisoformat(self.expires)


class SignedInvitation(NamedTuple):
    """An invitation, and the coordinator's signature of it."""

    invitation: Invitation
    signature: str

    @property
    def document(self) -> bytes:
        """The content of a file."""
        fields = json.loads(self.invitation.content) | {"signature": self.signature}
        return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"


def invite(
    site: str,
    number: int,
    *,
    federation: str,
    address: str,
    authority: str,
    run_config: Mapping[str, Any],
    key: SigningKey,
    days: float = DAYS,
) -> SignedInvitation:
    """A new invitation.

    Args:
        site: The member's name.
        number: Of its client.
        federation: What the coordinator calls it.
        address: HOST:PORT of the server.
        authority: The certificate of the server's authority, as PEM.
        run_config: The settings to which the site is asked to consent.
        key: The coordinator's.
        days: Until it expires.
    """
    now = datetime.datetime.now(datetime.UTC)
    settings = {path: value for path, value in settings_in(run_config).items() if path not in FREE}
    invitation = Invitation(
        federation=federation,
        site=site,
        number=number,
        address=address,
        authority=authority,
        settings=settings,
        coordinator=key.public,
        issued=now.isoformat(timespec="seconds"),
        expires=(now + datetime.timedelta(days=days)).isoformat(timespec="seconds"),
        nonce=secrets.token_hex(16),
    )
    signed = SignedInvitation(invitation, key.sign(_invites(invitation)))
    read(signed.document)  # what a site would refuse is an error here
    return signed


def _invites(invitation: Invitation) -> bytes:
    return statement("invitation", invitation.digest)


def read(content: bytes) -> SignedInvitation:
    """The invitation in a file's content; UsageError if it is none, or was changed after it was signed."""
    with raised_as(UsageError, "it is no invitation that can be used: {}", *foreign.DAMAGE, CopflError):
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        fields = json.loads(content)
        if fields.pop("format") != FORMAT:
            raise ValueError("another version of copfl wrote it")
        signature = str(fields.pop("signature"))
        invitation = Invitation(**fields)
        _check(invitation)
        if not is_signed(invitation.coordinator, _invites(invitation), signature):
            raise ValueError("it was changed after the coordinator signed it; ask for a new one")
    return SignedInvitation(invitation, signature)


def _check(invitation: Invitation) -> None:
    """ValueError if a field is not what it must be."""
    texts = {name: value for name, value in vars(invitation).items() if name not in ("number", "settings")}
    for name, text in texts.items():  # the certificate alone has several lines
        if not isinstance(text, str) or not text.replace("\n" * (name == "authority"), "").isprintable():
            raise ValueError("a field of it is no text in one line")
    if type(invitation.number) is not int or not NAME.fullmatch(invitation.site):
        raise ValueError("it has no name or number of a member")
    if not NAME.fullmatch(invitation.federation) or not PUBLIC.fullmatch(invitation.coordinator):
        raise ValueError("it has no name of a federation, or no key of a coordinator")
    address = ADDRESS.fullmatch(invitation.address)
    if (
        address is None
        or not 0 < int(address["port"]) < 2**16
        or settings_in(invitation.settings) != invitation.settings
    ):
        raise ValueError("it has no address of a server, or no settings")
    for text in (invitation.issued, invitation.expires):
        if datetime.datetime.fromisoformat(text).tzinfo is None:
            raise ValueError("a time in it has no zone")


# -- what a site consented to --------------------------------------------------------------------------------


def changes(consented: Invitation, proposed: Proposal) -> list[str]:
    """How a proposal differs from what a site consented to, a sentence each; none if it is the same.

    Means and categories that the contract left open may have been agreed on since.

    Args:
        consented: The invitation that the site's owner accepted.
        proposed: What the coordinator proposes now.
    """
    settings = {path: value for path, value in proposed.settings.items() if path not in FREE}
    agreed = dict(consented.settings)
    lines = [] if proposed.coordinator == consented.coordinator else ["its coordinator is another one"]
    member = proposed.numbers.get(consented.number)
    if member is not None and member.name != consented.site:
        lines.append(f"client {consented.number} is {member.name}, and not {consented.site}")
    now, before = settings.get(CONTRACT), agreed.get(CONTRACT)
    if now and before and now != before:
        frozen = Contract.read(str(now))
        if completes(frozen, Contract.read(str(before))):
            agreed |= flattened({"samples": samples_of(frozen)})
        else:
            lines.append("the data contract differs in more than what was left open")
            agreed[CONTRACT] = now
    for path in sorted(agreed.keys() | settings.keys()):
        was, becomes = agreed.get(path), settings.get(path)
        if not is_same_setting(was, becomes):
            lines.append(f"{path} was {printable(was, 60)}, and is {printable(becomes, 60)}")
    return lines


# -- the site's answer ---------------------------------------------------------------------------------------


class Misfit(NamedTuple):
    """That a site's data differ from the contract: in which of its columns, and how; nothing of the data."""

    column: str  # of the contract; empty: the whole file
    what: str  # as `Difference.what` has it

    def __str__(self) -> str:
        text = MISFIT_TEXTS.get(self.what, self.what.replace("_", " "))
        return f"{self.column}: {text}" if self.column else text


@dataclass(frozen=True, kw_only=True)
class InvitationAnswer:
    """What a site answers to an invitation."""

    invitation: str  # its SHA-256
    key: str  # the site's public key
    state: str  # of STATES
    misfits: tuple[Misfit, ...] = ()

    @property
    def content(self) -> bytes:
        return json.dumps({"format": FORMAT, **vars(self)}, sort_keys=True).encode()

    @property
    def words(self) -> str:
        """What the site reads out: of its key and the invitation."""
        return in_words(statement("answer", self.invitation, self.key))

    def signed(self, key: SigningKey) -> bytes:
        """The document, signed with the site's key."""
        signature = key.sign(statement("answer", self.content.decode()))
        return json.dumps(json.loads(self.content) | {"signature": signature}, indent=1).encode() + b"\n"


def invitation_of(content: bytes) -> str:
    """The SHA-256 of the invitation that a document says it answers, before its signature is looked at."""
    with raised_as(UsageError, NO_ANSWER, *foreign.DAMAGE):
        if len(content) > MOST_ANSWER:
            raise ValueError(f"it has more than {MOST_ANSWER:,} bytes")
        return str(json.loads(content)["invitation"])


def read_answer(content: bytes) -> InvitationAnswer:
    """The answer in a document; UsageError if it is none, or not signed by the key that it names."""
    with raised_as(UsageError, NO_ANSWER, *foreign.DAMAGE, CopflError):
        if len(content) > MOST_ANSWER:
            raise ValueError(f"it has more than {MOST_ANSWER:,} bytes")
        fields = json.loads(content)
        if fields.pop("format") != FORMAT:
            raise ValueError("another version of copfl wrote it")
        signature = str(fields.pop("signature"))
        misfits = tuple(
            Misfit(str(column)[:100], str(difference)) for column, difference in fields.pop("misfits")
        )
        answer = InvitationAnswer(**fields, misfits=misfits)
        is_plain = (
            answer.state in STATES and DIGEST.fullmatch(answer.invitation) and PUBLIC.fullmatch(answer.key)
        )
        if not is_plain or not all(WHAT.fullmatch(misfit.what) for misfit in misfits):
            raise ValueError("a field of it is not what it must be")
        if not is_signed(answer.key, statement("answer", answer.content.decode()), signature):
            raise ValueError("the key that it names did not sign it")
    return answer
