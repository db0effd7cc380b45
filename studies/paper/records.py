"""A small record of every run. Tables and figures are made of records alone.

A record contains all settings of its run, its metrics, and where it ran. Its identity does not depend on the
machine or the experiment: experiments share runs, and a table may be completed on several machines.
"""

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from copfl.comparison.jobs.job import Job, accuracies
from copfl.comparison.jobs.starts import Starts
from copfl.comparison.results.results import Record
from copfl.errors import CopflError, RunError, raised_as
from copfl.files import locked, write_bytes
from copfl.settings.complete import complete
from copfl.settings.identity import essential, identity_of
from copfl.settings.schema import Run
from copfl.settings.toml import Tables
from copfl.stats import averaged
from copfl.tables import plain

FORMAT = "copfl record 2"
SUFFIX = ".jsonl.gz"
WAIT = 600.0  # seconds for other processes that add records
COST = {"bytes_up": 1, "bytes_down": 1, "seconds": 4, "broken": 0}  # digits after the point
STATISTICS = {
    "last": "the mean of each client's last evaluations",
    "best_round": "the round with the highest mean over clients",
    "best_per_client": "the best round of each client",
}
# Of CO-PFL, in records that were made before there were such options.
BEFORE = {"head": "shared", "training": "in_turn"}
ADVICE = "use the data and the kind of processor of the other records, or another folder with --results DIR"


# Files


def evaluated(record: Record) -> set[str]:
    """The names of its metrics of the models that it evaluated."""
    return {name for name, values in record.clients.items() if not all(map(math.isnan, values))}


def serves(record: Record, job: Job) -> bool:
    """Whether it has all metrics of the job: another experiment may have evaluated fewer models.

    Args:
        record: Of a run with the job's settings.
        job: What is asked for.
    """
    wanted = accuracies(job.run.run.eval_models, record.metric.name)
    last = averaged(len(record.rounds)) if job.last is None else job.last
    return record.last == last and evaluated(record).issuperset(wanted)


@dataclass(frozen=True)
class Store:
    """The records of a folder: one file per experiment, a line per run; a shared run is stored once."""

    folder: Path
    known: dict[str, Record] = field(default_factory=dict)  # by identity
    unusable: list[str] = field(default_factory=list)  # what could not be read, and why
    starts: Starts = field(default_factory=lambda: Starts(ADVICE))
    read: dict[str, tuple[int, int]] = field(default_factory=dict)  # files read so far: time of writing, size
    defaults: dict[str, Tables] = field(default_factory=dict)  # by the names and keys of tables
    settings: dict[str, Tables] = field(
        default_factory=dict
    )  # with defaults, by those of a record without seed

    def get(self, job: Job) -> Record | None:
        """The job's record, if it has all that the job evaluates."""
        record = self.known.get(job.id)
        return record if record is not None and serves(record, job) else None

    def add(self, record: Record, experiment: str) -> None:
        """Adds the record to the experiment's file; several processes may do so at once."""
        self._check(record)
        record = from_json(as_json(record))  # rounded, as others read it: all choose alike
        id = self.id_of(record)
        refused = f"cannot write {self.folder}: {{}}; name another with --results DIR"
        with raised_as(RunError, refused, OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / ".lock", wait=WAIT):
                self.refresh()
                self.known[id] = record
                path = self.folder / f"{experiment}{SUFFIX}"
                written = dict(self.lines(path)) if path.exists() else {}
                write(path, {**written, id: record})
                self._seen(path)

    def refresh(self) -> None:
        """Reads what was added to the folder since the last time."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if self._seen(path):
                continue
            for id, record in self.lines(path):
                if id in self.known and not evaluated(record) > evaluated(self.known[id]):
                    continue
                try:
                    self._check(record)
                    self.known[id] = record
                except CopflError as error:
                    self.unusable.append(f"{path}: {error}")

    def id_of(self, record: Record) -> str:
        """The identity of the record's run."""
        return identity_of(self._settings(record), record.validation)

    def _settings(self, record: Record) -> Tables:
        """The essential settings of the record's run. Options that are younger than it get what there was before.

        These depend on the names and keys of the tables alone, so one resolution serves all records of a kind.
        Records that differ in their seed share the rest.
        """
        tables = record.tables
        if tables["algorithm"]["name"] == "copfl":
            tables = {**tables, "algorithm": {**BEFORE, **tables["algorithm"]}}
        without_seed = {**tables, "run": {**tables["run"], "seed": 0}}
        key = json.dumps(without_seed)
        if key not in self.settings:
            kind = json.dumps([[title, table.get("name"), sorted(table)] for title, table in tables.items()])
            if kind not in self.defaults:
                self.defaults[kind] = essential(complete(tables))
            filled = {
                title: {**table, **without_seed.get(title, {})}
                for title, table in self.defaults[kind].items()
            }
            self.settings[key] = essential(Run.of(filled))
        settings = self.settings[key]
        return {**settings, "run": {**settings["run"], "seed": record.seed}}

    def _check(self, record: Record) -> None:
        self.starts.check(record.title, self._settings(record), record.validation, record.start)

    def _seen(self, path: Path) -> bool:
        """Whether this state of the file has been read; from now on it has."""
        stat, before = path.stat(), self.read.get(path.name)
        self.read[path.name] = stat.st_mtime_ns, stat.st_size
        return before == self.read[path.name]

    def lines(self, path: Path) -> Iterator[tuple[str, Record]]:
        """The records of a file with their identities; what cannot be read is added to `unusable`."""
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


def opened(folder: Path) -> Store:
    """The records of a folder, read; a folder that does not exist has none."""
    store = Store(folder)
    store.refresh()
    return store


def write(path: Path, by_id: Mapping[str, Record]) -> None:
    """Writes a file of records; the same records give the same bytes."""
    lines = sorted(as_json(record) + "\n" for record in by_id.values())
    write_bytes(path, gzip.compress("".join(lines).encode(), mtime=0))


def as_json(record: Record) -> str:
    """The record as a line; nan is null. Six digits are more than a test set can distinguish."""
    content = record._asdict()
    # No experiment of the paper has new clients, another metric, or clients with names.
    del content["new"], content["metrics"], content["names"]
    for part in ("curves", "clients", "best"):
        content[part] = {name: [round(v, 6) for v in values] for name, values in content[part].items()}
    content["cost"] = {name: round(value, COST[name]) for name, value in record.cost.items()}
    content = plain({"format": FORMAT, **content})
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def from_json(text: str) -> Record:
    """The record of a line; a ValueError if it is of another format."""
    content = json.loads(text)
    if content.pop("format", None) != FORMAT:
        raise ValueError(f'it is no record of this version: "format" is not "{FORMAT}"')
    for part in ("curves", "clients", "best"):
        lists = content.get(part, {}).items()
        content[part] = {name: [math.nan if v is None else v for v in values] for name, values in lists}
    return Record(**content)
