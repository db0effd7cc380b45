"""The lines of rounds.jsonl: one JSON object per round, the same bytes for the same run.

Training appends them; folders, results, comparisons and reports read them.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl import foreign
from copfl.core.selection import BestRounds
from copfl.engine.rounds import Ids, Round, Values
from copfl.errors import RunError, raised_as, to_resume
from copfl.measures.metrics import MetricInfo
from copfl.stats import Numbers
from copfl.wire import plain

Record = dict[str, Any]


class FinalEvaluation(NamedTuple):
    """What was measured, after the last round, of the clients that no round evaluated: see `final`."""

    round: int  # the last one, from 1
    clients: list[int]
    values: dict[str, Numbers]  # by metric, as in a round: a value for each of these; nan where undefined
    # The clients that were in no round. Where a message has nothing, as of local training, they have no model of
    # the run and are not in `clients`.
    never_trained: list[int]

    def completed(self, values: Numbers, name: str) -> Numbers:
        """A metric of all clients, with the values of these.

        Args:
            values: Of the clients that a round evaluated, [clients].
            name: Of the metric.
        """
        if name not in self.values:
            return values
        whole = values.copy()
        whole[self.clients] = self.values[name]
        return whole


def as_record(round: Round) -> Record:
    """The round as plain numbers; rounds count from 1 here, and what is not finite is null."""
    metrics = sorted(round.clients.items())
    return {
        "round": round.number + 1,
        "clients": [int(n) for n in round.ids],
        "federation": {name: plain(value) for name, value in sorted(round.federation.items())},
        "mean": {name: plain(float(np.nanmean(v))) for name, v in metrics if not np.isnan(v).all()},
        "left_out": [int(n) for n in round.ids[round.clients["healthy"] == 0]],
        "per_client": {name: [plain(v) for v in values] for name, values in metrics},
    }


def encoded(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def append(path: Path, record: Record) -> None:
    """Adds one line, on disk before this returns; a line for which there is no space is removed again.

    Args:
        path: Of the file.
        record: The line.
    """
    line = encoded(record)
    failed = f"cannot write {path}: {{}}; free some space, then {to_resume(path.parent)}"
    with raised_as(RunError, failed, OSError), open(path, "ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(start)
            raise


def read(path: Path) -> list[Record]:
    """The records of a run, in order; a last line that was cut off is left out."""
    with raised_as(RunError, f"cannot read {path}: {{}}; is {path.parent} a run folder?", OSError):
        *lines, _ = path.read_bytes().split(b"\n")
    result, remedy = [], "restore the file, or start the run again"
    for number, line in enumerate(lines, 1):
        with raised_as(RunError, f"line {number} of {path} is damaged ({{}}); {remedy}", *foreign.DAMAGE):
            record = foreign.json_of(line)
            if record["round"] != number:
                raise ValueError(f"it is of round {record['round']}")
            _check(record)
        result.append(record)
    return result


def _check(record: Record) -> None:
    """Raises one of `foreign.DAMAGE` if the record, a line of rounds.jsonl or of timing.jsonl, was damaged."""
    if "seconds" in record:
        if record["seconds"] is None:
            raise ValueError("it has no seconds")
        return _check_numbers([record["seconds"]])
    clients, per_client = record["clients"], record["per_client"]
    if not all(type(n) is int and n >= 0 for n in [*clients, *record["left_out"]]):
        raise ValueError("its clients are not whole numbers")
    if len(set(clients)) < len(clients):
        raise ValueError("its clients are not distinct")
    for name, column in per_client.items():
        if type(column) is not list or len(column) != len(clients):
            raise ValueError(f"its {name} is not a number for each of {len(clients)} clients")
    for values in (record["federation"].values(), record["mean"].values(), *per_client.values()):
        _check_numbers(values)


def _check_numbers(values: Iterable[Any]) -> None:
    if not all(v is None or (type(v) in (int, float) and math.isfinite(v)) for v in values):
        raise ValueError("one of its values is not a number")


def table(records: list[Record], name: str, clients: int) -> Values:
    """One metric as an array [rounds, clients], nan where a client did not take part or was not evaluated.

    Args:
        records: Of the rounds.
        name: Of the metric.
        clients: How many there are.
    """
    result = np.full((len(records), clients), np.nan)
    for row, record in zip(result, records, strict=True):
        _fill(row, record, name)
    return result


def latest(records: list[Record], name: str, clients: int) -> Values:
    """The last value of one metric that is not nan, [clients]; of many rounds, a table takes much memory.

    Args:
        records: Of the rounds.
        name: Of the metric.
        clients: How many there are.
    """
    newest = np.full(clients, np.nan)
    for record in records:
        _fill(newest, record, name)
    return newest


def best_rounds(records: list[Record], metric: MetricInfo, clients: int) -> BestRounds:
    """Each client's best round by its validation samples.

    Args:
        records: Of the rounds.
        metric: The one that decides.
        clients: How many there are.
    """
    best = BestRounds.none_of(metric, clients)
    for record in records:
        values = {name: _numbers(column) for name, column in record["per_client"].items()}
        best.add(record["round"], _clients(record, clients), values)
    return best


def last_rounds(records: list[Record], metric: MetricInfo, clients: int) -> Ids:
    """The round of each client's last value of the metric, from 1; 0 where there is none.

    Args:
        records: Of the rounds.
        metric: Of the evaluations.
        clients: How many there are.
    """
    last = np.zeros(clients, np.int64)
    for record in records:
        row = np.full(clients, np.nan)
        _fill(row, record, metric.name)
        last[~np.isnan(row)] = record["round"]
    return last


def at_rounds(records: list[Record], name: str, rounds: Ids) -> Values:
    """One metric of each client in its round, from 1, [clients]; nan where there is none.

    Args:
        records: Of the rounds.
        name: Of the metric.
        rounds: Of each client, from 1; 0: none.
    """
    values = np.full(len(rounds), np.nan)
    for record in records:
        if (clients := rounds == record["round"]).any():
            row = np.full(len(rounds), np.nan)
            _fill(row, record, name)
            values[clients] = row[clients]
    return values


def _clients(record: Record, count: int) -> Ids:
    """The clients of a round; RunError if there are not so many."""
    unknown = [client for client in record["clients"] if not 0 <= client < count]
    if unknown:  # before numpy has them: they may be too large for it
        problem = f"round {record['round']} names client {unknown[0]}, but there are {count}"
        changed = "its rounds.jsonl or its partition.json was changed"
        raise RunError(f"{problem}: {changed}; restore them, or start the run again")
    return np.array(record["clients"], np.int64)


def _numbers(values: Iterable[float | None]) -> Values:
    return np.array([math.nan if v is None else v for v in values], np.float64)


def _fill(row: Values, record: Record, name: str) -> None:
    """Writes the values of one round that are known into a row [clients]."""
    if (values := record["per_client"].get(name)) is None:
        return
    clients, new = _clients(record, len(row)), _numbers(values)
    known = ~np.isnan(new)
    row[clients[known]] = new[known]
