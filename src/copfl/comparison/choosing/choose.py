"""Which method for this federation? `copfl.choose(...)`: the table of losses with many candidates, within a budget.

It is the table that a run chooses by, with more candidates: rows are held out on folds within each site, and every
candidate has a loss of each row that it did not see. What takes long begins with one fold. It goes on unless it is
worse than the best by more than a standard error; of those the best have more folds, and then more seeds, as far as
the budget allows. The choice and the verdict are those of a run. Test samples never enter the table. Local training is
always in it, and so is what each client trains alone by scikit-learn. A budget is a limit: what does not fit is not
begun, and what is running when the time is up is stopped.

OUT/losses/LABEL-HASH.npz    of a candidate on a fold, so that the same command goes on
    ranking.txt, .md, .json
    run.toml                 the choice, for `copfl run -c`
    chosen/                  the choice, trained on all training samples and tested
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from copfl.algorithms import ALGORITHMS
from copfl.choosing.candidates import LEVELS, LOCAL, TREES, Candidate, Tried, with_rivals
from copfl.choosing.evaluate import QUICK, Room
from copfl.choosing.first_run import Settings, can_keep, decided, rivals_of_sites
from copfl.comparison.choosing.budget import Budget, limit_of
from copfl.comparison.choosing.ranking import Choice, Row, ranked, write
from copfl.comparison.choosing.stages import Standing, fill, time_for_the_choice
from copfl.comparison.choosing.trying import Attempt, Trying
from copfl.comparison.jobs.forecast import Forecast
from copfl.comparison.jobs.processes import pool_for
from copfl.comparison.jobs.submission import TimeIsUp
from copfl.comparison.rows.entries import (
    Entry,
    Rows,
    at_commas,
    check_own,
    check_seeds,
    described,
    entries_of,
    entry_of,
    modules_of,
    rows_of,
)
from copfl.comparison.rows.entry_settings import (
    OPTIMIZER,
    common_of,
    row_settings,
    with_device,
    with_one_optimizer,
)
from copfl.comparison.rows.spaces import cells, grid_of
from copfl.comparison.rows.suitability import refusals
from copfl.core.algorithm import Traits, traits
from copfl.data.clients.groups import names_of_clients
from copfl.data.samples import REGRESSION
from copfl.engine.rounds import Round
from copfl.errors import RunError, UsageError, at_least
from copfl.experiment.choice import CHOICE, title_of
from copfl.experiment.choice import Choice as ChoiceOfRun
from copfl.experiment.folder import RunFolder, claimed
from copfl.experiment.preparation import prepare
from copfl.experiment.process import left_as_found
from copfl.experiment.progress import span
from copfl.experiment.result import Result
from copfl.experiment.rivals import plan_of, rivals_of
from copfl.experiment.run import reopen
from copfl.experiment.training import NOTHING, Given, train
from copfl.experiment.verdict import VERDICT
from copfl.settings import arguments, named_code
from copfl.settings.complete import complete
from copfl.settings.facts import LINEAR, WORDS
from copfl.settings.merging import Layer
from copfl.settings.schema import Run
from copfl.settings.toml import Tables
from copfl.telling import OF_ONE_RUN, Log, heard, heard_by_log, to_somebody

logger = logging.getLogger(__name__)
WRITING = 0.05  # of a time as budget, kept for the ranking and the end of a round
ADDONS: Tables = {"addons": {"ema": 0.95, "lr_schedule": "cosine"}}  # the finalists are also tried with these
END_BY_THEMSELVES = (LEVELS, TREES)  # algorithms whose rounds are no choice
# The server's steps that were best for some federation of studies/defaults; they are tried beside "all".
SERVER_STEPS = (
    "fedpac:server.name=fedexp:head_speed=3.0",
    "fedpac:server.name=momentum",
    "fedrod:server.name=fedexp",
    "fedrod:server.name=momentum",
    "fedper:server.name=fedexp",
    "fedper:server.name=momentum",
    "fedavg_ft:server.name=fedexp",
    "fedavg_ft:server.name=momentum",
)
# Of "all", these are tried first: each suits another kind of data, and the first
# choices of settings/first_choice.py are among them.
FIRST = (
    LOCAL,
    "levels",  # of different kinds of model first: they tell more than many methods on one network
    "wide_levels",
    "trees",
    "fedper:server.name=fedexp",
    "fedavg_ft:server.name=momentum",
    "fedpac:server.name=fedexp:head_speed=3.0",
    "ditto",
    "fedavg_ft",
    "apfl",
    "fedper:server.name=momentum",
    "lg_fedavg",
    "fedrod:server.name=fedexp",
    "fedavg",
    "fedper",
)
# Learning rates of Adam that these and training alone are tried with; the others have that of a first run.
RATES = (1e-3, 3e-3, 1e-2)


@arguments.shared
@left_as_found()
@heard_by_log(but_of=OF_ONE_RUN)
def choose(
    entries: Rows = ("all",),
    dataset: arguments.Data = arguments.DIGITS,
    *,
    budget: str | int = "",
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path = "runs/choose",
    tune: Mapping[str, Sequence[Any]] | None = None,
    addons: bool = False,
    retrain: bool = True,
    jobs: int = 1,
    code: named_code.Modules = (),
    log: Log | None = to_somebody,
    forecast: Forecast | None = None,
    **settings: Unpack[arguments.Settings],
) -> Choice:
    """The best method for this federation by rows that it did not see, and the ranking.

    >>> import copfl
    >>> found = copfl.choose(["fedavg", "fedper", "copfl"], "digits", budget=300, out="runs/mine")  # doctest: +SKIP
    >>> print(found.chosen, found)  # doctest: +SKIP

    Args:
        entries: The methods: names with options, such as "fedper:lr=0.05", or algorithms as values or classes; "all"
            are all that suit the data.
        settings: Of every run; without `rounds`, each method has those after which its loss is the lowest.
        budget: A number of rounds of all training together, or a time such as "10m", in which all of it ends; by
            default what all candidates take at most on one fold, and at least what two take on all folds.
        seeds: The first is used at first, the others by the best, as the budget allows.
        out: The folder of the losses and the ranking; what was tried in it is used again.
        tune: Values such as {"lr": [0.1, 0.01]}: each method is tried with each of them.
        addons: Whether the best candidates are also tried with the training add-ons.
        retrain: Whether the choice is trained again on all training samples, in `out`/chosen; not if a time
            as budget is too short for it.
        jobs: Candidates at a time; 0: as many as the machine has processors, and on a GPU as fit into its memory.
        code: Modules of yours that the tables, or runs in `out`, may name. What `entries` and `dataset` name
            needs no mention.
        log: Gets a line about each step; by default it is on stderr in a terminal or a notebook.
        forecast: Is kept up to date, for a caller that shows the time that is left.
    """
    begin = time.monotonic()
    if not isinstance(addons, bool):
        advice = f"pass their settings as base_tables={{'addons': {addons}}}"
        raise UsageError(
            f"addons={addons} must be True or False, whether the best candidates are also tried with them; {advice}"
        )
    entries = rows_of(entries)
    named_code.name(code, modules_of(entries))
    limit = limit_of(budget)
    out = Path(out)
    common = with_device(common_of(dataset, settings))
    base = _as_a_first_run(with_one_optimizer(common))
    seeds = check_seeds(seeds)
    at_least(0, jobs=jobs)
    is_rate_set = "lr" in {**common.get("optimizer", {}), **(tune or {})}
    layers = _layers(_suitable(entries, base, is_rate_set), base, tune or {})
    local = next(label for label, of_row in layers.items() if _name(of_row) == LOCAL)
    usual: Tables = {"run": {"seed": seeds[0], "find_rounds": "off"}}
    quiet: Tables = {"run": {**usual["run"], "rivals": False}}
    experiment = prepare(complete(*layers[local], quiet))
    refused = refusals({label: [*of_row, quiet] for label, of_row in layers.items()}, experiment)
    layers = {label: of_row for label, of_row in layers.items() if label not in refused}
    if len(layers) < 2:
        raise RunError(f"no candidate could run: {'; '.join(dict.fromkeys(refused.values()))}")
    room, plan = Room.of(experiment.run), None
    if complete(*layers[local]).run.rivals:
        plan = plan_of(experiment)
    limit, most = limit or Budget(), experiment.settings.rounds
    if limit == Budget():  # all on one fold, or two on all folds
        limit = Budget(rounds=most * max(len(layers), 2 * room.folds.number))
    forecast = Forecast() if forecast is None else forecast
    forecast.end = end = begin + limit.seconds
    within = span(limit.seconds) if limit.seconds < math.inf else f"{limit.rounds:,.0f} rounds of training"
    logger.info(
        f"trying {len(layers)} methods on {room.folds.number} folds of {room.rows:,} training rows, within {within}"
    )
    to_the_end = "rounds" in base.get("run", {})
    candidates = {label: _candidate(label, of_row) for label, of_row in layers.items()}
    notes = [f"{hint[:1].upper()}{hint[1:]}." for hint in experiment.hints]

    def run_of(candidate: Candidate) -> Run:
        return complete(*layers[candidate.name], usual)

    def attempt(label: str) -> Attempt:
        run = complete(*layers[label], quiet)
        few = run.run.rounds <= QUICK and not candidates[label].by_steps
        numbers = range(room.folds.number) if few else (0,)
        return Attempt(label, run, tuple(numbers), candidates[label].by_steps, to_the_end)

    def with_addons(best: Sequence[str]) -> list[Attempt]:
        for label in best if addons else ():
            if candidates[label].by_steps:
                layers[new := f"{label} with add-ons"] = [*layers[label], ADDONS]
                candidates[new] = candidates[label]._replace(name=new)
        return [attempt(label) for label in candidates if label.endswith(" with add-ons")]

    def after_first(standing: Standing) -> None:
        twice = bool(complete(*layers[local]).run.local_baseline)
        if late := time_for_the_choice(standing, (1 + twice) * retrain):
            notes.append(f"{late} {out / 'run.toml'} has its settings.")
            logger.info(notes[-1])
            too_late.append(True)

    too_late: list[bool] = []
    with rivals_of_sites(experiment.run, experiment, plan) as trained, pool_for(experiment, jobs) as pool:
        of_rivals = {one.name: one for one in with_rivals([], () if plan is None else plan.kinds)}
        standing = fill(
            Trying(
                out / "losses",
                experiment.run,
                room,
                experiment.fingerprints()["samples"],
                pool,
                limit.rounds,
                begin + (1 - WRITING) * limit.seconds,
                forecast,
            ),
            [attempt(label) for label in layers],
            lambda: {name: trained()[one.rival] for name, one in of_rivals.items() if one.rival in trained()},
            alone=[label for label, one in candidates.items() if one.is_alone],
            is_rmse=room.samples.kind == REGRESSION,
            only_shown=not can_keep(plan, room.samples),
            seeds=seeds,
            more=with_addons,
            after_first=after_first,
        )
    trying = standing.trying
    if not trying.trials:
        raise RunError(
            f"the budget of {budget} ended before any candidate was tried; the same with a larger budget goes on"
        )
    every = {**candidates, **of_rivals}
    tried = with_rivals(list(candidates.values()), () if plan is None else plan.kinds)
    run, given = decided(
        standing.able,
        Tried(tuple(one for one in tried if one.name in standing.able), {}),
        room,
        min(map(standing.folds, standing.able)),
        Settings(run_of, partial(_completed, base, usual), experiment, plan),
    )
    found: ChoiceOfRun = given[CHOICE]
    left_out = {**refused, **trying.refused}
    left_out |= {
        label: "the budget ended before" for label in candidates if label not in {*trying.trials, *left_out}
    }
    result = Choice(
        f"{Path(run.data.title).name}, {experiment.clients} clients",
        found.federation,
        ranked(
            [
                Row(
                    label,
                    one.losses,
                    standing.folds(label),
                    standing.seeds(label),
                    one.rounds,
                    standing.given_up.get(label, ""),
                )
                for label, one in standing.evaluated.items()
            ],
            found.federation,
            standing.is_rmse,
            found.validated.means,
        ),
        found,
        given.get(VERDICT),
        names_of_clients(experiment.federation.dataset, experiment.federation.partition),
        trying.spent,
        left_out,
        [f"Clients: {run.partition_text}.", *notes],
        out,
        rival=every[found.federation].rival,
    )
    write(result, run)
    if not retrain or too_late:
        return result
    logger.info(
        f"{title_of(result.chosen)} is chosen; it is trained on all training samples, in {out / 'chosen'}"
    )
    try:
        return dataclasses.replace(result, tested=str(_trained(run, out / "chosen", log, end, given)))
    except TimeIsUp:
        result.notes.append(
            f"The time was up before {title_of(result.chosen)} was trained on all training samples; the same again "
            "continues it."
        )
        write(result, run)
        return result


def _trained(run: Run, path: Path, log: Log | None, end: float, given: Given) -> Result:
    """The run, which continues in its folder if it was stopped; TimeIsUp after a round at the end of the time."""

    def stop(round: Round, seconds: float) -> None:
        if time.monotonic() > end:
            raise TimeIsUp

    folder = RunFolder(path)
    begun = folder.begun
    with claimed(path, new=not begun) as folder:
        passed = {"dataset" if kind == "data" else kind: value for kind, value in run.values.items()}
        experiment = reopen(folder, **passed) if begun else prepare(run)
        with heard(log, but_of=(rivals_of.__module__,)):  # which are heard already
            return train(experiment, folder, stop, stop, given=NOTHING if begun else given)


def _name(layers: Sequence[Tables]) -> str:
    """Of the algorithm of a row."""
    return str(layers[0]["algorithm"]["name"])


def _candidate(label: str, layers: Sequence[Tables]) -> Candidate:
    name = _name(layers)
    return Candidate(
        label, by_steps=name not in END_BY_THEMSELVES, keeps_own=name == LEVELS, is_local=name == LOCAL
    )


def _completed(base: Tables, usual: Layer, layer: Layer) -> Run:
    """A run that a rule makes, such as one whose sites keep models of their own, with what all candidates have."""
    common = {kind: table for kind, table in base.items() if kind in ("data", "partition", "task", "run")}
    return complete(common, usual, layer)


def _layers(
    rows: Sequence[Entry], base: Tables, tune: Mapping[str, Sequence[Any]]
) -> dict[str, list[Tables]]:
    """Of each candidate, by its label: every entry with every value of the grid that concerns it.

    Args:
        rows: The methods.
        base: Settings of every run.
        tune: Values by setting; each method is tried with each of them.
    """
    grid = grid_of(tune, "tune")
    check_own("tune", grid)
    layers: dict[str, list[Tables]] = {}
    for entry in rows:
        row = row_settings(entry, base)
        concerned = {key: values for key, values in grid.items() if row.concerns(key[0])}
        for cell in cells(concerned):
            label = f"{entry.label} {described(cell, 'optimizer', 'algorithm', entry.title)}".strip()
            layers[label] = row._replace(entry=entry._replace(label=label)).with_settings(cell)
    return layers


def _as_a_first_run(base: Tables) -> Tables:
    """The settings, with batch size, rate and schedule of a run whose algorithm nobody names."""
    usual = complete(base)
    tables = {**base, "run": {"batch": usual.run.batch, **base.get("run", {})}}
    if "name" in base["optimizer"]:
        tables["optimizer"] = {"lr": usual.optimizer.lr, **base["optimizer"]}
    if schedule := usual.addons.options.get("lr_schedule"):
        tables["addons"] = {"lr_schedule": schedule, **base.get("addons", {})}
    return tables


def _trains(algorithm: str, model: str) -> bool:
    """Whether an algorithm may train a model of this name: some train a head alone, or trees."""
    of_algorithm = traits(ALGORITHMS[algorithm]) if algorithm in ALGORITHMS else Traits()
    return model in (LINEAR, WORDS) if of_algorithm.head_only else of_algorithm.trains in ("", model)


def _names_all(entries: Rows) -> bool:
    return any(isinstance(row, str) and "all" in at_commas(row) for row in rows_of(entries))


def _suitable(entries: Rows, base: Tables, is_rate_set: bool) -> list[Entry]:
    """The entries that suit the settings, with the rates that are tried where nobody set one.

    Args:
        entries: The entries.
        base: Settings of every run.
        is_rate_set: Whether somebody did.
    """
    has_rates = base["optimizer"].get("name") == OPTIMIZER and not is_rate_set
    rows = _entries(entries, [rate for rate in RATES if has_rates and rate != base["optimizer"]["lr"]])
    if _names_all(entries) and (model := base.get("model", {}).get("name")):
        rows = [row for row in rows if _trains(row.name, model)]
    return rows


def _entries(entries: Rows, more_rates: Sequence[float] = ()) -> list[Entry]:
    """The entries, beside all algorithms the best steps of the server, and local training.

    Args:
        entries: The entries.
        more_rates: Learning rates with which SERVER_STEPS and local training are tried, too.
    """
    rows = entries_of(entries)
    if _names_all(entries):
        steps = [
            *SERVER_STEPS,
            *(f"{step}:lr={rate:g}" for rate in more_rates for step in (*SERVER_STEPS, LOCAL)),
        ]
        named = {row.label for row in rows}
        extra = [entry_of(text)._replace(optional=True) for text in steps]
        rows = [row for row in extra if row.label not in named] + rows
        first = [entry_of(text).label for text in FIRST]
        rows.sort(key=lambda row: first.index(row.label) if row.label in first else len(first))
    if not any(row.name == LOCAL for row in rows):
        rows.append(entry_of(LOCAL))
    labels = [row.label for row in rows]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f'two candidates are called "{twice[0]}"; remove one')
    return rows
