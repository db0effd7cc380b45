"""`copfl site join`, `start` and `leave`, and `copfl federate invite` and `admit`: one sentence for each wrong move."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl import foreign
from copfl.data.contract.contract import Column, Contract
from copfl.data.contract.file import write_contract
from copfl.errors import RunError
from copfl.federation.machines import admission, deployed
from copfl.federation.operations import joining
from copfl.federation.operations.status import as_text, status
from copfl.federation.policy.file import read_policy
from copfl.federation.protocol.invitation import invite
from copfl.federation.protocol.keys import SigningKey, fingerprint, new_key, public_text
from copfl.federation.server import invitations
from copfl.federation.server.membership import admit, read_roster
from tests.cli.site.conftest import Clinic
from tests.commands import called
from tests.federation.invited import TABLE, file_of, invitation_in, write_rows


def test_one_command_joins_and_one_admits(clinic: Clinic) -> None:
    done = clinic.join()
    assert done.code == 0, done.err
    for said in (
        "invited by   clinic, at fl.example.org:8800",
        "you are      north, one of 3 sites",
        "trained      outcome (ill, well) from 2 columns by fedavg with the model linear, 2 rounds",
        "your file    needs these columns, in any order:",
        "before that  the sites agree by sums on means and categories of age, ward",
        "masked: the server learns the sum over all 3 sites, and no site's own",
        "no noise is added, so no epsilon can be stated",
        "outputs      2 classes: ill, well",
        "rows of a class of which you have fewer than 5 do not count",
        "members      the node waits until you have compared them by telephone: copfl site approve shows them",
        "30 rows: they fit the contract",
    ):
        assert said in done.out
    site = joining.read(clinic.folder / "north")
    policy = read_policy(site.folder / "policy.toml")
    assert policy.proposals.coordinators == (fingerprint(site.invitation.coordinator),)
    assert policy.secure_aggregation.required
    assert policy.proposals.members == "approved"
    assert (site.folder / joining.KEY).stat().st_mode & 0o077 == 0
    ((address, options),) = clinic.started
    assert (address.superlink, address.key) == ("fl.example.org:8800", site.folder / joining.KEY)
    assert options == site.node_options
    words = done.out.partition("same call:  ")[2].splitlines()[0]
    admitted = clinic.call("federate", "admit", clinic.app, "north", "--words", words)
    assert admitted.code == 0, admitted.err
    assert "north is client 0" in admitted.out
    assert "Missing: south (has not answered), west (has not answered)" in admitted.out
    assert clinic.call("site", "start", site.folder, "--set", "cohort-changes=1").code == 0
    assert clinic.started.pop()[1] == {**site.node_options, "cohort-changes": 1}
    assert joining.read(site.folder).options["cohort-changes"] == 1  # it is kept
    again = clinic.call("site", "start", site.folder)  # after a restart of the machine
    assert (again.code, len(clinic.started)) == (0, 2)
    assert "Read these words" not in again.out


def test_a_file_is_compared_with_the_invitation_before_anything_is_sent(clinic: Clinic) -> None:
    """Its columns are a list that the owner can read."""
    invited = file_of(clinic.app, "north")
    contract = invitation_in(clinic.app, "north").contract
    assert contract is not None
    data = write_rows(clinic.folder / "mine.csv")
    done = clinic.call("site", "check", invited, "--data", data)
    assert (done.code, done.err) == (0, "")
    assert f"mine.csv fits the contract {contract.digest}: 30 rows" in done.out
    assert not (clinic.folder / "north").exists()
    columns = (
        Column(name="age", type="number", unit="years", minimum=0, maximum=120, missing=True),
        Column(name="sodium", type="number", minimum=100),
        Column(name="ward", type="category", categories=tuple(map(str, range(10)))),
        Column(name="admitted", type="date"),
    )
    target = Column(name="ill", type="category", categories=("no", "yes"))
    full = Contract(missing="fill", columns=columns, targets=(target,), group="patient", time="admitted_at")
    assert list(joining.columns_of(full)) == [
        "  age          number, in years, 0 to 120, may be missing",
        "  sodium       number, from 100",
        "  ward         category: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more",
        "  admitted     date, no model learns from it",
        "  ill          what is predicted: no, yes",
        "  patient      what belongs together, such as a patient; no model learns from it",
        "  admitted_at  when a row was; no model learns from it",
    ]
    many = dataclasses.replace(full, columns=tuple(Column(name=f"x{n}", type="number") for n in range(50)))
    assert "  and 10 more  as the check of your file says" in list(joining.columns_of(many))


def test_who_trusts_the_coordinator_says_so(clinic: Clinic) -> None:
    own = clinic.folder / "own.toml"
    own.write_text("[proposals]\ncoordinators = []\n")
    done = clinic.join("--trust-coordinator", policy=own)
    assert (
        "own.toml says which members it accepts, under [proposals]; leave --trust-coordinator out" in done.err
    )
    done = clinic.join("--trust-coordinator")
    assert "members      as the coordinator lists them first: if it invented them" in done.out
    assert read_policy(clinic.folder / "north" / "policy.toml").proposals.members == "first"


def test_a_unit_of_systemd_runs_the_node(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clinic.folder)
    done = clinic.join("--systemd", data="north.csv")
    assert done.code == 0, done.err
    assert "your data    north.csv, 30 rows" in done.out  # as its owner named it
    assert joining.read(clinic.folder / "north").options["data"] == str(clinic.data)  # from any folder
    unit = clinic.folder / "north" / "copfl-clinic-north.service"
    assert f"-m copfl site start {clinic.folder / 'north'}" in unit.read_text()
    assert f"systemctl enable --now {unit.stem}" in done.out
    assert clinic.started == []


def test_nothing_is_made_before_the_consent(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = clinic.file.read_bytes().replace(b'"run.rounds": 2', b'"run.rounds": 9')
    (clinic.folder / "changed.invite").write_bytes(changed)
    (clinic.folder / "no.invite").write_text("{}")
    own = clinic.folder / "own.toml"
    own.write_text('algorithms = ["fedprox"]\n[proposals]\ncoordinators = []\n')
    for words, said in (
        ([clinic.file], "there is no file"),
        ([clinic.folder / "none.invite"], "name the file that the coordinator sent"),
        ([clinic.folder / "no.invite"], "no.invite: it is no invitation that can be used"),
        ([clinic.data], "north.csv: it is no invitation that can be used"),
        (
            [clinic.folder / "changed.invite"],
            "was changed after the coordinator signed it; ask for a new one",
        ),
    ):
        data = clinic.folder / "nothing.csv" if said == "there is no file" else clinic.data
        done = clinic.call(
            "site", "join", *words, "--data", data, "--folder", clinic.folder / "north", "--yes"
        )
        assert (done.code, said in done.err) == (2, True), done.err
    done = clinic.join(words=invitation_in(clinic.app, "south").words)
    assert "not the words of north.invite: have them read again; if they stay different" in done.err
    done = clinic.join(policy=own)
    assert "policy refuses what clinic asks" in done.err
    assert "[algorithms]" in done.err
    done = clinic.call(
        "site", "join", clinic.file, "--data", clinic.data, "--folder", clinic.folder / "north"
    )
    assert 'this is no terminal to ask in: give --words "..." and --yes' in done.err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda text: False)
    done = clinic.call(
        *("site", "join", clinic.file, "--data", clinic.data),
        *("--folder", clinic.folder / "north", "--words", clinic.words),
    )
    assert "nothing was made or sent; tell the coordinator that north does not take part" in done.err
    assert not (clinic.folder / "north").exists()
    assert clinic.started == []
    assert list((clinic.app / "answers").glob("*")) == []


def test_an_expired_invitation_says_who_writes_a_new_one(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Later:
            return cls.fromtimestamp(super().now().timestamp() + 15 * 86400, tz)

    monkeypatch.setattr("copfl.federation.operations.joining.datetime.datetime", Later)
    done = clinic.join()
    assert "ask the coordinator for a new one (copfl federate invite FOLDER north)" in done.err


def test_a_file_that_does_not_fit_is_corrected_and_joins(clinic: Clinic) -> None:
    write_rows(clinic.data, "years,ward,outcome")
    done = clinic.join()
    assert done.code == 2
    assert 'differs    the column "age" is missing; is it your "years"? Rename it in the file' in done.out
    assert "Correct the file, then: copfl site start" in done.err
    assert clinic.started == []
    waiting = clinic.call("federate", "admit", clinic.app, "north", "--words", "x")
    assert (
        "north has data that do not fit; north corrects its file and runs copfl site start north"
        in waiting.err
    )
    write_rows(clinic.data)
    done = clinic.call("site", "start", clinic.folder / "north")
    assert "Read these words to the coordinator" in done.out, done.err


def test_another_server_or_none_loses_nothing(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: object) -> str:
        raise RunError("another server than that of the invitation answers")

    def closed(*_: object) -> str:
        attempts.append(1)
        if len(attempts) < 3:
            said.append(as_text(status(clinic.folder / "north")))
            raise admission.NotThere("the server does not answer: ask the coordinator whether it runs")
        return invitations.WAITS

    attempts: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(admission, "send", other)
    done = clinic.join()
    assert "another server" in done.err
    assert f"Afterwards: copfl site start {clinic.folder / 'north'}" in done.err
    monkeypatch.setattr(admission, "send", closed)
    monkeypatch.setattr("copfl.cli.site.join.RETRY", 0.0)
    done = clinic.call("site", "start", clinic.folder / "north")
    assert done.err.count("ask the coordinator whether it runs. This waits for it") == 1
    assert len(clinic.started) == 1
    assert "problem     the node is not running" in said[0]
    assert "problem     the server does not answer: ask the coordinator whether it runs" in said[1]
    answered, _ = joining.answer(joining.read(clinic.folder / "north"))
    assert (
        f"entered your words yet, they are:  {answered.words}" in done.out
    )  # they can be read out before the server is there
    assert f"send it the file {clinic.folder / 'north' / joining.ANSWER}" in done.out


def test_who_has_the_file_of_another_federation_names_another_folder(clinic: Clinic) -> None:
    (clinic.folder / "mine").mkdir()
    (clinic.folder / "mine" / "diary.txt").write_text("")
    assert "is not of this site; name another folder" in clinic.join(folder=clinic.folder / "mine").err
    assert clinic.join().code == 0
    clinic.file, clinic.words = file_of(clinic.app, "south"), invitation_in(clinic.app, "south").words
    assert "takes part in clinic as north, by another coordinator or name" in clinic.join().err
    done = clinic.call("site", "start", clinic.folder / "mine")
    assert "is no folder of `copfl site join`; join first" in done.err
    done = clinic.call("site", "report", clinic.folder / "north")
    assert "has no model yet: it gets one with the first round" in done.err


def test_wrong_words_at_the_coordinator_admit_nobody(clinic: Clinic) -> None:
    clinic.join()
    done = clinic.call("federate", "admit", clinic.app, "north", "--words", clinic.words)
    assert "not the words of the key that answered for north: have them read again" in done.err
    assert read_roster(clinic.app).members == ()
    done = clinic.call("federate", "admit", clinic.app, "north")
    assert "give the words that north reads out" in done.err
    done = clinic.call("federate", "run", clinic.app)
    assert "south has not answered: telephone south" in done.err
    assert "Nothing was started; --anyway starts a run that waits for them" in done.err


def test_a_run_goes_on_without_a_site_that_is_revoked(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    for client, site in enumerate(("north", "south", "west")):
        admit(clinic.app, 3, site, public_text(new_key().public_key()), client)
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(deployed, "start_run", lambda folder, config, **_: started.append(config))
    monkeypatch.setattr("copfl.federation.operations.status.as_text", lambda state: "")
    monkeypatch.setattr("copfl.federation.server.agreement.is_open", lambda folder: False)
    assert clinic.call("federate", "run", clinic.app).code == 0
    clinic.call("federate", "revoke", clinic.app, "south")
    monkeypatch.setattr(
        invitations,
        "invited",
        lambda folder: [
            invitations.InvitedSite(invitation_in(clinic.app, "south"), invitations.REVOKED, None)
        ],
    )
    done = clinic.call("federate", "run", clinic.app)
    assert "south is revoked: invite it again: copfl federate invite" in done.err
    assert "To train without: --set network.min_replies=2, which the other owners approve" in done.err
    assert "a round needs 3 sites, and 2 are members" in done.err
    assert len(started) == 1
    assert clinic.call("federate", "run", clinic.app, "--set", "network.min_replies=2").code == 0
    assert clinic.call("federate", "run", clinic.app, "--resume").code == 0  # at night, as it was agreed on
    assert started[1:] == [{"network.min_replies": 2}, {}]


def test_an_answer_may_come_as_a_file(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server cannot be reached yet, by the post."""
    monkeypatch.setattr(admission, "send", lambda *_: invitations.WAITS)
    words = clinic.join().out.partition("same call:  ")[2].splitlines()[0]
    file = clinic.folder / "north" / joining.ANSWER
    done = clinic.call("federate", "admit", clinic.app, file, "--words", words)
    assert "north is client 0" in done.out, done.err


def test_a_site_leaves_and_does_not_start_again(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    words = clinic.join().out.partition("same call:  ")[2].splitlines()[0]
    clinic.call("federate", "admit", clinic.app, "north", "--words", words)
    done = clinic.call("site", "leave", clinic.folder / "north", "--yes")
    assert "The server refuses this site's key from now on" in done.out, done.err
    assert read_roster(clinic.app).members == ()
    done = clinic.call("site", "start", clinic.folder / "north")
    assert "has left clinic; to return, ask for a new invitation" in done.err
    assert len(clinic.started) == 1

    def closed(*_: object) -> str:
        raise admission.NotThere("the server does not answer")

    monkeypatch.setattr(admission, "send", closed)
    done = clinic.call("site", "leave", clinic.folder / "north", "--yes")
    assert "Ask the coordinator to take your key out: copfl federate revoke FOLDER north" in done.out


def test_init_ends_with_what_to_send_to_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sites = ["--invite", "north", "--invite", "south"]
    folder = tmp_path / "clinic"
    done = called(
        capsys, "federate", "init", folder, "--dataset", "digits", *sites, "--host", "fl.example.org"
    )
    assert done.code == 0, done.err
    for site in ("north", "south"):
        about = invitation_in(folder, site)
        assert f"{site}: send {file_of(folder, site)}; it expires on {about.expires[:10]}" in done.out
        assert f"read out: {about.words}" in done.out
        assert about.settings["run.clients"] == 2
    assert f"Run the server: copfl federate server {folder}" in done.out
    done = called(capsys, "federate", "members", folder)
    assert (
        f"invited      north has not answered; words of its invitation: {invitation_in(folder, 'north').words}"
        in (done.out)
    )


def test_init_asks_for_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_contract(tmp_path / "contract.toml", Contract.of_table(TABLE))
    answers = iter([str(tmp_path / "contract.toml"), "north, south west", "fl.example.org"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    monkeypatch.setattr("typer.confirm", lambda *_, default: default)
    done = called(capsys, "federate", "init", tmp_path / "clinic")
    assert done.code == 0, done.err
    about = invitation_in(tmp_path / "clinic", "west")
    assert (about.address, about.settings["secure.aggregation"]) == ("fl.example.org:8800", True)
    assert done.out.count("then telephone, and read out: ") == 3


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["north", "../etc"], 'the name "../etc" must be letters'),
        (["north", "north"], "two sites are called north; give each a name of its own"),
    ],
)
def test_a_name_that_no_site_can_have_is_said_before_anything_is_written(
    names: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = [word for name in names for word in ("--invite", name)]
    done = called(capsys, "federate", "init", tmp_path / "clinic", "--dataset", "digits", *sites)
    assert (done.code, said in done.err) == (2, True), done.err
    assert not list(tmp_path.iterdir())


def test_nothing_of_an_invitation_moves_a_cursor_or_writes_a_line(clinic: Clinic) -> None:
    """Anybody may have written the file: its words are compared after the owner has read it."""
    real = invitation_in(clinic.app, "north")
    contract = real.contract
    assert contract is not None
    evil = "\x1b[1A\x1b[2K\nThe words are right\u202e"
    first, *others = contract.columns
    target = dataclasses.replace(contract.targets[0], name=evil)
    columns = (dataclasses.replace(first, name=f"{evil}age"), *others)
    hostile = dataclasses.replace(contract, columns=columns, targets=(target,))
    settings = {**real.settings, "samples.contract": hostile.as_json()}
    signed = invite(
        "north",
        0,
        federation="clinic",
        address=real.address,
        authority=real.authority,
        run_config=settings,
        key=SigningKey(new_key()),
    )
    clinic.file.write_bytes(signed.document)
    contract_file = clinic.folder / "contract.toml"
    write_contract(contract_file, hostile)
    checked = clinic.call("site", "check", contract_file, "--data", clinic.data)
    for shown in (clinic.join(), checked):
        assert shown.code in (1, 2)
        assert "The words are right" in shown.out
        assert shown.out == foreign.printable_lines(shown.out)
        assert not any(line.startswith("The words are right") for line in shown.out.splitlines())


def test_a_folder_that_is_not_there_is_said_with_those_that_are(clinic: Clinic) -> None:
    none = clinic.folder / "nroth"
    done = clinic.call("site", "report", none)
    assert f"there is no folder {none}; join first: copfl site join FILE --data FILE" in done.err
    clinic.join()
    for words in (["report"], ["predict", "--data", "x.csv"], ["leave"], ["start"], ["log"], ["approve"]):
        done = clinic.call("site", words[0], none, *words[1:])
        assert (
            done.err == f"copfl: there is no folder {none}; name that of a site: {clinic.folder / 'north'}\n"
        )
    for role in ("site", "federate"):
        done = clinic.call(role, "status", none)
        assert (
            f"there is no folder {none}; name one of `copfl site join` or `copfl federate init`" in done.err
        )
        done = clinic.call(role, "status", clinic.folder)
        assert "is no folder of `copfl site join` or `copfl federate init`" in done.err
    assert clinic.call("site", "status", clinic.folder / "north").code == 0
    assert clinic.call("federate", "status", clinic.app).code == 0
    assert "nothing has left this site" in clinic.call("site", "log", clinic.folder / "north").out
    done = clinic.call("site", "predict", clinic.folder / "north", "--data", clinic.data)
    assert "has no model yet: it gets one with the first round" in done.err
    done = clinic.call("site", "approve", clinic.folder / "north")
    assert "no proposal waits for its owner" in done.err
