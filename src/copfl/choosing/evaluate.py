"""The table of losses: of each candidate and site, the loss of every row that the candidate did not see.

A method that ends by itself is trained for its rounds. What trains by steps has the round whose mean loss is the
lowest, and the temperature with which the probabilities of that round are neither too sure nor not sure enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from copfl.choosing.candidates import Candidate, Tried
from copfl.choosing.choice import is_worse
from copfl.choosing.folds import Folds, folds
from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.core.task import Data, Personal, Task
from copfl.data.clients.federation import FederatedData
from copfl.data.samples import CLASSIFICATION, REGRESSION, SURVIVAL, Dataset
from copfl.engine.autotune import MAX_CLIENTS
from copfl.engine.rounds import Round
from copfl.engine.seed_batching import can_batch, run_batched
from copfl.engine.simulate import Executor
from copfl.errors import UsageError
from copfl.experiment import preparation
from copfl.experiment.experiment import Experiment
from copfl.experiment.models.client_models import ClientModel, InMemory
from copfl.experiment.preparation import prepare
from copfl.experiment.rivals import TrainedRivals
from copfl.experiment.training import baseline_of, rounds_left, simulation_of
from copfl.measures.calibration import fitted_temperature, tempered
from copfl.measures.losses import event_losses, row_losses
from copfl.measures.metrics import Metric, surprises
from copfl.measures.survival import risks
from copfl.rivals.records import Array
from copfl.settings.schema import Run
from copfl.stats import Numbers

logger = logging.getLogger(__name__)
MOST_PADDING = 4  # rows of the batch of all folds, padded to the largest client, for each row that there is
# Rounds of Newton's method, after which the loss of held-out rows changes by less than a thousandth; of other methods
# that end by themselves, more than QUICK take long.
QUICK, ENOUGH = 20, 8
PATIENCE = 10  # rounds without a lower loss, at least, after which a search ends
# A network that is trained for longer becomes better at telling classes apart and too sure at once, and a temperature
# repairs the second. So a round has the loss of the best of these; else training alone on few rows, which is soon too
# sure, would end in its first round.
TEMPERATURES = tuple(2 ** (n / 2) for n in range(-2, 8))


def idle() -> None:
    """What happens after a round where nobody waits for it."""


class Held(NamedTuple):
    """The answers of a site's models to rows that they did not see."""

    rows: NDArray[np.bool_]  # which of the site's training rows
    answers: Array  # as the metrics take predictions
    y: Array


class Evaluated(NamedTuple):
    """A candidate on the rows that it did not see, and what the folds say of its training."""

    losses: list[Array]  # [rows] of each site; nan: not held out
    rounds: int = 0  # with the lowest loss; 0: those of its settings
    temperature: float = 1.0

    def joined(self, more: Evaluated) -> Evaluated:
        """With the losses on other folds."""
        both = zip(self.losses, more.losses, strict=True)
        return self._replace(losses=[np.where(np.isnan(own), other, own) for own, other in both])


# -- the loss of a row ---------------------------------------------------------------------------------------


def _losses(
    held: Sequence[Sequence[Held]], sizes: Sequence[int], kind: str, temperature: float
) -> list[Array]:
    """The losses of each site's rows, of what its models of all folds answered."""
    losses = []
    for size, parts in zip(sizes, held, strict=True):
        of_site = np.full(size, np.nan)
        if kind == SURVIVAL and parts:
            y = np.zeros((size, parts[0].y.shape[1]))
            for part in parts:
                of_site[part.rows], y[part.rows] = part.answers, part.y
            of_site = event_losses(of_site, y)
        for part in () if kind == SURVIVAL else parts:
            answers = tempered(part.answers, temperature) if kind == CLASSIFICATION else part.answers
            of_site[part.rows] = row_losses(answers, part.y, kind)
        losses.append(of_site)
    return losses


def of_rivals(trained: TrainedRivals, federation: FederatedData, kind: str) -> dict[str, Evaluated]:
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
            losses[name][site] = row_losses(rival.inside, y, kind)
    return {name: Evaluated(of_sites) for name, of_sites in losses.items()}


# -- training on folds ---------------------------------------------------------------------------------------


def experiment_of(run: Run, folds: Folds, samples: Dataset, fold: int, eval_every: int = 1) -> Experiment:
    """The run on the other folds, with a fold for testing.

    Args:
        run: The settings.
        folds: Of the training rows.
        samples: The data set.
        fold: The number of the one that is tested on.
        eval_every: Rounds between evaluations.
    """
    settings = dataclasses.replace(
        run.run,
        find_rounds="off",
        benefit=False,
        rivals=False,
        local_baseline=False,
        eval_models="final",
        eval_every=eval_every,
        own_models="",
        workers=run.run.workers or 1,
    )
    partition = dataclasses.replace(run.partition, value=folds.partition(fold))
    data = dataclasses.replace(run.data, value=samples)
    return prepare(dataclasses.replace(run, partition=partition, data=data, run=settings))


def to_its_end(
    run: Run, folds: Folds, samples: Dataset, numbers: Iterable[int], on_round: Callable[[], None] = idle
) -> Evaluated:
    """What a method loses that ends by itself, after as many rounds as it says.

    Args:
        run: Its settings.
        folds: The rows that are held out.
        samples: The rows.
        numbers: Of the folds; rows of others have nan.
        on_round: Is called after each round of each fold, and may raise what stops it.
    """
    of_all_folds = len(folds.of) * folds.number
    settings = dataclasses.replace(
        run.run,
        workers=1,
        engine="vmap" if run.run.engine == "auto" else run.run.engine,
        chunk=run.run.chunk or (of_all_folds if of_all_folds <= MAX_CLIENTS["cpu"] else 0),
    )
    run = dataclasses.replace(run, run=settings)
    listed = list(numbers)
    experiments = [experiment_of(run, folds, samples, n, eval_every=run.run.rounds) for n in listed]
    models = [keeper.models for keeper in _trained(experiments, on_round)]
    held, kind = _answers(experiments, models, folds, listed), experiments[0].training.task.criterion.kind
    return Evaluated(_losses(held, _sizes(folds), kind, 1.0))


def _trained(experiments: Sequence[Experiment], on_round: Callable[[], None]) -> list[InMemory]:
    """The models of each experiment; of small and similar clients, those of all folds train as one batch."""
    models = [InMemory() for _ in experiments]

    def train(n: int, executor: Executor | None = None) -> None:
        with contextlib.ExitStack() as stack:
            loop = rounds_left(experiments[n], stack, executor=executor, models=models[n])
            for _ in stack.enter_context(contextlib.closing(loop)):
                on_round()

    simulations = [simulation_of(e) for e in experiments]
    sizes = experiments[0].training.federation.train.sizes
    is_even = len(sizes) * sizes.max() <= MOST_PADDING * sizes.sum()
    if len(experiments) > 1 and is_even and can_batch(simulations):
        run_batched(simulations, [partial(train, n) for n in range(len(experiments))])
    else:
        for n in range(len(experiments)):
            train(n)
    return models


def by_steps(
    experiments: Sequence[Experiment],
    folds: Folds,
    numbers: Sequence[int],
    to_the_end: bool = False,
    on_round: Callable[[], None] = idle,
) -> Evaluated:
    """What is lost in the round whose mean loss is the lowest.

    Args:
        experiments: The same run on several folds, which train side by side.
        folds: The rows that are held out.
        numbers: Of the folds of the experiments.
        to_the_end: The last round counts instead.
        on_round: As of `to_its_end`.
    """
    keepers = [InMemory() for _ in experiments]
    best: list[dict[int, ClientModel]] = []

    def keep() -> None:
        best[:] = [dict(keeper.models) for keeper in keepers]

    curve = _curve(experiments, keepers, on_round)
    if to_the_end:
        rounds = max(number for number, _ in curve)
        keep()
    else:
        rounds = lowest_loss(curve, on_lower=keep)
    held, kind = _answers(experiments, best, folds, numbers), experiments[0].training.task.criterion.kind
    temperature = 1.0
    if kind == CLASSIFICATION:  # one for all clients: a client has a few held-out samples
        known = [part for of_site in held for part in of_site if np.isfinite(part.answers).all()]
        if known:  # a model that diverged has no say
            answers, y = (
                np.concatenate(arrays) for arrays in zip(*((p.answers, p.y) for p in known), strict=True)
            )
            temperature = fitted_temperature(answers, y) if answers.ndim == 2 else 1.0
    return Evaluated(_losses(held, _sizes(folds), kind, temperature), rounds, temperature)


def _sizes(folds: Folds) -> list[int]:
    return [len(rows) for rows in folds.whole.train]


def _answers(
    experiments: Sequence[Experiment],
    models: Sequence[dict[int, ClientModel]],
    folds: Folds,
    numbers: Sequence[int],
) -> list[list[Held]]:
    """What each site's models answer to the rows that their fold held out."""
    found: list[list[Held]] = [[] for _ in folds.of]
    for fold, e, of_sites in zip(numbers, experiments, models, strict=True):
        task, federation = e.training[:2]
        for site, client_model in of_sites.items():
            is_held = folds.held_out(fold, site)
            if not is_held.any():
                continue
            test = tree.row(federation.test.rows([site]), 0)
            answers, y = _predicted(task, client_model.model, test)
            if task.criterion.kind == SURVIVAL:  # a risk is known up to a constant
                seen, _ = _predicted(task, client_model.model, tree.row(federation.train.rows([site]), 0))
                answers = risks(answers) - risks(seen).mean()
            found[site].append(Held(is_held, answers, y))
    return found


def _predicted(task: Task, model: Personal, data: Data) -> tuple[Array, Array]:
    with torch.no_grad():
        return predicted(task, tree.each(lambda t: t.to(task.device), model), data)


# -- the table --------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """The rows of a federation, and which of them are held out."""

    samples: Dataset
    folds: Folds

    @classmethod
    def of(cls, run: Run) -> Room:
        """Of the data and the partition of a run."""
        samples = preparation.dataset(run)
        whole = preparation.partition(run, samples)
        return cls(samples, folds(whole, samples, run.run.seed))

    @property
    def rows(self) -> int:
        """For training, of all sites."""
        return sum(map(len, self.folds.of))


def evaluate(
    tried: Tried,
    run_of: Callable[[Candidate], Run],
    room: Room,
    rivals: Callable[[], Mapping[str, Evaluated]],
    to_the_end: bool = False,
) -> tuple[dict[str, Evaluated], dict[str, str]]:
    """The table of losses, in the order of the candidates, and why others are not in it.

    What takes long begins with few folds. It goes on with the others until it is worse than the best one by more than
    a standard error.

    Args:
        tried: The candidates.
        run_of: The settings of a method.
        room: The rows, and which are held out.
        rivals: Waits for what sites have alone by scikit-learn, by kind.
        to_the_end: Whether what trains by steps is trained for all rounds of its settings, which somebody named.
    """
    evaluated: dict[str, Evaluated] = {}
    left_out: dict[str, str] = {}
    experiments: dict[str, list[Experiment]] = {}
    every, some = range(room.folds.number), range(room.folds.by_steps)
    long: list[str] = []
    is_rmse = room.samples.kind == REGRESSION
    for one in tried.candidates:
        if one.rival or one.alone_of in left_out:
            continue
        logger.debug(f"trying {one.name} ...")
        if one.if_near and is_worse(one.if_near, _losses_of(evaluated), is_rmse):
            left_out[one.name] = (
                "it is for sites that contradict each other, and training alone is worse here"
            )
            continue
        try:
            if one.alone_of:
                base = [(e, baseline_of(e)) for e in experiments[one.alone_of]]
                alone = [own for e, own in base if own is not None and own is not e]
                if alone:
                    evaluated[one.name] = by_steps(alone, room.folds, some, to_the_end)
            elif one.by_steps:
                experiments[one.name] = _experiments(run_of(one), room, some)
                evaluated[one.name] = by_steps(experiments[one.name], room.folds, some, to_the_end)
            else:
                run = _with_enough_rounds(run_of(one))
                is_long = run.run.rounds > QUICK and len(every) > 1
                long += [one.name] * is_long
                evaluated[one.name] = to_its_end(
                    run, room.folds, room.samples, every[:1] if is_long else every
                )
        except UsageError as error:  # such as more columns than its equations may have
            left_out[one.name] = str(error)
    of_kinds = rivals()
    evaluated |= {one.name: of_kinds[one.rival] for one in tried.candidates if one.rival in of_kinds}
    for one in tried.candidates:
        for fold in every[1:] if one.name in long and one.name in evaluated else ():
            if is_worse(one.name, _losses_of(evaluated), is_rmse):
                left_out[one.name] = (
                    f"it is worse than the best by more than a standard error, after {fold} of {len(every)} folds"
                )
                del evaluated[one.name]
                break
            evaluated[one.name] = evaluated[one.name].joined(
                to_its_end(run_of(one), room.folds, room.samples, [fold])
            )
    for name in [name for name, found in evaluated.items() if np.isinf(np.concatenate(found.losses)).any()]:
        left_out[name] = "it diverged, or is sure of what is wrong: a loss is infinite"
        del evaluated[name]
    return {one.name: evaluated[one.name] for one in tried.candidates if one.name in evaluated}, left_out


def _losses_of(evaluated: Mapping[str, Evaluated]) -> dict[str, list[Array]]:
    return {name: found.losses for name, found in evaluated.items()}


def tried_on(
    run: Run,
    room: Room,
    numbers: Sequence[int],
    *,
    steps: bool,
    to_the_end: bool = False,
    on_round: Callable[[], None] = idle,
) -> Evaluated:
    """A method on some folds.

    Args:
        run: Its settings.
        room: The rows, and which are held out.
        numbers: Of the folds.
        steps: Whether it trains by steps.
        to_the_end: As of `evaluate`.
        on_round: As of `to_its_end`.
    """
    if steps:
        return by_steps(_experiments(run, room, numbers), room.folds, numbers, to_the_end, on_round)
    return to_its_end(_with_enough_rounds(run), room.folds, room.samples, numbers, on_round)


def _experiments(run: Run, room: Room, numbers: Sequence[int]) -> list[Experiment]:
    """The run on each of these folds, all with the engine that was found to be the fastest."""
    experiments: list[Experiment] = []
    for number in numbers:
        experiments.append(experiment_of(run, room.folds, room.samples, number))
        engine = experiments[0].settings.engine
        run = dataclasses.replace(run, run=dataclasses.replace(run.run, engine=engine))
    return experiments


def _with_enough_rounds(run: Run) -> Run:
    if run.run.rounds > QUICK:
        return run
    return dataclasses.replace(run, run=dataclasses.replace(run.run, rounds=min(run.run.rounds, ENOUGH)))


# -- the round with the lowest loss --------------------------------------------------------------------------


@dataclasses.dataclass
class LossByRound:
    """The mean loss on held-out samples after each evaluated round."""

    sizes: NDArray[np.int64]  # held-out samples of each client
    names: tuple[str, ...] = ("test_loss",)  # of losses, of which the lowest mean counts
    latest: Numbers = dataclasses.field(init=False)  # [names, clients], nan: not evaluated yet

    def __post_init__(self) -> None:
        self.latest = np.full((len(self.names), len(self.sizes)), np.nan)

    def after(self, round: Round) -> Numbers | None:
        """[names], the means over samples of each client's latest loss; None where the round was not evaluated.

        A model that diverged has an infinite loss.
        """
        if self.names[0] not in round.clients:
            return None
        has_samples = self.sizes[round.ids] > 0
        for row, name in zip(self.latest, self.names, strict=True):
            row[round.ids[has_samples]] = np.nan_to_num(round.clients[name][has_samples], nan=math.inf)
        known = ~np.isnan(self.latest[0])
        return np.average(self.latest[:, known], axis=1, weights=self.sizes[known]) if known.any() else None


def _tempered(e: Experiment) -> Experiment:
    """The experiment, which also measures its log loss with each of TEMPERATURES."""
    task = e.training.task
    if task.criterion.kind != CLASSIFICATION:
        return e
    metrics = [
        Metric(f"log_loss_{t:g}", False, False, (CLASSIFICATION,), partial(_log_loss, temperature=t))
        for t in TEMPERATURES
    ]
    task = dataclasses.replace(task, metrics=(*task.metrics, *metrics))
    return dataclasses.replace(e, training=e.training._replace(task=task))


def _log_loss(probabilities: Array, y: Array, temperature: float) -> float:
    return float(surprises(tempered(probabilities, temperature), y).mean())


def lowest_loss(
    losses: Iterable[tuple[int, float]],
    patience: int | None = None,
    on_lower: Callable[[], None] = lambda: None,
) -> int:
    """The first round with the lowest loss, from 1.

    The search ends after half as many rounds again without a lower one, at least `patience`.

    Args:
        losses: Evaluated rounds and their losses, as they come.
        patience: In rounds; None: PATIENCE.
        on_lower: Is called after a round with a lower loss than those before.
    """
    least = PATIENCE if patience is None else patience
    best, lowest = 0, math.inf
    for number, loss in losses:
        if loss < lowest or not best:
            best, lowest = number, loss
            on_lower()
        if number - best >= max(least, best // 2):
            break
    return best


def _curve(
    experiments: Sequence[Experiment], models: Sequence[InMemory], on_round: Callable[[], None]
) -> Iterable[tuple[int, float]]:
    """Evaluated rounds, and the mean of their losses over the experiments, which train side by side."""
    has_classes = experiments[0].training.task.criterion.kind == CLASSIFICATION
    names = tuple(f"log_loss_{t:g}" for t in TEMPERATURES) if has_classes else ("test_loss",)
    curves = [LossByRound(e.training.federation.test.sizes, names) for e in experiments]
    experiments = [_tempered(e) for e in experiments]
    with contextlib.ExitStack() as stack:
        loops = [
            stack.enter_context(contextlib.closing(rounds_left(e, stack, models=keeper, models_of_all=True)))
            for e, keeper in zip_longest(experiments, models)
        ]
        for rounds in zip(*loops, strict=True):
            for _ in rounds:
                on_round()
            losses = [curve.after(round) for curve, round in zip(curves, rounds, strict=True)]
            known = [loss for loss in losses if loss is not None]
            if known:
                number, loss = rounds[0].number + 1, float(np.mean(known, axis=0).min())
                logger.debug(f"round {number}: loss {loss:.4g} on held-out samples")
                yield number, loss
