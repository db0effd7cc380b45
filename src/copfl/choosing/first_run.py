"""From the settings of a run to those that train: the candidate with the lowest loss on rows that it did not see.

`copfl run` and `copfl.run` begin with `completed_run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from copfl.choosing.candidates import (
    ALONE,
    APFL,
    LOCAL,
    MEASURES,
    Candidate,
    Facts,
    Tried,
    candidates_for,
    only,
)
from copfl.choosing.choice import choose
from copfl.choosing.evaluate import Evaluated, Room, evaluate, of_rivals
from copfl.choosing.folds import Folds
from copfl.data.samples import MULTILABEL, REGRESSION, SURVIVAL, Dataset
from copfl.engine.machine import processors
from copfl.errors import UsageError, option
from copfl.experiment.choice import CHOICE, Choice
from copfl.experiment.experiment import Experiment
from copfl.experiment.own_models import models_by_client, size_of, written
from copfl.experiment.preparation import on_device, prepare
from copfl.experiment.rivals import FEATURES, RivalPlan, plan_of, rivals_beside, trained_rivals
from copfl.experiment.training import NOTHING, Given, baseline_of
from copfl.experiment.verdict import VERDICT
from copfl.settings.complete import complete
from copfl.settings.components import WRAPPERS, usual_optimizer
from copfl.settings.merging import Layer
from copfl.settings.schema import Run
from copfl.verdict.drawn import lowest
from copfl.verdict.verdict import corrected_gain

logger = logging.getLogger(__name__)
WORTH_A_PROCESS = 2.0  # seconds of training rivals: a process takes one to start
OPEN_MODELS = ("mlp", "embedding", "linear", "cnn", "cnn1d", "resnet18", "causal_cnn")
# Where a layer has one of these tables, somebody chose how to train.
CHOSEN = (
    "algorithm",
    "optimizer",
    "model",
    "adapter",
    "server",
    "addons",
    "robust",
    "privacy",
    "attack",
    "task",
)
# Keys of them that do not: metrics say what one looks at, and a rate is for the candidates that have one.
FREE = {"task": {"metrics"}, "optimizer": {"lr"}}


def is_open(run: Run, layers: Sequence[Layer]) -> bool:
    """Whether nobody chose how to train.

    Args:
        run: The settings, with what suits the data.
        layers: What a person or a program set.
    """
    is_chosen = any(layer.get(kind, {}).keys() - FREE.get(kind, set()) for layer in layers for kind in CHOSEN)
    if is_chosen or run.run.participation != 1 or run.run.steps:
        return False
    return not any("own_models" in layer.get("run", {}) for layer in layers)


def completed_run(*layers: Layer | Run, preset: str = "") -> tuple[Run, Given]:
    """The record of a run as it trains, and what was found out before: the choice where nobody chose, and the verdict.

    `copfl run` and `copfl.run` begin here.

    Args:
        layers: Settings by title and key, or an incomplete record; later ones win.
        preset: The name of a preset, which is below the layers.
    """
    run = on_device(complete(*layers, preset=preset))
    plain = [layer for layer in layers if not isinstance(layer, Run)]
    says_how = bool(preset) or len(plain) < len(layers)  # a preset and a record say how to train
    plain.append({"run": {"device": run.run.device}})  # once, for every training of the choice
    is_free = not says_how and is_open(run, plain)
    if run.run.find_rounds == "first":
        return _chosen(run, plain) if is_free else found_and_judged(run)
    if is_free and any("rounds" in layer.get("run", {}) for layer in plain):
        without = [_without(layer, "run", "rounds") for layer in plain]
        if (searched := complete(*without)).run.find_rounds == "first":  # only their number is named
            return _chosen(searched, without, run.run.rounds)
    return run, NOTHING


def _without(layer: Layer, kind: str, key: str) -> Layer:
    """The layer without a key of a table."""
    kept = {name: value for name, value in layer.get(kind, {}).items() if name != key}
    return {**layer, kind: kept} if kind in layer else layer


def with_found_rounds(run: Run) -> Run:
    """The run of a named method, for as many rounds as have the lowest loss on rows that it did not see.

    Args:
        run: The settings. `run.rounds` is the most that is looked at.
    """
    return found_and_judged(run, has_verdict=False)[0]


def found_and_judged(run: Run, has_verdict: bool = True) -> tuple[Run, Given]:
    """As `with_found_rounds`, with the verdict on the method.

    Args:
        run: As of `with_found_rounds`.
        has_verdict: Whether it has one, for which each site's models alone are needed.
    """
    run = on_device(run)
    if run.privacy:
        raise UsageError(
            'run.find_rounds="first" trains twice, and noised uploads of the first training would also spend '
            f"privacy; name the number of rounds: {option('rounds')}"
        )
    name = run.algorithm.name or "the method"
    room = Room.of(run)
    off = dataclasses.replace(run, run=dataclasses.replace(run.run, find_rounds="off", rivals=False))
    alike, plan = None, None
    if run.run.rivals and has_verdict:
        alike = prepare(off)
        plan = plan_of(alike)
    tried = only(name, () if plan is None else plan.kinds, run.run.local_baseline)
    parts = f"{room.folds.by_steps} of 5 folds of each client's training rows held out"
    logger.info(
        f"finding the number of rounds, {run.run.rounds} at most, with {parts}; {option('rounds')} sets it"
    )
    with rivals_of_sites(run, alike, plan) as rivals:
        evaluated, left_out = evaluate(tried, lambda candidate: run, room, rivals)
    if name not in evaluated:
        raise UsageError(left_out[name])
    found = _with_rounds(run, evaluated, name)
    also = f", and {found.run.rounds_alone} of training alone," if name + ALONE in evaluated else ""
    logger.info(f"{found.run.rounds} rounds{also} had the lowest loss")
    return found, verdict_of(evaluated, tried, room, []) if has_verdict else NOTHING


def _chosen(run: Run, layers: Sequence[Layer], rounds: int = 0) -> tuple[Run, Given]:
    """The settings that train, and why.

    Args:
        run: The settings, with what suits the data.
        layers: What a person or a program set.
        rounds: At most, as somebody named them; 0: as many as have the lowest loss.
    """

    def completed(layer: Layer) -> Run:
        name = layer.get("algorithm", {}).get("name")
        has_rate = name is None or usual_optimizer(str(name), None, by_rule=True) is not None
        own = layers if has_rate else [_without(one, "optimizer", "lr") for one in layers]
        found = complete(*own, layer)
        if not rounds:
            return found
        return dataclasses.replace(
            found,
            run=dataclasses.replace(found.run, rounds=min(rounds, found.run.rounds) if name else rounds),
        )

    room = Room.of(run)
    off = {"run": {"find_rounds": "off"}}
    features = table_features(room.samples)
    # For the rows as rivals take them; it says nothing of rivals after the rounds, as they are trained now.
    quiet: Layer = {"run": {**off["run"], "rivals": False}}
    has_rate = any("lr" in layer.get("optimizer", {}) for layer in layers)
    facts = Facts(
        room.samples.kind,
        run.model.name,
        room.rows,
        features,
        rivals=(),
        is_mixed=run.algorithm.name == APFL,
        wants_network=has_rate,
    )
    first = candidates_for(facts).candidates[0]  # whose columns or words the rivals have, too
    alike = prepare(completed({**quiet, **(first.layer or {})}))
    plan = plan_of(alike)
    tried = candidates_for(facts._replace(rivals=() if plan is None else plan.kinds))
    methods = ", ".join(one.name for one in tried.candidates if not one.rival)
    logger.info(
        f"choosing among {methods} and what each client has alone, by cross-validation of {room.rows:,} training "
        f"rows, about {_seconds(plan, room.folds, features, tried):.0f} s; {option('algorithm')} names a method, "
        f"and {option('rounds')} their number"
    )

    def run_of(candidate: Candidate) -> Run:
        return completed({**off, **(candidate.layer or {})})

    with rivals_of_sites(run, alike, plan) as rivals:
        evaluated, left_out = evaluate(tried, run_of, room, rivals, bool(rounds))
    found, given = decided(
        evaluated,
        Tried(tried.candidates, {**tried.left_out, **left_out}),
        room,
        room.folds.number if features else room.folds.by_steps,
        Settings(run_of, completed, alike, plan),
    )
    choice: Choice = given[CHOICE]
    if found.run.find_rounds == "done":
        logger.info(f"{choice.federation} has the lowest loss, after {found.run.rounds} rounds")
    elif not found.run.own_models:
        logger.info(f"{choice.federation} has the lowest loss")
    return found, given


class Settings(NamedTuple):
    """How candidates become runs."""

    run_of: Callable[[Candidate], Run]  # of a method
    completed: Callable[[Layer], Run]  # with what all candidates have
    alike: Experiment  # has the rows as rivals take them
    plan: RivalPlan | None  # None: there are no rivals


def decided(
    evaluated: Mapping[str, Evaluated], tried: Tried, room: Room, folds: int, settings: Settings
) -> tuple[Run, Given]:
    """The settings that train, and why: the choice by the table of losses, and the verdict.

    Args:
        evaluated: The table.
        tried: The candidates, and why others are not in the table.
        room: The rows, and which are held out.
        folds: On which all were tried.
        settings: How a candidate becomes a run.
    """
    names = {one.name: one for one in tried.candidates if one.name in evaluated}
    plan, kind = settings.plan, room.samples.kind
    only_shown = [name for name, one in names.items() if one.rival and not can_keep(plan, room.samples)]
    choice = choose(
        {name: evaluated[name].losses for name in names},
        kind == REGRESSION,
        folds,
        tried.left_out,
        alone=[name for name, one in names.items() if one.is_alone],
        without_exceptions=[name for name, one in names.items() if not (one.keeps_own or one.rival)],
        only_shown=only_shown,
        measure=MEASURES[kind],
    )
    given = {CHOICE: choice, **verdict_of(evaluated, tried, room, only_shown)}
    taken = names[choice.federation]
    if plan is not None and (taken.rival or choice.exceptions):
        return _with_own_models(choice, names, settings, plan), given
    return _run_of(taken, names, settings.run_of, evaluated), given


def can_keep(plan: RivalPlan | None, samples: Dataset) -> bool:
    """Whether a site can have a model of scikit-learn as its own.

    Args:
        plan: Of the rivals.
        samples: The data set.
    """
    is_table = bool(table_features(samples)) and samples.kind != MULTILABEL
    return plan is not None and plan.inputs.trees and is_table


def verdict_of(
    evaluated: Mapping[str, Evaluated], tried: Tried, room: Room, only_shown: Sequence[str]
) -> Given:
    """What training together is worth by the table of losses; nothing where it has one of the sides only.

    Args:
        evaluated: The table.
        tried: The candidates.
        room: The rows, and which are held out.
        only_shown: As of `choose`.
    """
    names = {one.name: one for one in tried.candidates if one.name in evaluated}
    alone = [name for name, one in names.items() if one.is_alone]
    if not alone or len(alone) == len(names):
        return NOTHING
    units, is_rmse = room.samples.train.unit, room.samples.kind == REGRESSION
    fixed = [name for name, one in names.items() if not (one.keeps_own or one.rival)]
    verdict = corrected_gain(
        {name: evaluated[name].losses for name in names},
        together=[name for name in names if name not in alone],
        alone=alone,
        choose=partial(lowest, alone=alone, is_rmse=is_rmse, without_exceptions=fixed),
        only_shown=only_shown,
        units=None if units is None else [units[rows] for rows in room.folds.whole.train],
        is_rmse=is_rmse,
        seed=0,
    )
    return {VERDICT: verdict}


def table_features(samples: Dataset) -> int:
    """Numbers of a row of a table of classes, values or labels; 0 of other samples."""
    is_table = not isinstance(samples.train.x, dict) and samples.train.x.ndim == 2
    is_text = is_table and samples.train.x.dtype.kind in "US"
    has_one_target = samples.train.y[:1].size == 1 or samples.kind == MULTILABEL
    if not is_table or is_text or samples.kind == SURVIVAL or not has_one_target:
        return 0
    return int(samples.train.x.shape[1])


@contextlib.contextmanager
def rivals_of_sites(
    run: Run, alike: Experiment | None, plan: RivalPlan | None
) -> Iterator[Callable[[], Mapping[str, Evaluated]]]:
    """Trains what sites have alone beside the `with` block, which gets a function that waits for it."""
    if alike is None or plan is None:
        yield dict
        return
    with rivals_beside(alike, plan, 0 if plan.inputs.how == FEATURES else _processes(run, plan)) as trained:
        yield lambda: of_rivals(trained(), alike.federation, alike.task.criterion.kind)


def _processes(run: Run, plan: RivalPlan) -> int:
    """How many train the rivals beside this process; none where starting one takes longer than what it saves."""
    allowed = run.run.workers or processors()
    return min(allowed - 1, int(plan.effort.seconds / WORTH_A_PROCESS))


def _seconds(plan: RivalPlan | None, held_out: Folds, features: int, tried: Tried) -> float:
    """How long the choice takes, about: measured on tables of 100 to 10,000 rows, and of 10 to 1,500 features."""
    sites, rows = len(held_out.of), sum(map(len, held_out.whole.train))
    of_fold = 1 + 0.02 * sites + 2e-9 * rows * features**2  # the last: the products of the features
    by_steps = sum(one.by_steps for one in tried.candidates)
    return (0.0 if plan is None else plan.effort.seconds) + held_out.number * of_fold + 30 * by_steps


def _run_of(
    taken: Candidate,
    names: Mapping[str, Candidate],
    run_of: Callable[[Candidate], Run],
    evaluated: Mapping[str, Evaluated],
) -> Run:
    """The settings of a method that was chosen, with the rounds that were found."""
    run = run_of(names[taken.alone_of] if taken.alone_of else taken)
    if not taken.by_steps:
        return run
    found = _with_rounds(run, evaluated, taken.name)
    if not taken.alone_of:
        return found
    alone = baseline_of(prepare(run))
    assert alone is not None  # it was tried
    return dataclasses.replace(found, **{kind: getattr(alone.run, kind) for kind in ("algorithm", *WRAPPERS)})


def _with_rounds(run: Run, evaluated: Mapping[str, Evaluated], name: str) -> Run:
    rounds, alone = evaluated[name].rounds, evaluated.get(name + ALONE, evaluated.get(LOCAL))
    settings = dataclasses.replace(
        run.run,
        rounds=rounds,
        rounds_alone=rounds if alone is None else alone.rounds,
        find_rounds="done",
        temperature=evaluated[name].temperature,
    )
    return dataclasses.replace(run, run=settings)


def _with_own_models(
    choice: Choice,
    names: Mapping[str, Candidate],
    settings: Settings,
    plan: RivalPlan,
) -> Run:
    """The settings of a method whose sites keep models of their own, or of models of all sites alone."""
    base, alike = names[choice.federation], settings.alike
    alone = {n: names[name].rival for n, name in enumerate(choice.sites) if names[name].rival}
    models = models_by_client(trained_rivals(alike, plan), alone, alike)
    trees, nodes, depth = size_of(models.values(), alike)
    algorithm = {"name": "levels", "alone": True}  # nothing is sent
    if not base.rival:
        trained = settings.run_of(base).algorithm
        algorithm = {"name": trained.name, **trained.options}
    return settings.completed(
        {
            "algorithm": algorithm,
            "model": {"name": "trees", "trees": trees, "nodes": nodes, "depth": depth},
            "run": {"find_rounds": "off", "own_models": written(alone, alike.clients)},
        }
    )
