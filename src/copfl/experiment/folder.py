"""The folder a run leaves, and how it is written so that nothing is ever half there.

runs/NAME/run.toml           everything that was chosen; `copfl run -c run.toml` does it again
          partition.json     who holds what
          rounds.jsonl       a line a round, the same bytes for the same run
          timing.jsonl       what the clock said
          checkpoint/        the state after the last checkpoint; with store = "disk", the clients' states
          models/            each client's model: its own part, and the last broadcast
          environment.json   versions and hardware
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import platform
import re
import shlex
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from copfl import __version__, files
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.task import Experts, Task
from copfl.data.partition import Partition
from copfl.engine import checkpoint, simulate
from copfl.errors import RunError
from copfl.experiment import config, migration, records
from copfl.experiment.config import Tables

LOCK = ".lock"
ENDS, END = " Its last line says that it ends.", "# The end."  # of run.toml
FILES = ("run.toml", "partition.json", "rounds.jsonl", "timing.jsonl", "environment.json")
FOLDERS = ("checkpoint", "models")


class Busy(RunError):
    """Another process is working in the folder."""


@dataclass(frozen=True)
class RunFolder:
    """A folder that this process holds alone."""

    path: Path

    @property
    def begun(self) -> bool:
        """Whether a run began here; run.toml is written last, when everything else that a run needs is there."""
        return (self.path / "run.toml").exists()

    @property
    def _state(self) -> Path:
        return self.path / "checkpoint" / "state.safetensors"

    @property
    def states(self) -> Path:
        """Where the clients' states are, if they are kept on disk."""
        return self.path / "checkpoint" / "clients.bin"

    def begin(
        self, tables: Mapping[str, Mapping[str, Any]], partition: Partition, about: Mapping[str, Any]
    ) -> None:
        """Writes what is known before the first round."""
        partition.save(self.path / "partition.json")
        versions = {
            "copfl": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "command": shlex.join(sys.argv),
        }
        environment = json.dumps({**versions, **about}, indent=1, ensure_ascii=False) + "\n"
        files.write_bytes(self.path / "environment.json", environment.encode())
        for name in ("rounds.jsonl", "timing.jsonl"):
            files.write_bytes(self.path / name, b"")
        self.write_tables(tables)

    def write_tables(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes run.toml."""
        head = f"# copfl {__version__}. `copfl run -c run.toml` does this again, to the same rounds.jsonl.{ENDS}\n\n"
        files.write_bytes(self.path / "run.toml", f"{head}{config.as_toml(tables)}\n{END}\n".encode())

    def tables(self) -> Tables:
        """What run.toml says."""
        if not self.begun:
            raise RunError(
                f"{self.path} is not a run folder: it has no run.toml. If a run was stopped before its first round, "
                f"start it again. Known runs: {_known(self.path.parent)}"
            )
        tables = config.read_file(self.path / "run.toml")
        first, *rest = (self.path / "run.toml").read_text("utf-8").split("\n")
        if first.endswith(ENDS) and END not in rest:  # cut between two lines it would still be TOML
            raise RunError(
                f"{self.path / 'run.toml'} is cut short; restore it from a copy, or start the run again"
            )
        for kind in ("algorithm", "data", "partition", "model", "run"):
            if kind not in tables:
                raise RunError(
                    f"{self.path / 'run.toml'} has no table [{kind}], which every run has: it is damaged; restore it "
                    "from a copy, or start the run again"
                )
        return tables

    def partition(self) -> Partition:
        """What partition.json says."""
        return Partition.load(self.path / "partition.json")

    def append(self, record: dict[str, Any], seconds: float) -> None:
        """Adds a round."""
        records.append(self.path / "rounds.jsonl", record)
        records.append(self.path / "timing.jsonl", {"round": record["round"], "seconds": round(seconds, 6)})

    def check_rounds(self, rounds: int) -> None:
        """Nothing, if the run can end after this many rounds; a RunError if it has done more."""
        done = len(records.read(self.path / "rounds.jsonl"))
        if rounds < done:
            raise RunError(f"{self.path} has {done} rounds already; rounds={rounds} must be at least as many")

    def checkpoint(self, state: simulate.State, fingerprints: Mapping[str, str]) -> None:
        """Writes the whole state, so that `restore` can go on from here; `marks` say what run it is of."""
        checkpoint.save(self._state, _everything(state), {"round": state.round, **fingerprints})
        state.clients.settled()

    def restore(
        self, state: simulate.State, fingerprints: Mapping[str, str], contents: Tables
    ) -> tuple[list[dict[str, Any]], list[float]]:
        """The records and seconds up to the checkpoint, with the state set to it and the files cut back to it.

        A checkpoint of version 0.1 is written anew, before run.toml gets today's names.
        """
        lines = records.read(self.path / "rounds.jsonl")
        old = False
        if self._state.exists():
            trees, about = checkpoint.load(self._state, _everything(state), migration.renamed_tensor)
            if about.get("settings") == migration.settings_fingerprint(self._raw_tables(), contents):
                about, old = {**about, "settings": fingerprints["settings"]}, True
            for what, fingerprint in fingerprints.items():
                if about.get(what) != fingerprint:
                    raise RunError(
                        f"the {what} of {self.path} are not those of its checkpoint: run.toml or the data were changed "
                        f"since; undo that, or start a new run with `copfl run -c {self.path}/run.toml`"
                    )
            if len(lines) < about["round"]:
                raise RunError(
                    f"{self.path}/rounds.jsonl has {len(lines)} rounds, but the checkpoint is of round "
                    f"{about['round']}; restore the file, or start a new run with `copfl run -c {self.path}/run.toml`"
                )
            state.server, state.known_masks, state.round = (
                trees["server"],
                trees["known_masks"],
                about["round"],
            )
            state.clients.restore(trees["clients"])
        if old:
            RunFolder.checkpoint(self, state, fingerprints)
        # The rounds after the checkpoint will be trained again.
        timing = records.read(self.path / "timing.jsonl") if (self.path / "timing.jsonl").exists() else []
        for name, kept in (("rounds.jsonl", lines), ("timing.jsonl", timing)):
            content = b"".join(map(records.encoded, kept[: state.round]))
            files.write_bytes(self.path / name, content)
        return lines[: state.round], [line["seconds"] for line in timing[: state.round]]

    def _raw_tables(self) -> Tables:
        """The content of run.toml under the names that it has there."""
        return tomllib.loads((self.path / "run.toml").read_text("utf-8"))

    def save_models(self, algorithm: AnyAlgorithm, task: Task, state: simulate.State, clients: int) -> None:
        """Writes each client's model, its own part and the last broadcast, as tensors by name."""
        from safetensors.torch import save

        for n in range(clients):
            ids = torch.tensor([n], device=task.device)
            client = tree.row(state.clients.rows(ids), 0)
            personal = algorithm.personal_model(
                task, client, tree.row(algorithm.downlink(state.server, ids), 0)
            )
            path = self.path / "models" / f"client-{n:04d}.safetensors"
            files.write_bytes(path, save(named_tensors(task, personal)), durable=False)


def _everything(state: simulate.State) -> dict[str, Any]:
    return {"server": state.server, "clients": state.clients.saved(), "known_masks": state.known_masks}


def named_tensors(task: Task, personal: Tensor | Experts) -> dict[str, Tensor]:
    """A model's tensors by name; a mixture's with the expert's number in front, and the shares."""
    if isinstance(personal, Experts):
        parts = {f"{i}/{k}": v for i, w in enumerate(personal.w) for k, v in named_tensors(task, w).items()}
        return {**parts, "share": personal.share.cpu()}
    tensors = task.layout.split(personal[: task.d]) | task.layout.split(personal[task.d :], buffers=True)
    return {name: t.cpu().clone() for name, t in tensors.items()}


def _known(parent: Path) -> str:
    found = sorted(p.parent.name for p in parent.glob("*/run.toml")) if parent.is_dir() else []
    return ", ".join(found[-5:]) or "none"


def fresh(parent: Path, title: str) -> Path:
    """A new, empty folder under the parent, called after the day, the time and the title."""
    plain = re.sub(r"[^\w.-]+", "-", title).strip("-.")
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}"
    for count in itertools.count(1):
        path = parent / (stem if count == 1 else f"{stem}-{count}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError as error:
            if not parent.is_dir():
                raise _unwritable(path, error) from error
        except OSError as error:
            raise _unwritable(path, error) from error
    raise AssertionError("there is always a next number")


@contextlib.contextmanager
def claimed(path: Path, new: bool) -> Iterator[RunFolder]:
    """The folder, held by this process alone until the end; a new one that no run began in is removed again."""
    folder = RunFolder(path)
    if new:
        _check_free(folder)
    elif not path.is_dir():
        raise RunError(f"there is no folder {path}. Known runs: {_known(path.parent)}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        _remove_if_empty(path, new)
        raise _unwritable(path, error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(
                os.fstat(lock), os.stat(path / LOCK)
            )  # and not one that its owner has removed
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise Busy(f"another process is working in {path}; wait for it, or name another folder")
        try:
            if new:
                _check_free(folder)  # again: another may have come and gone in between
            for part in (path, *(path / name for name in FOLDERS)):
                files.remove_parts(part)
            yield folder
        finally:
            if new and not folder.begun:
                for name in FILES:
                    (path / name).unlink(missing_ok=True)
            (path / LOCK).unlink(missing_ok=True)
            _remove_if_empty(path, new)
    finally:
        os.close(lock)


def _remove_if_empty(path: Path, new: bool) -> None:
    if new:
        with contextlib.suppress(OSError):
            path.rmdir()


def _check_free(folder: RunFolder) -> None:
    """Nothing, if a run may begin here: the folder is new, empty, or left by a run that was stopped as it began."""
    path = folder.path
    if folder.begun:
        raise RunError(
            f"{path} already holds a run; use `copfl resume {path}`, or name another folder with --out"
        )
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error) from error
    others = sorted(n for n in names - {LOCK, *FILES} if not n.endswith((".part", ".tmp")))
    if others:
        raise RunError(
            f"{path} is no run folder and not empty (it holds {', '.join(others[:3])}); name a new folder with --out"
        )


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"cannot write into {path}: {error.strerror or error}; name another folder with --out (--runs of reproduce)"
    )
