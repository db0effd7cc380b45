"""A client's answers in the phases of secure aggregation. Its secrets are in a file until the sum is done.

A request of another phase than the next is refused, and so is a second, different request of one phase: its
answers together would reveal more than one sum. A repeated request gets the same answer. A round of which
this client has revealed its shares is not summed again: two sums over different clients differ by single
uploads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from copfl import wire
from copfl.errors import WireError
from copfl.flower import node, secure_sum, secure_total
from copfl.flower.node import LoadData, NodeConfig, node_data
from copfl.flower.registry import state_dir
from copfl.flower.secure_sum import PHASES, Keys, Secrets
from copfl.flower.settings import Settings
from copfl.flower.state import ClientRecords, write_json
from copfl.flower.transport import Field
from copfl.wire import Head, Packet

FILE = "secure.json"  # in the folder of the run
KEYS, SHARES, MASKED, REVEALED = PHASES


class Session(NamedTuple):
    """One sum, from the client's side."""

    name: str
    revealed: int  # the last round of which this client revealed its shares, in any session
    requests: dict[str, str]  # phase -> checksum of its request
    replies: dict[str, Packet]  # to requests of the other phases than MASKED, which is computed again
    secrets: Secrets | None


def local_update(
    settings: Settings, node_config: NodeConfig, packet: Packet, load_data: LoadData = node_data
) -> Packet:
    """The answer to a message of a round: the upload, or that of a phase if aggregation is secure."""
    if not settings.config.secure_aggregation:
        return node.local_update(settings, node_config, packet, load_data)
    head = node.head_of(settings, node_config, packet)
    fields = wire.opened_head(packet)
    phase = MASKED if fields.get("kind") == "down" else str(fields.get("kind"))
    path = ClientRecords(state_dir(node_config), head.run).folder / FILE
    session, is_repeated = _entered(_read(path), phase, fields["about"], json.loads(packet.head)["sha256"])
    if is_repeated and phase in session.replies:
        return session.replies[phase]
    if head.round <= session.revealed and not settings.config.rollback:
        raise WireError(
            f"this node has revealed its shares of round {session.revealed + 1}, and is asked for round "
            f"{head.round + 1}: two sums of a round would differ by single uploads; go on to the next round"
        )
    if phase == MASKED:
        trained = node.train(settings, node_config, packet, load_data)
        session, reply = _masked(settings, session, trained, node.reports_metrics(settings, node_config))
        trained.save()
    else:
        about = wire.decode(packet, (), head._replace(kind=phase)).about
        session, answer = _answered(settings, session, head, about)
        reply = wire.encode((), head._replace(kind=phase), about=answer)
        session = session._replace(replies={phase: reply})
    _write(path, session)
    return reply


def _entered(before: Session, phase: str, about: Mapping[str, Any], request: str) -> tuple[Session, bool]:
    """The session with this request, and whether it was made before; WireError if it is not the next one."""
    name = about.get(Field.SESSION)
    if phase not in PHASES or type(name) is not str:
        raise WireError("the run asks for secure aggregation, and this message is not part of it")
    if phase == KEYS and name != before.name:
        return Session(name, before.revealed, {KEYS: request}, {}, None), False
    last, following = ("", *PHASES)[len(before.requests)], (*PHASES, "")[len(before.requests)]
    is_repeated = phase == last and before.requests[phase] == request
    if name != before.name or not (is_repeated or phase == following):
        raise WireError(f"it asks for the phase {phase!r} of a sum out of turn, or a second time")
    return before._replace(requests={**before.requests, phase: request}), is_repeated


def _answered(
    settings: Settings, session: Session, head: Head, about: Mapping[str, Any]
) -> tuple[Session, dict[str, Any]]:
    """The session after its last request, in all phases but MASKED, and the fields of the answer."""
    phase, rules, secrets = list(session.requests)[-1], settings.config.rules, session.secrets
    try:
        if phase == KEYS:
            secrets, public = secure_sum.begin(head.client)
            return session._replace(secrets=secrets), {Field.KEYS: [key.hex() for key in public]}
        if secrets is None:
            raise WireError("this node has no keys of this sum")
        if phase == SHARES:
            keys = {int(n): Keys(*map(bytes.fromhex, pair)) for n, pair in about[Field.KEYS].items()}
            secrets, sealed = secure_sum.share(secrets, keys, rules)
            fields: dict[str, Any] = {Field.SHARES: {str(n): text.decode() for n, text in sealed.items()}}
            fields[Field.COMMITMENT] = secure_sum.commitment(secrets.seed).hex()
            return session._replace(secrets=secrets), fields
        shares = secure_sum.reveal(secrets, {int(n) for n in about[Field.SURVIVORS]}, rules)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError("its fields are not those that a copfl server sends") from error
    ended = session._replace(revealed=max(head.round, session.revealed), secrets=None)
    return ended, {Field.SHARES: {str(n): share.hex() for n, share in shares.items()}}


def _masked(
    settings: Settings, session: Session, trained: node.Trained, reported: bool
) -> tuple[Session, Packet]:
    """The masked contribution; a value that is not finite or out of range is refused before it is masked."""
    config, rules, sealed = settings.config, settings.config.rules, trained.about.get(Field.SHARES)
    if session.secrets is None or not isinstance(sealed, dict) or not all(n.isdecimal() for n in sealed):
        raise WireError("it has no shares of other clients")
    with torch.no_grad():
        upload = trained.output.upload
        total = secure_total.summand_of(settings.algorithm, settings.task, config.clients, upload)
    sums = secure_total.sums_of(total, trained.metrics, rules, reported=reported)
    words = secure_total.words_of(sums, rules)
    texts = {int(n): str(text).encode() for n, text in sealed.items()}
    secrets, content = secure_sum.mask(session.secrets, texts, words, rules)
    record = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    reply = wire.encode(record, trained.head._replace(kind=MASKED), about={Field.NOTE: trained.note})
    return session._replace(secrets=secrets), reply


def _read(path: Path) -> Session:
    """The session in the file; an empty one if there is none."""
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        return Session("", -1, {}, {}, None)
    except (OSError, ValueError) as error:
        raise WireError("its file of secrets cannot be read; see the node's log") from error
    secrets = None if fields["secrets"] is None else secure_sum.from_json(fields["secrets"])
    replies = {phase: Packet(head, bytes.fromhex(body)) for phase, (head, body) in fields["replies"].items()}
    return Session(fields["name"], fields["revealed"], fields["requests"], replies, secrets)


def _write(path: Path, session: Session) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    secrets = None if session.secrets is None else secure_sum.as_json(session.secrets)
    replies = {phase: [head, body.hex()] for phase, (head, body) in session.replies.items()}
    write_json(path, session._asdict() | {"secrets": secrets, "replies": replies})
