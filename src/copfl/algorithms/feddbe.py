"""FedDBE (Zhang et al., NeurIPS 2023): a personal bias on features whose mean is drawn to a common one."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Objective, Plan, State, Task, at_least, begin, kept, train
from copfl.parts.averaging import Averaging, personal_of, shared_of, weighted_mean
from copfl.parts.feature_bias import Biased, feature_count, mean_feature, shifted


class Server(NamedTuple):
    w: Tensor  # [s]
    mean: Tensor  # [f], the mean feature after the first round; zero before
    known: Tensor  # [] bool, whether there is one


class Client(NamedTuple):
    personal: Tensor  # [p], local statistics
    moments: State  # of the parameters and the bias
    bias: Tensor  # [f], the personal bias; zero in the first round


class Upload(NamedTuple):
    w: Tensor  # [s]
    size: Tensor  # []
    mean: Tensor  # [f], its mean feature in the first round; then zero


class Total(NamedTuple):
    w: Tensor
    size: Tensor
    mean: Tensor  # [f]


Down = Server  # the server sends its whole record


@dataclass(frozen=True)
class FedDBE(Averaging):
    """The head sees f(x) + bias_n; the loss has kappa times the distance of the batch's mean feature to the
    federation's, Eqs. (3) to (6).

    A Linear head of a shifted feature is the head with a shifted bias, so a client's model is one vector.

    Paper: the first round, without bias and distance, gives the mean; it is not computed again. The running
    mean of the features has a momentum, which the authors' script sets to 1: the batch's own mean, as here.
    """

    kappa: float = 50.0  # the authors' value for a CNN

    fine_tuned = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, kappa=self.kappa)

    def server_init(self, task: Task, clients: int) -> Server:
        w = super().server_init(task, clients).w
        return Server(w, w.new_zeros(feature_count(task)), torch.zeros((), dtype=torch.bool, device=w.device))

    def client_init(self, task: Task) -> Client:
        bias = task.initial.new_zeros(feature_count(task))
        state = kept(self.optimizer, self.optimizer.init(torch.cat([task.initial[: task.d], bias])))
        return Client(personal_of(task, self.personal, task.initial), state, bias)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        rows = (field.expand(len(ids), *field.shape) for field in server)
        return Down(*rows)

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return shifted(task, self.global_model(task, client, down), client.bias)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w, d = self.global_model(task, client, down), task.d
        both = torch.cat([w[:d], client.bias, w[d:]])
        state = begin(self.optimizer, client.moments, both[: len(both) - len(w[d:])])
        is_bias = torch.zeros(d + len(client.bias), dtype=torch.bool, device=w.device)
        is_bias[d:] = True
        biased = Biased(task)
        both, state, loss = train(
            biased,
            self.optimizer,
            both,
            state,
            data,
            plan,
            active=~is_bias | down.known,
            objective=self._drawn(task, down),
        )
        w, bias = torch.cat([both[:d], both[biased.d :]]), both[d : biased.d]
        weight = self.weight(data, w)
        mean = torch.where(down.known, 0, mean_feature(task, w, data))
        upload = Upload(shared_of(task, self.personal, w), weight, mean)
        after = Client(personal_of(task, self.personal, w), kept(self.optimizer, state), bias)
        return ClientOutput(after, upload, shifted(task, w, bias), {"loss": loss, "weight": weight})

    def _drawn(self, task: Task, down: Down) -> Objective:
        """The task's objective + kappa * mean over the features of (batch mean - federation's mean)² / 2."""
        strength = self.kappa * down.known

        def objective(logits: Tensor, features: Tensor, targets: Tensor, valid: Tensor | None) -> Tensor:
            count = len(features) if valid is None else valid.sum().clamp(min=1)
            counted = features if valid is None else torch.where(valid[:, None], features, 0)
            distance = (counted.sum(0) / count - down.mean).square().mean() / 2
            return task.objective(logits, features, targets, valid) + strength * distance

        return objective

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return Total(upload.size * upload.w, upload.size, upload.size * upload.mean)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        w = weighted_mean(total.w, total.size, server.w)
        mean = torch.where(server.known, server.mean, weighted_mean(total.mean, total.size, server.mean))
        return Server(w, mean, server.known | (total.size > 0)), {}
