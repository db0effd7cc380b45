"""A small record of every run. Tables and figures are made of records alone.

A record contains all settings of its run, its metrics, and where it ran. Its identity does not depend on the
machine or the experiment: experiments share runs, and a table may be completed on several machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from copfl.comparison.jobs import Job, Starts, accuracies
from copfl.errors import CopflError, RunError
from copfl.experiment.components import resolve
from copfl.experiment.config import Tables
from copfl.experiment.identity import essential, identity
from copfl.experiment.migration import migrated
from copfl.files import write_bytes
from copfl.tables import plain

FORMAT = "copfl record 2"
SUFFIX = ".jsonl.gz"
STATISTICS = {
    "last": "the mean of each client's last evaluations",
    "best_round": "the round with the highest mean over clients",
    "best_per_client": "the best round of each client",
}
ADVICE = "use the data and the kind of processor of the other records, or another folder with --results DIR"


class Record(NamedTuple):
    """What is kept of a run."""

    tables: Tables  # the essential settings
    validation: float
    last: int
    rounds: list[int]  # those with an evaluation, from 1
    curves: dict[str, list[float]]  # by metric, its mean over the clients at each evaluation
    clients: dict[str, list[float]]  # by accuracy, each client's mean over its last evaluations; nan: none
    cost: dict[str, float]  # bytes per client and round, seconds per round, outputs that are not finite
    start: dict[str, str]  # fingerprints of the partition, the samples and the initial weights
    data: str  # the data set's own note
    where: dict[str, str]
    best: Mapping[
        str, list[float]
    ] = {}  # by accuracy, each client's highest evaluation; none in older records

    @property
    def seed(self) -> int:
        return int(self.tables["run"]["seed"])

    @property
    def length(self) -> int:
        """Its rounds."""
        return int(self.tables["run"]["rounds"])

    @property
    def title(self) -> str:
        """Such as "cifar10, 10 clients, copfl, mamo, seed 0"."""
        data, algorithm, optimizer = (str(self.tables[t]["name"]) for t in ("data", "algorithm", "optimizer"))
        clients = self.tables["run"]["clients"]
        return f"{Path(data).stem}, {clients} clients, {algorithm}, {optimizer}, seed {self.seed}"

    def mean(self, accuracy: str = "accuracy", statistic: str = "last") -> float:
        """The mean over the clients; nan where the record does not have what the statistic needs."""
        if statistic == "best_round":
            return max(self.curves[accuracy], default=math.nan)
        values = self.clients if statistic == "last" else self.best
        return float(np.nanmean(values[accuracy])) if accuracy in values else math.nan

    @property
    def counted(self) -> tuple[int, int]:
        """The first and the last round whose evaluations are in its mean."""
        return self.rounds[-self.last :][0], self.rounds[-1]

    def mean_within(self, rounds: tuple[int, int], accuracy: str = "accuracy") -> float:
        """The mean of the evaluations from the first of these rounds to the last."""
        if rounds == self.counted:
            return self.mean(accuracy)
        low, high = rounds
        values = [v for r, v in zip(self.rounds, self.curves[accuracy], strict=True) if low <= r <= high]
        return float(np.mean(values)) if values else math.nan

    def serves(self, job: Job) -> bool:
        """Whether it has all metrics of the job: another experiment may have evaluated fewer models."""
        wanted = accuracies(job.tables["run"]["eval_models"])
        return self.last == job.last and self.evaluated().issuperset(wanted)

    def evaluated(self) -> set[str]:
        return {name for name, values in self.clients.items() if not all(map(math.isnan, values))}


# Files


@dataclass(frozen=True)
class Store:
    """The records of a folder: one file per experiment, a line per run; a shared run is stored once."""

    folder: Path
    found: dict[str, Record] = field(default_factory=dict)  # by identity
    unusable: list[str] = field(default_factory=list)  # what could not be read, and why
    starts: Starts = field(default_factory=lambda: Starts(ADVICE))
    read: dict[str, tuple[int, int]] = field(default_factory=dict)  # files read so far: time of writing, size
    defaults: dict[str, Tables] = field(default_factory=dict)

    def get(self, job: Job) -> Record | None:
        """The job's record, if it has all that the job evaluates."""
        record = self.found.get(job.id)
        return record if record is not None and record.serves(job) else None

    def add(self, record: Record, experiment: str) -> None:
        """Adds the record to the experiment's file; several processes may do so at once."""
        self._check(record)
        with self._locked():
            self.refresh()
            self.found[self.id_of(record)] = record
            path = self.folder / f"{experiment}{SUFFIX}"
            known = dict(self._lines(path)) if path.exists() else {}
            write(path, {**known, self.id_of(record): record})
            self._seen(path)

    def refresh(self) -> None:
        """Reads what was added to the folder since the last time."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if self._seen(path):
                continue
            for id, record in self._lines(path):
                if id in self.found and not record.evaluated() > self.found[id].evaluated():
                    continue
                try:
                    self._check(record)
                    self.found[id] = record
                except CopflError as error:
                    self.unusable.append(f"{path}: {error}")

    def id_of(self, record: Record) -> str:
        """The identity of the record's run. Options that are younger than the record get their defaults.

        They depend on the names and keys of the tables alone, so one resolution serves all records of a kind.
        """
        tables = record.tables
        kind = json.dumps([[title, table.get("name"), sorted(table)] for title, table in tables.items()])
        if kind not in self.defaults:
            self.defaults[kind] = essential(resolve([tables], {}))
        complete = {title: {**table, **tables.get(title, {})} for title, table in self.defaults[kind].items()}
        return identity(complete, record.validation)

    def _check(self, record: Record) -> None:
        self.starts.check(record.title, record.tables, record.validation, record.start)

    def _seen(self, path: Path) -> bool:
        """Whether this state of the file has been read; from now on it has."""
        state = path.stat()
        before = self.read.get(path.name)
        self.read[path.name] = state.st_mtime_ns, state.st_size
        return before == self.read[path.name]

    def _lines(self, path: Path) -> Iterator[tuple[str, Record]]:
        try:
            lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        except (OSError, EOFError, ValueError) as error:
            self.unusable.append(f"{path}: {error}")
            return
        for number, line in enumerate(lines, 1):
            try:
                record = from_json(line)
                yield self.id_of(record), record
            except (ValueError, KeyError, TypeError, CopflError) as error:
                self.unusable.append(f"{path}, line {number}: {error}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise RunError(f"cannot write {self.folder}: {error}; name another with --results DIR") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def opened(folder: Path) -> Store:
    """The records in a folder."""
    store = Store(folder)
    store.refresh()
    return store


def write(path: Path, found: Mapping[str, Record]) -> None:
    """Writes a file of records; the same records give the same bytes."""
    lines = sorted(as_json(record) + "\n" for record in found.values())
    write_bytes(path, gzip.compress("".join(lines).encode(), mtime=0))


def as_json(record: Record) -> str:
    """The record as a line; nan is null."""
    content = plain({"format": FORMAT, **record._asdict()})
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def from_json(text: str) -> Record:
    """The record in a line."""
    content = json.loads(text)
    if content.pop("format", None) != FORMAT:
        raise ValueError(f'it is no record of this version: "format" is not "{FORMAT}"')
    for part in ("curves", "clients", "best"):
        lists = content.get(part, {}).items()
        content[part] = {n: [math.nan if v is None else v for v in own] for n, own in lists}
    return Record(**{**content, "tables": migrated(content["tables"])})
