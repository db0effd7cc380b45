"""From the settings of a first run to those that train: on a table by cross-validation, else the rounds alone.

`copfl run` and `copfl.run` begin with `completed_run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from copfl.data.clients.partition import Partition
from copfl.data.samples import MULTILABEL, REGRESSION, Dataset
from copfl.engine.machine import processors
from copfl.errors import UsageError
from copfl.experiment import preparation, texts_search
from copfl.experiment.first_run import losses
from copfl.experiment.first_run.candidates import Candidate, FirstRunChoice, Losses, chosen, with_network
from copfl.experiment.first_run.folds import Folds, folds
from copfl.experiment.own_models import models_by_client, size_of, written
from copfl.experiment.preparation import Tell, prepare
from copfl.experiment.result import Experiment
from copfl.experiment.rivals import RivalPlan, plan_of, rivals_beside, trained_rivals
from copfl.experiment.rounds_search import CHOSEN, with_found_rounds
from copfl.rivals.effort import Effort
from copfl.rivals.records import CONSTANT, TITLES, Array
from copfl.settings.complete import complete
from copfl.settings.merging import Layer
from copfl.settings.schema import Run

NETWORK = "network"
MODEL = "mlp"  # of tables, where nobody chose one
QUICK = 20  # rounds: a method with more is left out after a fold on which another one is better
ENOUGH = (
    8  # rounds of Newton's method, after which the loss of held-out rows changes by less than a thousandth
)
SLOPES = "levels with slopes"
METHODS: dict[str, dict[str, Any]] = {
    "levels": {"name": "levels"},
    SLOPES: {"name": "levels", "varying": "all"},
    "trees": {"name": "trees"},
}
WITHOUT_EXCEPTIONS = ("trees",)  # its trees have a size of their own
MOST_SLOPES = 300  # features: each site's slopes enter the equations, which then take minutes
WORTH_A_PROCESS = 2.0  # seconds of training rivals: a process takes one to start
NETWORK_ROWS = 5_000  # of the federation: a network rarely wins with fewer, and takes most of the time
Completed = Callable[[Layer], Run]  # the settings with one more layer


def is_open(run: Run, layers: Sequence[Layer]) -> bool:
    """Whether nobody chose how to train on texts or on a table.

    Args:
        run: The settings, with what suits the data.
        layers: What a person or a program set.
    """
    is_chosen = any(layer.get(kind) for layer in layers for kind in CHOSEN)
    if is_chosen or run.run.participation != 1:
        return False
    has_own_models = any("own_models" in layer.get("run", {}) for layer in layers)
    is_usual_table = run.model.name == MODEL and not run.run.steps and not has_own_models
    return is_usual_table or run.model.name == texts_search.NETWORK


def completed_run(
    *layers: Layer | Run, preset: str = "", tell: Tell | None = None
) -> tuple[Run, FirstRunChoice | None]:
    """The record of a run as it trains, and what was chosen on a table where nobody chose how to train.

    `copfl run` and `copfl.run` begin here.

    Args:
        layers: Settings by title and key, or an incomplete record; later ones win.
        preset: The name of a preset, which is below the layers.
        tell: Gets a line about each step of a search.
    """
    tell = tell or (lambda line: None)
    run = preparation.on_device(complete(*layers, preset=preset), tell)
    if run.run.find_rounds != "first":
        return run, None
    named: Layer = {"run": {"device": run.run.device}}  # once, for every training of the choice
    plain = [layer for layer in layers if not isinstance(layer, Run)]
    says_how = bool(preset) or len(plain) < len(layers)  # a preset and a record say how to train
    if says_how or not is_open(run, plain):
        return with_found_rounds(run, tell), None

    def completed(layer: Layer) -> Run:
        return complete(*plain, named, layer)

    if run.model.name == texts_search.NETWORK:
        return texts_search.chosen_for_texts(run, completed, tell), None
    choice = _chosen_for_table(run, completed, tell)
    return (with_found_rounds(run, tell), None) if choice is None else choice


def _chosen_for_table(run: Run, completed: Completed, tell: Tell) -> tuple[Run, FirstRunChoice] | None:
    """The settings that train on a table, and why; None where folds cannot divide its rows."""
    samples = preparation.dataset(run, lambda line: None)
    whole = preparation.partition(run, samples)
    if not _can_choose(samples, whole):
        return None
    off = {"run": {"find_rounds": "off"}}
    alike = prepare(completed({**off, "algorithm": {"name": "levels"}}))
    plan = plan_of(alike)
    if plan is None or not plan.inputs.trees:
        return None
    if not run.run.rivals:  # nobody wants what a site has alone, but for the constant answer
        plan = plan._replace(effort=Effort((), 0, 0, 0.0))
    held_out = folds(whole, samples, run.run.seed)
    choice, candidates = _validated(run, completed, alike, plan, held_out, samples, tell)
    return _run_of(choice, candidates, completed, alike, plan), choice


def _can_choose(samples: Dataset, whole: Partition) -> bool:
    """Whether the rows are of a table with one target, and folds can divide them.

    They cannot where a row is at two clients, nor where rows have an order in time.
    """
    rows = np.concatenate(whole.train)
    is_table = not isinstance(samples.train.x, dict) and samples.train.x.ndim == 2
    has_one_target = samples.kind != MULTILABEL and samples.train.y[:1].size == 1
    return is_table and has_one_target and samples.train.time is None and len(np.unique(rows)) == len(rows)


def _validated(
    run: Run,
    completed: Completed,
    alike: Experiment,
    plan: RivalPlan,
    held_out: Folds,
    samples: Dataset,
    tell: Tell,
) -> tuple[FirstRunChoice, dict[str, Candidate]]:
    """The choice, and all candidates by name."""
    is_rmse = samples.kind == REGRESSION
    rows = sum(map(len, held_out.whole.train))
    has_network = rows >= NETWORK_ROWS
    features = samples.train.x.shape[1]
    left_out: dict[str, str] = {}
    if features > MOST_SLOPES:
        left_out[SLOPES] = f"there are {features:,} features, and more than {MOST_SLOPES} take long"
    methods = {name: table for name, table in METHODS.items() if name not in left_out}
    tell(
        f"choosing among {', '.join(methods)}, {'a network, ' if has_network else ''}and what each client has "
        f"alone, by cross-validation: {held_out.number} fold{'s' * (held_out.number > 1)} of {rows:,} training rows, "
        f"about {_seconds(plan, held_out, features, has_network):.0f} s; --algorithm names a method"
    )
    runs = {
        name: completed({"run": {"find_rounds": "off"}, "algorithm": table})
        for name, table in methods.items()
    }
    all_folds = range(held_out.number)
    slow = [name for name, method in runs.items() if method.run.rounds > QUICK and len(all_folds) > 1]
    of_rows: dict[str, Losses] = {}

    def validate(name: str, folds: Sequence[int]) -> None:
        """Adds what a method loses on these folds; one that cannot train is left out."""
        try:
            more = losses.of_federation(_with_enough_rounds(runs[name]), held_out, samples, folds)
        except UsageError as error:  # such as more columns than its equations may have
            left_out[name] = str(error)
            of_rows.pop(name, None)
        else:
            of_rows[name] = _joined(of_rows[name], more) if name in of_rows else more

    with rivals_beside(alike, plan, _processes(run, plan)) as trained:
        for name in runs:
            validate(name, all_folds[:1] if name in slow else all_folds)
        network = losses.of_network(run, held_out, samples, all_folds) if has_network else None
        of_rivals = losses.of_rivals(trained(), alike.federation, samples.kind)
    of_rows |= {_alone(kind): of_sites for kind, of_sites in of_rivals.items()}
    for name in filter(of_rows.__contains__, slow):
        if _is_best(name, of_rows, is_rmse):
            validate(name, all_folds[1:])
        else:
            del of_rows[name]
            left_out[name] = "it is not the best one on the first fold"
    candidates = {name: Candidate(name, method) for name, method in runs.items() if name in of_rows}
    candidates |= {_alone(kind): Candidate(_alone(kind), rival=kind) for kind in of_rivals}
    ordered = {name: of_rows[name] for name in (CONSTANT, *METHODS, *of_rows) if name in of_rows}
    alone = [name for name, candidate in candidates.items() if candidate.rival]
    choice = chosen(
        ordered, is_rmse, held_out.number, left_out, alone=alone, without_exceptions=WITHOUT_EXCEPTIONS
    )
    if network is not None:
        found = {"run": {"find_rounds": "done", "rounds": network.rounds}}
        candidates[NETWORK] = Candidate(NETWORK, completed(found))
        choice = with_network(choice, NETWORK, network.by_site)
    return choice, candidates


def _processes(run: Run, plan: RivalPlan) -> int:
    """How many train the rivals beside this process; none where starting one takes longer than what it saves."""
    allowed = run.run.workers or processors()
    return min(allowed - 1, int(plan.effort.seconds / WORTH_A_PROCESS))


def _with_enough_rounds(run: Run) -> Run:
    if run.run.rounds > QUICK:
        return run
    return dataclasses.replace(run, run=dataclasses.replace(run.run, rounds=min(run.run.rounds, ENOUGH)))


def _joined(first: Losses, rest: Losses) -> list[Array]:
    """The losses on two sets of folds."""
    return [np.where(np.isnan(own), more, own) for own, more in zip(first, rest, strict=True)]


def _is_best(name: str, of_rows: Mapping[str, Losses], is_rmse: bool) -> bool:
    """Whether a method is the best one on the rows on which it has losses; of equals another one is.

    Args:
        name: Of the method.
        of_rows: The losses of all candidates.
        is_rmse: As of `chosen`.
    """
    is_known = [~np.isnan(own) for own in of_rows[name]]
    on_these = {
        other: [np.where(known, own, np.nan) for known, own in zip(is_known, of_sites, strict=True)]
        for other, of_sites in sorted(of_rows.items(), key=lambda item: item[0] == name)
    }
    return chosen(on_these, is_rmse, 1, alone=()).federation == name


def _alone(kind: str) -> str:
    """The name of a candidate that each site trains alone."""
    return kind if kind == CONSTANT else f"{kind} alone"


def _seconds(plan: RivalPlan, held_out: Folds, features: int, has_network: bool) -> float:
    """How long the choice takes, about: measured on tables of 100 to 10,000 rows, and of 10 to 1,500 features."""
    sites, rows = len(held_out.of), sum(map(len, held_out.whole.train))
    of_fold = 1 + 0.02 * sites + 2e-9 * rows * features**2  # the last: the products of the features
    return plan.effort.seconds + held_out.number * of_fold + (30 if has_network else 0)


def _run_of(
    choice: FirstRunChoice,
    candidates: dict[str, Candidate],
    completed: Completed,
    alike: Experiment,
    plan: RivalPlan,
) -> Run:
    """The settings of what was chosen."""
    base = candidates[choice.federation]
    if base.run is not None and (not choice.exceptions or base.name == NETWORK):
        return base.run
    alone = {n: candidates[name].rival for n, name in enumerate(choice.sites) if candidates[name].rival}
    trained = base.run
    models = models_by_client(trained_rivals(alike, plan), alone, alike)
    trees, nodes, depth = size_of(models.values(), alike)
    if trained is None:  # nothing is sent
        algorithm = {"name": "levels", "alone": True}
    else:
        algorithm = {"name": trained.algorithm.name, **trained.algorithm.options}
    return completed(
        {
            "algorithm": algorithm,
            "model": {"name": "trees", "trees": trees, "nodes": nodes, "depth": depth},
            "run": {"find_rounds": "off", "own_models": written(alone, alike.clients)},
        }
    )


def title_of(name: str) -> str:
    """A candidate in words.

    Args:
        name: Of the candidate.
    """
    kind = name.removesuffix(" alone")
    return f"{TITLES[kind]} at each client alone" if kind in TITLES else name


def text_of(choice: FirstRunChoice) -> str:
    """What was chosen and why, in a sentence or two."""
    validated = choice.validated
    means = ", ".join(f"{title_of(name)} {mean:.4g}" for name, mean in validated.means.items())
    lowest = min(validated.means, key=lambda name: validated.means[name])
    text = f"{title_of(lowest)} has the lowest cross-validated {validated.loss} ({means})"
    if lowest != choice.federation:
        text += f"; by less than a standard error, so that {title_of(choice.federation)} is taken"
    if choice.exceptions:
        count, clients = len(choice.exceptions), len(choice.sites)
        text += f"; {count} of {clients} clients keep a model that is better on their own rows by two standard errors"
    return text
