"""The losses of the candidates on rows that they did not see."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.data.clients.federation import FederatedData
from copfl.data.samples import REGRESSION, Dataset
from copfl.engine.autotune import MAX_CLIENTS
from copfl.engine.seed_batching import can_batch, run_batched
from copfl.engine.simulate import Executor
from copfl.experiment.experiment import Experiment
from copfl.experiment.first_run.folds import Folds
from copfl.experiment.models.client_models import InMemory
from copfl.experiment.preparation import prepare
from copfl.experiment.rivals import TrainedRivals
from copfl.experiment.rounds_search import PATIENCE, LossByRound
from copfl.experiment.training import rounds_left, simulation_of
from copfl.measures.metrics import surprises
from copfl.rivals.records import Array
from copfl.settings.schema import Run
from copfl.stats import Numbers, mean_of_known

MOST_PADDING = 4  # rows of the batch of all folds, padded to the largest client, for each row that there is


def of_rows(answers: Array, y: Array, kind: str) -> Array:
    """[rows], the log loss or the squared error of answers; nan where there is no answer.

    Args:
        answers: As the metrics take predictions.
        y: The targets.
        kind: Of the task.
    """
    if kind == REGRESSION:
        return np.asarray(((answers.reshape(len(y), -1) - y.reshape(len(y), -1)) ** 2).mean(1), np.float64)
    return np.where(np.isnan(answers).any(1), np.nan, surprises(answers, y))


def of_rivals(trained: TrainedRivals, federation: FederatedData, kind: str) -> dict[str, list[Array]]:
    """By kind of model the losses of each site's rows; nan at sites without rivals.

    Args:
        trained: The rivals.
        federation: The rows that they were trained on.
        kind: Of the task.
    """
    names = list(next(iter(trained.by_site.values())))
    losses = {name: [np.full(size, np.nan) for size in federation.train.sizes] for name in names}
    for site, rivals in trained.by_site.items():
        y = federation.train.targets(site).cpu().numpy()
        for name, rival in rivals.items():
            losses[name][site] = of_rows(rival.inside, y, kind)
    return losses


def of_federation(run: Run, folds: Folds, samples: Dataset, held_out: Iterable[int]) -> list[Array]:
    """The losses of each site's rows, of the models of a federation that did not see them.

    Args:
        run: A method that ends by itself, after as many rounds as it says.
        folds: The rows that are held out.
        samples: The rows.
        held_out: The folds; rows of others have nan.
    """
    losses = [np.full(len(rows), np.nan) for rows in folds.whole.train]
    numbers = list(held_out)
    experiments = [experiment_of(run, folds, samples, fold, eval_every=run.run.rounds) for fold in numbers]
    for fold, e, models in zip(numbers, experiments, _trained(experiments), strict=True):
        task = e.training.task
        for site, of_site in enumerate(losses):
            if (client_model := models.get(site)) is None or not (
                is_held := folds.held_out(fold, site)
            ).any():
                continue
            test = tree.row(e.training.federation.test.rows([site]), 0)
            with torch.no_grad():
                answers, y = predicted(task, client_model.model, test)
            of_site[is_held] = of_rows(answers, y, task.criterion.kind)
    return losses


def _trained(experiments: Sequence[Experiment]) -> list[InMemory]:
    """The models of each experiment; of small and similar clients, those of all folds train as one batch."""
    models = [InMemory() for _ in experiments]

    def train(n: int, executor: Executor | None = None) -> None:
        with contextlib.ExitStack() as stack:
            loop = rounds_left(experiments[n], stack, executor=executor, models=models[n])
            for _ in stack.enter_context(contextlib.closing(loop)):
                pass

    simulations = [simulation_of(e) for e in experiments]
    sizes = experiments[0].training.federation.train.sizes
    is_even = len(sizes) * sizes.max() <= MOST_PADDING * sizes.sum()
    if len(experiments) > 1 and is_even and can_batch(simulations):
        run_batched(simulations, [partial(train, n) for n in range(len(experiments))])
    else:
        for n in range(len(experiments)):
            train(n)
    return models


def experiment_of(run: Run, folds: Folds, samples: Dataset, fold: int, eval_every: int = 1) -> Experiment:
    """The run on the other folds, with a fold for testing.

    Args:
        run: The settings.
        folds: Of the training rows.
        samples: The data set.
        fold: The number of the one that is tested on.
        eval_every: Rounds between evaluations.
    """
    of_all_folds = len(folds.of) * folds.number
    settings = dataclasses.replace(
        run.run,
        find_rounds="off",
        benefit=False,
        rivals=False,
        eval_models="final",
        eval_every=eval_every,
        workers=1,
        engine="vmap" if run.run.engine == "auto" else run.run.engine,
        chunk=run.run.chunk or (of_all_folds if of_all_folds <= MAX_CLIENTS["cpu"] else 0),
    )
    partition = dataclasses.replace(run.partition, value=folds.partition(fold))
    data = dataclasses.replace(run.data, value=samples)
    return prepare(dataclasses.replace(run, partition=partition, data=data, run=settings))


class TrainedNetwork(NamedTuple):
    """A method that is trained by steps, after as many rounds as have the lowest loss."""

    rounds: int
    by_site: Numbers  # the loss of each site, as of `site_losses`


def of_network(run: Run, folds: Folds, samples: Dataset, held_out: Sequence[int]) -> TrainedNetwork:
    """The losses of each site in the round whose mean over sites is the lowest.

    Args:
        run: The method; at most its rounds are trained.
        folds: The rows that are held out.
        samples: The rows.
        held_out: The folds, which are trained side by side.
    """
    experiments = [experiment_of(run, folds, samples, fold) for fold in held_out]
    curves = [LossByRound(e.training.federation.test.sizes) for e in experiments]
    factor = float(np.mean(np.square(samples.target_scale[1]))) if samples.kind == REGRESSION else 1.0
    best = TrainedNetwork(0, np.full(len(folds.of), np.nan))
    lowest = math.inf
    with contextlib.ExitStack() as stack:
        loops = [stack.enter_context(contextlib.closing(rounds_left(e, stack))) for e in experiments]
        for rounds in zip(*loops, strict=True):
            for curve, round in zip(curves, rounds, strict=True):
                curve.after(round)
            by_site = factor * _over_folds(curves)
            by_site = np.sqrt(by_site) if samples.kind == REGRESSION else by_site
            number, mean = rounds[0].number + 1, float(mean_of_known(by_site))
            if mean < lowest or not best.rounds:
                best, lowest = TrainedNetwork(number, by_site), mean
            if number - best.rounds >= max(PATIENCE, best.rounds // 2):
                break
    return best


def _over_folds(curves: Sequence[LossByRound]) -> Numbers:
    """The mean loss of each site over the rows of its folds."""
    sizes = np.stack([np.where(np.isnan(curve.latest), 0, curve.sizes) for curve in curves])
    sums = np.stack([np.nan_to_num(curve.latest, posinf=math.inf) * curve.sizes for curve in curves])
    with np.errstate(invalid="ignore"):
        return np.asarray(sums.sum(0) / sizes.sum(0))
