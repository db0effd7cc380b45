"""FedALA (Zhang et al. 2023): each client learns, for each entry, how much of the global model to take."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Epoch, Plan, State, Task, fraction_of, fresh
from copfl.parts.averaging import Averaging, Down, with_shared


class Client(NamedTuple):
    w: Tensor  # [D], after its last training
    mix: Tensor  # [t], W in [0, 1]: the weight of the global model, for each entry of the last tensors
    moments: State
    rounds: Tensor  # [] int64, how many it took part in


@dataclass(frozen=True)
class FedALA(Averaging):
    """The mean of all models; a client starts from its own mixture of that mean and its last model.

    Published: 2 tensors, 80 % of the samples, eta 1; Sgd(lr=0.005, momentum=0, weight_decay=0) in batches of
    10.

    Paper: W is trained to convergence the first time and for one epoch in every later round. Clients that are
    trained as a batch take the same steps: here it is `mix_epochs` every time, and W, which is kept,
    converges over the rounds.
    """

    tensors: int = 2  # p: how many of the last parameter tensors are mixed; 2 are the head's matrix and bias
    fraction: float = 0.8  # s: the fraction of the client's samples that W is trained on
    step: float = 1.0  # eta, of W
    mix_epochs: int = 1

    minimum = (("tensors", 1), ("mix_epochs", 0), ("step", 0))
    phases = ("mix_epochs", "epochs")

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction_of("the samples", fraction=self.fraction)

    def client_init(self, task: Task) -> Client:
        mix = torch.ones_like(task.initial[self._last(task)])
        never = task.initial.new_zeros((), dtype=torch.int64)
        return Client(task.initial, mix, fresh(self.optimizer, task), never)

    def global_statistics(self, task: Task, client: Client) -> Tensor:
        return client.w[task.d :]

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return self._mixed(task, client, down, client.mix)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        mix = client.mix
        for batches in plan[: self.mix_epochs]:
            mix = self._trained_mix(task, client, down, data, batches, mix)
        mix = torch.where(client.rounds > 0, mix, client.mix)  # a new client has no model to mix with
        start = self._mixed(task, client, down, mix)
        trained = self.fit(task, start, client.moments, data, plan[self.mix_epochs :])
        _, upload, w, metrics = self.output(task, trained, data)
        after = Client(trained.w, mix, trained.state, client.rounds + 1)
        return ClientOutput(after, upload, w, {**metrics, "global_fraction": mix.mean()})

    def _last(self, task: Task) -> slice:
        """The place of the last tensors in w: at the end of the parameters."""
        sizes = task.layout.sizes[: task.layout.trained]
        return slice(task.d - sum(sizes[-self.tensors :]), task.d)

    def _mixed(self, task: Task, client: Client, down: Down, mix: Tensor) -> Tensor:
        """The global model, but in the last tensors local + (global - local) * W."""
        last, w = self._last(task), with_shared(task, self.personal, client.w, down.w)
        local = client.w[last]
        return torch.cat([w[: last.start], local + (w[last] - local) * mix, w[last.stop :]])

    def _trained_mix(
        self, task: Task, client: Client, down: Down, data: Data, batches: Epoch, mix: Tensor
    ) -> Tensor:
        """W after the first `fraction` of an epoch: W - eta * gradient * (global - local), clipped."""
        last, visited = self._last(task), 0
        difference = self._mixed(task, client, down, torch.ones_like(mix))[last] - client.w[last]
        for batch in batches:
            place = torch.arange(visited, visited + batch.index.shape[0], device=batch.index.device)
            visited += batch.index.shape[0]
            chosen = place < torch.round(self.fraction * data.size).clamp(min=1)
            valid = chosen if batch.valid is None else chosen & batch.valid
            w, (x, y) = self._mixed(task, client, down, mix), task.batch(data, batch)
            grad, _, _ = task.gradient(w[: task.d], w[task.d :], x, y, valid)
            mix = torch.where(valid.any(), (mix - self.step * grad[last] * difference).clamp(0, 1), mix)
        return mix
