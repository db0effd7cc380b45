"""FedDPA (Yang et al. 2024): a global and a personal adapter, mixed sample by sample by similarity."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Experts, Plan, State, Task, begin, descend, kept, mean_loss
from copfl.errors import fraction_of
from copfl.parts.averaging import Averaging, Down
from copfl.parts.mixtures import MIXTURES, feature_size, mean_direction


class Client(NamedTuple):
    personal: Tensor  # [p], the personal entries of the global model: local statistics
    moments: State  # of the global model
    v: Tensor  # [D], the personal adapter and head
    v_moments: State
    # [f], the mean direction of the training samples' features in v; 0 before the first training.
    near: Tensor
    started: Tensor  # [] bool, whether it has trained before


@dataclass(frozen=True)
class FedDPA(Averaging):
    """w is FedAvg's; v descends the loss of the mixture share * v + (1 - share) * w, where w is as received.

    A sample is predicted with v's share times the mean cosine of its features with those of the client's
    training samples. What is unlike them is predicted by the global model, as everything is at a new client.
    """

    # Paper: the outputs of both adapters are added inside each layer; here two models' probabilities are
    # mixed. The similarity is that with 5 random training samples, here with all. This is the variant that
    # trains both adapters in every round; the released code mixes v into w's training too, from the
    # second round on.
    share: float = 0.5  # of v, in training, and of a sample that is just like the client's

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction_of("the mixture", share=self.share)

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        near, never = task.initial.new_zeros(feature_size(task)), task.initial.new_zeros((), dtype=torch.bool)
        return Client(personal, moments, task.initial, moments, near, never)

    def personal_model(self, task: Task, client: Client, down: Down) -> Experts:
        w = self.global_model(task, client, down)
        return self._mixed(torch.where(client.started, client.v, w), w, client.near)

    def _mixed(self, v: Tensor, w: Tensor, near: Tensor) -> Experts:
        share = w.new_full((), self.share)
        return Experts(torch.stack([v, w]), torch.stack([share, 1 - share]), near)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w, losses, share = self.global_model(task, client, down), [], down.w.new_full((), self.share)
        v = torch.where(client.started, client.v, w)
        state = begin(self.optimizer, client.v_moments, v[: task.d])
        batches = [batch for batches in plan for batch in batches]
        for batch in batches:
            options = MIXTURES["predictions"].options(task, w, share, data, batch)
            v, state, loss = descend(task, self.optimizer, v, state, data, (batch,), **options)
            losses.append(loss)
        trained = self.fit(task, w, client.moments, data, plan)
        near, received = mean_direction(task, v, data), torch.cat([w[: task.d], trained.w[task.d :]])
        (personal, moments), upload, *_ = self.output(task, trained, data)
        started = torch.ones_like(client.started)
        after = Client(personal, moments, v, kept(self.optimizer, state), near, started)
        metrics = {"loss": mean_loss(losses, batches), "weight": upload.size, "global_loss": trained.loss}
        return ClientOutput(after, upload, self._mixed(v, received, near), metrics)
