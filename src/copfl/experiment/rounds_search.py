"""How many rounds to train for, found before the training.

A first training holds out a part of each client's training samples and looks for the round with the lowest loss
on them. The run then trains on all training samples for as many rounds, so nothing is lost to validation. The models
of that round also tell by which temperature probabilities are too sure, or not sure enough. No test sample decides
anything.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.data.clients.partition import hold_out
from copfl.data.samples import CLASSIFICATION
from copfl.engine.rounds import Round
from copfl.errors import UsageError, option
from copfl.experiment import preparation
from copfl.experiment.analysis.gains import compared
from copfl.experiment.experiment import Experiment
from copfl.experiment.models.client_models import ClientModel, InMemory
from copfl.experiment.preparation import prepare
from copfl.experiment.training import baseline_of, rounds_left
from copfl.measures.calibration import fitted_temperature
from copfl.settings.schema import SELECTION, Run

logger = logging.getLogger(__name__)
PATIENCE = 10  # rounds without a lower loss, at least, after which the search ends
ENOUGH = 500  # held-out samples: with fewer, the loss is a mean over several choices of them
MOST_CHOICES = 3


# A network must have a loss that is lower by this fraction: its loss is the lowest of many rounds, and so too good.
MARGIN = 0.02
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


@dataclass
class LossByRound:
    """The mean loss on held-out samples after each evaluated round."""

    sizes: NDArray[np.int64]  # held-out samples of each client
    latest: NDArray[np.float64] = field(init=False)  # [clients], nan: not evaluated yet

    def __post_init__(self) -> None:
        self.latest = np.full(len(self.sizes), np.nan)

    def after(self, round: Round) -> float | None:
        """The mean over samples of each client's latest loss; None where the round was not evaluated.

        A model that diverged has an infinite loss.
        """
        losses = round.clients.get("test_loss")
        if losses is None:
            return None
        has_samples = self.sizes[round.ids] > 0
        self.latest[round.ids[has_samples]] = np.nan_to_num(losses[has_samples], nan=math.inf)
        known = ~np.isnan(self.latest)
        return float(np.average(self.latest[known], weights=self.sizes[known])) if known.any() else None


class Lowest(NamedTuple):
    """The lowest loss on held-out samples."""

    round: int  # the first that has it, from 1
    loss: float
    temperature: float = 1.0  # with which the probabilities of that round have an even lower one


def lowest_loss(
    losses: Iterable[tuple[int, float]],
    patience: int = PATIENCE,
    on_lower: Callable[[], None] = lambda: None,
) -> Lowest:
    """The lowest loss, and its round.

    The search ends after half as many rounds again without a lower one, at least `patience`.

    Args:
        losses: Evaluated rounds and their losses, as they come.
        patience: In rounds.
        on_lower: Is called after a round with a lower loss than those before.
    """
    best, lowest = 0, math.inf
    for number, loss in losses:
        if loss < lowest or not best:
            best, lowest = number, loss
            on_lower()
        if number - best >= max(patience, best // 2):
            break
    return Lowest(best, lowest)


def searched(experiments: Sequence[Experiment]) -> Lowest:
    """The lowest loss of experiments that train side by side, and the temperature of its models' probabilities.

    The temperature is one for all clients: a client has a few held-out samples.

    Args:
        experiments: The same run with other held-out samples.
    """
    kept = [InMemory(compared(e.clients)) for e in experiments]
    best: list[dict[int, ClientModel]] = []

    def keep() -> None:
        best[:] = [dict(models.models) for models in kept]

    found = lowest_loss(losses_of(experiments, kept), on_lower=keep)
    return found._replace(temperature=_temperature(experiments, best))


def _temperature(experiments: Sequence[Experiment], models: Sequence[dict[int, ClientModel]]) -> float:
    """The temperature with the lowest log loss on the held-out samples of all clients; 1 of other targets."""
    answers, classes = [], []
    for e, of_clients in zip(experiments, models, strict=True):
        task, test = e.training.task, e.training.federation.test
        if task.criterion.kind != CLASSIFICATION:
            return 1.0
        for n, client_model in of_clients.items():
            held_out = tree.row(test.rows([n]), 0)
            if not int(held_out.size):
                continue
            with torch.no_grad():
                probabilities, y = predicted(task, client_model.model, held_out)
            if np.isfinite(probabilities).all():  # a model that diverged has no say
                answers.append(probabilities)
                classes.append(y)
    return fitted_temperature(np.concatenate(answers), np.concatenate(classes)) if answers else 1.0


def with_found_rounds(run: Run) -> Run:
    """The run with the number of rounds that the search found.

    Args:
        run: The settings. `run.rounds` is the most that the search looks at.
    """
    settings = run.run
    if run.privacy:
        raise UsageError(
            'run.find_rounds="first" trains twice, and noised uploads of the first training would also spend '
            f"privacy; name the number of rounds: {option('rounds')}"
        )
    experiments = list(held_out(run))
    held_out_part = f"{SELECTION:g} of each client's training samples held out"
    logger.info(
        f"finding the number of rounds, {settings.rounds} at most, with {held_out_part}; {option('rounds')} sets it"
    )
    lowest = searched(experiments)
    rounds = lowest.round
    alone = [(e, baseline_of(e)) for e in experiments if settings.local_baseline]
    others = [baseline for e, baseline in alone if baseline is not None and baseline is not e]
    rounds_alone = lowest_loss(losses_of(others)).round if others else rounds
    of_alone = f", and {rounds_alone} of training alone," if others else ""
    logger.info(f"{rounds} rounds{of_alone} had the lowest loss")
    settings_found = dataclasses.replace(
        settings,
        rounds=rounds,
        rounds_alone=rounds_alone,
        find_rounds="done",
        temperature=lowest.temperature,
    )
    return dataclasses.replace(run, run=settings_found)


def held_out(run: Run) -> Iterator[Experiment]:
    """The run with held-out training samples in place of test samples, once or for several choices of them."""
    samples = preparation.dataset(run)
    whole = preparation.partition(run, samples)
    count = SELECTION * sum(map(len, whole.train))
    choices = min(MOST_CHOICES, max(1, math.ceil(ENOUGH / max(count, 1))))
    settings = dataclasses.replace(
        run.run, find_rounds="off", benefit=False, eval_models="final", workers=run.run.workers or 1
    )
    for choice in range(choices):
        partition = hold_out(whole, SELECTION, samples, run.run.seed + choice)
        chosen = dataclasses.replace(run.partition, value=partition)
        experiment = prepare(dataclasses.replace(run, partition=chosen, run=settings))
        settings = dataclasses.replace(settings, engine=experiment.settings.engine)  # measured once
        yield experiment


def losses_of(
    experiments: Sequence[Experiment], models: Sequence[InMemory] = ()
) -> Iterator[tuple[int, float]]:
    """Evaluated rounds, and the mean of their losses over the experiments, which train side by side.

    Args:
        experiments: The same run with other held-out samples.
        models: Get the clients' models of each experiment, as the last round evaluated them.
    """
    curves = [LossByRound(e.training.federation.test.sizes) for e in experiments]
    with contextlib.ExitStack() as stack:
        loops = [
            stack.enter_context(contextlib.closing(rounds_left(e, stack, models=keeper, models_of_all=True)))
            for e, keeper in zip_longest(experiments, models)
        ]
        for rounds in zip(*loops, strict=True):
            losses = [curve.after(round) for curve, round in zip(curves, rounds, strict=True)]
            known = [loss for loss in losses if loss is not None]
            if known:
                number, loss = rounds[0].number + 1, float(np.mean(known))
                logger.debug(f"round {number}: loss {loss:.4g} on held-out samples")
                yield number, loss
