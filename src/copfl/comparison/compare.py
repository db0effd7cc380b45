"""A comparison from entries and seeds to a table: `copfl.compare(...)` and `copfl.sweep(...)`.

OUT/runs/LABEL-seedS-HASH/   a run folder per entry and seed; any comparison uses a finished one again
    tuning/                  the same for the tuning runs, which test on a part of the training samples
    table.txt, .md, .csv, .json
    curves, clients, map     .png and .svg
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from copfl.algorithms import ALGORITHMS
from copfl.comparison import tuning
from copfl.comparison.jobs.forecast import Forecast
from copfl.comparison.jobs.job import Job, accuracies
from copfl.comparison.jobs.processes import pool_for
from copfl.comparison.jobs.runner import all_done
from copfl.comparison.jobs.starts import Starts
from copfl.comparison.results.remarks import (
    few_seeds,
    found_rounds,
    title_of,
    tuning_notes,
    undefined_values,
    unequal,
    values_at_the_end,
)
from copfl.comparison.results.results import Record, paired, read_record
from copfl.comparison.results.tables import Comparison, ComparisonRow, past_their_best, still_rising
from copfl.comparison.results.writing import write
from copfl.comparison.rivals import seed_rivals
from copfl.comparison.rows import suitability
from copfl.comparison.rows.entries import (
    VALIDATION,
    Base,
    Entry,
    Rows,
    check_own,
    check_seeds,
    described,
    entries_of,
    modules_of,
    rows_of,
)
from copfl.comparison.rows.entry_settings import (
    RowSettings,
    common_of,
    job_of,
    optimizer_of,
    row_settings,
    with_device,
    with_one_optimizer,
)
from copfl.comparison.rows.rounds import RowRounds
from copfl.comparison.rows.spaces import EXAMPLE, Space, cells, check_by_setting, grid_of, space_of
from copfl.comparison.rows.suitability import reasons
from copfl.core.algorithm import AnyAlgorithm
from copfl.errors import UsageError, at_least, in_words, unknown
from copfl.experiment.experiment import Experiment
from copfl.experiment.preparation import prepare
from copfl.experiment.process import left_as_found
from copfl.settings import arguments, named_code
from copfl.settings.checking import parameters_of, unknown_key
from copfl.settings.complete import complete
from copfl.settings.components import OPTIMIZERS, factory_of
from copfl.settings.schema import KINDS
from copfl.stats import Difference, for_all
from copfl.tables import capital
from copfl.telling import OF_ONE_RUN, Log, heard_by_log, to_somebody

logger = logging.getLogger(__name__)


@arguments.shared
@left_as_found()
@heard_by_log(but_of=OF_ONE_RUN)
def compare(
    entries: Rows,
    dataset: arguments.Data = arguments.DIGITS,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path = "runs/compare",
    tune: Mapping[str, Sequence[Any] | str] | None = None,
    trials: int | None = None,
    tune_seeds: Sequence[int] | None = None,
    validation: float = VALIDATION,
    reference: str | None = None,
    last: int | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    code: named_code.Modules = (),
    log: Log | None = to_somebody,
    forecast: Forecast | None = None,
    **settings: Unpack[arguments.WithAddons],
) -> Comparison:
    """The entries on the same clients, each with its best settings, and paired differences to the reference.

    >>> import copfl
    >>> found = copfl.compare(["copfl", "fedavg:lr=0.05", "local"], "digits", out="runs/mine")  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP

    Args:
        entries: The rows: names with options, such as "fedavg:lr=0.05", or algorithms as values or classes.
        settings: Of every run.
        seeds: Each row is trained with each of them; the table has means over them.
        out: The folder of the table and the runs; finished runs in it are used again.
        tune: The values to try, such as {"lr": [0.1, 0.01]}; by default three learning rates, with {} nothing
            is tuned. With a range, {"lr": "log:1e-4..1e-1"}, Optuna searches.
        trials: Of a search, the number of each row.
        tune_seeds: The seeds of the tuning; by default the first of `seeds`.
        validation: Fraction of each client's training samples on which the tuning is decided.
        reference: The label of the row that the others are compared with; by default the first.
        last: A value is the mean of so many last evaluations of a client; by default the last third, at most
            five.
        jobs: Runs at a time; 0: as many as the machine has processors, and on a GPU as fit into its memory.
            They have processes of their own, so a script needs `if __name__ == "__main__":`.
        executor: Any of `concurrent.futures`: it trains the runs, in a folder that its workers share.
        code: Modules of yours that the tables, or runs in `out`, may name. What `entries`, `algorithm` and
            `dataset` name needs no mention.
        log: Gets a line about each step; by default it is on stderr in a terminal or a notebook.
        forecast: Is kept up to date, for a caller that shows the time that is left.
    """
    named = rows_of(entries)
    named_code.name(code, modules_of(named))
    rows = entries_of(named)
    common = common_of(dataset, settings)
    base = with_one_optimizer(common if executor else with_device(common))  # another machine finds its own
    base["run"] = {"find_rounds": "auto", **base.get("run", {})}
    seeds, space = check_seeds(seeds), space_of(tune or {}, "tune")
    tune_seeds = check_seeds(seeds[:1] if tune_seeds is None else tune_seeds, "tune_seeds")
    _check_rows(rows, base, space, last, jobs)
    check_own("tune", space)
    tries = tuning.trials_of(space, trials)
    rounds = RowRounds(Path(out) / "rounds", seeds[0])
    plan = tuning.ComparisonPlan(Path(out), seeds, tune_seeds, validation, last, rounds)
    settled, spaces_of = list[RowSettings](), dict[str, Space]()
    for entry in rows:
        row = row_settings(entry, base)
        tried = tuning.space_of_row(row, base, None if tune is None else space)
        for cell in cells(tried):  # an error now, and not after the tuning
            complete(*row.with_settings(cell))
        settled.append(row)
        spaces_of[row.label] = tried
    first = [*settled[0].layers, {"run": {"seed": seeds[0]}}, suitability.CHECK if executor else {}]
    experiment = prepare(complete(*first), validation=validation if any(spaces_of.values()) else 0.0)
    settled, remarks = _suitable(settled, experiment)
    remarks += [f"{capital(hint)}." for hint in experiment.hints]
    for note in remarks:
        logger.info(note)
    labels = [row.label for row in settled]
    chosen = labels[0] if reference is None else reference
    if chosen not in labels:
        raise unknown("row to be the reference:", chosen, labels)
    spaces = [spaces_of[label] for label in labels]
    forecast = Forecast() if forecast is None else forecast
    forecast.later += tuning.rounds_of(plan, settled, spaces, tries)
    with pool_for(experiment, jobs) as pool:
        run = partial(all_done, pool=pool, executor=executor, forecast=forecast)
        rounds.search(plan.tried(settled, spaces), pool, executor)
        metric, tune_all = experiment.task.metrics[0], partial(run, what="tuning runs")
        tuned = tuning.tuned(plan, settled, spaces, tries, metric, tune_all)
        how: dict[str, Any] = {"last": last, "rounds": rounds}
        final = [
            [
                job_of(plan.out / "runs", row.label, row.with_settings(best.chosen), seed, **how)
                for seed in seeds
            ]
            for row, best in zip(settled, tuned, strict=True)
        ]
        forecast.later = sum(job.rounds for of_row in final for job in of_row)  # now that they are known
        records = _records(final, run)
    rivals = seed_rivals([*settled[0].layers, suitability.CHECK if executor else {}], seeds)
    against = records[labels.index(chosen)]
    differences = _differences(
        {label: runs for label, runs in zip(labels, records, strict=True) if label != chosen}, against
    )
    table = [
        ComparisonRow(row.entry, runs, best, differences.get(row.label, {}))
        for row, runs, best in zip(settled, records, tuned, strict=True)
    ]
    notes = remarks + few_seeds(seeds) + undefined_values(table) + values_at_the_end(table)
    notes += tuning_notes(table, spaces) + found_rounds([of_row[0] for of_row in final], seeds[0])
    title = "; ".join([title_of([of_row[0] for of_row in final], seeds), *unequal(table)])
    result = Comparison(title, table, seeds, last, chosen, notes=notes, rivals=rivals)
    result.notes.extend([*still_rising(result), *past_their_best(result)])
    write(result, plan.out)
    return result


@arguments.shared
@left_as_found()
@heard_by_log(but_of=OF_ONE_RUN)
def sweep(
    over: Mapping[str, Sequence[Any]],
    dataset: arguments.Data = arguments.DIGITS,
    *,
    algorithm: str | AnyAlgorithm | type[AnyAlgorithm] = "copfl",
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path = "runs/sweep",
    last: int | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    code: named_code.Modules = (),
    log: Log | None = to_somebody,
    forecast: Forecast | None = None,
    **settings: Unpack[arguments.WithAddons],
) -> Comparison:
    """One algorithm in every cell of a grid.

    Args:
        over: The grid: values by setting, such as {"copfl.rate": [0.01, 0.25], "run.batch": [8, 32]}.
        settings: Of every run.
        algorithm: Its name, or an algorithm as a value or class, unless `base_tables` has one.
        seeds: Each cell is trained with each of them; the table has means over them.
        out: The folder of the table and the runs; finished runs in it are used again.
        last: A value is the mean of so many last evaluations of a client; by default the last third, at most
            five.
        jobs: Runs at a time; 0: as many as the machine has processors, and on a GPU as fit into its memory.
            They have processes of their own, so a script needs `if __name__ == "__main__":`.
        executor: Any of `concurrent.futures`: it trains the runs, in a folder that its workers share.
        code: Modules of yours that the tables, or runs in `out`, may name. What `entries`, `algorithm` and
            `dataset` name needs no mention.
        log: Gets a line about each step; by default it is on stderr in a terminal or a notebook.
        forecast: Is kept up to date, for a caller that shows the time that is left.
    """
    check_by_setting(over, "over")
    named_code.name(code, modules_of([algorithm]))
    base = common_of(dataset, settings)
    options = base.pop("algorithm", {})
    one, *others = entries_of([options.pop("name", algorithm)])
    if others:
        raise UsageError(
            f"a sweep is of one algorithm, and {algorithm} names {1 + len(others)}; use compare for several"
        )
    name = one.name
    own = parameters_of(factory_of("algorithm", name), ("optimizer",))  # they need no table
    over = {f"{name}.{key}" if key in own else key: tried for key, tried in over.items()}
    seeds, grid = check_seeds(seeds), grid_of(over, "over")
    base[name] = {**options, **one.settings.get("algorithm", {}), **base.get(name, {})}
    if not grid:
        raise UsageError(
            f"there is nothing to sweep over; name values, such as {in_words('copfl.rate=0.05,0.25', EXAMPLE)}"
        )
    if ("run", "seed") in grid:
        raise UsageError("over run.seed: the table is of means over seeds, which are named apart (seeds)")
    rows = [Entry(name, described(cell, name, "algorithm", "optimizer"), cell) for cell in cells(grid)]
    _check_rows(rows, base, grid, last, jobs)

    final = []
    for entry in rows:
        layers = row_settings(entry, base, keeps_state=True).layers
        label = f"{one.label} {entry.label}"
        final.append([job_of(Path(out) / "runs", label, layers, seed, last=last) for seed in seeds])
    experiment = prepare(final[0][0].run.replaced(suitability.CHECK if executor else {}))
    with pool_for(experiment, jobs) as pool:
        run = partial(all_done, pool=pool, executor=executor, forecast=forecast)
        records = _records(final, run)
    table = [ComparisonRow(entry, runs) for entry, runs in zip(rows, records, strict=True)]
    title = f"{one.label} on {title_of([of_row[0] for of_row in final], seeds, grid)}"
    result = Comparison(
        title,
        table,
        seeds,
        last,
        over=grid,
        notes=few_seeds(seeds) + undefined_values(table) + values_at_the_end(table),
    )
    result.notes.extend([*still_rising(result), *past_their_best(result)])
    write(result, Path(out))
    return result


def _check_rows(rows: Sequence[Entry], base: Base, space: Space, last: int | None, jobs: int) -> None:
    """Nothing, if the entries and the settings of all of them make a table."""
    at_least(1, last=1 if last is None else last)
    at_least(0, jobs=jobs)
    labels = [row.label for row in rows]
    twice = [label for label in labels if labels.count(label) > 1]
    if not rows:
        raise UsageError("there is nothing to compare; name some algorithms, such as copfl, fedavg and local")
    if "name" in base.get("algorithm", {}):
        raise UsageError("algorithm.name is for one run; the algorithms of a comparison are its rows")
    if "seed" in base.get("run", {}):
        raise UsageError("run.seed is for one run; the seeds of a comparison are named apart (seeds)")
    if twice:
        raise UsageError(f'two rows are called "{twice[0]}"; remove one, or give them labels as [[entry]]')
    used = {name for entry in rows for name in (entry.title, optimizer_of(entry, base)) if name}
    for title in [*base, *(table for table, _ in space)]:
        if title not in used and title not in KINDS:
            if title not in (*ALGORITHMS, *OPTIMIZERS):
                raise unknown_key(title, None, [*KINDS, *used])
            names = ", ".join(sorted(used))
            raise UsageError(f'settings of "{title}" are for no entry; those use {names}')


def _suitable(rows: Sequence[RowSettings], experiment: Experiment) -> tuple[list[RowSettings], list[str]]:
    """The rows that can train on the task, and a note on those that are left out; an error for others."""
    refused = suitability.refusals({row.label: row.layers for row in rows}, experiment)
    optional = {row.label for row in rows if row.entry.optional and len(refused) < len(rows)}
    named = {label: reason for label, reason in refused.items() if label not in optional}
    if named:
        raise UsageError(f"these rows cannot train on this task; leave them out: {reasons(named)}")
    left = [row for row in rows if row.label not in refused]
    return left, [f"Left out, as they cannot train on this task: {reasons(refused)}"] if refused else []


def _records(plan: list[list[Job]], run: Callable[[list[Job]], None]) -> list[list[Record]]:
    """The record of every run, a list per entry; those that are missing are run."""
    by_seed = [job for seed in zip(*plan, strict=True) for job in seed]  # all rows grow together
    run(by_seed)
    starts, by_path = Starts("delete the older run"), {job.path: read_record(job) for job in by_seed}
    for path, record in by_path.items():
        starts.check(str(path), record.tables, record.validation, record.start)
    return [[by_path[job.path] for job in row] for row in plan]


def _differences(
    rows: Mapping[str, Sequence[Record]], reference: Sequence[Record]
) -> dict[str, dict[str, Difference]]:
    """By row and metric, its difference to the reference, corrected for the number of rows."""
    differences: dict[str, dict[str, Difference]] = {label: {} for label in rows}
    for name in accuracies("all", reference[0].metric.name):
        of_rows = {
            label: paired(runs, reference, name)
            for label, runs in rows.items()
            # Not of a model that was not evaluated.
            if not any(math.isnan(run.mean(name)) for run in (*runs, *reference))
        }
        for label, corrected in for_all(of_rows).items():
            differences[label][name] = corrected
    return differences
