"""Keys where they belong: members make their own, and are admitted, revoked and rotated by the coordinator."""

from __future__ import annotations

import datetime
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.errors import UsageError
from copfl.federation import init
from copfl.federation.machines import deployed
from copfl.federation.operations.status import as_text, status
from copfl.federation.policy.file import read_policy
from copfl.federation.policy.record import OPEN, Policy, ProposalRules
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.keys import fingerprint, read_key, read_public
from copfl.federation.protocol.proposal import KEY, differences, read, settings_in
from copfl.federation.server import certificates, membership
from copfl.federation.server.certificates import expiries, expiry_warnings
from copfl.federation.server.membership import (
    coordinator_key,
    overrides,
    propose,
    read_roster,
    revoke,
    revoked_keys,
    server_proposal,
)
from copfl.settings.checking import SettingError
from copfl.settings.flat import nested
from tests.commands import called
from tests.federation.network import CONFIG


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An app for three machines, without members."""
    return init(tmp_path / "app", nested(CONFIG), host="fl.example.org")


@pytest.fixture
def admitted(app: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The app with three members, which made their own keys."""
    for name in ("north", "south", "west"):
        done = called(capsys, "site", "key", tmp_path / name)
        public = read_public(tmp_path / f"{name}.pub")
        assert f"fingerprint {fingerprint(public)}" in done.out
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        done = called(capsys, "federate", "admit", app, tmp_path / f"{name}.pub")
        assert done.code == 0, done.err
        assert f"is {name}, fingerprint {fingerprint(public)}" in done.out
    return app


def signed(app: Path, **config: Any) -> Any:
    return propose(app, {"session.run": "first", **config}, coordinator_key(app), read_roster(app))


def test_members_make_their_own_keys(
    admitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = called(capsys, "federate", "members", admitted)
    lines = done.out.splitlines()
    names = ("north", "south", "west")
    keys = [read_public(tmp_path / f"{name}.pub") for name in names]
    assert lines[0] == f"coordinator  {fingerprint(coordinator_key(admitted).public)}"
    assert lines[1:4] == [f"client {n}     {fingerprint(keys[n])}  {names[n]}" for n in range(3)]
    assert [m.key for m in signed(admitted).proposal.members] == keys
    assert not list(admitted.rglob("north"))
    full = called(capsys, "federate", "admit", admitted, tmp_path / "north.pub", "--name", "east")
    assert "all 3 clients have a member" in full.err


def test_a_key_or_a_number_is_one_members(
    app: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        called(capsys, "site", "key", tmp_path / name)
    (tmp_path / "rsa.pub").write_text("ssh-rsa AAAA")
    assert called(capsys, "federate", "admit", app, tmp_path / "a.pub", "--client", "2").code == 0
    for words, error in (
        (("b.pub", "--client", "2"), "client 2 is a member's already"),
        (("b.pub", "--client", "3"), "not one of 3 clients"),
        (("b.pub", "--name", "a"), "a is a member already"),
        (("a.pub", "--name", "c"), "a is a member already"),
        (("b.pub", "--name", "../x"), "must be letters"),
        (("rsa.pub",), "is no public key"),
        (("none.pub",), "No such file"),
    ):
        done = called(capsys, "federate", "admit", app, tmp_path / words[0], *words[1:])
        assert (done.code, error in done.err) == (2, True), done.err
    again = called(capsys, "site", "key", tmp_path / "a")
    assert "keys are never overwritten" in again.err


def test_a_revoked_member_leaves_the_next_proposal(
    admitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signed(admitted)
    done = called(capsys, "federate", "revoke", admitted, "south")
    assert done.code == 0, done.err
    south = read_public(tmp_path / "south.pub")
    assert revoked_keys(admitted) == {south}
    assert not (admitted / "keys" / "south.pub").exists()  # the server registers what is there
    after = signed(admitted)
    assert [m.name for m in after.proposal.members] == ["north", "west"]
    assert after.proposal.revoked == (south,)
    assert after.proposal.digest != before.proposal.digest
    back = called(capsys, "federate", "admit", admitted, tmp_path / "south.pub")
    assert "this key was revoked" in back.err
    assert "south" in called(capsys, "federate", "members", admitted).out
    wrong = called(capsys, "federate", "revoke", admitted, "nroth")
    assert 'did you mean "north"' in wrong.err


def test_a_member_rotates_its_key(admitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = read_key(tmp_path / "north")
    done = called(capsys, "site", "rotate", tmp_path / "north")
    assert done.code == 0, done.err
    new = read_key(tmp_path / "north")
    assert read_key(tmp_path / "north.old").public == old.public != new.public
    assert stat.S_IMODE((tmp_path / "north").stat().st_mode) == 0o600
    again = called(capsys, "site", "rotate", tmp_path / "north")
    assert "an earlier rotation" in again.err
    words = ("federate", "admit", admitted, tmp_path / "north.pub", "--rotation")
    (tmp_path / "forged").write_text(json.dumps({"signature": "00"}))
    assert "is not signed with its old one" in called(capsys, *words, tmp_path / "forged").err
    assert called(capsys, *words, tmp_path / "north.rotation").code == 0
    (member,) = [m for m in signed(admitted).proposal.members if m.name == "north"]
    assert (member.number, member.key, member.identity) == (0, new.public, old.public)
    assert signed(admitted).proposal.revoked == (old.public,)


def test_a_proposal_is_the_same_until_something_changes(admitted: Path) -> None:
    """So a resumed run needs no new approval."""
    first = signed(admitted)
    assert signed(admitted, **{"session.resume": True}) == first
    assert signed(admitted, **{"run.rounds": 7}) != first


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("run.ronds", 'run.ronds=3 is no setting; did you mean "rounds"'),
        ("optmizer.lr", 'optmizer is no setting; did you mean "optimizer"'),
        ("privacy.noise", "privacy.noise=3 is not among the settings of this app; write it into"),
    ],
)
def test_a_key_that_the_app_does_not_have_is_refused_before_flower_sees_it(
    admitted: Path, key: str, said: str
) -> None:
    with pytest.raises(SettingError, match=re.escape(said)):
        signed(admitted, **{key: 3, "session.resume": True})


def test_a_proposal_signed_elsewhere_is_started_here(
    admitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "stick"
    (tmp_path / "app-authority").rename(key)
    with pytest.raises(UsageError, match="the coordinator's key is not on this machine"):
        coordinator_key(admitted)
    words = ("--run", "first", "-s", "run.rounds=7", "--key", key / "coordinator")
    done = called(capsys, "federate", "propose", admitted, tmp_path / "p.json", *words)
    assert done.code == 0, done.err
    assert "setting      run.rounds = 7" in done.out
    agreed = read((tmp_path / "p.json").read_bytes()).proposal
    given = overrides(admitted, agreed)
    assert given == {"session.run": "first", "run.rounds": 7} | {
        k: v for k, v in given.items() if k not in ("session.run", "run.rounds")
    }
    assert differences(agreed, {**settings_in(read_app(admitted)["config"]), **given}) == []
    both = called(capsys, "federate", "run", admitted, "--proposal", tmp_path / "p.json", "--rounds", "3")
    assert "has all settings of the run" in both.err


def test_a_run_is_submitted_with_its_proposal(
    admitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode = 0

    def run(command: list[str], **_: Any) -> Done:
        commands.append(command)
        return Done()

    monkeypatch.setattr("copfl.federation.machines.deployed.subprocess.run", run)
    found = {"superlink": {"answers": True, "address": "x"}, "runs": []}
    monkeypatch.setattr(deployed, "status", lambda *_: found)
    with pytest.raises(Exception, match="ended before its first round"):
        deployed.start_run(admitted, {"session.run": "first", "run.rounds": 7})
    from flwr.common.config import parse_config_args

    sent = parse_config_args([commands[0][-1]])
    run_config = {**settings_in(read_app(admitted)["config"]), **sent}
    agreed = server_proposal(read_policy(admitted / "policy.toml"), run_config)
    assert agreed is not None
    assert (agreed.proposal.run, agreed.proposal.settings["run.rounds"]) == ("first", 7)


def test_the_server_starts_what_its_coordinator_signed_alone(admitted: Path, tmp_path: Path) -> None:
    """The policy that init writes for the server has the coordinator's fingerprint."""
    policy = read_policy(admitted / "policy.toml")
    run_config = {**settings_in(read_app(admitted)["config"]), "session.run": "first"}
    good = run_config | {KEY: signed(admitted).text}
    assert server_proposal(policy, good) is not None
    with pytest.raises(UsageError, match=r"no coordinator signed it.*\[proposals.unsigned\]"):
        server_proposal(policy, run_config)
    with pytest.raises(UsageError, match=r"run\.rounds is 9, and 3 in the proposal"):
        server_proposal(policy, good | {"run.rounds": 9})
    with pytest.raises(UsageError, match=r"is signed by .*\[proposals.coordinators\]"):
        server_proposal(Policy(proposals=ProposalRules(coordinators=(fingerprint("x"),))), good)
    assert server_proposal(OPEN, run_config) is None


def test_a_trial_has_members_of_its_own(admitted: Path) -> None:
    """`up` in the folder of a real federation changes nothing of it."""
    from copfl.federation.machines.local_federation import LocalFederation

    before = (admitted / "members.json").read_bytes()
    local = LocalFederation(admitted)
    membership.make_member_keys(local.home, 3)
    assert local.home != admitted
    assert (admitted / "members.json").read_bytes() == before
    assert [m.name for m in read_roster(local.home).members] == ["node-0", "node-1", "node-2"]


# -- certificates --------------------------------------------------------------------------------------------


def test_a_server_gets_a_new_certificate(
    app: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cryptography import x509

    keys = app / "keys"
    before = [(keys / name).read_bytes() for name in ("server.key", "server.pem", "ca.pem")]
    done = called(capsys, "federate", "rotate", app)
    assert done.code == 0, done.err
    after = [(keys / name).read_bytes() for name in ("server.key", "server.pem", "ca.pem")]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, False, True]
    root, server = (x509.load_pem_x509_certificate(content) for content in (after[2], after[1]))
    server.verify_directly_issued_by(root)
    assert stat.S_IMODE((keys / "server.key").stat().st_mode) == 0o600
    (tmp_path / "app-authority").rename(tmp_path / "stick")
    assert "--authority" in called(capsys, "federate", "rotate", app).err
    assert called(capsys, "federate", "rotate", app, "--authority", tmp_path / "stick").code == 0
    other = init(tmp_path / "other", nested(CONFIG), host="fl.example.org")
    wrong = called(capsys, "federate", "rotate", other, "--authority", tmp_path / "stick")
    assert "is not the key of the authority" in wrong.err


@pytest.mark.parametrize(
    ("days", "named"),
    [(31, ""), (29.4, "expires in 29 days"), (0.4, "expires in 0 days"), (-1, "expired on")],
)
def test_a_certificate_that_ends_soon_is_named(days: float, named: str, app: Path) -> None:
    ends = expiries(app / "keys")
    assert sorted(ends) == ["ca.pem", "server.pem"]
    now = ends["server.pem"] - datetime.timedelta(days=days)
    warnings = [line for line in expiry_warnings(ends, now) if "server.pem" in line]
    assert bool(warnings) == bool(named)
    assert all(named in line for line in warnings)


def test_the_server_gets_new_certificates_of_an_authority_that_lasts(app: Path) -> None:
    ends = expiries(app / "keys")
    assert (ends["ca.pem"] - ends["server.pem"]).days == 3650 - 397


def test_the_status_has_the_end_of_certificates(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = expiries(app / "keys")["server.pem"]
    assert f"certificate server.pem is valid until {end:%Y-%m-%d}" in as_text(status(app))
    monkeypatch.setattr(certificates, "WARNING_DAYS", 400)
    assert "the certificate server.pem expires in 397 days" in " ".join(status(app)["problems"])


def test_revoking_twice_is_an_error(admitted: Path) -> None:
    revoke(admitted, "west")
    with pytest.raises(UsageError, match="west"):
        revoke(admitted, "west")
