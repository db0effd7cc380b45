"""Backups of a server's folder or of a node's, each one zip file with checksums. Without torch.

A backup is of one moment: if a file changes while the files are read, they are read again. The SuperLink's
database, which changes all the time, is copied by SQLite itself.
"""

import contextlib
import hashlib
import json
import lzma
import os
import shutil
import sqlite3
import stat
import tempfile
import time
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from copfl import foreign
from copfl.errors import RunError
from copfl.federation.protocol.app_folder import DATABASE, is_node, read_app
from copfl.federation.protocol.node_config import WORKER

MANIFEST, FORMAT = "manifest.json", 1
KINDS = OF_SERVER, OF_NODE = "server", "node"
MOST_MANIFEST = 2**26  # bytes
# What reading an archive raises where its content is damaged, or compressed in a way that Python does not know.
DAMAGED_ZIP = zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError
ATTEMPTS = 10  # to read files that do not change meanwhile
PAUSE = 0.5
# Of a server: logs, the trial's nodes, and what `copfl federate up` keeps of Flower's.
NOT_OF_SERVER = ("logs", "nodes", ".flwr/local", ".flwr/apps", ".git", DATABASE)
NOT_OF_NODE = tuple(f"{WORKER}/{name}" for name in ("socket", "lock", "message", "reply", "contact", "waits"))


def write_backup(folder: Path, file: Path) -> str:
    """Writes the backup; the text describes it. RunError if the files change all the time.

    Args:
        folder: Of a server or of a node.
        file: A new file.
    """
    kind = OF_NODE if is_node(folder) else OF_SERVER
    if kind == OF_SERVER:
        read_app(folder)  # RunError if it is none
    if file.exists():
        raise RunError(f"{file} exists, and backups are never overwritten; choose another name")
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        for _ in range(ATTEMPTS):
            before = _states(folder, kind)
            try:
                with os.fdopen(
                    os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b"
                ) as stream:
                    manifest = _write(folder, kind, sorted(before), stream)
                    os.fsync(stream.fileno())
            except FileNotFoundError:
                manifest = None  # a record that was replaced by a newer one
            if manifest is not None and _states(folder, kind) == before:
                os.link(unfinished, file)  # unlike a rename, an error if the file exists by now
                return f"{file}: {kind}, {len(manifest['files'])} files, {file.stat().st_size / 1e6:.1f} MB"
            time.sleep(PAUSE)
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    raise RunError(
        f"the files in {folder} changed during each of {ATTEMPTS} attempts: its rounds are short; try again "
        "after the run, or stop the process for the time of the backup"
    )


def _states(folder: Path, kind: str) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of change of each file of a backup."""
    excluded = NOT_OF_NODE if kind == "node" else NOT_OF_SERVER
    states = {}
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(root) / name
            relative = path.relative_to(folder).as_posix()
            is_excluded = relative in excluded or name.endswith((".part", ".tmp", ".lock"))
            if is_excluded or relative.startswith(f"{DATABASE}-"):  # SQLite's, of the open database
                if name in folders:
                    folders.remove(name)
                continue
            with contextlib.suppress(FileNotFoundError):
                state = path.lstat()
                if stat.S_ISREG(state.st_mode):
                    states[relative] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return states


def _write(folder: Path, kind: str, names: list[str], stream: Any) -> dict[str, Any]:
    """Writes the files and their manifest into a zip file."""
    from copfl import __version__

    files: dict[str, dict[str, Any]] = {}
    paths = {name: folder / name for name in names}
    with (
        zipfile.ZipFile(
            stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False
        ) as archive,
        tempfile.TemporaryDirectory() as temporary,
    ):
        if kind == "server" and (folder / DATABASE).exists():
            copy = paths[DATABASE] = Path(temporary) / DATABASE
            with (
                contextlib.closing(sqlite3.connect(copy)) as target,
                contextlib.closing(sqlite3.connect(folder / DATABASE)) as source,
            ):
                source.backup(target)
            copy.chmod(0o600)
        for name, path in paths.items():
            archive.write(path, name)
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            files[name] = {"sha256": digest, "mode": stat.S_IMODE(path.stat().st_mode)}
        manifest = {"format": FORMAT, "kind": kind, "copfl": __version__, "files": files}
        archive.writestr(MANIFEST, json.dumps(manifest))
    return manifest


def restore_backup(file: Path, folder: Path) -> str:
    """Restores the files into a new folder, when all checksums are right; the text describes it.

    Args:
        file: What `write_backup` wrote; it may be another machine's.
        folder: A new folder, or an empty one.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} exists, and nothing is overwritten; choose a new folder, or move it away")
    unfinished = folder.with_name(f".{folder.resolve().name}.{os.getpid()}.part")
    try:
        folder.resolve().parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir(mode=0o700)
        with zipfile.ZipFile(file) as archive:
            manifest = _manifest(archive)
            needed = sum(info.file_size for info in archive.infolist())
            if needed > (free := shutil.disk_usage(unfinished).free):
                raise ValueError(f"its files have {needed:,} bytes, and {free:,} are free")
            for name, entry in manifest["files"].items():
                _restore(archive, name, entry, unfinished / name)
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except (OSError, *foreign.DAMAGE, *DAMAGED_ZIP) as error:
        reason = foreign.printable(str(error)) or type(error).__name__
        raise RunError(f"{file} cannot be restored: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return f"{folder}: {manifest['kind']}, {len(manifest['files'])} files"


def _manifest(archive: zipfile.ZipFile) -> dict[str, Any]:
    if archive.getinfo(MANIFEST).file_size > MOST_MANIFEST:
        raise ValueError(f"its {MANIFEST} has more than {MOST_MANIFEST:,} bytes")
    manifest = foreign.json_of(archive.read(MANIFEST))
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {str(manifest['format'])[:20]}, and this version reads {FORMAT}")
    if manifest["kind"] not in KINDS or not isinstance(manifest["files"], dict):
        raise ValueError("it is neither of a server nor of a node, or its manifest names no files")
    for name in manifest["files"]:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
            raise ValueError(f"its file {name[:80]!r} would lie outside of the folder")
    names = set(archive.namelist()) - {MANIFEST}
    if names != set(manifest["files"]):
        raise ValueError("its files are not those of its manifest")
    return dict(manifest)


def _restore(archive: zipfile.ZipFile, name: str, entry: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = int(entry["mode"]) & 0o755
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    with archive.open(name) as source, os.fdopen(handle, "w+b") as target:
        shutil.copyfileobj(source, target)
        target.seek(0)
        digest = hashlib.file_digest(target, "sha256").hexdigest()
        os.fsync(target.fileno())
    if digest != entry["sha256"]:
        raise ValueError(f"the checksum of {name} is wrong: the archive is damaged")
