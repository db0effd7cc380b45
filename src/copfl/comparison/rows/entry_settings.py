"""The settings of a row: layers of tables, which with a seed make a job.

`compare`, `sweep` and `choose` make a `RowSettings` of each entry once, by `row_settings`, and pass it on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from copfl.comparison.jobs.job import Job, placed
from copfl.comparison.rows.entries import Base, Entry
from copfl.comparison.rows.rounds import RowRounds
from copfl.experiment.preparation import on_device
from copfl.settings import arguments, presets
from copfl.settings.checking import SettingError, parameters_of
from copfl.settings.complete import complete
from copfl.settings.components import factory_of, name_of, usual_optimizer
from copfl.settings.facts import DATA_SET_DEFAULTS
from copfl.settings.record import declared
from copfl.settings.schema import KINDS, RunSettings
from copfl.settings.toml import Tables

OPTIMIZER = "adam"  # of every row, where none is named
OWN = "own"  # in place of a name: each algorithm's own optimizer


class RowSettings(NamedTuple):
    """An entry with the settings of its runs."""

    entry: Entry
    optimizer: str  # the name; "" of an algorithm that has none
    layers: list[Tables]  # of `complete`, from below: of all rows, then its own

    @property
    def label(self) -> str:
        return self.entry.label

    def concerns(self, title: str) -> bool:
        """Whether a table of this title is for this row; one named after another algorithm is not."""
        return title in KINDS or title in (self.entry.title, self.optimizer)

    def concerning(self, tables: Base) -> Tables:
        """The tables that are for this row, by kind: [copfl] is [algorithm] of its rows, and not of others."""
        kinds = {self.entry.title: "algorithm", self.optimizer: "optimizer"}
        result: Tables = {}
        for title, table in tables.items():
            kind = title if title in KINDS else kinds.get(title)
            if kind is not None:
                result[kind] = {**result.get(kind, {}), **table}
        return result

    def with_settings(self, tables: Base) -> list[Tables]:
        """The layers, and on top the tables that are for this row."""
        return [*self.layers, self.concerning(tables)]


def row_settings(entry: Entry, base: Base, keeps_state: bool = False) -> RowSettings:
    """The settings of a row: what all rows have and concerns it, then its own.

    With one optimizer for every row, each phase has a new state: a state that two phases share makes the steps of
    the second one smaller.

    Args:
        entry: The row.
        base: The settings of every row, also under the names of algorithms and optimizers.
        keeps_state: Whether the algorithm's own default decides about the state instead, as in a sweep, which
            compares no algorithms.
    """
    name, optimizer = entry.name, optimizer_of(entry, base)
    plain = {title: dict(table) for title, table in base.items() if title in KINDS}
    titled = {title: table for title, table in base.items() if title not in KINDS}
    if not optimizer:
        plain.pop("optimizer", None)
    row = RowSettings(entry, optimizer, [])
    chosen: Tables = {"optimizer": {"name": optimizer}} if optimizer else {}
    layers = [
        {"algorithm": {"name": name}},
        plain,
        chosen,
        row.concerning(titled),
        row.concerning(entry.settings),
    ]
    phased = not keeps_state and "state_per_phase" in parameters_of(factory_of("algorithm", name))
    if phased and "name" in base.get("optimizer", {}) and not complete(*layers).optimizer.options["keep"]:
        layers.insert(1, {"algorithm": {"state_per_phase": True}})
    return row._replace(layers=layers)


def optimizer_of(entry: Entry, base: Base) -> str:
    """The name of a row's optimizer; "" of an algorithm that has none.

    Args:
        entry: The row.
        base: The settings of every row.
    """
    if (usual := usual_optimizer(entry.name)) is None:
        return ""
    named = entry.settings.get("optimizer", {}).get("name") or base.get("optimizer", {}).get("name")
    return str(named or name_of("optimizer", usual))


def job_of(
    folder: Path,
    label: str,
    layers: Sequence[Tables],
    seed: int,
    *,
    validation: float = 0.0,
    last: int | None = None,
    rounds: RowRounds | None = None,
) -> Job:
    """The run of these layers of settings and this seed; a SettingError if it cannot be compared with others.

    Args:
        folder: Of the run folders.
        label: Of the row.
        layers: As of `complete`.
        seed: Of the run.
        validation: The fraction of the training samples that it is tested on; 0: on the test samples.
        last: The evaluations that a value is the mean of; None: the last third.
        rounds: Finds the number of rounds where nobody named it; None: it is not looked for.
    """
    run = complete(*layers, {"run": {"seed": seed}}) if rounds is None else rounds.of(layers, seed)
    for field in declared(RunSettings):
        value, fitting = getattr(run.run, field.name), field.metadata["comparable"]
        if value not in fitting:
            no_fit = f"does not fit a comparison, whose rows have equal rounds; use {next(iter(fitting))}"
            raise SettingError(f"run.{field.name}", value, no_fit)
    return placed(Job(label, run, validation=validation, last=last), folder)


def common_of(dataset: arguments.Data, settings: Mapping[str, Any]) -> Tables:
    """The settings of every row.

    Args:
        dataset: As of `copfl.compare`.
        settings: The others, by keyword.
    """
    base = arguments.tables(dataset, settings)
    if not (preset := settings.get("preset")):
        return base
    name = str(base.get("data", {}).get("name", "digits"))
    below = presets.preset(preset, [base], DATA_SET_DEFAULTS.get(name))
    return {title: {**below.get(title, {}), **base.get(title, {})} for title in {**below, **base}}


def with_device(base: Tables) -> Tables:
    """The tables with the device named, once for all rows that train here; as they are where there is no GPU.

    Args:
        base: The settings of every row.
    """
    if base.get("run", {}).get("device", "auto") != "auto" or not torch.cuda.is_available():
        return base
    device = on_device(complete(base)).run.device
    return {**base, "run": {**base.get("run", {}), "device": device}}


def with_one_optimizer(base: Base) -> Tables:
    """The tables with one optimizer for every row, or with none for each algorithm's own."""
    table = {"name": OPTIMIZER, **base.get("optimizer", {})}
    if table["name"] == OWN:
        del table["name"]
    return {**{title: dict(settings) for title, settings in base.items()}, "optimizer": table}
