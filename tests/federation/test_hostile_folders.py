"""Folders of a federation that somebody else wrote: the coordinator's, a site's, a node's; invitations and contracts.

Every command that opens one ends with a result or one printable error, and every reader takes fifty changed versions
of each of its files, a thousand with COPFL_SLOW=1. Signatures hold in all of them: who writes a folder can sign it.
"""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli_w

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.data.contract.check import check
from copfl.data.contract.file import read_contract
from copfl.errors import CopflError
from copfl.federation.node import acceptance, measured_rounds
from copfl.federation.node.report import site_of
from copfl.federation.operations import joining, page, status, watched
from copfl.federation.policy.file import read_policy
from copfl.federation.protocol import invitation, proposal
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.chained_log import verified
from copfl.federation.protocol.round_record import read_rounds
from copfl.federation.server import invitations
from copfl.federation.server.membership import read_roster
from tests.commands import called
from tests.federation.folders import RUN, ServerState
from tests.federation.invited import coordinated, file_of, joined
from tests.federation.network import CONFIG, digits, play, write_nodes
from tests.hostile import COUNT, WATCH, bait, forbidden, json_versions, versions
from tests.slow import SLOW
from tests.test_foreign import ends, harmless

Capture = pytest.CaptureFixture[str]
NORTH = "north"


class Folders(NamedTuple):
    """What somebody sent: all below one folder."""

    root: Path
    app: Path  # a coordinator's, with invitations and their answers
    server: Path  # a coordinator's, with a run
    site: Path  # that joined
    node: Path  # that trained a round

    def at(self, root: Path) -> Folders:
        """A copy of all of them."""
        shutil.copytree(self.root, root)
        return Folders(root, *(root / folder.relative_to(self.root) for folder in self[1:]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("sent")
    app = coordinated(root, NORTH, "south", "west")
    site = joined(app, NORTH, root)
    invitations.receive(app, joining.answer(site)[1])
    state = ServerState(root / "server")
    state.sign()
    state.start()
    for number in (1, 2):
        state.begin_round(number)
        state.end_round(number, {2: "it was late"} if number == 2 else None)
    nodes = write_nodes(digits(), root / "nodes")
    play(CONFIG | {"algorithm.name": "fedavg", "run.rounds": 1}, nodes, root / "runs")
    return Folders(root, app, state.app, site.folder, Path(nodes[0]["state-dir"]))


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the attacker are in the current folder; documents are signed; nothing is sent or started."""
    mark = bait(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for module in (invitation, proposal):
        monkeypatch.setattr(module, "is_signed", lambda *_: True)
    monkeypatch.setattr("copfl.cli.site.join._send", lambda *_: "admitted")
    monkeypatch.setattr("copfl.cli.site.join._serve", lambda *_: None)
    yield
    assert not mark.exists()


HOSTILE = "\x1b]0;evil\x07\x1b[2J\r\u202e"
DAMAGE = {
    ".toml": (b"a = " + b"[" * 10_000, b"", b"node = 3\ntool = 3", b"\xff\x00"),
    ".json": (b"[" * 10_000, b"[]", b"{}", b"3"),
}
FILES = {
    "app": (
        "pyproject.toml",
        f"invitations/{NORTH}.invite",
        f"answers/{NORTH}.json",
        "policy.toml",
        "contract.toml",
    ),
    "server": (
        "members.json",
        "pyproject.toml",
        f"proposals/{RUN}.json",
        f"runs/{RUN}/audit.jsonl",
        f"runs/{RUN}/rounds.jsonl",
    ),
    "site": ("site.toml", "invitation.json", "policy.toml", "answer.json"),
    "node": ("test/settings.json", "test/client.json", "test/measured.jsonl", ".secure/ledger.jsonl"),
}


def commands(kind: str, sent: Folders, out: Path) -> Iterator[tuple[object, ...]]:
    """All that open such a folder, but those that run a federation."""
    app = sent.app if kind == "app" else sent.server
    rows, contract = sent.root / f"{NORTH}.csv", sent.app / "contract.toml"
    if kind in ("app", "server"):
        yield "federate", "status", app
        yield "federate", "watch", app, "--once", out / "page.html"
        yield "federate", "members", app
        yield "federate", "admit", app, NORTH, "--words", "one two three"
        yield "federate", "invite", app, "east"
        yield "federate", "propose", app, out / "proposal.json"
        yield "federate", "revoke", app, "south"
        yield "federate", "clean", app, "--dry-run"
        yield "federate", "stop", app
        yield "federate", "backup", app, out / f"{app.name}.zip"
    if kind == "app":
        invited = file_of(app, NORTH)
        yield "site", "join", invited, "--data", rows, "--folder", out / "new", "--words", "a b", "--yes"
        yield "site", "check", contract, "--data", rows
        yield "site", "policy", app / "policy.toml"
        yield "site", "policy", sent.site / "policy.toml", "--app", app
        yield "federate", "init", out / "again", "--contract", contract
    if kind in ("site", "node"):
        state = sent.site if kind == "site" else sent.node
        for name in ("status", "log", "approve"):
            yield "site", name, state
        yield "report", state, "--no-baseline", "--no-rivals"  # as site report
        yield "site", "predict", state, "--data", rows
        yield "site", "clean", state, "--dry-run"
        yield "site", "backup", state, out / f"{state.name}.zip"
    if kind == "site":
        yield "site", "policy", sent.site / "policy.toml"
        yield "site", "start", sent.site
        yield "site", "leave", sent.site, "--yes"


@pytest.mark.parametrize(("kind", "file"), [(kind, file) for kind in FILES for file in FILES[kind]])
def test_a_damaged_file_is_one_error(
    kind: str, file: str, folders: Folders, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "out").mkdir()
    for number, content in enumerate(DAMAGE.get(Path(file).suffix, DAMAGE[".json"])):
        sent = folders.at(tmp_path / f"sent-{number}")
        (getattr(sent, kind) / file).write_bytes(content)
        # Each command meets each file with two of its four damages, and with COPFL_SLOW=1 with all of them.
        for place, words in enumerate(commands(kind, sent, tmp_path / "out")):
            if (place + number) % 2 and not SLOW:
                continue
            with WATCH.on() as seen:
                answer = called(capsys, *words)
            harmless(answer._replace(code=0 if answer.code == 1 else answer.code))  # 1: a problem was found
            # It is asked whether a server answers at the address that a coordinator's folder names.
            seen = [one for one in seen if one[0] != "socket.connect" or kind in ("site", "node")]
            assert forbidden(seen, tmp_path, folders.root) == [], words
        shutil.rmtree(sent.root)


@pytest.mark.parametrize(
    "line",
    [
        "node = 3",
        "node = []",
        "[node]\nclient = 0",
        "[node]\ndata = 3",
        '[node]\ndata = "evilmod:f"\nthreads = "x"',
        '[node]\ndata = "\\u001b[2J"',
    ],
)
def test_options_of_a_site_are_checked(line: str, folders: Folders, tmp_path: Path, capsys: Capture) -> None:
    sent = folders.at(tmp_path / "sent")
    (sent.site / "site.toml").write_text(line)
    for words in (("site", "start", sent.site), ("site", "leave", sent.site, "--yes")):
        harmless(called(capsys, *words))


def described(file: Path) -> None:
    """What the owner of a site reads of an invitation."""
    signed = joining.open_invitation(file.read_bytes(), file.name)
    policy = joining.policy_of(signed.invitation)
    joining.refused(signed.invitation, policy)
    compared = joining.checked(signed.invitation, str(file.parents[2] / f"{NORTH}.csv"))
    list(joining.described(signed.invitation, "rows.csv", compared, policy))


def checked(app: Path) -> None:
    check(read_contract(app / "contract.toml"), app.parent / f"{NORTH}.csv")


def page_of(app: Path) -> None:
    page.FederationPage(app, None).html()
    status.as_text(status.status(app, None))


def of_file(read: Callable[[bytes], object]) -> Callable[[Path], object]:
    return lambda path: read(path.read_bytes())


def measured(state: Path) -> None:
    site_of(state, None, baseline=False, tell=lambda round: None, rivals=False)


# Of each file its reader, which takes all versions, and what is made of it for a person, which takes some.
READERS: dict[tuple[str, str], tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    ("app", f"invitations/{NORTH}.invite"): (
        of_file(invitation.read),
        lambda app: described(file_of(app, NORTH)),
    ),
    ("app", f"answers/{NORTH}.json"): (
        of_file(invitation.read_answer),
        lambda app: list(invitations.invited(app)),
    ),
    ("app", "contract.toml"): (read_contract, checked),
    ("app", "pyproject.toml"): (lambda path: read_app(path.parent), watched.read),
    ("server", "members.json"): (lambda path: read_roster(path.parent), watched.read),
    ("server", f"proposals/{RUN}.json"): (of_file(proposal.read), watched.read),
    ("server", f"runs/{RUN}/audit.jsonl"): (verified, page_of),
    ("server", f"runs/{RUN}/rounds.jsonl"): (read_rounds, page_of),
    ("site", "site.toml"): (lambda path: joining.read(path.parent), joining.read),
    ("site", "invitation.json"): (lambda path: joining.read(path.parent), joining.read),
    ("site", "policy.toml"): (read_policy, status.status),
    ("node", "test/measured.jsonl"): (lambda path: measured_rounds.read(path.parent), measured),
    ("node", ".secure/ledger.jsonl"): (verified, status.status),
}
SOME = 10  # of so many versions, one becomes a page


@pytest.mark.job
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that no run has
@pytest.mark.parametrize(("kind", "file"), READERS)
def test_random_files(kind: str, file: str, folders: Folders, tmp_path: Path) -> None:
    sent = folders.at(tmp_path / "sent")
    folder, (read, show) = getattr(sent, kind), READERS[kind, file]
    path = folder / file
    original = path.read_bytes()
    *before, line = original.rstrip(b"\n").split(b"\n") if path.suffix == ".jsonl" else (original,)
    if path.suffix == ".toml":
        changed = versions(original, tomli_w.dumps, tomllib.loads, COUNT)
    else:
        changed = json_versions(line, COUNT)
    for number, version in enumerate(changed):
        path.write_bytes(b"\n".join([*before, version]) + b"\n" * (path.suffix == ".jsonl"))
        with WATCH.on() as seen:
            ends(partial(read, path))
            if number % SOME == 0:
                ends(partial(show, folder))
        seen = [one for one in seen if one[0] != "socket.connect"]  # to the server that the folder names
        assert forbidden(seen, tmp_path, folders.root) == []


def test_a_proposal_that_somebody_else_wrote_is_shown_or_refused(folders: Folders, tmp_path: Path) -> None:
    """It is compared with the invitation, and each line of the difference is printable."""
    sent = folders.at(tmp_path / "sent")
    consented = acceptance.invitation_of(sent.site)
    assert consented is not None
    document = (sent.server / f"proposals/{RUN}.json").read_bytes()
    for version in json_versions(document, COUNT):
        try:
            proposed = proposal.read(version).proposal
            lines = invitation.changes(consented.invitation, proposed)
        except CopflError:
            continue
        assert all(line.isprintable() for line in lines)
