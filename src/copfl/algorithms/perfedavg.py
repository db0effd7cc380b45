"""Per-FedAvg (Fallah et al. 2020), first order: a model trained for its loss after one gradient step."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from copfl.core import Batch, ClientOutput, Data, Plan, Task, Trained, begin, descend, mean_loss
from copfl.parts.averaging import Averaging, Client, Down


@dataclass(frozen=True)
class PerFedAvg(Averaging):
    """w <- w - beta * grad f(w - alpha * grad f(w; first batch); second batch).

    An epoch goes over the data twice, once for the first batches and once for the second ones, so that the
    two are independent and every sample is trained on once. The optimizer takes the outer step, beta. The
    evaluated model is the global model after `tune_steps` plain steps of alpha; it is never uploaded.
    inner_rate=0 is FedAvg on every second epoch.
    """

    # Paper: the exact method multiplies by (I - alpha * Hessian); its first-order version, this one, does
    # not. It draws clients evenly and averages them evenly; weights="equal" restores it.
    inner_rate: float = 0.01  # alpha
    tune_steps: int = 1

    minimum = (("inner_rate", 0), ("tune_steps", 0))
    phases = ("epochs", "epochs")
    fine_tuned = True

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        start = self.global_model(task, client, down)
        w, moments = start, begin(self.optimizer, client.moments, start[: task.d])
        inner, outer = ([batch for batches in plan[first::2] for batch in batches] for first in (0, 1))
        losses = []
        for first, second in zip(inner, outer, strict=True):
            ahead = self._inner_step(task, w, data, first)
            w, moments, loss = descend(task, self.optimizer, w, moments, data, (second,), at=ahead)
            losses.append(loss)
        tuned = start[: task.d]
        for batch in islice(cycle(inner), self.tune_steps):
            tuned = self._inner_step(task, start, data, batch)(tuned)
        tuned = torch.cat([tuned, w[task.d :]])  # the statistics of one step alone would be noise
        return self.output(task, Trained(w, moments, mean_loss(losses, outer)), data, predicts=tuned)

    def _inner_step(self, task: Task, w: Tensor, data: Data, batch: Batch) -> Callable[[Tensor], Tensor]:
        """Parameters to parameters after one plain step; without valid samples the gradient is 0."""
        x, y = task.batch(data, batch)
        buffers = w[task.d :]
        return lambda p: p - self.inner_rate * task.gradient(p, buffers, x, y, batch.valid)[0]
