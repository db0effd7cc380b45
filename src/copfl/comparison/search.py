"""A search for settings: Optuna draws them, and `tuning` trains the better ones for longer, by successive halving.

All settings of a row train for a ninth of the rounds, the best third of them for a third, and the best third
of those for all rounds. So every row has the same budget. A setting that is promoted begins again, in a
folder of its own, as any run does.

What is drawn depends on the seed and on the results so far, not on the number of processes. Several machines
may search in one folder: OUT/tuning/search.journal has the trials, and the run folders their results.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from copfl.comparison.halving import SEARCH
from copfl.comparison.rows.spaces import Range, Space
from copfl.errors import library
from copfl.files import locked
from copfl.measures.metrics import MetricInfo
from copfl.settings.identity import digest
from copfl.settings.toml import Tables

JOURNAL = "search.journal"
GENERATION = 5  # trials that are drawn at once, so that they can train in parallel
WAIT = 600.0  # seconds for another process that draws


class Attempt(NamedTuple):
    """Settings that a row tries."""

    row: int
    settings: Tables


# The values of attempts after a fraction of the rounds.
Measure = Callable[[Sequence[Attempt], float], list[float]]


class SharedSearch(NamedTuple):
    """What the searches of all rows share."""

    trials: int  # of each row
    folder: Path  # of the journal
    seed: int
    metric: MetricInfo
    measure: Measure


def drawn(search: SharedSearch, spaces: Sequence[Space], names: Sequence[str]) -> list[list[Attempt]]:
    """What each row tries, drawn from its space; nothing where that is empty.

    What is drawn depends on the values after the first rung, so this trains that rung.

    Args:
        search: What the searches of all rows share.
        spaces: Of each row.
        names: Of the studies, with all that the trials of a row depend on: the same study goes on.
    """
    studies = {row: _study(search, name) for row, name in enumerate(names) if spaces[row]}
    while generation := [
        (row, number, Attempt(row, settings))
        for row, study in studies.items()
        for number, settings in _drawn(search, study, spaces[row]).items()
    ]:
        values = search.measure([attempt for *_, attempt in generation], SEARCH[0])
        with locked(search.folder / ".search.lock", wait=WAIT):  # Optuna refuses a value that comes twice
            for (row, number, _), value in zip(generation, values, strict=True):
                _tell(studies[row], number, value)
    trials = {row: study.trials[: search.trials] for row, study in studies.items()}
    return [
        [Attempt(row, _settings(trial.params, space)) for trial in trials.get(row, [])]
        for row, space in enumerate(spaces)
    ]


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
