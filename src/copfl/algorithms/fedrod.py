"""FedRoD (Chen and Chao, ICLR 2022): a shared head for all classes, plus a personal head."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import (
    ClientOutput,
    Data,
    Objective,
    Plan,
    State,
    Task,
    Trained,
    UsageError,
    begin,
    descend,
    kept,
    mean_loss,
)
from copfl.errors import how_to_set
from copfl.parts.averaging import Averaging, Down, Server
from copfl.parts.phases import HeadAlone, fresh_head


class Client(NamedTuple):
    personal: Tensor  # [p], local statistics
    moments: State  # of the shared model
    head: Tensor  # [h], the personal head, added to the shared one; zero before the first round
    head_moments: State


@dataclass(frozen=True)
class FedRoD(Averaging):
    """Body and shared head descend the balanced softmax loss (Eq. 5); the personal head, beside the fixed
    outputs and features of both, the client's own loss (Eq. 7). A client predicts with the sum of the heads.

    The heads are linear, so the sum of their outputs is the output of one head: their sum.
    """

    # Paper: there is also a form whose personal head is the output of a hypernetwork of the class shares.

    def server_init(self, task: Task, clients: int) -> Server:
        if task.criterion.kind != "classification" or len(task.layout.head_shape) != 2:
            raise UsageError(
                "fedrod balances the loss over classes and adds two Linear heads; this task is "
                f'{task.criterion.kind}, with the head "{task.layout.head}". Choose another algorithm, or '
                f"name a Linear head, such as {how_to_set('model.head', 'fc')}"
            )
        server: Server = super().server_init(task, clients)
        return server

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        head = torch.zeros_like(task.layout.entries(task.initial, "head"))
        return Client(personal, moments, head, fresh_head(self.optimizer, task))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return with_head(task, self.global_model(task, client, down), client.head)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w, head, losses = self.global_model(task, client, down), client.head, []
        moments = begin(self.optimizer, client.moments, w[: task.d])
        head_moments = begin(self.optimizer, client.head_moments, head)
        balanced, batches = balanced_softmax(task, data), [batch for epoch in plan for batch in epoch]
        for batch in batches:  # both step from the same w
            shared, personal = task.layout.entries(w, "head"), torch.cat([head, w[task.d :]])
            stepped = descend(
                HeadAlone(task, w),
                self.optimizer,
                personal,
                head_moments,
                data,
                (batch,),
                at=lambda own, shared=shared: own + shared,  # type: ignore[misc]
            )
            head, head_moments = stepped.w[: len(head)], stepped.state
            w, moments, _ = descend(task, self.optimizer, w, moments, data, (batch,), objective=balanced)
            losses.append(stepped.loss)
        trained = Trained(w, moments, mean_loss(losses, batches))
        (local, moments), upload, _, metrics = self.output(task, trained, data)
        after = Client(local, moments, head, kept(self.optimizer, head_moments))
        return ClientOutput(after, upload, with_head(task, w, head), metrics)


def with_head(task: Task, w: Tensor, head: Tensor) -> Tensor:
    """w with a second head added to its own."""
    return task.layout.with_entries(w, "head", task.layout.entries(w, "head") + head)


def balanced_softmax(task: Task, data: Data) -> Objective:
    """The objective with log(number of samples) of each class added to its logit, Eq. (5).

    A class without a sample gets a very small number: its logit has no gradient, as with the logarithm of 0.
    """
    is_valid = torch.arange(len(data.y), device=data.y.device) < data.size
    is_member = (data.y[:, None] == torch.arange(task.classes, device=data.y.device)) & is_valid[:, None]
    logs = is_member.sum(0).to(task.initial.dtype).clamp(min=1e-9).log()

    def objective(logits: Tensor, features: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
        return task.objective(logits + logs, features, labels, valid)

    return objective
