"""Backups of a server and of a node: everything comes back, nothing is overwritten, damage is refused."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.errors import RunError
from copfl.federation import init
from copfl.federation.operations import backup
from copfl.federation.operations.backup import MANIFEST, restore_backup, write_backup
from copfl.federation.operations.status import status
from copfl.settings.flat import nested
from tests.commands import called
from tests.federation.network import CONFIG, digits, play, write_nodes
from tests.hostile import garbled


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mode & 0o777) for p in files}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An app with one finished round, keys and a database; and the states of its nodes."""
    folder = tmp_path_factory.mktemp("federation")
    app = init(folder / "app", nested(CONFIG), secure=True)
    play(CONFIG | {"run.rounds": 1}, write_nodes(digits(), folder / "nodes"), app / "runs")
    (app / "logs").mkdir()
    (app / "logs" / "run.log").write_text("a log")
    with sqlite3.connect(app / "superlink.db") as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE nodes (id INTEGER)")
        database.execute("INSERT INTO nodes VALUES (7)")
    database.close()
    return folder


def test_a_server_comes_back_with_its_keys_runs_and_database(federation: Path, tmp_path: Path) -> None:
    app, file = federation / "app", tmp_path / "backup.zip"
    open_database = sqlite3.connect(app / "superlink.db")  # as the SuperLink has
    open_database.execute("INSERT INTO nodes VALUES (8)")
    open_database.commit()
    assert "server" in write_backup(app, file)
    open_database.close()
    assert file.stat().st_mode & 0o777 == 0o600
    restore_backup(file, tmp_path / "restored")
    ours, theirs = contents(app), contents(tmp_path / "restored")
    del ours["logs/run.log"]
    assert {k: v for k, v in ours.items() if k != "superlink.db"} == {
        k: v for k, v in theirs.items() if k != "superlink.db"
    }
    assert theirs["keys/node-0"][1] == theirs["keys/ca.key"][1] == 0o600
    with sqlite3.connect(tmp_path / "restored" / "superlink.db") as restored:
        assert restored.execute("SELECT id FROM nodes").fetchall() == [(7,), (8,)]
    restored.close()
    assert status(tmp_path / "restored")["rounds"]["done"] == 1


def test_a_node_continues_from_its_backup(federation: Path, tmp_path: Path) -> None:
    """The same second round as without the loss of its folder."""
    nodes = write_nodes(digits(), tmp_path / "nodes")
    config = CONFIG | {"session.run": "again", "run.rounds": 1}
    play(config, nodes, tmp_path / "runs")
    state = Path(nodes[1]["state-dir"])
    assert ": node, " in write_backup(state, tmp_path / "node.zip")
    restore_backup(tmp_path / "node.zip", tmp_path / "elsewhere")
    assert contents(tmp_path / "elsewhere") == contents(state)
    nodes[1]["state-dir"] = str(tmp_path / "elsewhere")
    second = play(config | {"run.rounds": 2, "session.resume": True}, nodes, tmp_path / "runs").records[0]
    assert second["clients"] == [0, 1, 2]
    assert second["notes"] == {}


def test_nothing_is_overwritten(federation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "backup.zip"
    assert called(capsys, "federate", "backup", federation / "app", file).code == 0
    before = file.read_bytes()
    again = called(capsys, "federate", "backup", federation / "app", file)
    assert (again.code, "never overwritten" in again.err) == (2, True)
    assert file.read_bytes() == before
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    done = called(capsys, "federate", "restore", file, full)
    assert (done.code, "nothing is overwritten" in done.err) == (2, True)
    assert called(capsys, "federate", "restore", file, tmp_path / "new").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["backup.zip", "full", "new"]


def test_what_is_no_folder_of_a_federation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no app"):
        write_backup(tmp_path, tmp_path / "a.zip")
    assert not list(tmp_path.iterdir())


def test_files_that_change_all_the_time_are_refused(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "PAUSE", 0)
    numbers = iter(range(1000))
    monkeypatch.setattr(backup, "_states", lambda folder, kind: {"pyproject.toml": (next(numbers), 0, 0)})
    with pytest.raises(RunError, match="changed during each of 10 attempts"):
        write_backup(federation / "app", tmp_path / "a.zip")
    assert not list(tmp_path.iterdir())


def changed(archive: bytes, change: Callable[[dict[str, bytes]], None]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        files = {name: source.read(name) for name in source.namelist()}
    change(files)
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as target:
        for name, content in files.items():
            target.writestr(name, content)
    return result.getvalue()


def outside(files: dict[str, bytes]) -> None:
    manifest = json.loads(files[MANIFEST])
    manifest["files"]["../evil"] = manifest["files"].pop("README.md")
    files[MANIFEST], files["../evil"] = json.dumps(manifest).encode(), files.pop("README.md")


def manifest(**fields: Any) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        files[MANIFEST] = json.dumps(json.loads(files[MANIFEST]) | fields).encode()

    return change


def endless_mode(files: dict[str, bytes]) -> None:
    files[MANIFEST] = re.sub(rb'"mode": [0-9]+', b'"mode": Infinity', files[MANIFEST])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (manifest(files=[MANIFEST]), "names no files"),
        (manifest(kind="\x1b[2Jnode"), "neither of a server nor of a node"),
        (manifest(format="\x1b[2J"), r"its format is \\x1b\[2J"),
        (endless_mode, "cannot convert float infinity"),
        (lambda files: files.update({MANIFEST: b"[" * 100_000}), "nested too deeply"),
        (lambda files: files.update({"README.md": b"other"}), "checksum of README.md is wrong"),
        (lambda files: files.pop("README.md"), "not those of its manifest"),
        (lambda files: files.update({"more": b""}), "not those of its manifest"),
        (lambda files: files.pop(MANIFEST), "cannot be restored"),
        (lambda files: files.update({MANIFEST: b'{"format": 9}'}), "its format is 9"),
        (outside, "outside of the folder"),
    ],
)
def test_a_damaged_archive_is_refused(change: Any, message: str, federation: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.zip"
    write_backup(federation / "app", file)
    file.write_bytes(changed(file.read_bytes(), change))
    with pytest.raises(RunError, match=message):
        restore_backup(file, tmp_path / "new")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RunError, match="cannot be restored"):
        restore_backup(file, tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]


def test_any_damage_is_one_error(federation: Path, tmp_path: Path) -> None:
    """A byte of what is compressed is another error than one of a header, and an archive may claim any size."""
    file, rng = tmp_path / "a.zip", random.Random(0)
    write_backup(federation / "app", file)
    original = file.read_bytes()
    for version in (garbled(original, rng) for _ in range(300)):
        file.write_bytes(version)
        with contextlib.suppress(RunError):  # some bytes are of no matter
            restore_backup(file, tmp_path / "new")
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]


def test_what_needs_more_room_than_there_is_is_not_begun(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.zip"
    write_backup(federation / "app", file)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(RunError, match="and 100 are free"):
        restore_backup(file, tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]
