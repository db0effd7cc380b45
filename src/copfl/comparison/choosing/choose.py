"""Which method for this federation? `copfl.choose(...)`: a race by successive halving on validation samples.

Every candidate trains for half of the rounds or more with the first seed. Those beyond the best third are
dropped. The others train for all rounds, and the last eighth with the other seeds. The order after few rounds
is not that after all of them, so half of the rounds come before more seeds. From half of the rounds on, what
is distinguishably worse than the best is dropped too; earlier, the loss decides, and what is not better than a
constant answer yet is kept as far as the budget allows it.
With few clients or a small budget, fewer of all methods race. A run continues
from its checkpoint. Test samples never enter the race. Local training is always in it. Beside the race, each
client trains scikit-learn's usual models alone; the verdict is against the best of them, too, so the answer may
be to stay alone. A budget is a limit: what does not fit is not begun, and what is running when the time is up is
stopped.

OUT/race/LABEL-seedS-HASH/   a run folder per candidate and seed
    ranking.txt, .md, .json
    curves                   .png and .svg, of the validation samples
    run.toml                 the choice, for `copfl run -c`
    chosen/                  the choice, trained on all training samples and tested
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from copfl.algorithms import ALGORITHMS
from copfl.comparison.choosing.budget import Budget, limit_of
from copfl.comparison.choosing.deciding import most_candidates
from copfl.comparison.choosing.race import Race
from copfl.comparison.choosing.ranking import LOCAL, Choice, write
from copfl.comparison.choosing.verdict import against_rivals
from copfl.comparison.jobs.forecast import Forecast
from copfl.comparison.jobs.processes import Pool, pool_for
from copfl.comparison.jobs.submission import TimeIsUp
from copfl.comparison.results.results import Record
from copfl.comparison.rows.entries import (
    VALIDATION,
    Entry,
    Rows,
    at_commas,
    check_seeds,
    entries_of,
    entry_of,
    modules_of,
    rows_of,
)
from copfl.comparison.rows.entry_settings import OPTIMIZER, common_of, with_device, with_one_optimizer
from copfl.core.algorithm import Traits, traits
from copfl.engine.rounds import Round
from copfl.errors import UsageError, at_least
from copfl.experiment.analysis.gains import constant_answers
from copfl.experiment.folder import RunFolder, claimed
from copfl.experiment.preparation import prepare
from copfl.experiment.process import left_as_found
from copfl.experiment.result import Result
from copfl.experiment.rivals import rivals_of
from copfl.experiment.run import reopen
from copfl.experiment.training import train
from copfl.rivals.records import TITLES
from copfl.settings import arguments, named_code
from copfl.settings.complete import complete
from copfl.settings.facts import LINEAR, WORDS
from copfl.settings.schema import Run, RunSettings
from copfl.settings.toml import Tables
from copfl.stats import mean_of_known
from copfl.telling import OF_ONE_RUN, Log, heard, heard_by_log, to_somebody

logger = logging.getLogger(__name__)
WRITING = 0.05  # of a time as budget, kept for the ranking, its pictures and the end of a round
# The server's steps that were best for some federation of studies/defaults; they race beside "all".
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
# Of "all", these race first, and alone where clients or time are few: each suits another kind of data, and the first
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
# Learning rates of Adam that these and training alone race with; the others have that of a first run.
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
    validation: float = VALIDATION,
    retrain: bool = True,
    jobs: int = 1,
    code: named_code.Modules = (),
    log: Log | None = to_somebody,
    forecast: Forecast | None = None,
    **settings: Unpack[arguments.Settings],
) -> Choice:
    """The best method for this federation by a race on validation samples, and the ranking.

    >>> import copfl
    >>> found = copfl.choose(["fedavg", "fedper", "copfl"], "digits", budget=300, out="runs/mine")  # doctest: +SKIP
    >>> print(found.chosen, found)  # doctest: +SKIP

    Args:
        entries: The methods: names with options, such as "fedper:lr=0.05", or algorithms as values or classes; "all"
            are all that suit the data.
        settings: Of every run; `rounds` belong to a run that reaches the last stage.
        budget: A number of rounds of all runs together, or a time such as "10m", in which all of it ends; by
            default a third of what the full comparison takes.
        seeds: The first is used in every stage but the last, in which the finalists have as many as the
            budget allows.
        out: The folder of the runs and the ranking; finished runs in it are used again.
        tune: Values such as {"lr": [0.1, 0.01]}: each method races with each of them.
        addons: Whether the last candidates also race with the training add-ons.
        validation: Fraction of each client's training samples on which the race is decided.
        retrain: Whether the choice is trained again on all training samples, in `out`/chosen; not if a time
            as budget is too short for it.
        jobs: Runs at a time; 0: as many as the machine has processors, and on a GPU as fit into its memory.
        code: Modules of yours that the tables, or runs in `out`, may name. What `entries` and `dataset` name
            needs no mention.
        log: Gets a line about each step; by default it is on stderr in a terminal or a notebook.
        forecast: Is kept up to date, for a caller that shows the time that is left.
    """
    begin = time.monotonic()
    if not isinstance(addons, bool):
        advice = f"pass their settings as base_tables={{'addons': {addons}}}"
        raise UsageError(
            f"addons={addons} must be True or False, whether the last candidates also race with them; {advice}"
        )
    entries = rows_of(entries)
    named_code.name(code, modules_of(entries))
    limit = limit_of(budget)
    out = Path(out)
    common = with_device(common_of(dataset, settings))
    every = {"checkpoint_every": 1}  # a rung may end after any round
    base = _as_a_first_run(with_one_optimizer({**common, "run": {**common.get("run", {}), **every}}))
    seeds = check_seeds(seeds)
    forecast = Forecast() if forecast is None else forecast
    at_least(0, jobs=jobs)
    # The pool comes later: how many runs fit depends on the prepared experiment, and that on the candidates.
    race = Race(out, base, seeds, validation, Pool(1), forecast=forecast)
    is_rate_set = "lr" in {**common.get("optimizer", {}), **(tune or {})}
    is_adam = base["optimizer"].get("name") == OPTIMIZER
    rates = RATES if is_adam and not is_rate_set else ()
    rows = _entries(entries, [rate for rate in rates if rate != base["optimizer"]["lr"]])
    if _names_all(entries) and (model := base.get("model", {}).get("name")):
        rows = [row for row in rows if _trains(row.name, model)]
    candidates = race.candidates(rows, tune or {})
    local = next(candidate for candidate in candidates if candidate.entry.name == LOCAL)
    # Local training is always in the race and suits every task, so its run stands for all of them here.
    experiment = prepare(complete(*local.layers, {"run": {"seed": seeds[0]}}), validation=validation)
    race.constant = constant_answers(experiment.federation, experiment.task.metrics[0])
    # On the validation samples, as the race is: test samples decide nothing.
    rivals = rivals_of(experiment, lambda client: None) if experiment.settings.rivals else None
    for hint in experiment.hints:
        race.note(f"{hint[:1].upper()}{hint[1:]}.")
    candidates = race.suitable(candidates, experiment)
    race.samples = experiment.federation.test.sizes.tolist()
    if _names_all(entries):
        clients = len(race.samples)
        few = f"{clients} client{'s' * (clients > 1)}"
        candidates = race.first(candidates, most_candidates(clients), few, "more could not be told apart")
    rounds = candidates[0].jobs[0].run.run.rounds  # also where none are named
    limit = limit or Budget(rounds * len(seeds) * len(candidates) / 3, usual=True)
    # The choice is a run as any other, so it has the usual checkpoints and not those of a race.
    usual = {"seed": seeds[0], "checkpoint_every": RunSettings.checkpoint_every}
    trained_twice = bool(complete(*local.layers, {"run": usual}).run.local_baseline)
    race.passes = (1 + trained_twice) * retrain
    if limit.seconds:
        race.end = begin + (1 - WRITING) * limit.amount
        forecast.later, forecast.end = math.inf, begin + limit.amount  # it takes the time that it has
    with pool_for(experiment, jobs) as race.pool:
        standing = race.run(candidates, rounds, limit, addons)
    best = standing.best
    run = best.jobs[0].run
    race.notes.insert(0, f"Clients: {run.partition_text}.")
    verdict = race.verdict(standing)
    if rivals is not None:
        verdict = against_rivals(verdict, best.label, race.first_values(best.label), rivals)
    result = Choice(
        f"{Path(run.data.title).name}, {run.run.clients} clients",
        best.label,
        race.ranking(standing),
        verdict,
        standing.metric,
        race.spent,
        race.notes,
        out,
        rivals=rivals,
    )
    curves = {label: at.records[label] for label, at in race.last.items()}
    chosen = complete(*best.layers, {"run": {**usual, "find_rounds": "auto"}})
    if chosen.run.find_rounds == "first":  # nobody named their number, and the race has the losses by round
        lowest = {
            label: _lowest(curves[label], rounds) for label in (best.label, local.label) if label in curves
        }
        found = dataclasses.replace(
            chosen.run,
            rounds=lowest[best.label],
            rounds_alone=lowest.get(local.label, 0),
            find_rounds="done",
        )
        chosen = dataclasses.replace(chosen, run=found)
        if found.rounds < rounds:
            race.note(
                f"{best.label} is trained for {found.rounds} rounds, after which its loss was the lowest."
            )
    write(result, curves, chosen)
    if not retrain or (limit.seconds and not race.passes):
        return result
    logger.info(f"{best.label} is chosen; it is trained on all training samples, in {out / 'chosen'}")
    try:
        tested = _trained(chosen, out / "chosen", log, begin + limit.amount if limit.seconds else math.inf)
    except TimeIsUp:
        race.note(
            f"The time was up before {best.label} was trained on all training samples; the same again "
            "continues it."
        )
        write(result, curves, chosen)
        return result
    return dataclasses.replace(result, tested=f"{tested}{_rival_tested(tested)}")


def _lowest(records: Sequence[Record], rounds: int) -> int:
    """The round with the lowest loss on validation samples, from 1.

    All rounds where the race ended while it fell, or where no loss is known.

    Args:
        records: Of a candidate, one of each seed.
        rounds: Of a complete run.
    """
    evaluated = records[0].rounds
    unknown = [math.nan] * len(evaluated)
    losses = np.mean([record.curves.get("test_loss", unknown) for record in records], 0)
    if np.isnan(losses).all():
        return rounds
    lowest = evaluated[int(np.nanargmin(losses))]
    return rounds if lowest == evaluated[-1] else lowest


def _rival_tested(result: Result) -> str:
    """What the best rival has on the same test samples, such as "; a random forest alone: accuracy 81.0 %"."""
    if result.rivals is None:
        return ""
    metric, title = result.rivals.metric, TITLES[result.rivals.chosen]
    value = metric.text(float(mean_of_known(result.rivals.best)))
    return f"; {title} at each client alone: {metric.title} {value}{metric.unit}"


def _trained(run: Run, path: Path, log: Log | None, end: float) -> Result:
    """The run, which continues in its folder if it was stopped; TimeIsUp after a round at the end of the time."""

    def stop(round: Round, seconds: float) -> None:
        if time.monotonic() > end:
            raise TimeIsUp

    begun = RunFolder(path).begun
    with claimed(path, new=not begun) as folder:
        passed = {"dataset" if kind == "data" else kind: value for kind, value in run.values.items()}
        experiment = reopen(folder, **passed) if begun else prepare(run)
        with heard(log, but_of=(rivals_of.__module__,)):  # which are heard already
            return train(experiment, folder, stop, stop)


def _as_a_first_run(base: Tables) -> Tables:
    """The settings, with batch size, rate and schedule of a run whose algorithm nobody names."""
    usual = complete(base)
    tables = {**base, "run": {"batch": usual.run.batch, **base["run"]}}
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


def _entries(entries: Rows, more_rates: Sequence[float] = ()) -> list[Entry]:
    """The entries, beside all algorithms the best steps of the server, and local training.

    Args:
        entries: The entries.
        more_rates: Learning rates with which SERVER_STEPS and local training race, too.
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
