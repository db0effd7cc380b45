"""The settings of an entry: layers of tables, which with a seed make a job."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from copfl.comparison.jobs.job import Job, placed
from copfl.comparison.rows.entries import Base, Entry
from copfl.settings import arguments, presets
from copfl.settings.checking import SettingError, parameters_of
from copfl.settings.complete import complete
from copfl.settings.components import factory_of, name_of, usual_optimizer
from copfl.settings.schema import KINDS, RunSettings
from copfl.settings.toml import Tables

OPTIMIZER = "adam"  # of every row, where none is named
OWN = "own"  # in place of a name: each algorithm's own optimizer


def layers(entry: Entry, base: Base) -> list[Tables]:
    """The layers of `resolve` for an entry: the settings of all that concern it, then its own."""
    plain = {title: dict(table) for title, table in base.items() if title in KINDS}
    titled = {title: table for title, table in base.items() if title not in KINDS}
    name, optimizer = applies(entry, base)
    named: Tables = {"algorithm": {"name": name}}
    chosen: Tables = {"optimizer": {"name": optimizer}} if optimizer else {}
    if not optimizer:  # of an algorithm that has none
        plain.pop("optimizer", None)
    return [named, plain, chosen, by_kind(entry, base, titled), by_kind(entry, base, entry.settings)]


def by_kind(entry: Entry, base: Base, tables: Base) -> Tables:
    """The tables that concern an entry, by kind: [copfl] is [algorithm] of its rows, and not of others."""
    algorithm, optimizer = applies(entry, base)
    kinds = {algorithm: "algorithm", optimizer: "optimizer"}
    result: Tables = {}
    for title, table in tables.items():
        if title in KINDS or title in kinds:
            kind = title if title in KINDS else kinds[title]
            result[kind] = {**result.get(kind, {}), **table}
    return result


def applies(entry: Entry, base: Base) -> tuple[str, str]:
    """The names of the entry's algorithm and optimizer: tables named after others do not concern it."""
    if (usual := usual_optimizer(entry.name)) is None:
        return entry.name, ""
    named = entry.settings.get("optimizer", {}).get("name") or base.get("optimizer", {}).get("name")
    return entry.name, str(named or name_of("optimizer", usual))


def concerns(entry: Entry, base: Base, title: str) -> bool:
    """Whether a table of this title is for this entry; one named after another algorithm is not."""
    return title in applies(entry, base) or title in KINDS


def job_of(
    folder: Path,
    label: str,
    layers: Sequence[Tables],
    seed: int,
    *,
    validation: float = 0.0,
    last: int | None = None,
) -> Job:
    """The run of these layers of settings and this seed."""
    run = complete(*layers, {"run": {"seed": seed}})
    if run.run.patience:
        raise SettingError(
            "run.patience", run.run.patience, "does not fit a comparison, whose rows have equal rounds; use 0"
        )
    if run.run.find_rounds == "first":
        raise SettingError(
            "run.find_rounds", "first", "does not fit a comparison, whose rows have equal rounds; use off"
        )
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
    rounds = base.get("run", {}).get("rounds", RunSettings.rounds)
    below = presets.preset(preset, rounds)
    return {title: {**below.get(title, {}), **base.get(title, {})} for title in {**below, **base}}


def with_optimizer(base: Base) -> Tables:
    """The tables with one optimizer for every row, or with none for each algorithm's own."""
    table = {"name": OPTIMIZER, **base.get("optimizer", {})}
    if table["name"] == OWN:
        del table["name"]
    return {**{title: dict(settings) for title, settings in base.items()}, "optimizer": table}


def layers_of(entry: Entry, base: Base) -> list[Tables]:
    """The layers of an entry. With one optimizer for every row, each phase has a new state.

    A state that two phases share makes the steps of the second one smaller.
    """
    result = layers(entry, base)
    phased = "state_per_phase" in parameters_of(factory_of("algorithm", entry.name))
    if phased and "name" in base.get("optimizer", {}) and not complete(*result).optimizer.options["keep"]:
        result.insert(1, {"algorithm": {"state_per_phase": True}})
    return result
