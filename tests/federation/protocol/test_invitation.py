"""Invitations as documents: what changed them is seen, and what a proposal may say after the consent."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from copfl.data.contract.contract import Contract
from copfl.errors import UsageError
from copfl.federation.protocol import invitation as invitations
from copfl.federation.protocol import proposal
from copfl.federation.protocol.agreed_samples import completes, samples_of
from copfl.federation.protocol.keys import SigningKey, new_key
from copfl.federation.protocol.proposal import Member
from copfl.federation.protocol.words import COUNT, WORDS, in_words, same_words
from copfl.settings.flat import flattened
from tests.federation.invited import TABLE

KEY, SITE = SigningKey(new_key()), SigningKey(new_key())
OPEN = Contract.of_table(TABLE)
FROZEN = OPEN.replaced(
    {"age": {"mean": 50.0, "deviation": 9.0}, "ward": {"categories": ("heart", "lung"), "candidates": ()}}
)


def settings(contract: Contract = OPEN) -> dict[str, Any]:
    of_run = {"run.clients": 3, "run.rounds": 5, "algorithm.name": "fedavg", "secure.aggregation": True}
    return of_run | flattened({"samples": samples_of(contract)})


def written(key: SigningKey = KEY, **options: Any) -> invitations.SignedInvitation:
    about: dict[str, Any] = {"federation": "clinic", "address": "fl.example.org:8800", "authority": "PEM"}
    return invitations.invite("north", 0, run_config=settings(), key=key, **about, **options)


def proposed(
    contract: Contract = OPEN,
    changed: dict[str, Any] | None = None,
    name: str = "north",
    key: SigningKey = KEY,
) -> proposal.Proposal:
    config = settings(contract) | (changed or {}) | {"session.run": "first"}
    return proposal.sign(config, (Member(0, name, SITE.public),), (), key).proposal


def test_words_are_256_that_differ_in_their_first_letters() -> None:
    assert len(WORDS) == len({word[:4] for word in WORDS}) == 256
    words = in_words(b"a document")
    assert len(words.split()) == COUNT
    assert words == in_words(b"a document") != in_words(b"another document")
    assert same_words(words, f"  {words.upper().replace(' ', ', ')}. ")
    assert not same_words(words, words.rpartition(" ")[0])


def test_an_invitation_survives_its_file_and_no_change() -> None:
    signed = written()
    assert invitations.read(signed.document) == signed
    fields = json.loads(signed.document)
    for name, value in fields.items():
        other = {"number": 1, "settings": value | {"run.rounds": 6} if name == "settings" else 1}.get(name)
        changed = fields | {
            name: other if other is not None else f"{value}0" if name != "signature" else "00"
        }
        with pytest.raises(UsageError, match="no invitation that can be used"):
            invitations.read(json.dumps(changed).encode())
    for content in (b"", b"[]", b"{}", b"\xff", signed.document[:-200]):
        with pytest.raises(UsageError, match="no invitation that can be used"):
            invitations.read(content)


@pytest.mark.parametrize("name", ["address", "federation", "nonce", "issued", "expires", "site"])
def test_no_field_of_an_invitation_writes_a_line(name: str) -> None:
    """Of the certificate alone: errors have the address, and the terminal of the owner would have what follows it."""
    own = written().invitation
    value = getattr(own, name)
    lines = f"server:1\nThe words are right\n{value}" if name == "address" else f"{value}\n"
    changed: dict[str, Any] = {name: lines}
    forged = dataclasses.replace(own, **changed)
    document = invitations.SignedInvitation(forged, KEY.sign(invitations._invites(forged))).document
    with pytest.raises(UsageError, match="no invitation that can be used"):
        invitations.read(document)


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        ("fl.example.org:8800", True),
        ("super_link:1", True),
        ("192.0.2.1:65535", True),
        ("[2001:db8::1]:8800", True),
        ("fl.example.org", False),
        ("fl.example.org:0", False),
        ("fl.example.org:65536", False),  # no socket has it: an error of Python's
        ("fl.example.org:\u0663\u0663", False),
        ("fl.example.org@evil.example:8800", False),  # another host than it seems
        ("fl.example.org/#:8800", False),
        ("[::1:8800", False),  # an error of httpx
        ("a b:8800", False),
        ("k\u00f6ln..de:8800", False),
    ],
)
def test_the_address_of_an_invitation_is_a_host_and_a_port(address: str, is_one: bool) -> None:
    forged = dataclasses.replace(written().invitation, address=address)
    document = invitations.SignedInvitation(forged, KEY.sign(invitations._invites(forged))).document
    if is_one:
        assert invitations.read(document).invitation.address == address
        return
    with pytest.raises(UsageError, match="no address of a server"):
        invitations.read(document)


def test_a_forged_invitation_has_other_words() -> None:
    """Who signs with a key of his own makes a valid file: the words on the telephone are what stops it."""
    own = written()
    forged = invitations.SignedInvitation(
        dataclasses.replace(own.invitation, coordinator=SITE.public), ""
    ).invitation
    signature = SITE.sign(invitations._invites(forged))
    assert invitations.read(invitations.SignedInvitation(forged, signature).document).invitation == forged
    assert forged.words != own.invitation.words
    assert written().invitation.words != own.invitation.words  # of the same settings: the file has a nonce


def test_an_invitation_ends() -> None:
    now = datetime.datetime.now(datetime.UTC)
    assert not written().invitation.is_over(now)
    assert written(days=1).invitation.is_over(now + datetime.timedelta(days=1, seconds=2))


def test_the_proposal_to_which_a_site_consented_has_no_changes() -> None:
    consented = written().invitation
    assert invitations.changes(consented, proposed()) == []
    assert invitations.changes(consented, proposed(changed={"session.agree": True})) == []
    assert invitations.changes(consented, proposed(FROZEN)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run.rounds": 500}, "run.rounds was 5, and is 500"),
        ({"secure.aggregation": False}, "secure.aggregation was True, and is False"),
        ({"run.benefit": "all"}, "run.benefit was None, and is all"),
        ({"session.rollback": True}, "session.rollback was None, and is True"),
        ({"session.join": 3}, "session.join was None, and is 3"),
    ],
)
def test_a_setting_that_changed_after_the_consent_is_named(change: dict[str, Any], said: str) -> None:
    assert said in invitations.changes(written().invitation, proposed(changed=change))


def test_another_coordinator_name_or_contract_is_named() -> None:
    consented = written().invitation
    assert invitations.changes(consented, proposed(key=SITE)) == ["its coordinator is another one"]
    assert "client 0 is mallory" in invitations.changes(consented, proposed(name="mallory"))[0]
    (age, ward), (target,) = FROZEN.columns, FROZEN.targets
    for other in (
        dataclasses.replace(FROZEN, columns=(dataclasses.replace(age, maximum=500.0), ward)),
        dataclasses.replace(FROZEN, columns=(age, dataclasses.replace(ward, categories=("heart", "cash")))),
        dataclasses.replace(FROZEN, targets=(dataclasses.replace(target, categories=("well", "ill")),)),
        dataclasses.replace(FROZEN, missing="drop"),
    ):
        assert not completes(other, OPEN)
        assert "the data contract differs in more" in invitations.changes(consented, proposed(other))[0]
    # What follows from the contract cannot be something else.
    assert invitations.changes(consented, proposed(FROZEN, {"samples.shape": "[7]"}))


def test_an_answer_is_of_its_key_alone() -> None:
    said = invitations.InvitationAnswer(invitation="0" * 64, key=SITE.public, state=invitations.JOINS)
    document = said.signed(SITE)
    assert invitations.read_answer(document) == said
    misfit = invitations.Misfit("age", "missing_column")
    told = dataclasses.replace(said, state=invitations.MISFITS, misfits=(misfit,))
    assert invitations.read_answer(told.signed(SITE)) == told
    for changed in (
        {"key": KEY.public},
        {"state": "leaves"},
        {"state": "is admitted"},
        {"invitation": "1" * 64},
        {"misfits": [["age", "has the value 140"]]},
    ):
        with pytest.raises(UsageError, match="no answer to an invitation"):
            invitations.read_answer(json.dumps(json.loads(document) | changed).encode())
    with pytest.raises(UsageError, match="no answer"):
        invitations.read_answer(said.signed(KEY))
    with pytest.raises(UsageError, match="more than"):
        invitations.read_answer(b" " * 10**6)


def test_the_words_of_an_answer_are_of_key_and_invitation() -> None:
    said = invitations.InvitationAnswer(invitation="0" * 64, key=SITE.public, state=invitations.JOINS)
    others = (dataclasses.replace(said, key=KEY.public), dataclasses.replace(said, invitation="1" * 64))
    assert said.words not in {other.words for other in others}


def test_the_file_of_an_invitation_fits_a_mail(tmp_path: Path) -> None:
    assert len(written().document) < 10_000
