"""An app, a run and nodes' states that version 0.1 wrote: they are read, upgraded and continued.

`version-0.1.zip` was written by the code of version 0.1: two of four rounds of CO-PFL on the digits of
`network.digits`, and the checkpoint with which version 0.1 ended the whole run.
"""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from copfl.core import tree
from copfl.flower.app import upgrade
from copfl.flower.backup import restore_backup, write_backup
from copfl.flower.run_config import COMPONENTS
from copfl.flower.settings import DEFAULTS, settings_of
from copfl.flower.status import read_app, status
from copfl.wire import Head, decode, from_bytes
from tests.commands import called
from tests.flower.network import digits, farthest, play, write_nodes

ARCHIVE = Path(__file__).parent / "version-0.1.zip"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def continued(folder: Path, config: dict[str, Any]) -> Any:
    """The server's record after the last two rounds, on the nodes' old states."""
    nodes = write_nodes(digits(), folder / "nodes")
    played = play({**config, "resume": True}, nodes, folder / "app" / "runs")
    assert [r["round"] for r in played.records] == [3, 4]
    assert not any(r["notes"] or r["left_out"] for r in played.records)  # no node started again
    return played.server


def test_a_run_of_version_0_1_is_continued_to_the_same_end(old: Path) -> None:
    assert status(old / "app")["rounds"] == {"done": 2, "of": 4}
    assert upgrade(old / "app") == old / "app" / "pyproject.toml.old"
    assert upgrade(old / "app") is None  # nothing more to do
    config = read_app(old / "app")["config"]
    server = continued(old, config)
    settings = settings_of(config)
    head = Head("server", "test", settings.layout, 4, -1)
    packet = from_bytes((old / "server-of-the-whole-run.copfl").read_bytes())
    whole = decode(packet, settings.algorithm.server_init(settings.task, 3), head).record
    assert tree.leaves(whole)
    assert farthest(server, whole) <= 1e-6
    found = status(old / "app")
    assert found["rounds"] == {"done": 4, "of": 4}
    assert found["audit"]["problem"] == ""


def test_an_upgraded_app_has_every_key_under_its_name(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flower overrides only keys that are there."""
    done = called(capsys, "federate", "upgrade", old / "app")
    assert (done.code, "pyproject.toml.old" in done.out) == (0, True)
    app = tomllib.loads((old / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert {key for key in app["config"] if not isinstance(app["config"][key], dict)} == set(DEFAULTS)
    assert app["components"] == COMPONENTS
    assert app["config"]["options"]["interval"] == 2
    assert app["config"]["options"]["max_weight"] == 0.9
    assert "most" not in app["config"]["options"]
    assert "is up to date" in called(capsys, "federate", "upgrade", old / "app").out


def test_a_backup_before_the_upgrade_brings_the_old_folder_back(old: Path, tmp_path: Path) -> None:
    write_backup(old / "app", tmp_path / "before.zip")
    write_backup(old / "nodes" / "state-1", tmp_path / "node.zip")
    upgrade(old / "app")
    restore_backup(tmp_path / "before.zip", tmp_path / "again")
    assert "guard" in (tmp_path / "again" / "pyproject.toml").read_text()
    restore_backup(tmp_path / "node.zip", tmp_path / "state")
    assert status(tmp_path / "state")["runs"] == {"test": 2}
