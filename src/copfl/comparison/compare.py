"""A comparison from entries and seeds to a table: `copfl.compare(...)` and `copfl.sweep(...)`.

OUT/runs/LABEL-seedS-HASH/   a run folder per entry and seed; one that is finished is used again, by any comparison
    tuning/                  the same for the tuning runs, and the validation parts they are tested on
    table.txt, .md, .csv, .json
    curves, clients, map     .png and .svg
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from copfl.comparison import tuning
from copfl.comparison.entries import (
    Entry,
    Grid,
    cells,
    check_own,
    check_seeds,
    check_titles,
    checked,
    described,
    entry_of,
    grid_of,
    layers,
)
from copfl.comparison.executor import Say, all_done
from copfl.comparison.jobs import Job, check_common, job_of
from copfl.comparison.results import ACCURACIES, LAST, Outcome, outcome_of
from copfl.comparison.rows import Comparison, Row
from copfl.comparison.tables import write
from copfl.comparison.tuning import VALIDATION, Tuned
from copfl.errors import UsageError, at_least, unknown
from copfl.experiment.components import resolve
from copfl.experiment.run import prepare
from copfl.stats import Difference, difference

BaseTables = Mapping[str, Mapping[str, Any]]


def compare(
    entries: Sequence[str | Entry],
    seeds: Sequence[int] = (0, 1, 2),
    base_tables: BaseTables | None = None,
    out: str | Path = "runs/compare",
    *,
    tune: Mapping[str, Sequence[Any]] | None = None,
    tune_seeds: Sequence[int] | None = None,
    validation: float = VALIDATION,
    reference: str | None = None,
    last: int = LAST,
    jobs: int = 1,
    say: Say | None = None,
) -> Comparison:
    """The entries on the same clients, each with its best settings, and its paired difference to the reference.

    >>> import copfl
    >>> found = copfl.compare(["copfl", "fedavg:lr=0.05", "local"], seeds=[0, 1, 2], out="runs/mine")  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP

    The table is written into `out`, beside the runs; runs that are there already are used again. `base_tables` hold
    for every run, as in run.toml. `tune` gives the values to try, such as {"lr": [0.1, 0.01]}. With several `jobs`
    the runs go in processes of their own, so a script needs the usual `if __name__ == "__main__":`.
    """
    rows, base, out = [_entry(e) for e in entries], dict(base_tables or {}), Path(out)
    seeds, grid = check_seeds(seeds), grid_of(tune or {}, "--tune")
    tune_seeds = check_seeds(seeds[:1] if tune_seeds is None else tune_seeds, "--tune-seeds")
    labels = _checked(rows, base, [table for table, _ in grid], last, jobs)
    check_own("--tune", grid)
    chosen = labels[0] if reference is None else reference
    if chosen not in labels:
        raise unknown("row to be the reference:", chosen, labels)
    for entry in rows:  # what cannot be run is found out before the first run
        for cell in cells(tuning.grid_for(entry, base, grid)):
            resolve([*layers(entry, base), cell], {})
    prepare([*layers(rows[0], base), {"run": {"seed": seeds[0]}}])
    found = [Tuned([])] * len(rows)
    if grid:
        found = tuning.tuned(
            rows, base, grid, tune_seeds, validation, out / "tuning", last,
            lambda trials: all_done(trials, jobs, say or _silent, "tuning runs"),
        )  # fmt: skip
    final = [
        [job_of(out / "runs", entry.label, [*layers(entry, base), choice.chosen], seed) for seed in seeds]
        for entry, choice in zip(rows, found, strict=True)
    ]
    outcomes = _outcomes(final, last, jobs, say)
    against = outcomes[labels.index(chosen)]
    table = [
        Row(entry, own, choice, {} if entry.label == chosen else _differences(own, against))
        for entry, own, choice in zip(rows, outcomes, found, strict=True)
    ]
    notes = _notes(table) + _tuning_notes(table, base, grid)
    result = Comparison(_title(final[0][0], seeds), table, seeds, last, chosen, notes=notes)
    write(result, out)
    return result


def sweep(
    over: Mapping[str, Sequence[Any]],
    seeds: Sequence[int] = (0, 1, 2),
    base_tables: BaseTables | None = None,
    out: str | Path = "runs/sweep",
    *,
    algorithm: str = "copfl",
    last: int = LAST,
    jobs: int = 1,
    say: Say | None = None,
) -> Comparison:
    """One algorithm in every cell of a grid, such as {"copfl.rate": [0.01, 0.25], "copfl.budget": [0.05, 0.5]}."""
    seeds, grid = check_seeds(seeds), grid_of(over, "--over")
    base = {title: dict(table) for title, table in (base_tables or {}).items()}
    own = base.pop("algorithm", {})
    name = str(own.pop("name", algorithm))
    base[name] = {**own, **base.get(name, {})}
    if not grid:
        raise UsageError(
            "there is nothing to sweep over; name a key and its values: --over copfl.rate=0.05,0.25"
        )
    if ("run", "seed") in grid:
        raise UsageError("--over run.seed: name the seeds with --seeds; the table is of means over them")
    rows = [Entry(name, described(cell, name, "optimizer"), cell) for cell in cells(grid)]
    checked(Entry(name, name, {}))
    _checked(rows, base, [table for table, _ in grid], last, jobs)
    final = [
        [job_of(Path(out) / "runs", f"{name} {row.label}", layers(row, base), s) for s in seeds]
        for row in rows
    ]
    prepare([final[0][0].tables])
    outcomes = _outcomes(final, last, jobs, say)
    table = [Row(entry, runs) for entry, runs in zip(rows, outcomes, strict=True)]
    title = f"{name} on {_title(final[0][0], seeds, grid)}"
    result = Comparison(title, table, seeds, last, over=grid, notes=_notes(table))
    write(result, Path(out))
    return result


def _entry(given: str | Entry) -> Entry:
    return entry_of(given) if isinstance(given, str) else checked(given)


def _silent(line: str) -> None:
    """Says nothing."""


def _checked(
    rows: Sequence[Entry], base: BaseTables, titles: Sequence[str], last: int, jobs: int
) -> list[str]:
    """The labels, if the entries and what is set for all of them make a table."""
    at_least(1, last=last, jobs=jobs)
    if not rows:
        raise UsageError(
            "there is nothing to compare; name some algorithms, such as --algorithms copfl,fedavg,local"
        )
    if "algorithm" in base:
        raise UsageError("[algorithm] is for one run; name the algorithms with --algorithms or as [[entry]]")
    if "seed" in base.get("run", {}):
        raise UsageError("run.seed is for one run; name the seeds with --seeds")
    labels = [row.label for row in rows]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(
                f'two rows are called "{label}"; leave one out, or give them labels in a file: [[entry]]'
            )
    check_titles(rows, base, [*base, *titles])
    return labels


def _outcomes(plan: list[list[Job]], last: int, jobs: int, say: Say | None) -> list[list[Outcome]]:
    """What every run found, a list per entry; they are carried out where they are not there yet."""
    everything = [
        job for row in zip(*plan, strict=True) for job in row
    ]  # seed by seed: all rows grow together
    all_done(everything, jobs, say or _silent)
    check_common(everything)
    return [[outcome_of(job, last) for job in row] for row in plan]


def _differences(own: Sequence[Outcome], reference: Sequence[Outcome]) -> dict[str, Difference]:
    return {
        name: difference([run.clients[name] for run in own], [run.clients[name] for run in reference])
        for name in ACCURACIES
        if not any(math.isnan(run.mean(name)) for run in (*own, *reference))  # a model that was not tried
    }


def _title(job: Job, seeds: Sequence[int], grid: Grid | None = None) -> str:
    """Such as "digits, 10 clients, 40 rounds, seeds 0, 1, 2"; what the sweep is over is left out."""
    data, run = job.tables["data"], job.tables["run"]
    counts = [f"{run[key]} {key}" for key in ("clients", "rounds") if ("run", key) not in (grid or {})]
    word = "seeds" if len(seeds) > 1 else "seed"
    return ", ".join([Path(str(data.get("name"))).name, *counts, f"{word} {', '.join(map(str, seeds))}"])


def _notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know of the runs."""
    broken = {row.label: sum(run.broken for run in row.outcomes) for row in rows}
    return [
        f"{label}: {count} looks at a model without a finite answer count as accuracy 0."
        for label, count in broken.items()
        if count
    ]


def _tuning_notes(rows: Sequence[Row], base: BaseTables, grid: Grid) -> list[str]:
    """What a reader must know of the tuning."""
    ends = {r.label: tuning.at_an_end(r.tuned.chosen, tuning.grid_for(r.entry, base, grid)) for r in rows}
    told = ", ".join(f"{label} {' '.join(found)}" for label, found in ends.items() if found)
    notes = [f"At an end of what was tried, so a wider grid may do better: {told}."] if told else []
    budgets = {len(row.tuned.trials) for row in rows}
    if len(budgets) > 1:
        told = ", ".join(f"{row.label} {len(row.tuned.trials)}" for row in rows)
        notes.append(
            f"The rows did not try equally many settings ({told}): those with more had an advantage."
        )
    return notes
