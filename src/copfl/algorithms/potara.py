"""Potara (Zou et al. 2026): clients mix the federated and their own weights by their Fisher information."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Plan, State, Task
from copfl.errors import above
from copfl.parts.averaging import Averaging, Down
from copfl.parts.fisher import curvature, groups_of, merging_weight


class Client(NamedTuple):
    personal: Tensor  # [p], the personal entries of the global model: local statistics
    moments: State  # of the global model
    local: Tensor  # [D], theta_l, trained on its own samples alone
    local_moments: State
    share: Tensor  # [], lambda of the last round; 1 before the first
    statistics: Tensor  # [D - d], of the mixture


@dataclass(frozen=True)
class Potara(Averaging):
    """FedAvg (FedIT, over adapters) gives theta_g, and separate local training theta_l. A client predicts
    with lambda theta_g + (1 - lambda) theta_l, where lambda minimises the variance of the mixture, in closed
    form.
    """

    # Paper: known to us from its abstract and a reader's notes. The variances are traces of the inverse
    # diagonal Fisher information; that its small entries are damped relative to their mean, and the
    # covariance that of the gradients' correlation, is our reading. The paper squares gradients of single
    # samples (together=1).
    samples: int = 30  # training samples for the Fisher information
    together: int = 5  # samples in one of its gradients
    damping: float = 0.1  # added to the Fisher information, relative to its mean

    minimum = (("samples", 1), ("together", 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, damping=self.damping)

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        one = task.initial.new_ones(())
        return Client(personal, moments, task.initial, moments, one, task.initial[task.d :])

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """The mixture by the last lambda; for a new client the global model."""
        w = self.global_model(task, client, down)
        mixed = torch.cat([_mixture(task, w, client.local, client.share), client.statistics])
        return torch.where(client.share < 1, mixed, w)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w = self.global_model(task, client, down)
        trained = self.fit(task, w, client.moments, data, plan)
        local = self.fit(task, client.local, client.local_moments, data, plan)
        groups = groups_of(plan[0], self.samples, self.together)
        models = (task.with_local_statistics(model, data) for model in (w, local.w))  # as they would predict
        of_all, own = (curvature(task, model, data, groups) for model in models)
        share = merging_weight(of_all, own, self.damping)
        mixed = torch.cat([_mixture(task, w, local.w, share), local.w[task.d :]])
        mixed = task.with_local_statistics(mixed, data)
        (personal, moments), upload, _, metrics = self.output(task, trained, data)
        after = Client(personal, moments, local.w, local.state, share, mixed[task.d :])
        metrics = {**metrics, "global_share": share, "local_loss": local.loss}
        return ClientOutput(after, upload, mixed, metrics)


def _mixture(task: Task, w: Tensor, local: Tensor, share: Tensor) -> Tensor:
    """[d], the parameters lambda theta_g + (1 - lambda) theta_l."""
    return share * w[: task.d] + (1 - share) * local[: task.d]
