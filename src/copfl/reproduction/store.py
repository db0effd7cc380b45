"""A small record of every run, which is all that tables and figures are made of.

A record says which run it is of (all its tables), what came out, and where. What identifies a run is neither the
machine nor a path, and not the item that asked for it: a table may be finished over several sittings on several
machines by carrying the records, and items share runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.comparison.jobs import Job, start_of
from copfl.comparison.results import ACCURACIES, accuracies, outcome_of
from copfl.errors import CopflError, RunError
from copfl.experiment import records as lines
from copfl.experiment.components import resolve
from copfl.experiment.config import Tables
from copfl.experiment.folder import RunFolder
from copfl.experiment.migration import migrated
from copfl.files import write_bytes
from copfl.reproduction.experiments import Run
from copfl.stats import Numbers

FORMAT = "copfl record 1"
# Where and how quickly a run is done and which of its models are looked at, not what it is.
FREE = {
    "data": {"dir", "code"},
    "model": {"code"},
    "run": {
        "device",
        "engine",
        "chunk",
        "threads",
        "workers",
        "store",
        "mkldnn",
        "checkpoint_every",
        "eval_models",
    },
}
USUAL = ("auto", "fp32", "tf32")  # precisions that count as one: what is usual on a machine
WHERE = ("copfl", "python", "torch", "numpy", "device")


class Record(NamedTuple):
    """What is kept of a run."""

    tables: Tables  # what it is
    validation: float
    last: int
    rounds: list[int]  # those with a look, from 1
    curves: dict[str, list[float]]  # by figure, its mean over the clients at each look
    clients: dict[
        str, list[float]
    ]  # by accuracy, each client's mean over its last looks; nan: no look, or it lies
    cost: dict[
        str, float
    ]  # bytes up and down per client and round, seconds a round, looks without a finite answer
    start: dict[str, str]  # fingerprints of the partition, the samples and the first weights
    data: str  # what the data set says of itself
    where: dict[str, str]

    @property
    def id(self) -> str:
        return identity(self.tables, self.validation, self.last)

    @property
    def seed(self) -> int:
        return int(self.tables["run"]["seed"])

    def values(self, accuracy: str) -> Numbers:
        return np.array(self.clients[accuracy], np.float64)

    def mean(self, accuracy: str = "accuracy") -> float:
        return float(np.nanmean(self.values(accuracy)))

    @property
    def length(self) -> int:
        """Its rounds."""
        return int(self.tables["run"]["rounds"])

    @property
    def counted(self) -> tuple[int, int]:
        """The first and the last round whose looks are in its mean."""
        return self.rounds[-self.last :][0], self.rounds[-1]

    def mean_within(self, rounds: tuple[int, int], accuracy: str = "accuracy") -> float:
        """The mean of the looks from the first of these rounds to the last."""
        if rounds == self.counted:
            return self.mean(accuracy)
        low, high = rounds
        looks = [v for r, v in zip(self.rounds, self.curves[accuracy], strict=True) if low <= r <= high]
        return float(np.mean(looks)) if looks else math.nan


def kept(tables: Mapping[str, Mapping[str, Any]]) -> Tables:
    """The tables as far as they say what a run is."""
    result = {
        title: {k: v for k, v in table.items() if v is not None and k not in FREE.get(title, ())}
        for title, table in tables.items()
    }
    if result["run"].get("precision") in USUAL:
        del result["run"]["precision"]
    plain: Tables = json.loads(json.dumps(result, default=str))
    return plain


def identity(tables: Mapping[str, Mapping[str, Any]], validation: float, last: int) -> str:
    """Twelve hexadecimal digits that differ where two runs may differ in more than rounding.

    The tables are completed first: an option that is younger than a record has its default there.
    """
    return _digest(resolve([kept(tables)], {}), validation, last)


def id_of(run: Run) -> str:
    return _digest(run.tables, run.validation, run.last)  # its tables are complete


def _digest(tables: Tables, validation: float, last: int) -> str:
    text = json.dumps([kept(tables), validation, last], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# From a run folder


def record_of(folder: Path, run: Run) -> Record:
    """What is kept of the finished run in this folder."""
    job = Job(run.label, run.seed, run.tables, folder)
    found = outcome_of(job, run.last)
    rounds = lines.read(folder / "rounds.jsonl")
    if len(rounds) != run.tables["run"]["rounds"]:
        raise RunError(
            f"{folder} has {len(rounds)} of {run.tables['run']['rounds']} rounds: the run is not finished"
        )
    if wrong := overgrown(run.tables["algorithm"], rounds):
        raise RunError(
            f"{folder}: {wrong}; such a run gets no record: remove its folder, and it is run again"
        )
    looks = [line["mean"] for line in rounds if line["round"] in set(found.rounds.tolist())]
    environment = json.loads((folder / "environment.json").read_text("utf-8"))
    ran = RunFolder(folder).tables()["run"]
    notes = [environment.get("data", ""), *environment.get("partition", [])]
    return Record(
        tables=kept(run.tables),
        validation=run.validation,
        last=run.last,
        rounds=found.rounds.tolist(),
        curves={name: [_short(look.get(name)) for look in looks] for name in (*ACCURACIES, "loss")},
        clients={name: [_short(v) for v in found.clients[name].tolist()] for name in ACCURACIES},
        cost={
            "bytes_up": round(found.bytes_up, 1),
            "bytes_down": round(found.bytes_down, 1),
            "seconds": round(found.seconds, 4),
            "broken": found.broken,
        },
        start=start_of(job),
        data="; ".join(note for note in notes if note),
        where={key: str(environment[key]) for key in WHERE if key in environment}
        | {key: str(ran[key]) for key in ("engine", "precision") if key in ran},
    )


def overgrown(algorithm: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str | None:
    """Which mask grew by more than `rate` of what was shared, as no mask may, on whatever machine; None: none did.

    A kernel that once chose too many entries, now and then and on a busy GPU alone, would have shown itself here.
    """
    rate, before = algorithm.get("rate", 1.0), dict[int, float]()
    for line in rounds:
        shares = line["per_client"].get("personal_fraction")
        for id, share in zip(line["clients"], shares, strict=True) if shares else ():
            held = before.get(id, 0.0)
            if share > held + rate * (1 - held) + 1e-3:  # counts are rounded
                grew = f"the mask of client {id} grew from {held:.1%} to {share:.1%} of the parameters"
                return f"in round {line['round']} {grew}, more than rate={rate} allows"
            before[id] = share
    return None


def _short(value: float | None) -> float:
    """Six digits behind the point: more than test samples can tell apart."""
    return math.nan if value is None else round(float(value), 6)


def run_in(folder: Path, last: Mapping[bool, int]) -> Run:
    """The run that a folder of `copfl compare` holds; `last` looks if it is a tuning run (True) or not."""
    held = RunFolder(folder)
    tables, partition = held.tables(), held.partition()
    validation = 0.0
    if partition.test_from == "train":
        told = re.search(r"validation: ([0-9.]+) of", " ".join(partition.notes))
        if told is None:
            raise RunError(f"{folder}: its partition does not say how much was held out")
        validation = float(told[1])
    if str(tables["partition"].get("name", "")).endswith(".json"):
        options = {key: value for key, value in partition.keywords.items() if key != "seed"}
        tables["partition"] = {"name": partition.scheme, **options}
    return Run(folder.name, resolve([tables], {}), validation, last[validation > 0])


# Files


@dataclass(frozen=True)
class Store:
    """The records of a folder, by what they are of."""

    folder: Path
    found: dict[str, Record] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)  # what could not be used, and why
    begun: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # what runs of the same clients began with, and one
    read: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # the files that were looked at: when written, size

    def get(self, run: Run) -> Record | None:
        """The run's record, if it has all that this run looks at: another item may have asked for less."""
        record = self.found.get(id_of(run))
        return record if record is not None and serves(record, run) else None

    def add(self, record: Record) -> Path:
        """Keeps the record, once it is on disk."""
        self.check_common(record)
        path = self.folder / file_name(record)
        write_bytes(path, as_json(record).encode())
        self.found[record.id] = record
        return path

    def refresh(self) -> None:
        """Takes in what came into the folder since: other processes and other machines add records too."""
        for path in sorted(self.folder.glob("*.json")):
            try:
                state = path.stat()
                if self.read.get(path.name) == (mark := (state.st_mtime_ns, state.st_size)):
                    continue
                self.read[path.name] = mark
                record = from_json(path.read_text("utf-8"))
                self.check_common(record)
                known = self.found.get(record.id)
                if known is None or tried(record) > tried(known):  # one that was made again looked at more
                    self.found[record.id] = record
            except (OSError, ValueError, KeyError, TypeError, CopflError) as error:
                self.odd.append(f"{path}: {error}")

    def check_common(self, record: Record) -> None:
        """Nothing, if the record began with what those of the same clients and seed began with."""
        self.check_start(file_name(record), record.tables, record.validation, record.start, record.data)

    def check_start(
        self, name: str, tables: Tables, validation: float, start: Mapping[str, str], data: str = ""
    ) -> None:
        """`check_common` of a run that may only be about to begin."""
        for what, group, mark in starts_of(tables, validation, start):
            known, other = self.begun.setdefault(group, (mark, name))
            if mark != known:
                why = (
                    "other kinds of processors, or versions of torch, draw them with other last digits: use what those "
                    "records were made with"
                    if what == "first weights"
                    else f"the data sets differ (this one: {data or 'no note'}): use the data of the records that are "
                    "there"
                )
                raise RunError(
                    f"{name} and {other} began with different {what}, so they cannot be compared; {why}, or another "
                    "folder with --results DIR"
                )


def tried(record: Record) -> set[str]:
    """The accuracies that the run looked at."""
    return {name for name, values in record.clients.items() if not all(map(math.isnan, values))}


def serves(record: Record, run: Run) -> bool:
    """Whether the record has all that the run looks at."""
    return tried(record).issuperset(accuracies(run.tables["run"]["eval_models"]))


def opened(folder: Path) -> Store:
    """The records in a folder; those that this version does not understand are named, not used."""
    store = Store(folder)
    store.refresh()
    return store


def file_name(record: Record) -> str:
    """Such as cifar10-10-copfl-mamo-seed0-0123456789ab.json."""
    t = record.tables
    what = [
        Path(str(t["data"]["name"])).stem,
        t["run"]["clients"],
        t["algorithm"]["name"],
        t["optimizer"]["name"],
    ]
    words = [*map(str, what), *(["validation"] if record.validation else []), f"seed{record.seed}", record.id]
    return "-".join(words) + ".json"


def as_json(record: Record) -> str:
    """The record as text, a line per part; nan is null."""
    parts = {"format": FORMAT, **record._asdict()}
    return "{\n" + ",\n".join(f'"{key}": {_text(value)}' for key, value in parts.items()) + "\n}\n"


def _text(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_plain(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(text: str) -> Record:
    """The record in the text."""
    content = json.loads(text)
    if content.pop("format", None) != FORMAT:
        raise ValueError(f'it is no record of this version: "format" is not "{FORMAT}"')
    for part in ("curves", "clients"):
        content[part] = {n: [math.nan if v is None else v for v in own] for n, own in content[part].items()}
    return Record(**{**content, "tables": migrated(content["tables"])})


def starts_of(tables: Tables, validation: float, start: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Of the partition, the samples and the first weights: what it is, what all records with it share, and its mark."""
    clients = [
        tables["data"],
        tables["partition"],
        tables["run"]["clients"],
        tables["run"]["seed"],
        validation,
    ]
    for key, what, group in (
        ("partition", "partition", clients),
        ("samples", "samples", clients),
        ("first", "first weights", [*clients, tables["model"]]),
    ):
        yield what, json.dumps([key, group], sort_keys=True), start[key]
