"""The coordinator's side of invitations: who may answer, once, and what an attacker with the file can do."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.data.contract.check import ContractCheck, ContractDifference
from copfl.errors import UsageError
from copfl.federation.node.acceptance import accept, approve, pending
from copfl.federation.operations import joining, watched
from copfl.federation.operations.page import FederationPage
from copfl.federation.operations.status import status
from copfl.federation.policy.refusal import PolicyError
from copfl.federation.protocol import invitation
from copfl.federation.protocol.chained_log import AUDIT, append
from copfl.federation.protocol.invitation import JOINS, MISFITS, InvitationAnswer, Misfit, read_answer
from copfl.federation.protocol.keys import SigningKey, is_signed, new_key
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.proposal import KEY, members_fingerprint
from copfl.federation.server import invitations
from copfl.federation.server.invitations import ADMITTED, DO_NOT_FIT, NO_ANSWER, TWO_KEYS, WAITS
from copfl.federation.server.membership import admit, coordinator_key, propose, read_roster, revoke
from tests.commands import called
from tests.federation.invited import SITES, coordinated, invitation_in, joined, write_rows


def states(app: Path) -> dict[str, str]:
    return {one.invitation.site: one.state for one in invitations.invited(app)}


def test_a_site_answers_waits_and_is_admitted(tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north", "south")
    assert states(app) == {"north": NO_ANSWER, "south": NO_ANSWER}
    site = joined(app, "north", tmp_path)
    said, document = joining.answer(site)
    assert invitations.receive(app, document) == WAITS
    assert invitations.receive(app, document) == WAITS  # replayed, nothing changes
    assert states(app)["north"] == WAITS
    assert read_roster(app).members == ()  # nobody is admitted by an answer alone
    with pytest.raises(UsageError, match="not the words of the key"):
        invitations.admit_answer(app, "north", invitation_in(app, "north").words)
    member = invitations.admit_answer(app, "north", said.words.title())
    assert (member.number, member.key) == (0, site.key.public)
    assert invitations.receive(app, document) == ADMITTED == states(app)["north"]
    with pytest.raises(UsageError, match="south has not answered; telephone south"):
        invitations.admit_answer(app, "south", said.words)
    with pytest.raises(UsageError, match="east is neither invited nor a file"):
        invitations.admit_answer(app, "east", said.words)


def test_a_site_that_joined_rotates_its_key_and_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the commands that the messages name; until the coordinator has entered it, it is another key."""
    app = coordinated(tmp_path, "north")
    site = joined(app, "north", tmp_path)
    old = site.key.public
    said, document = joining.answer(site)
    invitations.receive(app, document)
    invitations.admit_answer(app, "north", said.words)

    done = called(capsys, "site", "rotate", site.folder)
    assert done.code == 0, done.err
    assert "copfl federate admit FOLDER north.pub --rotation north.rotation" in done.out
    assert f"copfl site start {site.folder} when the coordinator has entered the new one" in done.out
    assert site.key.public != old
    _, document = joining.answer(site)
    with pytest.raises(UsageError, match="another key has answered this invitation"):
        invitations.receive(app, document)
    rotation = ("--rotation", site.folder / "north.rotation")
    done = called(capsys, "federate", "admit", app, site.folder / "north.pub", *rotation)
    assert "client 0 is north" in done.out, done.err
    assert invitations.receive(app, document) == ADMITTED == states(app)["north"]

    revoke(app, "north")
    with pytest.raises(UsageError, match="the coordinator has taken this key out"):
        invitations.receive(app, document)


def test_a_thief_who_answers_first_is_not_admitted(tmp_path: Path) -> None:
    """The site is told that another key was faster, and the coordinator that there are two."""
    app = coordinated(tmp_path, "north")
    thief = SigningKey(new_key())
    stolen = InvitationAnswer(invitation=invitation_in(app, "north").digest, key=thief.public, state=JOINS)
    assert invitations.receive(app, stolen.signed(thief)) == WAITS
    site = joined(app, "north", tmp_path)
    own, document = joining.answer(site)
    with pytest.raises(UsageError, match="another key has answered this invitation"):
        invitations.receive(app, document)
    assert states(app)["north"] == TWO_KEYS
    for words in (own.words, stolen.words):
        with pytest.raises(
            UsageError, match=r"answered twice; .*or the site lost its folder; invite it again"
        ):
            invitations.admit_answer(app, "north", words)
    invitations.invite(app, "north", coordinator_key(app))  # the stolen file is void
    with pytest.raises(UsageError, match="knows no such invitation"):
        invitations.receive(app, stolen.signed(thief))
    again, document = joining.answer(joined(app, "north", tmp_path))
    assert again.key == own.key
    assert invitations.receive(app, document) == WAITS
    assert invitations.admit_answer(app, "north", again.words).key == own.key


def test_an_answer_after_the_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = coordinated(tmp_path, "north", "south")
    _, document = joining.answer(joined(app, "north", tmp_path))
    said, of_member = joining.answer(joined(app, "south", tmp_path))
    invitations.receive(app, of_member)
    invitations.admit_answer(app, "south", said.words)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Later:
            return cls.fromtimestamp(super().now().timestamp() + 15 * 86400, tz)

    monkeypatch.setattr("copfl.federation.server.invitations.datetime.datetime", Later)
    with pytest.raises(UsageError, match="expired; ask the coordinator for a new one"):
        invitations.receive(app, document)
    assert states(app) == {"north": invitations.EXPIRED, "south": ADMITTED}
    assert invitations.receive(app, of_member) == ADMITTED  # a member that starts again


def test_data_that_do_not_fit_are_named_by_their_columns_alone(tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north")
    site = joined(app, "north", tmp_path)
    write_rows(tmp_path / "north.csv", "years,ward,outcome")
    found = joining.checked(site.invitation, site.options["data"])
    said, document = joining.answer(site, found)
    assert [str(misfit) for misfit in said.misfits] == [
        "age: the column is missing, and another may be meant"
    ]
    assert "years" not in document.decode()
    assert invitations.receive(app, document) == DO_NOT_FIT == states(app)["north"]
    with pytest.raises(UsageError, match=r"north has data that do not fit; north corrects its file"):
        invitations.waiting(app, "north")
    write_rows(tmp_path / "north.csv")
    found = joining.checked(site.invitation, site.options["data"])
    assert invitations.receive(app, joining.answer(site, found)[1]) == WAITS


def test_an_answer_has_room_whatever_differs(tmp_path: Path) -> None:
    """The server refused the answer of a site with the wrong file, whose columns were all named."""
    site = joined(coordinated(tmp_path, "north"), "north", tmp_path)
    long = "\N{BRAIN}" * 150
    differences = [ContractDifference(f"{n}{long}", "missing_column", "") for n in range(5000)]
    said, document = joining.answer(site, ContractCheck(30, tuple(differences)))
    assert read_answer(document) == said
    assert str(said.misfits[-1]) == "other columns differ, too"


def test_a_site_tells_no_columns_but_the_contracts(tmp_path: Path) -> None:
    """What it tells is shown to the coordinator: no text of its own, and nothing of its data."""
    app = coordinated(tmp_path, "north")
    site = joined(app, "north", tmp_path)
    said, _ = joining.answer(site)
    for column in ("\x1b[2J", "=HYPERLINK(1)", "Mr Smith has HIV", "../../etc"):
        told = dataclasses.replace(said, state=MISFITS, misfits=(Misfit(column, "missing_column"),))
        with pytest.raises(UsageError, match="it names columns that the contract does not have"):
            invitations.receive(app, told.signed(site.key))
    assert states(app)["north"] == NO_ANSWER


def test_who_knows_no_invitation_has_the_server_verify_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each post was a signature for its own, and one for every invitation in the folder."""
    app = coordinated(tmp_path, *SITES)
    _, document = joining.answer(joined(app, "north", tmp_path))
    assert len(list(invitations.of_folder(app))) == 3
    verified: list[bytes] = []

    def noted(public: str, content: bytes, signature: str) -> bool:
        verified.append(content)
        return is_signed(public, content, signature)

    monkeypatch.setattr(invitation, "is_signed", noted)
    digest = json.loads(document)["invitation"]
    for _ in range(5):
        with pytest.raises(UsageError, match="knows no such invitation"):
            invitations.receive(app, document.replace(digest.encode(), b"0" * 64))
    assert not verified
    assert invitations.receive(app, document) == WAITS
    assert len(verified) == 1


def test_who_leaves_is_revoked_by_its_own_signature(tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north")
    site = joined(app, "north", tmp_path)
    said, document = joining.answer(site)
    invitations.receive(app, document)
    invitations.admit_answer(app, "north", said.words)
    forged = dataclasses.replace(said, state="leaves", key=SigningKey(new_key()).public)
    with pytest.raises(UsageError, match="no answer"):
        invitations.receive(app, forged.signed(site.key))
    joining.leave(site)
    assert joining.read(site.folder).has_left
    assert invitations.receive(app, joining.answer(site)[1]) == "leaves"
    assert read_roster(app).members == ()
    assert states(app)["north"] == "leaves"
    with pytest.raises(UsageError, match="has taken this key out"):
        invitations.receive(app, document)
    # It returns with a new invitation and a new key.
    invitations.invite(app, "north", coordinator_key(app))
    back = joined(app, "north", tmp_path)
    assert back.key.public != said.key
    assert invitations.receive(app, joining.answer(back)[1]) == WAITS


def test_a_revoked_key_does_not_answer_again(tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north")
    site = joined(app, "north", tmp_path)
    said, document = joining.answer(site)
    invitations.receive(app, document)
    invitations.admit_answer(app, "north", said.words)
    revoke(app, "north")
    assert states(app)["north"] == "is revoked"
    with pytest.raises(UsageError, match=r"taken this key out: leave .*, and ask for a new invitation"):
        invitations.receive(app, document)


def test_two_sites_with_one_key_are_refused(tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north", "south")
    site = joined(app, "north", tmp_path)
    said, document = joining.answer(site)
    invitations.receive(app, document)
    invitations.admit_answer(app, "north", said.words)
    other = dataclasses.replace(said, invitation=invitation_in(app, "south").digest)
    invitations.receive(app, other.signed(site.key))
    with pytest.raises(UsageError, match="north is a member already, as client 0"):
        invitations.admit_answer(app, "south", other.words)


def test_who_can_be_invited(tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north", "south", "west")
    key = coordinator_key(app)
    with pytest.raises(UsageError, match=r"all 3 sites are invited; raise run\.clients"):
        invitations.invite(app, "east", key)
    with pytest.raises(UsageError, match="must be letters, digits"):
        invitations.invite(app, "../east", key)
    with pytest.raises(UsageError, match="--days 0 must be above 0"):
        invitations.invite(app, "north", key, 0)
    assert invitations.file_of(app, "north").stat().st_mode & 0o777 == 0o600
    assert [one.number for one in invitations.of_folder(app)] == [0, 1, 2]


def test_members_that_a_coordinator_invented_wait_for_the_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of its own keys beside the only real site: what the three add up is the site's upload.

    The coordinator wrote the invitation, so its words say nothing of who the others are.
    """
    app = coordinated(tmp_path, "north")
    site = joined(app, "north", tmp_path)
    said, document = joining.answer(site)
    invitations.receive(app, document)
    invitations.admit_answer(app, "north", said.words)
    for client, name in ((1, "south"), (2, "west")):
        admit(app, 3, name, SigningKey(new_key()).public, client)
    signed = propose(app, {"session.run": "first"}, coordinator_key(app), read_roster(app))
    asked = {**signed.proposal.settings, KEY: signed.text}
    config = NodeConfig.parse(site.node_options)
    with pytest.raises(PolicyError, match=r"members that this node does not know.*\[proposals\.members\]"):
        accept(config, asked)
    everybody = members_fingerprint(signed.proposal.members)
    done = called(capsys, "site", "approve", site.folder, "--members", "3b0c-" * 7 + "3b0c", "--yes")
    assert "another site sees others: do not approve it; telephone all sites" in done.err
    done = called(capsys, "site", "approve", site.folder, "--members", everybody.upper(), "--yes")
    assert done.code == 0, done.err
    assert "new members  north, south, west" in done.out
    assert f"they see the same line in copfl site approve,  all members  {everybody}" in done.out
    assert accept(config, asked).node.config.client == 0
    again = propose(app, {"session.run": "second"}, coordinator_key(app), read_roster(app))
    assert accept(config, {**again.proposal.settings, KEY: again.text}).node.config.client == 0

    trusting = joining.policy_of(site.invitation, trusts_members=True)
    lines = [
        list(joining.described(site.invitation, "x", None, text))
        for text in (joining.policy_of(site.invitation), trusting)
    ]
    (careful,), (told,) = ([line for line in of if line.startswith("members ")] for of in lines)
    assert "the node waits until you have compared them by telephone" in careful
    assert "if it invented them, it can read what your site adds to a sum" in told
    (site.folder / "policy.toml").write_text(trusting)
    shutil.rmtree(site.folder / ".proposals")
    assert accept(config, asked).node.config.client == 0  # as the owner chose with --trust-coordinator


def test_settings_that_changed_after_the_consent_wait_for_the_owner(tmp_path: Path) -> None:
    """The coordinator's signature and the policy are not enough: the owner consented to something else."""
    app = coordinated(tmp_path, "north")
    site = joined(app, "north", tmp_path)
    said, document = joining.answer(site)
    invitations.receive(app, document)
    invitations.admit_answer(app, "north", said.words)
    config = NodeConfig.parse(site.node_options)
    key, roster = coordinator_key(app), read_roster(app)
    approve(site.folder, propose(app, {"session.run": "known"}, key, roster))  # the members were compared

    def asked(**changed: object) -> dict[str, Any]:
        named = {path.replace("_", ".", 1): value for path, value in changed.items()}
        signed = propose(app, {"session.run": f"run-{len(changed)}", **named}, key, roster)
        return {**signed.proposal.settings, KEY: signed.text}

    assert accept(config, asked()).node.config.client == 0
    assert accept(config, asked(session_agree=True)).node.config.client == 0
    with pytest.raises(PolicyError, match=r"not what its owner consented to \(run\.rounds was 2, and is 9\)"):
        accept(config, asked(run_rounds=9))
    (waits,) = pending(site.folder)
    approve(site.folder, waits)
    assert accept(config, asked(run_rounds=9)).node.config.client == 0


def test_the_page_has_the_one_command_with_which_it_goes_on(tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north")
    said, document = joining.answer(joined(app, "north", tmp_path))
    invitations.receive(app, document)
    invitations.admit_answer(app, "north", said.words)
    train = f"copfl federate run {app}"
    assert f"All sites that were invited are admitted. Agree and train: {train}" in FederationPage(app).html()
    run = app / "runs" / "first"
    run.mkdir(parents=True)
    append(run / AUDIT, {"event": "started", "round": 1, "rounds": 2, "clients": 1, "secure": True})
    assert f"Continue it: {train} --resume --run first" in FederationPage(app).html()
    append(run / AUDIT, {"event": "ended"})
    assert f"Train again: {train}" in FederationPage(app).html()


def test_the_page_says_who_is_missing_and_what_to_do(tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north", "south")
    site = joined(app, "north", tmp_path)
    write_rows(tmp_path / "north.csv", "years,ward,outcome")
    before = watched.fingerprint_of(app)
    invitations.receive(app, joining.answer(site, joining.checked(site.invitation, site.options["data"]))[1])
    assert watched.fingerprint_of(app) != before
    page = FederationPage(app).html()
    for said in (
        "nobody is admitted yet, 2 invited sites are missing",
        "has data that do not fit (age: the column is missing, and another may be meant)",
        "north corrects its file and runs copfl site start north",
        "a round waits at most 10 minutes for it, and begins again when 3 sites are there",
        "telephone south; it runs copfl site join south.invite --data FILE",
        invitation_in(app, "south").words,
    ):
        assert said in page
    assert "years" not in page
    assert status(app)["invited"] == {"north": DO_NOT_FIT, "south": NO_ANSWER}
