"""The folder a run leaves, and how it is written so that nothing is ever half there.

runs/NAME/run.toml           everything that was chosen; `copfl run -c run.toml` does it again
          partition.json     who holds what
          rounds.jsonl       a line a round, the same bytes for the same run
          timing.jsonl       what the clock said
          checkpoint/        the state after the last checkpoint
          models/            each client's model: its own part, and the last broadcast
          environment.json   versions and hardware
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from copfl import __version__, configure, tree
from copfl.algorithms.algorithm import AnyAlgorithm
from copfl.data.partition import Partition
from copfl.engine import checkpoint, simulate
from copfl.errors import RunError
from copfl.report import records
from copfl.task import Experts, Task


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

    def begin(self, tables: Mapping[str, Mapping[str, Any]], partition: Partition, about: Mapping[str, Any]) -> None:
        """Writes what is known before the first round."""
        partition.save(self.path / "partition.json")
        versions = {
            "copfl": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "command": " ".join(sys.argv[1:]),
        }
        checkpoint.write_bytes(self.path / "environment.json", json.dumps({**versions, **about}, indent=1).encode())
        for name in ("rounds.jsonl", "timing.jsonl"):
            checkpoint.write_bytes(self.path / name, b"")
        self.write_tables(tables)

    def write_tables(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes run.toml."""
        checkpoint.write_bytes(self.path / "run.toml", configure.as_toml(tables).encode())

    def tables(self) -> dict[str, dict[str, Any]]:
        """What run.toml says; only what names can say can be run again."""
        path = self.path / "run.toml"
        if not path.is_file():
            raise RunError(
                f"{self.path} is not a run folder: it has no run.toml. Known runs: {_known(self.path.parent)}"
            )
        tables = configure.read_toml(path.read_text("utf-8"), str(path))
        values = [kind for kind, table in tables.items() if "value" in table]
        if values:
            raise RunError(
                f"{path} was written by a Python program that passed its own {', '.join(values)}; "
                "only that program can run it again"
            )
        return tables

    def append(self, record: dict[str, Any], seconds: float) -> None:
        """Adds a round."""
        records.append(self.path / "rounds.jsonl", record)
        records.append(self.path / "timing.jsonl", {"round": record["round"], "seconds": round(seconds, 6)})

    def checkpoint(self, state: simulate.State) -> None:
        """Writes the whole state, so that `restore` can go on from here."""
        checkpoint.save(self._state, _everything(state), {"round": state.round})

    def restore(self, state: simulate.State) -> list[dict[str, Any]]:
        """The records up to the checkpoint, with the state set to it and the files cut back to it."""
        lines: list[dict[str, Any]] = []
        if self._state.exists():
            trees, about = checkpoint.load(self._state, _everything(state))
            lines = records.read(self.path / "rounds.jsonl")
            if len(lines) < about["round"]:
                raise RunError(
                    f"{self.path}/rounds.jsonl has {len(lines)} rounds, its checkpoint is of round {about['round']}"
                )
            state.server, state.round = trees["server"], about["round"]
            state.clients.all = trees["clients"]
        for name in ("rounds.jsonl", "timing.jsonl"):  # what came after the checkpoint will come again
            path = self.path / name
            kept = path.read_bytes().split(b"\n")[: state.round] if path.exists() else []
            checkpoint.write_bytes(path, b"".join(line + b"\n" for line in kept if line))
        return lines[: state.round]

    def save_models(self, algorithm: AnyAlgorithm, task: Task, state: simulate.State, clients: int) -> None:
        """Writes each client's model, its own part and the last broadcast, as tensors by name."""
        from safetensors.torch import save

        for n in range(clients):
            ids = torch.tensor([n], device=task.device)
            client = tree.row(tree.rows(state.clients.all, ids), 0)
            personal = algorithm.personal(task, client, tree.row(algorithm.downlink(state.server, ids), 0))
            path = self.path / "models" / f"client-{n:04d}.safetensors"
            checkpoint.write_bytes(path, save(named_tensors(task, personal)))


def _everything(state: simulate.State) -> dict[str, Any]:
    return {"server": state.server, "clients": state.clients.all}


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


@contextlib.contextmanager
def claimed(path: Path, new: bool) -> Iterator[RunFolder]:
    """The folder, held by this process alone until the end."""
    if new and (path / "run.toml").exists():
        raise RunError(f"{path} already holds a run; use `copfl resume {path}`, or name another folder with --out")
    if not new and not path.is_dir():
        raise RunError(f"there is no folder {path}. Known runs: {_known(path.parent)}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise RunError(
            f"cannot write into {path}: {error.strerror or error}; name another folder with --out"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"another process is working in {path}; wait for it, or name another folder") from error
        yield RunFolder(path)
    finally:
        os.close(lock)
