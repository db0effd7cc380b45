"""A comparison from entries and seeds to a table: `copfl.compare(...)` and `copfl.sweep(...)`.

OUT/runs/LABEL-seedS-HASH/   a run folder per entry and seed; any comparison uses a finished one again
    tuning/                  the same for the tuning runs, which test on a part of the training samples
    table.txt, .md, .csv, .json
    curves, clients, map     .png and .svg
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from copfl.algorithms import ALGORITHMS
from copfl.comparison import entries as reading
from copfl.comparison.entries import Entry, Grid, cells, check_own, check_seeds, described, layers
from copfl.comparison.jobs import LAST, Job, Starts, accuracies, placed
from copfl.comparison.results import Record, Trial, Tuned, record_of
from copfl.comparison.runner import Log, all_done
from copfl.comparison.tables import Comparison, Row, write
from copfl.core.metrics import MetricInfo
from copfl.errors import UsageError, at_least, unknown
from copfl.experiment.components import default_rate, resolve
from copfl.experiment.config import Tables, keywords_of
from copfl.experiment.run import prepare
from copfl.stats import Difference, Numbers, difference

BaseTables = Mapping[str, Mapping[str, Any]]
VALIDATION = 0.2  # of each client's training samples
OPTIMIZER = "adam"  # of every row, where none is named
OWN = "own"  # in place of a name: each algorithm's own optimizer
ELSEWHERE: Tables = {
    "run": {"device": "cpu", "engine": "sequential", "precision": "auto"}
}  # a check without the GPU
RATES = (3, 1, 10)  # tried by default, as multiples of the optimizer's learning rate on the data set


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
    executor: Executor | None = None,
    log: Log | None = None,
) -> Comparison:
    """The entries on the same clients, each with its best settings, and paired differences to the reference.

    >>> import copfl
    >>> found = copfl.compare(["copfl", "fedavg:lr=0.05", "local"], out="runs/mine")  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP

    The table and the runs are written to `out`; finished runs there are used again. `base_tables` apply to
    every run, as in run.toml. Every row has the same optimizer, Adam unless one is named there. `tune` has
    the values to try, such as {"lr": [0.1, 0.01]}; by default three learning rates, with {} nothing is tuned.
    With several `jobs`, runs have processes of their own, so a script needs `if __name__ == "__main__":`.
    With an `executor`, any of `concurrent.futures`, it trains the runs, in a folder that all its workers
    share.
    """
    rows = [reading.entry_of(e) if isinstance(e, str) else reading.checked(e) for e in entries]
    base, out, log = _with_optimizer(base_tables or {}), Path(out), log or _silent
    seeds, grid = check_seeds(seeds), reading.grid_of(tune or {}, "--tune")
    tune_seeds = check_seeds(seeds[:1] if tune_seeds is None else tune_seeds, "--tune-seeds")
    labels = _checked(rows, base, grid, last, jobs)
    check_own("--tune", grid)
    chosen = labels[0] if reference is None else reference
    if chosen not in labels:
        raise unknown("row to be the reference:", chosen, labels)

    def jobs_of(entry: Entry, cell: Tables, tuning: bool) -> list[Job]:
        label = f"{entry.label} {described(cell, 'optimizer', entry.name)}" if tuning else entry.label
        folder, tested, used = ("tuning", validation, tune_seeds) if tuning else ("runs", 0.0, seeds)
        parts = [*_layers(entry, base), cell]
        return [job_of(out / folder, label, parts, s, validation=tested, last=last) for s in used]

    grids = [_default_grid(entry, base) if tune is None else _own_grid(entry, base, grid) for entry in rows]
    trials = [
        [(cell, jobs_of(entry, cell, tuning=True)) for cell in cells(own)] if own else []
        for entry, own in zip(rows, grids, strict=True)
    ]
    for entry in rows:  # an error now, and not after the tuning
        resolve(_layers(entry, base), {})
    tuning = [job for plan in trials for _, tests in plan for job in tests]
    checked = [*_layers(rows[0], base), {"run": {"seed": seeds[0]}}, ELSEWHERE if executor else {}]
    prepare(checked, validation=validation if tuning else 0.0)
    run = partial(all_done, processes=jobs, log=log, executor=executor)
    if tuning:
        run(tuning, what="tuning runs")
    found = [_tuned(plan) for plan in trials]
    final = [jobs_of(entry, best.chosen, tuning=False) for entry, best in zip(rows, found, strict=True)]
    records = _records(final, run)
    against = records[labels.index(chosen)]
    table = [
        Row(entry, own, best, {} if entry.label == chosen else _differences(own, against), optimizer_of(plan))
        for entry, own, best, plan in zip(rows, records, found, final, strict=True)
    ]
    notes = _notes(table) + _tuning_notes(table, grids)
    title = "; ".join([_title(final[0][0], seeds), *unequal(table)])
    result = Comparison(title, table, seeds, last, chosen, notes=notes)
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
    executor: Executor | None = None,
    log: Log | None = None,
) -> Comparison:
    """One algorithm in every cell of a grid, such as {"copfl.rate": [0.01, 0.25], "run.batch": [8, 32]}."""
    seeds, grid = check_seeds(seeds), reading.grid_of(over, "--over")
    base = {title: dict(table) for title, table in (base_tables or {}).items()}
    own = base.pop("algorithm", {})
    name = str(own.pop("name", algorithm))
    base[name] = {**own, **base.get(name, {})}
    if not grid:
        raise UsageError("there is nothing to sweep over; name values, such as --over copfl.rate=0.05,0.25")
    if ("run", "seed") in grid:
        raise UsageError("--over run.seed: name the seeds with --seeds; the table is of means over them")
    rows = [Entry(name, described(cell, name, "optimizer"), cell) for cell in cells(grid)]
    reading.checked(Entry(name, name, {}))
    _checked(rows, base, grid, last, jobs)
    final = [
        [job_of(Path(out) / "runs", f"{name} {row.label}", layers(row, base), s, last=last) for s in seeds]
        for row in rows
    ]
    prepare([final[0][0].tables, ELSEWHERE if executor else {}])
    records = _records(final, partial(all_done, processes=jobs, log=log or _silent, executor=executor))
    table = [
        Row(entry, runs, optimizer=optimizer_of(plan))
        for entry, runs, plan in zip(rows, records, final, strict=True)
    ]
    title = f"{name} on {_title(final[0][0], seeds, grid)}"
    result = Comparison(title, table, seeds, last, over=grid, notes=_notes(table))
    write(result, Path(out))
    return result


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


def optimizer_of(jobs: Sequence[Job]) -> dict[str, Any]:
    """The optimizer of these runs of one row, with every option."""
    return dict(jobs[0].tables["optimizer"])


def unequal(rows: Sequence[Row]) -> list[str]:
    """A remark for the title if the rows differ in the optimizer or in the learning rates tried."""
    kinds = {
        repr(sorted((key, value) for key, value in row.optimizer.items() if key != "lr")) for row in rows
    }
    tried = [{t.settings.get("optimizer", {}).get("lr") for t in row.tuned.trials} - {None} for row in rows]
    rates = {frozenset(of_row or {row.optimizer["lr"]}) for of_row, row in zip(tried, rows, strict=True)}
    if len(kinds) > 1:
        return ["unequal optimizers"]
    return ["unequal learning rates"] if len(rates) > 1 else []


def _with_optimizer(base: BaseTables) -> Tables:
    """The tables with one optimizer for every row, or with none for each algorithm's own."""
    table = {"name": OPTIMIZER, **base.get("optimizer", {})}
    if table["name"] == OWN:
        del table["name"]
    return {**{title: dict(own) for title, own in base.items()}, "optimizer": table}


def _layers(entry: Entry, base: BaseTables) -> list[Tables]:
    """The layers of an entry. With one optimizer for every row, each phase has a new state.

    A state that two phases share makes the steps of the second one smaller.
    """
    result = layers(entry, base)
    phased = "state_per_phase" in keywords_of(ALGORITHMS[entry.name])
    if phased and "name" in base.get("optimizer", {}) and not resolve(result, {})["optimizer"]["keep"]:
        result.insert(1, {entry.name: {"state_per_phase": True}})
    return result


def _default_grid(entry: Entry, base: BaseTables) -> Grid:
    """Multiples of the optimizer's learning rate on this data set; empty where the rate is given."""
    name = reading.applies(entry, base)[1]
    titles = ("optimizer", name)
    if any("lr" in tables.get(title, {}) for tables in (base, entry.settings) for title in titles):
        return {}
    usual = default_rate(name, str(base.get("data", {}).get("name", "digits")))
    return {("optimizer", "lr"): [float(f"{factor * usual:.3g}") for factor in RATES]}


def _own_grid(entry: Entry, base: BaseTables, grid: Grid) -> Grid:
    """The grid without the keys of other algorithms, and without those that the entry sets."""
    return {
        (title, key): values
        for (title, key), values in grid.items()
        if reading.concerns(entry, base, title) and key not in entry.settings.get(title, {})
    }


def _silent(line: str) -> None:
    """Prints nothing."""


def _checked(rows: Sequence[Entry], base: BaseTables, grid: Grid, last: int, jobs: int) -> list[str]:
    """The labels, if the entries and the settings of all of them make a table."""
    at_least(1, last=last, jobs=jobs)
    labels = [row.label for row in rows]
    twice = [label for label in labels if labels.count(label) > 1]
    if not rows:
        raise UsageError("there is nothing to compare; name some algorithms: --algorithms copfl,fedavg,local")
    if "name" in base.get("algorithm", {}):
        raise UsageError(
            "algorithm.name is for one run; name the algorithms with --algorithms or as [[entry]]"
        )
    if "seed" in base.get("run", {}):
        raise UsageError("run.seed is for one run; name the seeds with --seeds")
    if twice:
        raise UsageError(f'two rows are called "{twice[0]}"; remove one, or give them labels as [[entry]]')
    reading.check_titles(rows, base, [*base, *(table for table, _ in grid)])
    return labels


def _records(plan: list[list[Job]], run: Callable[[list[Job]], None]) -> list[list[Record]]:
    """The record of every run, a list per entry; those that are missing are run."""
    by_seed = [job for seed in zip(*plan, strict=True) for job in seed]  # all rows grow together
    run(by_seed)
    starts, found = Starts("delete the older run"), {job.path: record_of(job) for job in by_seed}
    for path, record in found.items():
        starts.check(str(path), record.tables, record.validation, record.start)
    return [[found[job.path] for job in row] for row in plan]


def _differences(own: Sequence[Record], reference: Sequence[Record]) -> dict[str, Difference]:
    def values(row: Sequence[Record], name: str) -> list[Numbers]:
        return [np.array(run.clients[name]) for run in row]

    return {
        name: difference(values(own, name), values(reference, name))
        for name in accuracies("all", reference[0].metric.name)
        if not any(math.isnan(run.mean(name)) for run in (*own, *reference))  # a model that was not evaluated
    }


def _title(job: Job, seeds: Sequence[int], grid: Grid | None = None) -> str:
    """Such as "digits, 10 clients, 40 rounds, seeds 0, 1, 2"; without the keys of the sweep."""
    data, run = job.tables["data"], job.tables["run"]
    counts = [f"{run[key]} {key}" for key in ("clients", "rounds") if ("run", key) not in (grid or {})]
    if run.get("new_clients"):
        counts[0] += f" ({run['new_clients']:.0%} of them new)"
    word = "seeds" if len(seeds) > 1 else "seed"
    return ", ".join([Path(str(data.get("name"))).name, *counts, f"{word} {', '.join(map(str, seeds))}"])


def _notes(rows: Sequence[Row]) -> list[str]:
    metric = _common_metric(rows)
    undefined = {row.label: sum(int(run.cost.get("undefined", 0)) for run in row.outcomes) for row in rows}
    broken = {row.label: sum(int(run.cost["broken"]) for run in row.outcomes) for row in rows}
    return [
        f"{label}: {count} evaluations of a model without a finite output count as {metric.title} "
        f"{metric.worst_value:g}."
        for label, count in broken.items()
        if count
    ] + [
        f"{label}: the {metric.title} of {count} evaluations is not defined by the client's test samples, "
        "such as those of one class; they are left out of the means."
        for label, count in undefined.items()
        if count
    ]


def _common_metric(rows: Sequence[Row]) -> MetricInfo:
    """The primary metric; a UsageError if rows have different ones."""
    metrics = {row.label: row.metric for row in rows}
    if len(set(metrics.values())) > 1:
        named = ", ".join(f"{label} {metric.name}" for label, metric in metrics.items())
        raise UsageError(f"the rows have different primary metrics ({named}); name one for all of them")
    return rows[0].metric


def _tuning_notes(rows: Sequence[Row], grids: Sequence[Grid]) -> list[str]:
    ends = {row.label: at_an_end(row.tuned.chosen, own) for row, own in zip(rows, grids, strict=True)}
    at_ends = ", ".join(f"{label} {' '.join(found)}" for label, found in ends.items() if found)
    notes = [f"At an end of the values tried, so a wider grid may do better: {at_ends}."] if at_ends else []
    budgets = {row.label: len(row.tuned.trials) for row in rows}
    if len(set(budgets.values())) > 1:
        counts = ", ".join(f"{label} {count}" for label, count in budgets.items())
        advantage = "those with more had an advantage"
        notes.append(f"The rows did not try equally many settings ({counts}): {advantage}.")
    return notes


def _tuned(plan: Sequence[tuple[Tables, list[Job]]]) -> Tuned:
    """The cells that were tried, each with the mean primary metric over the seeds."""
    found = [(cell, [record_of(job) for job in jobs]) for cell, jobs in plan]
    trials = [Trial(cell, float(np.mean([record.mean() for record in runs]))) for cell, runs in found]
    return Tuned(trials, found[0][1][0].metric) if found else Tuned([])


def at_an_end(chosen: Tables, grid: Grid) -> list[str]:
    """Chosen values at an end of those tried, such as "lr=0.1"; there may be better ones beyond."""
    found = []
    for (table, key), values in grid.items():
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        value = chosen.get(table, {}).get(key)
        if len(numbers) > 1 and value in (min(numbers), max(numbers)):
            found.append(f"{key}={value:g}")
    return found
