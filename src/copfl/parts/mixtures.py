"""Mixtures of models. Two models, alpha * v + (1 - alpha) * w: of their predictions, or of their weights.

Each kind of mixture of two has three methods:

personal_model  what a client predicts with
options         the keywords of `descend` to train v on the mixture's loss on this batch, with w fixed
slope           the derivative of the mixture's loss on this batch by alpha
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from copfl.core.criteria import mean_of_valid
from copfl.core.task import EVAL_BATCH, Batch, Data, Experts, Personal, Task
from copfl.errors import UsageError, how_to_set
from copfl.kernels.private_torch import gradient


class Predictions:
    """Predictions are mixed: of classes, the loss is -log(alpha p_v + (1 - alpha) p_w) of the right label."""

    def personal_model(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor) -> Personal:
        return Experts(torch.stack([v, w]), torch.stack([alpha, 1 - alpha]))

    def options(self, task: Task, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> dict[str, Any]:
        of_w = predictions(task, w, data, batch)

        def objective(outputs: Tensor, features: Tensor, targets: Tensor, valid: Tensor | None) -> Tensor:
            mixed = mixture(task, task.criterion.predictions(outputs), of_w, alpha)
            losses = task.criterion.test_losses(mixed, task.criterion.at_risk(targets, valid))
            return mean_of_valid(losses, task.criterion.counted(targets, valid))

        return {"objective": objective}

    def slope(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> Tensor:
        """The mixture is a line from w to v; of classes, the mean of (p_w - p_v) / mixture."""
        of_v, of_w = (predictions(task, model, data, batch) for model in (v, w))
        mixed = mixture(task, of_v, of_w, alpha)
        _, targets = task.batch(data, batch)

        def loss(mixed: Tensor) -> tuple[Tensor, tuple[()]]:
            losses = task.criterion.test_losses(mixed, task.criterion.at_risk(targets, batch.valid))
            return mean_of_valid(losses, task.criterion.counted(targets, batch.valid)), ()

        if task.criterion.logarithmic:
            of_v, of_w = (of_v - mixed).exp(), (of_w - mixed).exp()
        (of_mixed,), _ = gradient(loss, mixed)
        slope: Tensor = (of_mixed * (of_v - of_w)).sum()
        return slope


class Weights:
    """Parameters are mixed: the loss is f(alpha v + (1 - alpha) w), and v's gradient has the factor alpha."""

    def personal_model(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor) -> Personal:
        # v's statistics are those of the mixture.
        return torch.cat([self._mixed(task, v, w, alpha), v[task.d :]])

    def options(self, task: Task, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> dict[str, Any]:
        rest = (1 - alpha) * w[: task.d]
        return {"at": lambda v: alpha * v + rest, "adjust": lambda v, grad: alpha * grad}

    def slope(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> Tensor:
        """<grad f(mixture), v - w>."""
        x, y = task.batch(data, batch)
        grad = task.gradient(self._mixed(task, v, w, alpha), v[task.d :], x, y, batch.valid)[0]
        return (grad * (v - w)[: task.d]).sum()

    def _mixed(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor) -> Tensor:
        return alpha * v[: task.d] + (1 - alpha) * w[: task.d]


MIXTURES: dict[str, Predictions | Weights] = {"predictions": Predictions(), "weights": Weights()}


def predictions(task: Task, w: Tensor, data: Data, batch: Batch) -> Tensor:
    """The predictions for a batch, with the model in training mode."""
    x, _ = task.batch(data, batch)
    return task.criterion.predictions(task.forward(w, x, True, batch.valid)[0])


def mixture(task: Task, of_v: Tensor, of_w: Tensor, alpha: Tensor) -> Tensor:
    """The predictions of alpha * v + (1 - alpha) * w, from those of v and of w."""
    return task.criterion.mixed(torch.stack([of_v, of_w]), torch.stack([alpha, 1 - alpha]))


def mean_direction(task: Task, w: Tensor, data: Data) -> Tensor:
    """[f], the mean of the samples' features, each at length 1: an inner product with it is a mean cosine."""
    total = w.new_zeros(feature_size(task))
    for x, _, valid in data.in_parts(EVAL_BATCH):
        _, features = task.forward(w, task.numbers(x))
        total = total + torch.where(valid[:, None], normalize(features), 0).sum(0)
    return total / data.size.clamp(min=1)


def feature_size(task: Task, who: str = "feddpa") -> int:
    """f, the columns of the head's matrix; UsageError where there is none, in the name of the algorithm."""
    shape = task.layout.head_shape
    if len(shape) != 2 or task.criterion.kind == "next_token":
        raise UsageError(
            f'{who} compares the features before a trained Linear head; "{task.layout.head}" is none, or '
            f"predicts tokens. Name another head, as {how_to_set('model.head', 'classifier')}, or choose another "
            "algorithm"
        )
    return shape[1]


# -- an ensemble with weights that fall by exp(-rate * loss): a pair, a bank of models, and both as halves --
#
# prediction = c (a own + b mean) + d sum_k s_k stored_k         (a + b = c + d = sum s = 1)


class Logs(NamedTuple):
    """Logarithms of the multiplicative weights; only differences within a field count."""

    pair: Tensor  # [2], of the own model and the mean
    bank: Tensor  # [M], of the stored means
    halves: Tensor  # [2], of the pair and of the bank


def even(like: Tensor, places: int) -> Logs:
    """Equal weights."""
    return Logs(like.new_zeros(2), like.new_zeros(places), like.new_zeros(2))


def shares(logs: Logs, stored: Tensor) -> Tensor:
    """[2 + M], the weight of each model: c a, c b, d s_1, ...; 0 for empty places of the bank."""
    halves, pair, bank = logs.halves.softmax(0), logs.pair.softmax(0), _masked(logs.bank, stored).softmax(0)
    return torch.cat([halves[0] * pair, halves[1] * bank])


def losses(task: Task, models: Iterable[Personal], data: Data) -> Tensor:
    """The mean loss of each model on these samples."""
    return torch.stack([task.evaluate(model, data)[0] for model in models])


def losses_of_halves(task: Task, w: Tensor, logs: Logs, stored: Tensor, data: Data) -> Tensor:
    """[2], the mean loss of the pair and of the bank, each mixed by these weights."""
    pair = Experts(w[:2], logs.pair.softmax(0))
    bank = Experts(w[2:], _masked(logs.bank, stored).softmax(0))
    return losses(task, (pair, bank), data)


def fallen(logs: Logs, single: Tensor, halves: Tensor, rate: float) -> Logs:
    """weight <- weight * exp(-rate * loss), for each model and each half."""
    return Logs(logs.pair - rate * single[:2], logs.bank - rate * single[2:], logs.halves - rate * halves)


def _masked(logs: Tensor, stored: Tensor) -> Tensor:
    return torch.where(stored, logs, -torch.inf)
