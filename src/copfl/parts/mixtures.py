"""Two models in a mixture, alpha * v + (1 - alpha) * w: of their predictions, or of their weights.

Each kind of mixture has three methods:

personal_model  what a client predicts with
options         the keywords with which `descend` trains v on the mixture's loss on this batch while w is fixed
slope           the derivative of the mixture's loss on this batch by alpha
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.core.task import Batch, Data, Experts, Personal, Task, mean_of_valid


class Predictions:
    """Probabilities are mixed: the loss is -log(alpha p_v + (1 - alpha) p_w) of the right label."""

    def personal_model(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor) -> Personal:
        return Experts(torch.stack([v, w]), torch.stack([alpha, 1 - alpha]))

    def options(self, task: Task, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> dict[str, Any]:
        log_w = log_right(task, w, data, batch) + (1 - alpha).log()  # [b]

        def objective(logits: Tensor, features: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
            log_v = -F.cross_entropy(logits, labels, reduction="none") + alpha.log()
            return mean_of_valid(-torch.logaddexp(log_v, log_w), valid)

        return {"objective": objective}

    def slope(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> Tensor:
        """The mean of (p_w - p_v) / mixture."""
        p_v, p_w = (log_right(task, model, data, batch).exp() for model in (v, w))
        mixed = alpha * p_v + (1 - alpha) * p_w
        return mean_of_valid((p_w - p_v) / mixed.clamp(min=1e-6), batch.valid)


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


def log_right(task: Task, w: Tensor, data: Data, batch: Batch) -> Tensor:
    """The log-probability of each sample's label [b] with the model in training mode."""
    x, y = task.batch(data, batch)
    return -F.cross_entropy(task.forward(w, x, True, batch.valid)[0], y, reduction="none")
