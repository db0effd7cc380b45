"""A coordinator and a site in one process: its server is a function, and a started node a line in a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.federation.machines import admission, supernode
from copfl.federation.server import invitations
from tests.commands import Answer, called
from tests.federation.invited import coordinated, file_of, invitation_in, write_rows

SEND, SERVE = admission.send, supernode.serve  # the real ones, which the fixture replaces


class Clinic:
    """A coordinator and its server in this process; a node is started as a line in a list."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], **settings: Any) -> None:
        self.folder, self.capsys = folder, capsys
        self.app = coordinated(folder, "north", "south", "west", **settings)
        self.words = invitation_in(self.app, "north").words
        self.file = file_of(self.app, "north")
        self.data = write_rows(folder / "north.csv")
        self.started: list[tuple[Any, Any]] = []

    def join(self, *more: object, **changed: Any) -> Answer:
        options = {"words": self.words, "data": self.data, "folder": self.folder / "north"} | changed
        named = [word for name, value in options.items() for word in (f"--{name}", value)]
        return called(self.capsys, "site", "join", self.file, *named, "--yes", *more)

    def call(self, *words: object) -> Answer:
        return called(self.capsys, *words)


@pytest.fixture
def clinic(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Clinic:
    made = Clinic(tmp_path, capsys)
    monkeypatch.setattr(
        admission, "send", lambda address, authority, document: invitations.receive(made.app, document)
    )
    monkeypatch.setattr(supernode, "serve", lambda *node: made.started.append(node))
    return made
