"""A client's answers in the phases of secure aggregation. Its secrets are in a file until the sum is done.

`protocol.secure_sum` has the five phases and their arithmetic. Here is what a node checks of a message and remembers:
`added_up` is called for every message, `_entered` decides whether it is the next one, and a function for each phase
makes the answer. What is added up is a `Summand`: local updates (`secure_update`) or statistics (`statistics`).

A request of another phase than the next is refused, and so is a second, different request of one phase: its
answers together would reveal more than one sum. A repeated request gets the same answer, or none if the data
have changed since: two vectors with the same masks differ by the uploads alone. All phases have the same
settings: with the threshold of another run config, too few clients would have to agree. What was added up
with whom is remembered for the data, not for the run: see `secure_memory`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from copfl import wire
from copfl.errors import WireError, raised_as
from copfl.federation.node.incoming import head_of
from copfl.federation.node.ledger import Ledger
from copfl.federation.node.node import Node
from copfl.federation.node.records import ClientRecords
from copfl.federation.policy.request import require_cohort
from copfl.federation.protocol import secure_sum
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.keys import is_signed
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.noise import own_key_for, require_noise, sum_noise
from copfl.federation.protocol.secure_members import Subject, context_of, keys_statement, sum_statement
from copfl.federation.protocol.secure_sum import PHASES, SMALLEST_COHORT, Keys, Secrets, Words
from copfl.federation.protocol.settings import Terms
from copfl.wire import Head, Packet

FILE = "secure.json"  # in the folder of the run
KEYS, SHARES, MASKED, CONSISTENT, REVEALED = PHASES
KINDS = {"down" if phase == MASKED else phase: phase for phase in PHASES}  # of messages: "down" has the model
MALFORMED = "its fields are not those that a copfl server sends"


@dataclass(frozen=True)
class SecureSession:
    """One sum, from the client's side."""

    name: str = ""
    requests: dict[str, str] = field(default_factory=dict)  # phase -> checksum of its request
    replies: dict[str, Packet] = field(default_factory=dict)  # without MASKED, which is computed again
    secrets: Secrets | None = None
    cohort: dict[int, str] = field(default_factory=dict)  # the member of each client that sent keys
    settings: str = ""  # digest of the settings when it began
    context: str = ""  # of the masks
    vector: str = ""  # digest of the masked vector that was sent
    samples: str = ""  # the data that are in the vector, as `KnownData` names them
    upload: str = ""  # digest of the upload that is in the vector
    noised: str = ""  # the name of the upload in the ledger; empty: it has no noise
    survivors: list[int] = field(default_factory=list)  # the clients whose sum this client signed


class PhaseRequest(NamedTuple):
    """A request of the server, and what the node has to answer it."""

    settings: Terms
    node: Node
    head: Head
    about: dict[str, Any]  # the fields of the server's message
    session: SecureSession  # what this node did in the phases before
    summand: "Summand"  # what is added up

    @property
    def subject(self) -> Subject:
        """Which sum this node's signatures are about."""
        return Subject(self.head.run, self.head.round, self.session.name)

    def identities(self, cohort: Iterable[str]) -> frozenset[str]:
        """The members whose keys these are: one that has rotated its key is the same member."""
        return frozenset(map(self.node.identity, cohort))

    @property
    def secrets(self) -> Secrets:
        """This node's, of this sum; WireError before the first phase and after the last."""
        if self.session.secrets is None:
            raise WireError("this node has no keys of this sum")
        return self.session.secrets


class Contribution(NamedTuple):
    """What a node adds to a sum, before it is masked."""

    words: Words
    samples: str  # the data that are in it, as `KnownData` names them
    upload: str  # digest of what is added
    about: dict[str, Any]  # fields beside the vector
    save: Callable[[], None]  # what is written down when the vector leaves
    noised: str = ""  # the name of the upload in the ledger; empty: it has no noise


class Summand(Protocol):
    """What is added up: the local updates of a round, or statistics."""

    def contribution(self, request: PhaseRequest, packet: Packet) -> Contribution:
        """What this node adds; WireError if it may not.

        Args:
            request: The phase MASKED.
            packet: The server's message, with the model.
        """

    def enter(self, request: PhaseRequest, cohort: frozenset[str]) -> None:
        """Notes a sum of these members, before this node signs it; WireError if it may not take part.

        Args:
            request: The phase CONSISTENT.
            cohort: The identities of the members whose vectors are in the sum.
        """


def hiding_words(request: PhaseRequest, size: int) -> Words:
    """Random words, the same for the same request: a sum with them is of nothing.

    What a node adds that has nothing to add, or a value out of range. With zeros, or with the end of the range, the sum
    was that of the other members: settings at which all but the smallest site fail had left this one alone.

    Args:
        request: The phase MASKED.
        size: How many.
    """
    asked = f"no sum {request.head.run} {request.head.round} {request.session.name}"
    return secure_sum.stream(own_key_for(request.node.folder, asked.encode()), size, request.settings.rules)


PhaseAnswer = tuple[SecureSession, dict[str, Any]]  # the session after a phase, and the fields of the reply


def added_up(settings: Terms, node: Node, packet: Packet, summand: Summand) -> Packet:
    """The answer to a message of a phase of a sum.

    Args:
        settings: What all members must agree on.
        node: The one that is asked; its proposal has the members of sums.
        packet: The server's message.
        summand: What this node adds, and what it remembers of it.
    """
    head = head_of(settings, node, packet)
    head_fields = wire.opened_head(packet)
    phase = KINDS.get(str(head_fields.get("kind")), "")
    path = ClientRecords(node.folder, head.run).folder / FILE
    session, is_repeated = _entered(
        _read(path), phase, head_fields["about"], json.loads(packet.head)["sha256"]
    )
    agreed = settings.layout, settings.federation.tables()  # with the rules of the sum
    digest = hashlib.sha256(json.dumps(agreed, sort_keys=True, default=str).encode()).hexdigest()
    if session.settings not in ("", digest):
        raise WireError("the settings have changed since this sum began; begin another one")
    session = replace(session, settings=digest)
    if is_repeated and phase in session.replies:
        return session.replies[phase]
    if not is_repeated:  # before anything is computed: a phase that was begun counts, whatever happens
        write_session(path, session)
    if phase == MASKED:
        request = PhaseRequest(settings, node, head, head_fields["about"], session, summand)
        session, reply = _masked(request, packet)
    else:
        fields_of_phase = wire.decode(packet, (), head._replace(kind=phase)).about
        with raised_as(WireError, MALFORMED, KeyError, TypeError, ValueError, AttributeError):
            request = PhaseRequest(settings, node, head, fields_of_phase, session, summand)
            session, answer = ANSWERS[phase](request)
        reply = wire.encode((), head._replace(kind=phase), about=answer)
        session = replace(session, replies={phase: reply})
    write_session(path, session)
    return reply


def _entered(
    before: SecureSession, phase: str, fields: Mapping[str, Any], checksum: str
) -> tuple[SecureSession, bool]:
    """The session with this request, and whether it was made before; WireError if it is not the next one."""
    name = fields.get(Field.SESSION)
    if phase not in PHASES or type(name) is not str:
        raise WireError("the run asks for secure aggregation, and this message is not part of it")
    if phase == KEYS and name != before.name:
        return SecureSession(name, {KEYS: checksum}), False
    last, following = ("", *PHASES)[len(before.requests)], (*PHASES, "")[len(before.requests)]
    is_repeated = phase == last and before.requests[phase] == checksum
    if name != before.name or not (is_repeated or phase == following):
        raise WireError(f"it asks for the phase {phase!r} of a sum out of turn, or a second time")
    return replace(before, requests={**before.requests, phase: checksum}), is_repeated


# -- the phases ----------------------------------------------------------------------------------------------


def _keys(request: PhaseRequest) -> PhaseAnswer:
    """Fresh keys, signed with the member's own."""
    secrets, public = secure_sum.begin(request.head.client)
    member = request.node.key
    statement = keys_statement(request.subject, request.head.client, request.settings.rules, public)
    fields = {
        Field.KEYS: [key.hex() for key in public],
        Field.MEMBER: member.public,
        Field.SIGNATURE: member.sign(statement),
    }
    return replace(request.session, secrets=secrets), fields


def _shares(request: PhaseRequest) -> PhaseAnswer:
    """Shares of this client's secrets for its neighbours, if their keys are signed by their members."""
    rules, client = request.settings.rules, request.head.client
    cohort = {int(other): str(member) for other, member in request.about[Field.COHORT].items()}
    keys = {int(n): Keys(*map(bytes.fromhex, pair)) for n, pair in request.about[Field.KEYS].items()}
    if cohort.get(client) != request.node.key.public or client not in keys:
        raise WireError("it does not name this node as a member of the sum")
    if len(set(cohort.values())) < len(cohort):  # else one member would count as two against the least cohort
        raise WireError("it names the same member for two clients")
    require_cohort(request.node.policy, len(cohort))
    if (
        request.node.proposal is not None
    ):  # the server's list of members counts only where the coordinator signed it
        pinned = {number: member.key for number, member in request.node.proposal.numbers.items()}
        if strangers := [other for other, member in cohort.items() if pinned.get(other) != member]:
            raise WireError(f"client {strangers[0]} is not the member that the accepted proposal names")
    for other, public in keys.items():
        statement = keys_statement(request.subject, other, rules, public)
        if not is_signed(cohort.get(other, ""), statement, str(request.about[Field.SIGNATURE][str(other)])):
            raise WireError(f"the keys of client {other} are not signed by its member")
    secrets, sealed = secure_sum.share(request.secrets, keys, rules)
    fields = {
        Field.SHARES: {str(n): text.decode() for n, text in sealed.items()},
        Field.COMMITMENT: secure_sum.commitment(secrets.seed).hex(),
    }
    return replace(request.session, secrets=secrets, cohort=cohort), fields


def _masked(request: PhaseRequest, packet: Packet) -> tuple[SecureSession, Packet]:
    """The masked contribution."""
    session, rules, sealed = request.session, request.settings.rules, request.about.get(Field.SHARES)
    if not isinstance(sealed, dict) or not all(n.isdecimal() for n in sealed):
        raise WireError("it has no shares of other clients")
    secrets = request.secrets
    contribution = request.summand.contribution(request, packet)
    texts = {int(n): str(text).encode() for n, text in sealed.items()}
    context = context_of(request.settings, request.subject, session.cohort, packet.body)
    secrets, content = secure_sum.mask(secrets, texts, contribution.words, rules, context)
    # A repeated request trains again instead of storing the vector; the same data give the same bytes.
    vector = hashlib.sha256(content).hexdigest()
    if session.vector not in ("", vector):
        raise WireError(
            "this node has sent its vector of this sum, and its data have changed since: the difference of "
            "two vectors with the same masks would reveal its upload"
        )
    record = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    reply = wire.encode(record, request.head._replace(kind=MASKED), about=contribution.about)
    contribution.save()
    after = replace(session, secrets=secrets, context=context.hex(), samples=contribution.samples)
    return replace(after, upload=contribution.upload, vector=vector, noised=contribution.noised), reply


def _consistent(request: PhaseRequest) -> PhaseAnswer:
    """The signature of the sum's members, if this node's data may be added up with them."""
    session, secrets, rules = request.session, request.secrets, request.settings.rules
    survivors = {int(client) for client in request.about[Field.SURVIVORS]}
    # This node's vector has no mask for a neighbour whose shares it never got, so that one cannot be in the sum.
    without_shares = (survivors & set(secrets.keys)) - set(secrets.shares)
    if without_shares or not survivors <= set(session.cohort):
        raise WireError("it names clients in the sum that did not take part in it")
    if len(survivors) < SMALLEST_COHORT:
        raise WireError(f"{len(survivors)} clients would be in the sum; at least {SMALLEST_COHORT} must be")
    require_cohort(request.node.policy, len(survivors))
    require_noise(request.node.policy, request.settings.noised, len(survivors))
    secure_sum.reveal(secrets, survivors, rules)  # an error if too few neighbours are among them
    members = [session.cohort[client] for client in survivors]
    # Written before the signature leaves: the others may reveal the sum without this node.
    request.summand.enter(request, request.identities(members))
    statement = sum_statement(request.subject, bytes.fromhex(session.context), members)
    return replace(session, survivors=sorted(survivors)), {Field.SIGNATURE: request.node.key.sign(statement)}


def _revealed(request: PhaseRequest) -> PhaseAnswer:
    """A share of one secret of each neighbour, if enough holders of shares signed the same sum."""
    session, secrets, rules = request.session, request.secrets, request.settings.rules
    members = [session.cohort[client] for client in session.survivors]
    statement = sum_statement(request.subject, bytes.fromhex(session.context), members)
    signatures = {int(client): str(text) for client, text in request.about[Field.SIGNATURE].items()}
    # Only signatures of clients that hold shares count: as many as the threshold demands, so two different lists of
    # survivors cannot both be signed by enough of them, unless a third of the holders signs both.
    signers = [n for n in session.survivors if n in secrets.shares and n in signatures]
    agreeing = [n for n in signers if is_signed(session.cohort[n], statement, signatures[n])]
    if len(agreeing) < rules.threshold:
        raise WireError(
            f"{len(agreeing)} clients signed the same model, settings and members of the sum; the threshold "
            f"is {rules.threshold}"
        )
    if session.noised:  # two sets of members cannot both have so many signatures
        noise = sum_noise(request.settings.noised, len(session.survivors))
        Ledger(request.node.memory).settle(session.noised, noise)
    shares = secure_sum.reveal(secrets, session.survivors, rules)
    return replace(session, secrets=None), {
        Field.SHARES: {str(n): share.hex() for n, share in shares.items()}
    }


ANSWERS = {KEYS: _keys, SHARES: _shares, CONSISTENT: _consistent, REVEALED: _revealed}


# -- the file ------------------------------------------------------------------------------------------------


def _read(path: Path) -> SecureSession:
    """The session in the file; an empty one if there is none."""
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        return SecureSession()
    except (OSError, ValueError) as error:
        raise WireError("its file of secrets cannot be read; see the node's log") from error
    secrets = None if fields["secrets"] is None else secure_sum.from_json(fields["secrets"])
    replies = {phase: Packet(head, bytes.fromhex(body)) for phase, (head, body) in fields["replies"].items()}
    cohort = {int(client): member for client, member in fields["cohort"].items()}
    return SecureSession(**fields | {"secrets": secrets, "replies": replies, "cohort": cohort})


def write_session(path: Path, session: SecureSession) -> None:
    """Writes the session before its reply leaves.

    Args:
        path: FILE, in the folder of the run.
        session: What is true when the reply leaves.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    secrets = None if session.secrets is None else secure_sum.as_json(session.secrets)
    replies = {phase: [head, body.hex()] for phase, (head, body) in session.replies.items()}
    write_json(path, vars(session) | {"secrets": secrets, "replies": replies})
