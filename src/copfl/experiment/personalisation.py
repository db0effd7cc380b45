"""A model for a client that did not take part in a finished run, trained on the client's own samples.

`copfl personalize` calls it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import (
    AnyAlgorithm,
    message_to_new_client,
    next_plan,
    received,
    trained_alone,
)
from copfl.core.batches import plan
from copfl.core.evaluation import predicted, primary_metrics
from copfl.core.optim import Optimizer, begin
from copfl.core.task import Data, Task
from copfl.core.train import train
from copfl.data.clients.federation import tensors
from copfl.data.held_out import split_off, without_tested
from copfl.data.samples import NEXT_TOKEN, Samples
from copfl.errors import DataError, UsageError, at_least
from copfl.experiment import process
from copfl.experiment.analysis.gains import constant_answer
from copfl.experiment.bundle.bundle import Bundle
from copfl.experiment.bundle.description import Score
from copfl.experiment.bundle.places import OF_SERVER
from copfl.experiment.folder import RunFolder
from copfl.experiment.loading import load
from copfl.experiment.models.client_models import TRAINED, vector_of
from copfl.experiment.models.new_clients import UPDATES, WithoutServer
from copfl.experiment.survival import hazard_of
from copfl.rivals.paired import gain_interval
from copfl.settings import named_code
from copfl.settings.components import build
from copfl.settings.schema import Run, RunSettings
from copfl.stats import Interval

Tick = Callable[[int], None]  # takes the number of trainings that are done since the last call
FOLDS = 3  # of the cross-validation within the client's samples
RATES = (1, 3, 10)  # multiples of the run's learning rate that are tried
EPOCHS = (0, 1, 3, 10, 30)  # tried


class FineTunedModel(NamedTuple):
    """A model fine-tuned for a client that did not take part, and its primary metric on test samples."""

    bundle: Bundle
    start: str  # what it was trained from
    lr: float | None  # None: by the updates of an algorithm without one
    epochs: int  # or updates
    scores: list[float]  # the primary metric of the start, and after each epoch or all updates
    alone: list[float]  # the same for training alone, from the initial weights
    train: int  # samples
    test: int
    gain: Interval | None = None  # over training alone, when the test samples are drawn again; None: too few
    constant: float | None = None  # the same metric of the constant answer, where there is one


@dataclass(frozen=True, eq=False)
class Personalisation:
    """The training of new clients, from the models of a finished run; its folder is only read."""

    path: Path
    shared: Bundle  # of the global model
    settings: RunSettings
    optimizer: Optimizer | None  # None: the algorithm has none, and fits clients by its own updates
    algorithm: AnyAlgorithm
    model: Any = None  # where the run's was a value of a Python program
    code: named_code.Modules = ()  # modules that the folder may name

    @classmethod
    @named_code.scope()
    def of(
        cls,
        path: Path,
        algorithm: AnyAlgorithm | None = None,
        model: Any = None,
        code: named_code.Modules = (),
    ) -> "Personalisation":
        """That of the run in this folder; values are passed again, as to `run`.

        Args:
            path: The run folder.
            algorithm: Where it was a value.
            model: Where it was a value.
            code: Modules of yours that the folder may name.
        """
        named_code.name(code)
        run = Run.of(RunFolder(path).tables())
        if algorithm is None:
            if run.algorithm.description:
                raise UsageError("the run's algorithm is a value that a Python program passed; pass it again")
            algorithm = build("algorithm", run.algorithm, optimizer=run.optimizer)
        optimizer: Optimizer | None = getattr(algorithm, "optimizer", None)
        if not hasattr(optimizer, "lr"):
            if trained_alone(algorithm) is None:
                raise UsageError("the run's algorithm has no optimizer, so it cannot train a new client")
            optimizer = None
        return cls(path, load(path, OF_SERVER, model=model), run.run, optimizer, algorithm, model, code)

    def samples(self, path: Path) -> tuple[Samples, Samples, list[str]]:
        """The train and test samples of a file with targets, encoded as the run's; a fifth is test."""
        if self.shared.description.output.kind == NEXT_TOKEN:
            raise UsageError(
                "the run's models predict the next token of a text, and a new client's model is trained on samples "
                "with targets of their own; add its texts to the run's data as one more client and train again"
            )
        rows = self.shared.read(path, missing=self.shared.description.input.missing)
        if rows.y is None:
            raise DataError(f"{path} lacks {rows.target}; a model is trained on samples with their targets")
        if not rows.has_target.all():
            row = int(rows.rows[~rows.has_target][0]) + 1
            raise DataError(
                f"{path} has nothing in {rows.target} in row {row}; complete it or remove the row"
            )
        targets_of = self.shared.preparation.targets
        samples = Samples(rows.x, targets_of(rows.y), None, rows.unit, rows.time)
        if rows.test is not None:
            x_test, y_test = rows.test
            own, test, warning = without_tested(
                samples, Samples(x_test, targets_of(y_test)), are_marked=False
            )
            return own, test, [*rows.notes, *filter(None, [warning])]
        own, test, how = split_off(samples)
        return own, test, [*rows.notes, how]

    @process.left_as_found()
    def fit(
        self,
        own: Samples,
        test: Samples,
        epochs: int | None = None,
        lr: float | None = None,
        seed: int = 0,
        start: Callable[[int], Tick] = lambda trainings: lambda done: None,
    ) -> FineTunedModel:
        """The new client's model, fine-tuned on its `own` samples.

        The start (the global model, the mean of the personal models, or the nearest client's), the learning
        rate and the epochs are those with the best cross-validation score on these samples; a single sample
        trains the global model at the run's rate for one epoch.

        Args:
            own: The samples to train on.
            test: Those that measure it.
            epochs: None: by validation. Of an algorithm that fits a client by equations, its local updates.
            lr: None: by validation.
            seed: Of the order of the samples.
            start: Called with the number of trainings of the validation; what it returns, after each.
        """
        if epochs is not None:
            at_least(1, epochs=epochs)
        if self.optimizer is None:
            if lr is not None:
                raise UsageError(
                    "the run's algorithm fits a client by equations, without a rate; leave out lr"
                )
            return self._by_updates(own, test, epochs or UPDATES, seed)
        task, few = self.shared.task, len(own if own.unit is None else np.unique(own.unit)) < 2
        how = FineTuning(task, self.optimizer, self.settings.batch, seed, self.settings.clients)
        rate: float = self.optimizer.lr  # type: ignore[attr-defined]  # `of` has checked that it has one
        torch.set_num_threads(self.settings.threads)
        usual = [float(f"{factor * rate:.3g}") for factor in ((1,) if few else RATES)]
        rates = usual if lr is None else [lr]
        counts = [epochs] if epochs is not None else [1] if few else list(EPOCHS)

        starts = self._starts(own)
        folds = _folds(own, seed)
        tick = start((len(starts) + 1) * len(rates) * (folds.max() + 1))

        def best(w: Tensor) -> ChosenTraining:
            if few:
                return ChosenTraining(rates[0], counts[0], (0.0, 0.0))
            return choose(how, w, own, folds, rates, counts, tick)

        def scores(models: list[Tensor]) -> list[float]:
            with torch.no_grad():
                return [primary_metrics(task, w, [as_data(test)])[0] for w in models]

        choices = {name: best(w) for name, w in starts.items()}
        of_best = max(choices, key=lambda name: choices[name].score)
        alone, chosen = best(task.initial), choices[of_best]
        models = fine_tuned(with_rate(how, chosen.lr), starts[of_best], own, chosen.epochs)
        others = fine_tuned(with_rate(how, alone.lr), task.initial, own, alone.epochs)
        measured = scores(models)
        return FineTunedModel(
            self._bundle(models[-1], own, measured[-1], len(test)), of_best, chosen.lr, chosen.epochs, measured,
            scores(others), len(own), len(test), *compared(task, models[-1], others[-1], own, test),
        )  # fmt: skip

    def _by_updates(self, own: Samples, test: Samples, updates: int, seed: int) -> FineTunedModel:
        """The new client's model by the algorithm's own updates, with the message after the run's last round."""
        task, algorithm = self.shared.task, self.algorithm
        alone = trained_alone(algorithm)
        assert alone is not None
        server = RunFolder(self.path).server(algorithm.server_init(task, self.settings.clients))
        trained = torch.from_numpy(self.settings.split_clients[0])
        fitting = WithoutServer(algorithm, message_to_new_client(algorithm, server, trained), updates)
        how = {"id": self.settings.clients, "batch": self.settings.batch, "seed": seed}
        models = updated(task, fitting, as_data(own), updates, **how)
        by_itself = updated(task, alone, as_data(own), self.settings.rounds, **how)
        with torch.no_grad():
            scores, alone_scores = (
                [primary_metrics(task, w, [as_data(test)])[0] for w in pair] for pair in (models, by_itself)
            )
        return FineTunedModel(
            self._bundle(models[-1], own, scores[-1], len(test)), "what the clients have in common", None, updates,
            scores, alone_scores, len(own), len(test),
        )  # fmt: skip

    def _bundle(self, model: Tensor, own: Samples, score: float, samples: int) -> Bundle:
        """The bundle of a new client's model, with the base of the run."""
        output, task = self.shared.description.output, self.shared.task
        if output.is_survival:
            output = dataclasses.replace(output, hazard=hazard_of(task, model, as_data(own)))
        facts, metric = self.shared.description, self.shared.task.metrics[0].name
        origin = dataclasses.replace(facts.origin, stage=TRAINED, round=0, name="a new client")
        found = (Score(metric, "test", score, samples),) if math.isfinite(score) else ()
        described = dataclasses.replace(facts, origin=origin, output=output, scores=found)
        return dataclasses.replace(self.shared, description=described, model=model)

    def _starts(self, own: Samples) -> dict[str, Tensor]:
        """The models a new client may start from, by name."""
        starts = {"the global model": vector_of(self.shared.model)}
        if len(own) > 1:
            trained = self.settings.split_clients[0].tolist()
            models = {
                n: vector_of(load(self.path, n, model=self.model, code=self.code).model) for n in trained
            }
            closest = nearest(self.shared.task, models, own)
            starts["the mean of the personal models"] = torch.stack(list(models.values())).mean(0)
            starts[f"the model of client {closest}, the nearest"] = models[closest]
        return starts


class FineTuning(NamedTuple):
    """How a new client's model is trained."""

    task: Task
    optimizer: Optimizer
    batch: int
    seed: int
    id: int  # of the new client: the order of its samples depends on it


class ChosenTraining(NamedTuple):
    """The best learning rate and number of epochs from one start, and their score on held-out samples."""

    lr: float
    epochs: int
    score: tuple[float, float]  # accuracy, or what else is best when high, then minus the loss


def updated(
    task: Task, algorithm: AnyAlgorithm, data: Data, updates: int, *, id: int, batch: int, seed: int
) -> list[Tensor]:
    """A client's model before its local updates, and after them.

    Args:
        task: What it learns.
        algorithm: Whose server sends the same message each time.
        data: Its samples.
        updates: Their number.
        id: Of the client.
        batch: Samples of a step.
        seed: Of the order of the samples.
    """
    client = algorithm.client_init(task)
    down = received(algorithm, algorithm.server_init(task, 1), torch.tensor(0))
    models = [vector_of(algorithm.personal_model(task, client, down))]
    with torch.no_grad():
        for n in range(updates):
            rows, size = tree.repeat(client, 1), [int(data.size)]
            order = next_plan(algorithm, task, rows, n, [id], size, seed=seed, batch=batch)
            client = algorithm.client_update(task, client, down, data, tree.row(order, 0)).client
    return [*models, vector_of(algorithm.personal_model(task, client, down))]


def as_data(samples: Samples) -> Data:
    """The samples of one client as tensors."""
    return Data(tensors(samples.x), tensors(samples.y), torch.tensor(len(samples)))


def compared(
    task: Task, ours: Tensor, alone: Tensor, own: Samples, test: Samples
) -> tuple[Interval | None, float | None]:
    """The interval of the gain over training alone, and the constant answer's metric, on the test samples.

    Args:
        task: What the clients learn.
        ours: The new client's model.
        alone: The one that was trained alone.
        own: The training samples, of which the constant answer is.
        test: Those that measure.
    """
    metric = task.metrics[0]
    with torch.no_grad():
        (answers, y), (others, _) = (predicted(task, w, as_data(test)) for w in (ours, alone))
    interval = gain_interval(metric, answers, others, y) if len(y) > 1 else None
    if task.criterion.kind == NEXT_TOKEN or not len(own):
        return interval, None
    answer = constant_answer(task.criterion.kind, task.classes, np.asarray(own.y))
    return interval, float(metric.of(np.repeat(answer[None], len(y), axis=0), y))


def nearest(task: Task, models: Mapping[int, Tensor], samples: Samples) -> int:
    """The client whose model has the lowest loss on these samples.

    Args:
        task: What the clients learn.
        models: By client.
        samples: Of the new client.
    """
    data = as_data(samples)
    with torch.no_grad():
        losses = {client: float(task.evaluate(w, data)[0]) for client, w in models.items()}
    return min(losses, key=lambda client: losses[client] if losses[client] == losses[client] else np.inf)


def fine_tuned(how: FineTuning, w: Tensor, samples: Samples, epochs: int) -> list[Tensor]:
    """The model before training, and after each epoch.

    Args:
        how: The model is trained.
        w: Where it starts.
        samples: That it is trained on.
        epochs: Passes over them.
    """
    task, data, models = how.task, as_data(samples), [w]
    batches = plan(how.seed, 0, [how.id], [len(samples)], batch=how.batch, epochs=epochs, random=task.random)
    moments = begin(how.optimizer, how.optimizer.init(w[: task.d]), w[: task.d])
    with torch.no_grad():
        for epoch in tree.row(batches, 0):
            w, moments, _ = train(task, how.optimizer, w, moments, data, (epoch,))
            models.append(w)
    return models


def with_rate(how: FineTuning, lr: float) -> FineTuning:
    """The same with another learning rate.

    Args:
        how: A model is trained.
        lr: The other rate.
    """
    return how._replace(optimizer=dataclasses.replace(how.optimizer, lr=lr))  # type: ignore[type-var]


def choose(
    how: FineTuning,
    w: Tensor,
    samples: Samples,
    folds: NDArray[np.int64],
    rates: Sequence[float],
    epochs: Sequence[int],
    tick: Tick,
) -> ChosenTraining:
    """The learning rate and epochs with the best mean score over the folds; of equals, the first.

    Args:
        how: The model is trained, but for rate and epochs.
        w: Where it starts.
        samples: For training; a fold at a time is held out.
        folds: The fold of each sample.
        rates: That are tried.
        epochs: That are tried.
        tick: Called after each training.
    """
    scores: dict[tuple[float, int], list[tuple[float, float]]] = {}
    for fold in range(folds.max() + 1):
        held_out = as_data(samples.take(folds == fold))
        for lr in rates:
            models = fine_tuned(with_rate(how, lr), w, samples.take(folds != fold), max(epochs))
            for count in epochs:
                with torch.no_grad():
                    loss, score = how.task.evaluate(models[count], held_out)
                judged = (float(score), -float(loss)) if torch.isfinite(loss) else (-np.inf, -np.inf)
                scores.setdefault((lr, count), []).append(judged)
            tick(1)
    means = {key: tuple(np.mean(own, 0).tolist()) for key, own in scores.items()}
    lr, count = max(means, key=lambda key: means[key])
    return ChosenTraining(lr, count, means[lr, count])


def _folds(samples: Samples, seed: int) -> NDArray[np.int64]:
    """The fold of each sample, every class in proportion; what belongs together is in one fold."""
    unit = np.arange(len(samples)) if samples.unit is None else samples.unit
    first, member = np.unique(unit, return_index=True, return_inverse=True)[1:]
    order = np.random.default_rng(seed).permutation(len(first))
    order = order[np.argsort(samples.strata[first][order], kind="stable")]
    folds = np.empty(len(first), np.int64)
    folds[order] = np.arange(len(first)) % min(FOLDS, len(first))
    return np.asarray(folds[member])
