"""A model for a client that did not take part: start, learning rate and epochs by its own samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.batches import plan
from copfl.core.optim import Optimizer, begin
from copfl.core.task import Data, Experts, Personal, Task
from copfl.core.train import train
from copfl.data.federation import tensors
from copfl.data.samples import Samples

FOLDS = 3  # of the cross-validation within the client's samples
RATES = (1, 3, 10)  # multiples of the run's learning rate that are tried
EPOCHS = (0, 1, 3, 10, 30)  # tried


class Training(NamedTuple):
    """How a new client's model is trained."""

    task: Task
    optimizer: Optimizer
    batch: int
    seed: int
    id: int  # of the new client: the order of its samples depends on it


class Choice(NamedTuple):
    """The best learning rate and number of epochs from one start, and their score on held-out samples."""

    lr: float
    epochs: int
    score: tuple[float, float]  # accuracy, or what else is best when high, then minus the loss


def data_of(samples: Samples) -> Data:
    """The samples of one client as tensors."""
    return Data(tensors(samples.x), tensors(samples.y), torch.tensor(len(samples)))


def vector_of(model: Personal) -> Tensor:
    """The model as one vector; of a mixture, the expert with the largest share."""
    return model.w[int(model.share.argmax())] if isinstance(model, Experts) else model


def nearest(task: Task, models: Mapping[int, Tensor], samples: Samples) -> int:
    """The client whose model has the lowest loss on these samples."""
    data = data_of(samples)
    with torch.no_grad():
        losses = {client: float(task.evaluate(w, data)[0]) for client, w in models.items()}
    return min(losses, key=lambda client: losses[client] if losses[client] == losses[client] else np.inf)


def fine_tuned(how: Training, w: Tensor, samples: Samples, epochs: int) -> list[Tensor]:
    """The model before training, and after each epoch."""
    task, data, found = how.task, data_of(samples), [w]
    batches = plan(how.seed, 0, [how.id], [len(samples)], batch=how.batch, epochs=epochs, random=task.random)
    moments = begin(how.optimizer, how.optimizer.init(w[: task.d]), w[: task.d])
    with torch.no_grad():
        for epoch in tree.row(batches, 0):
            w, moments, _ = train(task, how.optimizer, w, moments, data, (epoch,))
            found.append(w)
    return found


def with_rate(how: Training, lr: float) -> Training:
    """The same with another learning rate."""
    return how._replace(optimizer=dataclasses.replace(how.optimizer, lr=lr))  # type: ignore[type-var]


def choose(
    how: Training, w: Tensor, samples: Samples, rates: Sequence[float], epochs: Sequence[int]
) -> Choice:
    """The learning rate and epochs with the best mean score over the folds; of equals, the first."""
    folds = _folds(samples, how.seed)
    scores: dict[tuple[float, int], list[tuple[float, float]]] = {}
    for fold in range(folds.max() + 1):
        held_out = data_of(samples.take(folds == fold))
        for lr in rates:
            models = fine_tuned(with_rate(how, lr), w, samples.take(folds != fold), max(epochs))
            for count in epochs:
                with torch.no_grad():
                    loss, score = how.task.evaluate(models[count], held_out)
                finite = bool(torch.isfinite(loss))
                scores.setdefault((lr, count), []).append(
                    (float(score), -float(loss)) if finite else (-np.inf, -np.inf)
                )
    means = {key: tuple(np.mean(found, 0).tolist()) for key, found in scores.items()}
    lr, count = max(means, key=lambda key: means[key])
    return Choice(lr, count, means[lr, count])


def _folds(samples: Samples, seed: int) -> NDArray[np.int64]:
    """The fold of each sample, every class in proportion."""
    order = np.random.default_rng(seed).permutation(len(samples))
    order = order[np.argsort(samples.strata[order], kind="stable")]
    folds = np.empty(len(samples), np.int64)
    folds[order] = np.arange(len(samples)) % min(FOLDS, len(samples))
    return folds
