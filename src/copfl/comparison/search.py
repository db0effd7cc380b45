"""A search for settings: Optuna draws them, and successive halving trains the better ones for longer.

All settings of a row train for a ninth of the rounds, the best third of them for a third, and the best third
of those for all rounds. So every row has the same budget. A setting that is promoted begins again, in a
folder of its own, as any run does.

What is drawn depends on the seed and on the results so far, not on the number of processes. Several machines
may search in one folder: OUT/tuning/search.journal has the trials, and the run folders their results.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from copfl.comparison.jobs.job import Job
from copfl.comparison.results.results import Tuned, TuningTrial, record_of
from copfl.comparison.rows.spaces import Range, Space, space_text
from copfl.core.metrics import MetricInfo
from copfl.errors import library
from copfl.files import locked
from copfl.settings.identity import digest
from copfl.settings.toml import Tables

C = TypeVar("C")

JOURNAL = "search.journal"
FRACTIONS = (1 / 9, 1 / 3, 1.0)  # of the rounds, at each step of the halving
KEPT = 3  # one of so many is promoted
GENERATION = 5  # trials that are drawn at once, so that they can train in parallel
WAIT = 600.0  # seconds for another process that draws


class Attempt(NamedTuple):
    """Settings that a row tries."""

    row: int
    settings: Tables


class SharedSearch(NamedTuple):
    """What the searches of all rows share."""

    trials: int  # of each row
    folder: Path  # of the journal
    seed: int
    metric: MetricInfo
    # The runs of a candidate with this fraction of the rounds, one per seed.
    jobs_of: Callable[[Attempt, float], list[Job]]
    run: Callable[[list[Job]], None]


def searched(search: SharedSearch, spaces: Sequence[Space], names: Sequence[str]) -> list[Tuned]:
    """What each row tried, from its space; nothing where that is empty. `names` are those of the studies."""
    studies = {row: _study(search, name) for row, name in enumerate(names) if spaces[row]}
    while drawn := [
        (row, number, Attempt(row, settings))
        for row, study in studies.items()
        for number, settings in _drawn(search, study, spaces[row]).items()
    ]:
        values = measured(search, [candidate for *_, candidate in drawn], FRACTIONS[0])
        with locked(search.folder / ".search.lock", wait=WAIT):  # Optuna refuses a value that comes twice
            for (row, number, _), value in zip(drawn, values, strict=True):
                _tell(studies[row], number, value)
    trials = {row: study.trials[: search.trials] for row, study in studies.items()}
    groups = [
        [Attempt(row, _settings(trial.params, space)) for trial in trials.get(row, [])]
        for row, space in enumerate(spaces)
    ]
    tried = halving(groups, partial(measured, search), search.metric)
    return [
        Tuned(
            [TuningTrial(c.settings, *measurement) for c, *measurement in of_row],
            search.metric,
            space_text(space),
        )
        for of_row, space in zip(tried, spaces, strict=True)
    ]


def halving(
    groups: Sequence[Sequence[C]], measure: Callable[[list[C], float], list[float]], metric: MetricInfo
) -> list[list[tuple[C, float, float]]]:
    """Of each group, every candidate with its value and the fraction of the rounds it was measured after.

    The best of each group are measured again with more rounds; of equals, the first are.
    """
    left = [dict(enumerate(group)) for group in groups]
    results: list[dict[int, tuple[C, float, float]]] = [{} for _ in groups]
    for fraction in FRACTIONS:
        values = iter(measure([candidate for group in left for candidate in group.values()], fraction))
        for of_group, group in zip(results, left, strict=True):
            of_group |= {number: (candidate, next(values), fraction) for number, candidate in group.items()}
            ranked = sorted((-metric.score(of_group[number][1]), number) for number in group)
            for _, number in ranked[math.ceil(len(group) / KEPT) :]:
                del group[number]
    return [list(of_group.values()) for of_group in results]


def whole_runs(trials: int) -> float:
    """What the halving of so many trials costs, in runs of all rounds."""
    counts = [trials]
    for _ in FRACTIONS[1:]:
        counts.append(math.ceil(counts[-1] / KEPT))
    return sum(count * fraction for count, fraction in zip(counts, FRACTIONS, strict=True))


def measured(search: SharedSearch, candidates: Sequence[Attempt], fraction: float) -> list[float]:
    """The primary metric of each on its validation samples, the mean over clients and seeds."""
    plans = [search.jobs_of(candidate, fraction) for candidate in candidates]
    search.run([job for plan in plans for job in plan])
    return [float(np.mean([record_of(job).mean() for job in plan])) for plan in plans]


# Optuna


def optuna_module() -> Any:
    """Optuna; a UsageError if it is not installed."""
    optuna = library("optuna", "a range to tune in, unlike values such as lr=0.1,0.01,")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(search: SharedSearch, name: str) -> Any:
    optuna = optuna_module()
    search.folder.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(search.folder / JOURNAL))
    return optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name=name,
        direction="maximize" if search.metric.higher_is_better else "minimize",
        load_if_exists=True,
    )


def _drawn(search: SharedSearch, study: Any, space: Space) -> dict[int, Tables]:
    """Trials without a value, by number, of this generation or the next; none at the end."""
    optuna = optuna_module()
    distributions = {".".join(path): _distribution(optuna, values) for path, values in space.items()}
    with locked(search.folder / ".search.lock", wait=WAIT):
        done = [trial.state.is_finished() for trial in study.trials]
        begun = len(done) + GENERATION * all(done)  # of a process that was killed here, the rest is drawn too
        for number in range(len(done), min(search.trials, math.ceil(begun / GENERATION) * GENERATION)):
            # A sampler per trial: what it draws does not depend on where the search was interrupted.
            seed = int(digest([search.seed, study.study_name, number]), 16) % 2**32
            study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=GENERATION)
            study.ask(distributions)
        trials = study.trials[: search.trials]
    open_trials = [trial for trial in trials if not trial.state.is_finished()]
    return {trial.number: _settings(trial.params, space) for trial in open_trials}


def _tell(study: Any, number: int, value: float) -> None:
    optuna = optuna_module()
    if math.isnan(value):
        study.tell(number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
    else:
        study.tell(number, value, skip_if_finished=True)


def _distribution(optuna: Any, values: list[Any] | Range) -> Any:
    if isinstance(values, list):
        return optuna.distributions.CategoricalDistribution(values)
    if values.whole:
        return optuna.distributions.IntDistribution(int(values.low), int(values.high), log=values.log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)


def _settings(params: dict[str, Any], space: Space) -> Tables:
    """The tables of a draw; three digits of a number are enough."""
    tables: Tables = {}
    for (table, key), values in space.items():
        value = params[f"{table}.{key}"]
        rounded = isinstance(values, Range) and not values.whole
        tables.setdefault(table, {})[key] = float(f"{value:.3g}") if rounded else value
    return tables
