"""The settings of a row, layer by layer, and the jobs that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from copfl.algorithms import ALGORITHMS
from copfl.comparison.entries import Entry, layers
from copfl.comparison.jobs import LAST, Job, placed
from copfl.experiment.components import resolve
from copfl.experiment.config import Tables, keywords_of

BaseTables = Mapping[str, Mapping[str, Any]]
VALIDATION = 0.2  # of each client's training samples
OPTIMIZER = "adam"  # of every row, where none is named
OWN = "own"  # in place of a name: each algorithm's own optimizer


def job_of(
    folder: Path,
    label: str,
    layers: Sequence[Tables],
    seed: int,
    *,
    validation: float = 0.0,
    last: int = LAST,
) -> Job:
    """The run of these layers of settings and this seed."""
    tables = resolve([*layers, {"run": {"seed": seed}}], {})
    return placed(Job(label, tables, validation=validation, last=last), folder)


def with_optimizer(base: BaseTables) -> Tables:
    """The tables with one optimizer for every row, or with none for each algorithm's own."""
    table = {"name": OPTIMIZER, **base.get("optimizer", {})}
    if table["name"] == OWN:
        del table["name"]
    return {**{title: dict(own) for title, own in base.items()}, "optimizer": table}


def layers_of(entry: Entry, base: BaseTables) -> list[Tables]:
    """The layers of an entry. With one optimizer for every row, each phase has a new state.

    A state that two phases share makes the steps of the second one smaller.
    """
    result = layers(entry, base)
    phased = "state_per_phase" in keywords_of(ALGORITHMS[entry.name])
    if phased and "name" in base.get("optimizer", {}) and not resolve(result, {})["optimizer"]["keep"]:
        result.insert(1, {entry.name: {"state_per_phase": True}})
    return result
