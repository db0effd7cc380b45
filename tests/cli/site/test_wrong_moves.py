"""The wrong moves of docs/wrong-moves.md: each is said in the sentence of its row, and the right move works after it.

A move is a generator: the answer to the wrong move, then the answer to the right one, which must succeed.
"""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

import httpx

from copfl.errors import CopflError
from copfl.federation.machines import admission, supernode
from copfl.federation.node.acceptance import accept
from copfl.federation.operations import joining
from copfl.federation.protocol import invitation as documents
from copfl.federation.protocol.keys import SigningKey, new_key
from copfl.federation.protocol.messages import refusal
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.proposal import KEY
from copfl.federation.server import invitations
from copfl.federation.server.certificates import make_certificates
from copfl.federation.server.membership import admit, coordinator_key, propose, read_roster
from copfl.files import locked
from tests import code_blocks
from tests.cli.site.conftest import SEND, SERVE, Clinic
from tests.commands import Answer
from tests.federation.invited import file_of, invitation_in, write_rows
from tests.federation.machines.test_admission import flower, serving

Move = Callable[[Clinic, pytest.MonkeyPatch], Iterator[Answer]]
MOVES: dict[str, Move] = {}
PAGE = code_blocks.ROOT / "docs" / "wrong-moves.md"
ROW = re.compile(
    r"^\| (?P<move>[^|]+) \| `(?P<said>[^|]+)` \| (?P<who>[^|]+) \| (?P<test>[^|]+) \|$", re.MULTILINE
)


def move(words: str) -> Callable[[Move], Move]:
    """Enters a move under the words that its row has."""

    def entered(function: Move) -> Move:
        MOVES[words] = function
        return function

    return entered


def words_of(done: Answer) -> str:
    """What a site reads out."""
    return done.out.partition("same call:  ")[2].splitlines()[0]


def admitted(clinic: Clinic) -> Answer:
    """North joins, and is a member."""
    return clinic.call("federate", "admit", clinic.app, "north", "--words", words_of(clinic.join()))


def sent(clinic: Clinic, content: bytes) -> Answer:
    """A site joins with a file of this content."""
    (clinic.folder / "sent.invite").write_bytes(content)
    own, clinic.file = clinic.file, clinic.folder / "sent.invite"
    done = clinic.join()
    clinic.file = own
    return done


def asked(clinic: Clinic, **changed: object) -> Answer:
    """What north's node says to a run with other settings than those of the invitation."""
    site = joining.read(clinic.folder / "north")
    settings = {path.replace("_", ".", 1): value for path, value in changed.items()}
    run = {"session.run": f"run-{len(changed)}", **settings}
    signed = propose(clinic.app, run, coordinator_key(clinic.app), read_roster(clinic.app))
    try:
        accept(NodeConfig.parse(site.node_options), {**signed.proposal.settings, KEY: signed.text})
    except CopflError as error:
        return Answer(2, "", f"copfl: {json.loads(refusal(error)[0])['refused']}\n")
    return Answer(0, "", "")


# -- the file ------------------------------------------------------------------------------------------------


@move("names its data where the invitation belongs")
def data_as_invitation(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    yield sent(clinic, clinic.data.read_bytes())
    yield clinic.join()


@move("has a file that the mail cut off")
def cut_off(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    yield sent(clinic, clinic.file.read_bytes()[:-300])
    yield clinic.join()


@move("has a file that somebody changed")
def changed(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    yield sent(clinic, clinic.file.read_bytes().replace(b'"run.rounds": 2', b'"run.rounds": 9'))
    yield clinic.join()


@move("has a file that somebody else wrote")
def forged(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    thief = SigningKey(new_key())
    invited = dataclasses.replace(invitation_in(clinic.app, "north"), coordinator=thief.public)
    yield sent(clinic, documents.SignedInvitation(invited, thief.sign(documents._invites(invited))).document)
    yield clinic.join()


@move("has the file of another site")
def of_another_site(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    yield sent(clinic, file_of(clinic.app, "south").read_bytes())
    yield clinic.join()


@move("joins after the last day")
def expired(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Later:
            return cls.fromtimestamp(super().now().timestamp() + 15 * 86400, tz)

    with monkeypatch.context() as later:
        later.setattr("copfl.federation.operations.joining.datetime.datetime", Later)
        yield clinic.join()
    clinic.call("federate", "invite", clinic.app, "north")
    yield clinic.join(words=invitation_in(clinic.app, "north").words)


@move("uses a file for which there is a newer one")
def older(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    before, words = clinic.file.read_bytes(), clinic.words
    clinic.call("federate", "invite", clinic.app, "north")
    clinic.words = words
    yield sent(clinic, before)
    yield clinic.join(words=invitation_in(clinic.app, "north").words)


@move("lost its folder, and joins again with the same file")
def lost_folder(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    clinic.join()
    shutil.rmtree(clinic.folder / "north")
    yield clinic.join()
    clinic.call("federate", "invite", clinic.app, "north")
    yield clinic.join(words=invitation_in(clinic.app, "north").words)


# -- the data ------------------------------------------------------------------------------------------------


@move("names data that are not there")
def no_data(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    yield clinic.join(data=clinic.folder / "nothing.csv")
    yield clinic.join()


@move("names a file that is no table")
def no_table(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    (clinic.folder / "scan.pdf").write_bytes(b"%PDF-1.4")
    yield clinic.join(data=clinic.folder / "scan.pdf")
    yield clinic.join()


@move("has a column of another name")
def other_columns(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    write_rows(clinic.data, "years,ward,outcome")
    yield clinic.join()
    write_rows(clinic.data)
    yield clinic.call("site", "start", clinic.folder / "north")


@move("has other categories")
def other_categories(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    clinic.data.write_text(clinic.data.read_text().replace("lung", "Lunge"))
    yield clinic.join()
    write_rows(clinic.data)
    yield clinic.call("site", "start", clinic.folder / "north")


# -- the consent ---------------------------------------------------------------------------------------------


@move("says no")
def no(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    with monkeypatch.context() as at_terminal:
        at_terminal.setattr("sys.stdin.isatty", lambda: True)
        at_terminal.setattr("typer.confirm", lambda text: False)
        where = ("--folder", clinic.folder / "north", "--words", clinic.words)
        yield clinic.call("site", "join", clinic.file, "--data", clinic.data, *where)
    assert not (clinic.folder / "north").exists()
    yield clinic.join()


@move("has a policy that refuses what is asked")
def own_policy(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    own = clinic.folder / "own.toml"
    own.write_text('algorithms = ["fedprox"]\n[proposals]\ncoordinators = []\n')
    yield clinic.join(policy=own)
    yield clinic.join()


@move("joins in the folder of another site")
def other_folder(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    clinic.join()
    clinic.file, clinic.words = file_of(clinic.app, "south"), invitation_in(clinic.app, "south").words
    yield clinic.join()
    yield clinic.join(folder=clinic.folder / "south")


# -- the network ---------------------------------------------------------------------------------------------


@move("does not reach the server: it is off, or the port is closed")
def closed(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    attempts: list[bytes] = []

    def send(address: str, authority: str, document: bytes) -> str:
        attempts.append(document)
        if len(attempts) < 3:
            raise admission.NotThere(
                "the server does not answer at fl:8800: ask the coordinator whether it runs"
            )
        return invitations.receive(clinic.app, document)

    monkeypatch.setattr(admission, "send", send)
    monkeypatch.setattr("copfl.cli.site.join.RETRY", 0.0)
    done = clinic.join()
    yield Answer(2, done.out, done.err)  # it waited, and went on by itself
    yield done


@move("reaches another server")
def other_server(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    (clinic.folder / "port").mkdir()
    with monkeypatch.context() as redirected:
        redirected.setattr(
            admission, "send", lambda *_: _answer_of_another_server(clinic.folder / "port", clinic)
        )
        yield clinic.join()
    yield clinic.call("site", "start", clinic.folder / "north")


def _answer_of_another_server(folder: Path, clinic: Clinic) -> str:
    """`admission.send` to a server whose certificate is of another authority."""
    make_certificates(folder, "fl.example.org")
    with serving(flower, folder) as address:
        return SEND(address, (clinic.app / "keys" / "ca.pem").read_text(), b"")


@move("has a clock that is off")
def clock(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    date = {"date": email.utils.formatdate(time.time() - 60, usegmt=True)}
    why = supernode.why_refused(httpx.Response(401, headers=date), clinic.folder / "site.key")
    yield Answer(2, "", f"{why}\n")
    yield clinic.join()


@move("is not admitted yet")
def not_admitted(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    detail = {"code": 2004, "detail": "Failed to activate SuperNode."}
    yield Answer(2, "", f"{supernode.why_refused(httpx.Response(412, json=detail), Path('site.key'))}\n")
    yield admitted(clinic)


# -- the node ------------------------------------------------------------------------------------------------


@move("starts a folder in which nobody joined")
def nobody_joined(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    yield clinic.call("site", "start", clinic.folder / "north")
    yield clinic.join()


@move("starts its node twice")
def twice(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    clinic.join()
    with monkeypatch.context() as real, locked(clinic.folder / "north" / ".worker" / "lock"):
        real.setattr(supernode, "serve", SERVE)
        yield clinic.call("site", "start", clinic.folder / "north")
    yield clinic.join()


@move("wants its report before the training")
def early_report(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    clinic.join()
    yield clinic.call("site", "report", clinic.folder / "north")
    yield clinic.call("site", "start", clinic.folder / "north")


@move("starts again after it left")
def left(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    admitted(clinic)
    clinic.call("site", "leave", clinic.folder / "north", "--yes")
    yield clinic.call("site", "start", clinic.folder / "north")
    clinic.call("federate", "invite", clinic.app, "north")
    yield clinic.join(words=invitation_in(clinic.app, "north").words)


@move("was revoked, and answers again")
def revoked(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    admitted(clinic)
    clinic.call("federate", "revoke", clinic.app, "north")
    yield clinic.call("site", "start", clinic.folder / "north")
    clinic.call("site", "leave", clinic.folder / "north", "--yes")
    clinic.call("federate", "invite", clinic.app, "north")
    yield clinic.join(words=invitation_in(clinic.app, "north").words)


# -- the coordinator -----------------------------------------------------------------------------------------


@move("enters words that are not the site's")
def wrong_words(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    words = words_of(clinic.join())
    yield clinic.call("federate", "admit", clinic.app, "north", "--words", clinic.words)
    yield clinic.call("federate", "admit", clinic.app, "north", "--words", words)


@move("admits a site that has not answered")
def not_answered(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    yield clinic.call("federate", "admit", clinic.app, "north", "--words", clinic.words)
    yield admitted(clinic)


@move("admits a second site with the key of the first")
def one_key(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    admitted(clinic)
    site = joining.read(clinic.folder / "north")
    other = invitation_in(clinic.app, "south")
    said, document = joining.answer(site._replace(invitation=other))
    invitations.receive(clinic.app, document)
    yield clinic.call("federate", "admit", clinic.app, "south", "--words", said.words)
    clinic.call("federate", "invite", clinic.app, "south")
    clinic.file, other = file_of(clinic.app, "south"), invitation_in(clinic.app, "south")
    done = clinic.join(words=other.words, folder=clinic.folder / "south")
    yield clinic.call("federate", "admit", clinic.app, "south", "--words", words_of(done))


@move("trains before all sites are there")
def too_early(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    yield clinic.call("federate", "run", clinic.app)
    yield admitted(clinic)


@move("invites more sites than the federation has")
def too_many(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    yield clinic.call("federate", "invite", clinic.app, "east")
    yield clinic.join()


@move("invites where the key of the coordinator is not")
def key_elsewhere(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    authority = clinic.app.with_name("clinic-authority")
    safe = authority.rename(clinic.folder / "safe")
    yield clinic.call("federate", "invite", clinic.app, "north")
    yield clinic.call("federate", "invite", clinic.app, "north", "--key", safe / "coordinator")


@move("changes a setting after the consent")
def other_settings(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    admitted(clinic)
    yield asked(clinic, run_rounds=9)
    clinic.call("site", "approve", clinic.folder / "north", "--yes")
    yield asked(clinic, run_rounds=9)


@move("trains with members that a site has not compared")
def not_compared(clinic: Clinic, _: pytest.MonkeyPatch) -> Iterator[Answer]:
    admitted(clinic)
    admit(clinic.app, 3, "south", SigningKey(new_key()).public, 1)
    yield asked(clinic)
    clinic.call("site", "approve", clinic.folder / "north", "--yes")
    yield asked(clinic)


# ------------------------------------------------------------------------------------------------------------


def rows() -> dict[str, dict[str, Any]]:
    """The rows of the page whose test is this one, by their move."""
    found = (row.groupdict() for row in ROW.finditer(PAGE.read_text("utf-8")))
    return {row["move"]: row for row in found if row["test"] == "here"}


def test_the_page_has_these_moves() -> None:
    assert list(rows()) == list(MOVES)
    assert len(MOVES) >= 20
    assert all(row["who"] for row in rows().values())


@pytest.mark.job
@pytest.mark.parametrize("words", MOVES)
def test_it_is_said_and_nothing_is_lost(words: str, clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    said = rows()[words]["said"]
    wrong, right = MOVES[words](clinic, monkeypatch)
    assert wrong.code == 2, wrong
    pattern = ".*".join(map(re.escape, said.split(" … ")))
    (line,) = (line for line in wrong.err.splitlines() if line.startswith("copfl: "))
    assert re.search(pattern, line), line
    assert not re.search(r"\w\.\.(\s|$)", line), line
    assert right.code == 0, right.err
