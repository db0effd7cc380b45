"""APFL (Deng et al. 2020): a mixture of a personal and the global model, with a learned weight."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import Data, Personal, Plan, State, Task, Trained, begin, descend, kept, mean_loss
from copfl.core.algorithm import ClientOutput
from copfl.errors import UsageError, one_of
from copfl.parts.averaging import Averaging, Down
from copfl.parts.mixtures import MIXTURES


class Client(NamedTuple):
    personal: Tensor  # [p], the personal entries of the global model: local statistics
    moments: State  # of the global model
    v: Tensor  # [D], v_n, the personal model
    v_moments: State
    alpha: Tensor  # [], alpha_n
    started: Tensor  # [] bool, whether it has trained before


@dataclass(frozen=True)
class APFL(Averaging):
    """w is FedAvg's; v descends the loss of alpha * v + (1 - alpha) * w, and once a round so does alpha.

    mixture  "predictions": the two models' probabilities are mixed (the authors' code mixes outputs too).
             "weights": their parameters are (Paper: Algorithm 1)
    """

    # Paper: the released code averages w evenly (weights="equal" restores it), mixes outputs before the
    # softmax, steps w before v, and adds 0.02 alpha to alpha's derivative. v_n starts from the initial
    # weights; here that of a client that joins later starts from the global model.
    alpha: float = 0.5  # before the first round
    alpha_rate: float = 0.01  # the step size of alpha; 0 keeps it fixed
    mixture: str = "predictions"

    minimum = (("alpha_rate", 0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(MIXTURES, mixture=self.mixture)
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"alpha={self.alpha} must be between 0, all global, and 1, all personal")

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        alpha = task.initial.new_full((), self.alpha)
        never = task.initial.new_zeros((), dtype=torch.bool)
        return Client(personal, moments, task.initial, moments, alpha, never)

    def personal_model(self, task: Task, client: Client, down: Down) -> Personal:
        return MIXTURES[self.mixture].personal_model(task, *self._models(task, client, down), client.alpha)

    def _models(self, task: Task, client: Client, down: Down) -> tuple[Tensor, Tensor]:
        """v_n and w; a new client has no v_n yet and takes the global model."""
        w = self.global_model(task, client, down)
        return torch.where(client.started, client.v, w), w

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        mixture, (v, w) = MIXTURES[self.mixture], self._models(task, client, down)
        v_moments = begin(self.optimizer, client.v_moments, v[: task.d])
        moments = begin(self.optimizer, client.moments, w[: task.d])
        batches, losses = [batch for batches in plan for batch in batches], []
        slope = mixture.slope(task, v, w, client.alpha, data, batches[0])
        alpha = (client.alpha - self.alpha_rate * slope).clamp(0, 1)
        for batch in batches:
            options = mixture.options(task, w, alpha, data, batch)  # both step from the same v and w
            v, v_moments, loss = descend(task, self.optimizer, v, v_moments, data, (batch,), **options)
            w, moments, _ = descend(task, self.optimizer, w, moments, data, (batch,))
            losses.append(loss)
        trained = Trained(w, moments, mean_loss(losses, batches))
        predicts = mixture.personal_model(task, v, w, alpha)
        (personal, moments), upload, _, metrics = self.output(task, trained, data)
        v_moments, started = kept(self.optimizer, v_moments), torch.ones_like(client.started)
        after = Client(personal, moments, v, v_moments, alpha, started)
        return ClientOutput(after, upload, predicts, {**metrics, "alpha": alpha})
