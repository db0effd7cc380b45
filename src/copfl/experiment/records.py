"""The lines a run leaves behind: one JSON object a round, the same bytes for the same run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from copfl.engine.simulate import Round
from copfl.errors import RunError
from copfl.experiment.migration import METRICS, renamed


def as_record(round: Round) -> dict[str, Any]:
    """The round as plain numbers. Rounds count from 1 here; what is not finite is null."""
    clients = {name: [_plain(v) for v in values] for name, values in sorted(round.clients.items())}
    return {
        "round": round.number + 1,
        "clients": [int(n) for n in round.ids],
        "federation": {name: _plain(value) for name, value in sorted(round.federation.items())},
        "mean": {
            name: _plain(np.nanmean(v)) for name, v in sorted(round.clients.items()) if not np.isnan(v).all()
        },
        "left_out": [int(n) for n in round.ids[round.clients["healthy"] == 0]],
        "per_client": clients,
    }


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def encoded(record: dict[str, Any]) -> bytes:
    """The record as a line."""
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds one line, on disk before this returns; a line that does not fit on the disk is taken back."""
    line = encoded(record)
    try:
        with open(path, "ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(start)
                raise
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; free some space, then `copfl resume {path.parent}`"
        ) from error


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a run, in order; a last line that was cut off by a crash is left out."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")  # what follows the last newline was never finished
    except OSError as error:
        raise RunError(
            f"cannot read {path}: {error.strerror or error}; is {path.parent} a run folder?"
        ) from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["round"] != number:
                raise ValueError(f"it is of round {record['round']}")
            _check(record, timing=path.name == "timing.jsonl")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise RunError(
                f"line {number} of {path} is damaged ({error}); restore the file, or start the run again"
            ) from error
        records.append(_renamed(record))
    return records


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its metrics under today's names."""
    parts: dict[str, Any] = {
        part: dict(sorted(renamed(record[part], METRICS).items()))
        for part in ("federation", "mean", "per_client")
        if part in record
    }
    return {**record, **parts}


def _check(record: dict[str, Any], timing: bool) -> None:
    """Raises whatever comes of it if the record is not one that was written here: damage that is still JSON."""
    if timing:
        if record["seconds"] is None:
            raise ValueError("it has no seconds")
        _check_numbers([record["seconds"]])
        return
    clients = record["clients"]
    if not all(type(n) is int and n >= 0 for n in [*clients, *record["left_out"]]) or len(set(clients)) < len(
        clients
    ):
        raise ValueError("its clients are not distinct whole numbers")
    for values in (record["federation"], record["mean"]):
        _check_numbers(values.values())
    for name, column in record["per_client"].items():
        if type(column) is not list or len(column) != len(clients):
            raise ValueError(f"its {name} is not a number for each of {len(clients)} clients")
        _check_numbers(column)


def _check_numbers(values: Iterable[Any]) -> None:
    if not all(v is None or (type(v) in (int, float) and math.isfinite(v)) for v in values):
        raise ValueError("what should be a number is none")


def table(records: list[dict[str, Any]], name: str, clients: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One figure as an array [rounds, clients], nan where a client did not take part or was not looked at."""
    result = np.full((len(records), clients), np.nan)
    for place, record in enumerate(records):
        values = record["per_client"].get(name)
        if values is not None:
            if max(record["clients"], default=-1) >= clients:
                raise RunError(
                    f"round {record['round']} names client {max(record['clients'])}, but there are {clients}: its "
                    "rounds.jsonl or its partition.json was changed; restore them, or start the run again"
                )
            result[place, record["clients"]] = [math.nan if v is None else v for v in values]
    return result
