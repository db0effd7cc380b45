"""What a run folder tells, finished or not, without the data set, the model or the code that made it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.engine import checkpoint
from copfl.errors import RunError, UsageError
from copfl.experiment import records
from copfl.experiment.config import Tables
from copfl.experiment.folder import RunFolder
from copfl.experiment.migration import ENVIRONMENT, renamed

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RunData:
    """One run. Arrays are [rounds, clients], nan where a client did not take part or was not looked at."""

    path: Path
    label: str  # what tells it apart from the other runs of the report
    tables: Tables
    toml: str  # run.toml as it is
    environment: Mapping[str, Any]
    records: list[dict[str, Any]]
    seconds: list[float]
    partition: str  # fingerprint
    sizes: tuple[list[int], list[int]]  # train and test samples of each client
    held: NDArray[np.int64] | None  # [clients, classes], train samples
    masks: Masks | None
    audit: Mapping[str, Any] | None = None  # what `copfl audit` found, if it was asked

    @property
    def algorithm(self) -> str:
        return algorithm_of(self.tables)

    @property
    def clients(self) -> int:
        return len(self.sizes[0])

    @property
    def rounds(self) -> list[int]:
        return [record["round"] for record in self.records]

    @property
    def planned(self) -> int:
        """How many rounds it is to have."""
        return int(self.tables["run"]["rounds"])

    def has(self, name: str) -> bool:
        """Whether any round recorded this figure of its clients."""
        return any(name in record["per_client"] for record in self.records)

    def metric(self, name: str) -> Numbers:
        """A figure of the clients, in every round."""
        return records.table(self.records, name, self.clients)

    def last(self, name: str) -> Numbers:
        """Each client's newest value, [clients]."""
        latest = np.full(self.clients, np.nan)
        for row in self.metric(name):
            latest = np.where(np.isnan(row), latest, row)
        return latest

    def federation(self, name: str) -> list[float | None]:
        """A figure of the whole federation, in every round."""
        return [record["federation"].get(name) for record in self.records]


@dataclass(frozen=True, eq=False)
class Masks:
    """Where each client personalises, at the last checkpoint."""

    round: int
    layers: list[str]
    sizes: list[int]
    share: Numbers  # [clients, layers], personal parameters of all there are
    common: Numbers  # [layers], parameters that every client shares


def algorithm_of(tables: Tables) -> str:
    """The algorithm's name, or what was said of it where it was given as a value."""
    table = tables["algorithm"]
    return str(table.get("name") or str(table.get("value", "own")).partition("(")[0])


def read_all(paths: Sequence[Path]) -> list[RunData]:
    """The runs, each with a label of its own: the algorithm's name, and the folder's where that is not enough."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("a run was named twice; name each run folder once")
    names = [algorithm_of(RunFolder(path).tables()) for path in paths]
    folders = [path.resolve().name for path in paths]
    labels = list(names)
    for place, name in enumerate(names):
        if names.count(name) > 1:
            twins = [folder for folder, other in zip(folders, names, strict=True) if other == name]
            alone = twins.count(folders[place]) == 1
            labels[place] = f"{name} ({folders[place] if alone else paths[place].resolve()})"
    return [read(path, label) for path, label in zip(paths, labels, strict=True)]


def read(path: Path, label: str) -> RunData:
    """What the folder tells now; a run that is still going on may be read at any time."""
    folder = RunFolder(path)
    tables, partition = folder.tables(), folder.partition()
    rounds = tables["run"].get("rounds")
    if type(rounds) is not int or not 0 < rounds < 2**63:
        raise RunError(
            f"{path / 'run.toml'} does not say how many rounds the run is to have; restore it from a copy"
        )
    environment = _environment(path / "environment.json")
    lines = records.read(path / "rounds.jsonl")
    timing = path / "timing.jsonl"
    seconds = [line["seconds"] for line in records.read(timing)] if timing.exists() else []
    held = _held(path / "environment.json", environment)
    return RunData(
        path=path,
        label=label,
        tables=tables,
        toml=(path / "run.toml").read_text(encoding="utf-8"),
        environment=environment,
        records=lines,
        seconds=seconds[: len(lines)],
        partition=partition.fingerprint,
        sizes=([len(part) for part in partition.train], [len(part) for part in partition.test]),
        held=held,
        masks=_masks(path / "checkpoint" / "state.safetensors", environment.get("layers", {})),
        audit=_audit(path / "audit.json", len(partition.train)),
    )


def _environment(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        layers = found.get("layers", {})
        if not all(type(size) is int and 0 < size < 2**63 for size in layers.values()):
            raise ValueError("its layers are not sizes")
        if type(number := found.get("parameters", 0)) is not int or not 0 <= number < 2**63:
            raise ValueError("its number of parameters is none")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"cannot read {path} ({error}); restore it from a copy, or start the run again"
        ) from error
    return renamed(found, ENVIRONMENT)


def _held(path: Path, environment: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """How many samples of each class every client holds; None where the file does not say."""
    try:
        held = [[int(count) for count in row.split()] for row in environment.get("label_counts", [])]
        if held and {len(row) for row in held} != {len(environment["classes"])}:
            raise ValueError("it does not count every class for every client")
        return np.array(held, np.int64) if held else None
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise RunError(
            f"cannot read {path} ({error}); restore it from a copy, or start the run again"
        ) from error


def _audit(path: Path, clients: int) -> dict[str, Any] | None:
    """The audit beside the run; None where there is none, or none of these clients."""
    if not path.is_file():
        return None
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        return found if found["format"] == "copfl audit 1" and len(found["clients"]) == clients else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"cannot read {path} ({error}); `copfl audit {path.parent}` makes it again") from error


def _masks(path: Path, layers: Mapping[str, int]) -> Masks | None:
    """The clients' masks by layer; None where there is no checkpoint, or the algorithm has no masks.

    Only the masks are read: the whole state of ten ResNets takes gigabytes.
    """
    if not layers or not path.is_file():
        return None
    found, about = checkpoint.peek(path, "clients:mask")
    if found is None:
        return None
    mask = found.numpy()
    modules: dict[str, int] = {}  # a layer's weight and bias are one row of the picture
    for name in layers:
        modules.setdefault(name.rpartition(".")[0] or name, len(modules))
    share, sizes, common = np.zeros((len(mask), len(modules))), [0] * len(modules), np.zeros(len(modules))
    start = 0
    for name, size in layers.items():
        place = modules[name.rpartition(".")[0] or name]
        piece = mask[:, start : start + size]
        share[:, place] += piece.sum(1)
        common[place] += (~piece.any(0)).sum()
        sizes[place] += size
        start += size
    return Masks(int(about["round"]), list(modules), sizes, share / np.array(sizes), common / np.array(sizes))
