"""The folder of a run, written so that a crash at any time leaves it complete up to a checkpoint.

runs/NAME/run.toml           all settings; `copfl run -c run.toml` repeats the run
          partition.json     the samples of each client
          rounds.jsonl       one line per round, the same bytes for the same run
          timing.jsonl       the seconds of each round
          final.json         with partial participation: the clients that no round evaluated
          checkpoint/        the state after the last checkpoint; with store = "disk", the client states
          models/            each client's model as last evaluated, or its best one: run.select
          environment.json   versions and hardware
          rows.csv           of a table, which rows of its file were train and test rows
          fingerprints.npz   hashes of the train samples, by which `predict` and `evaluate` recognise them
          data.npz           the samples, if `Result.save` stored them
"""

import contextlib
import itertools
import json
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from copfl import __version__, files, foreign
from copfl.core.task import Task
from copfl.data.clients.partition import Partition
from copfl.data.sets.stored import read_stored
from copfl.engine import checkpoint
from copfl.engine.rounds import State
from copfl.errors import RunError, option, raised_as, to_repeat, to_resume
from copfl.experiment import records
from copfl.experiment.known_runs import check_folder, known
from copfl.experiment.models.client_models import InFolder
from copfl.settings import toml
from copfl.settings.toml import Tables
from copfl.tables import listed

LOCK = ".lock"
HEAD, END = "# copfl ", "# The end."  # of run.toml
FILES = ("run.toml", "partition.json", "rounds.jsonl", "timing.jsonl", "environment.json", "data.npz")
BASELINE = "baseline"  # the folder of the local baseline, a run of its own
FOLDERS = ("checkpoint", "models", BASELINE, f"{BASELINE}/checkpoint")


@dataclass(frozen=True)
class RunFolder:
    """A folder that no other process uses, see `claimed`."""

    path: Path

    keeps_models: ClassVar[bool] = True

    @property
    def begun(self) -> bool:
        """Whether a run began here: run.toml is written after all other files that a run needs."""
        return (self.path / "run.toml").exists()

    @property
    def _state(self) -> Path:
        return self.path / "checkpoint" / "state.safetensors"

    @property
    def states(self) -> Path:
        """The file of the client states, if they are kept on disk."""
        return self.path / "checkpoint" / "clients.bin"

    def begin(
        self, tables: Tables, partition: Partition, about: Mapping[str, Any], data: bytes | None = None
    ) -> None:
        """Writes what is known before the first round; `data`: samples that have no name in the tables.

        Args:
            tables: The settings.
            partition: Who has which samples.
            about: Facts for environment.json.
            data: Samples that have no name in the tables.
        """
        partition.save(self.path / "partition.json")
        if data is not None:
            files.write_bytes(self.path / "data.npz", data)
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

    def write_tables(self, tables: Tables) -> None:
        head = f"{HEAD}{__version__}. `copfl run -c run.toml` repeats this run, to the same rounds.jsonl."
        content = f"{head}\n\n{toml.written(tables)}\n{END}\n"
        files.write_bytes(self.path / "run.toml", content.encode())

    def tables(self) -> Tables:
        """The content of run.toml."""
        path = self.path / "run.toml"
        check_folder(self.path)
        if not self.begun:
            raise RunError(
                f"{self.path} is not a run folder: it has no run.toml. Start a run again that was stopped "
                f"before its first round. Known runs: {known(self.path.parent)}"
            )
        foreign.inside(self.path, self.path)
        tables = toml.read_file(path)
        first, *rest = path.read_text("utf-8").split("\n")
        problem = "is cut short" if first.startswith(HEAD) and END not in rest else ""
        for kind in ("algorithm", "data", "partition", "model", "run"):
            problem = problem or ("" if kind in tables else f"has no table [{kind}]: it is damaged")
        if problem:
            raise RunError(f"{path} {problem}; restore it from a copy, or start the run again")
        return tables

    def partition(self) -> Partition:
        """The content of partition.json."""
        return Partition.load(self.path / "partition.json")

    def values(self) -> dict[str, Any]:
        """The values that a Python program passed to the run and that the folder has: the data."""
        path = self.path / "data.npz"
        return {"data": read_stored(path)} if path.is_file() else {}

    def append(self, record: dict[str, Any], seconds: float) -> None:
        """Adds a round.

        Args:
            record: Of the round.
            seconds: That it took.
        """
        records.append(self.path / "rounds.jsonl", record)
        records.append(self.path / "timing.jsonl", {"round": record["round"], "seconds": round(seconds, 6)})

    def server(self, like: Any) -> Any:
        """The server's record after the last round.

        Args:
            like: Before the first round.
        """
        return checkpoint.load(self._state, {"server": like})[0]["server"]

    def checkpoint(self, state: State, fingerprints: Mapping[str, str]) -> None:
        """Writes the whole state for `restore`, with the fingerprints of the run that it belongs to.

        Args:
            state: After a round.
            fingerprints: Of the settings and the samples.
        """
        checkpoint.save(self._state, _trees(state), {"round": state.round, **fingerprints})
        state.clients.settled()

    def restore(
        self, state: State, fingerprints: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]], list[float]]:
        """The records and seconds up to the checkpoint; the state is set and the files are cut to it.

        Args:
            state: Before the first round, which it sets.
            fingerprints: Of the settings and the samples as they are now.
        """
        lines = self.load_state(state, fingerprints)
        # The rounds after the checkpoint are trained again.
        timing = records.read(self.path / "timing.jsonl") if (self.path / "timing.jsonl").exists() else []
        for name, stored_lines in (("rounds.jsonl", lines), ("timing.jsonl", timing)):
            files.write_bytes(self.path / name, b"".join(map(records.encoded, stored_lines[: state.round])))
        return lines[: state.round], [line["seconds"] for line in timing[: state.round]]

    def load_state(self, state: State, fingerprints: Mapping[str, str]) -> list[dict[str, Any]]:
        """All records; the state is set to the checkpoint, if there is one. Nothing is written.

        Args:
            state: Before the first round, which it sets.
            fingerprints: Of the settings and the samples as they are now.
        """
        lines = records.read(self.path / "rounds.jsonl")
        if self._state.exists():
            trees, header = checkpoint.load(self._state, _trees(state))
            self._check(header, fingerprints, len(lines))
            state.server, state.known_masks = trees["server"], trees["known_masks"]
            state.round = header["round"]
            state.clients.restore(trees["clients"])
        return lines

    def _check(self, header: Mapping[str, Any], fingerprints: Mapping[str, str], rounds: int) -> None:
        """A RunError, if the checkpoint does not belong to the run as it is now."""
        anew = f"start a new run with {to_repeat(self.path)}"
        for what, fingerprint in fingerprints.items():
            if header.get(what) != fingerprint:
                changed = f"the {what} of {self.path} are not those of its checkpoint"
                raise RunError(f"{changed}: run.toml or the data were changed since; undo that, or {anew}")
        if rounds < (done := header["round"]):
            found = f"{self.path}/rounds.jsonl has {rounds} rounds, but the checkpoint is of round {done}"
            raise RunError(f"{found}; restore the file, or {anew}")

    def models(self, task: Task) -> InFolder:
        """The clients' models."""
        return InFolder(self.path / "models", task.layout)


def _trees(state: State) -> dict[str, Any]:
    return {"server": state.server, "clients": state.clients.saved(), "known_masks": state.known_masks}


def fresh(parent: Path, title: str) -> Path:
    """A new, empty folder under the parent, named after the day, the time and the title.

    Args:
        parent: Of run folders.
        title: Of the run.
    """
    plain = re.sub(r"[^\w.-]+", "-", title).strip("-.")
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}"
    with _writing_into(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for count in itertools.count(1):
            path = parent / (stem if count == 1 else f"{stem}-{count}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    return path


@contextlib.contextmanager
def claimed(path: Path, new: bool) -> Iterator[RunFolder]:
    """The folder, locked until the end; a new one in which no run began is removed again.

    Args:
        path: Of the folder.
        new: Whether no run may be there yet; else one must.
    """
    folder = RunFolder(path)
    if new:
        _check_free(folder)
    else:
        check_folder(path)
    with contextlib.ExitStack() as stack:
        if new:
            stack.callback(_remove_if_empty, path)
        with _writing_into(path):
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.locked(path / LOCK))
        if new:
            _check_free(folder)  # again: another process may have used it in between
            stack.callback(_remove_unless_begun, folder)
        for folder_inside in (path, *(path / name for name in FOLDERS), *(path / "models").glob("*/")):
            files.remove_parts(folder_inside)
        yield folder


def _remove_unless_begun(folder: RunFolder) -> None:
    for name in () if folder.begun else FILES:
        (folder.path / name).unlink(missing_ok=True)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _check_free(folder: RunFolder) -> None:
    """Nothing, if a run may begin here: the folder is new, empty, or of a run that never began."""
    path = folder.path
    if folder.begun:
        remedy = f"use {to_resume(path)}, or name another folder with {option('out')}"
        raise RunError(f"{path} already contains a run; {remedy}")
    with _writing_into(path):
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    others = sorted(n for n in names - {LOCK, *FILES} if not n.endswith((".part", ".tmp")))
    if others:
        content = f"it contains {listed(others, 3)}"
        raise RunError(
            f"{path} is no run folder and not empty ({content}); name a new folder with {option('out')}"
        )


def _writing_into(path: Path) -> contextlib.AbstractContextManager[None]:
    remedy = f"name another folder with {option('out')}"
    return raised_as(RunError, f"cannot write into {path}: {{}}; {remedy}", OSError)
