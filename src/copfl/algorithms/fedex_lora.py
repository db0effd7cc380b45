"""FedEx-LoRA (Singhal et al. 2025): the exact mean of the products B A, by a residual added to the layers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Personal, Plan, Task, Trained, fresh
from copfl.parts.adapters import BASE, A, B, check, products
from copfl.parts.averaging import (
    Client,
    PartlyPersonal,
    Upload,
    combined,
    personal_of,
    shared_of,
    weighted_mean,
    with_shared,
)


class Server(NamedTuple):
    w: Tensor  # [s], the shared entries that are trained: A, B, the head
    base: Tensor  # [b], W of the adapted layers, with all residuals so far


Down = Server


class Total(NamedTuple):
    w: Tensor  # [s], sum of size * w
    size: Tensor
    products: Tensor  # [b], sum of size * scaling * B A


@dataclass(frozen=True)
class FedExLoRA(PartlyPersonal):
    """FedAvg of A and B, and W <- W + scaling * (mean of B A - mean of B * mean of A).

    W must be in the model's vector, so that it can differ from the pretrained one. No client trains or sends
    it. `personal` names parts that stay with the client, such as the head; A and B are shared.
    """

    # Paper: the residual is sent to the clients as factors of its rank; here W itself is, which is larger.
    personal: tuple[str, ...] = ()  # type: ignore[misc]

    needs = (A, B, BASE)
    only_mean = "the residual that it adds to the layers is that of the mean"
    fine_tuned = True

    def parts(self, task: Task) -> tuple[str, ...]:
        """What no client sends."""
        check(task, "fedex_lora", self.needs)
        return (*self.personal, BASE)

    def server_init(self, task: Task, clients: int) -> Server:
        w = super().server_init(task, clients).w
        products(task, task.initial)  # UsageError if the W of some layer is missing
        return Server(w, task.layout.entries(task.initial, BASE))

    def client_init(self, task: Task) -> Client:
        return Client(personal_of(task, self.personal, task.initial), fresh(self.optimizer, task))

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1), server.base.expand(len(ids), -1))

    def global_model(self, task: Task, client: Client, down: Down) -> Tensor:
        w = task.layout.with_entries(self._with(task, down.w), BASE, down.base)
        return combined(task, self.personal, client.personal, shared_of(task, self.personal, w))

    def _with(self, task: Task, sent: Tensor) -> Tensor:
        """The model's vector with these entries, and zeros where nothing is sent."""
        return with_shared(task, self.parts(task), torch.zeros_like(task.initial), sent)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w, active = self.global_model(task, client, down), ~task.where(BASE)[: task.d]
        return self.output(task, self.fit(task, w, client.moments, data, plan, active=active), data)

    def output(
        self, task: Task, trained: Trained, data: Data, predicts: Personal | None = None
    ) -> ClientOutput:
        output = super().output(task, trained, data, predicts)
        client = Client(personal_of(task, self.personal, trained.w), output.client.moments)
        return output._replace(client=client)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        product = products(task, self._with(task, upload.w))
        return Total(upload.size * upload.w, upload.size, upload.size * product)

    def server_update(self, task: Task, server: Any, total: Total) -> tuple[Server, Metrics]:
        after, metrics = super().server_update(task, server, total)
        product_of_means = products(task, self._with(task, after.w))
        mean_of_products = weighted_mean(total.products, total.size, product_of_means)
        residual = mean_of_products - product_of_means
        return Server(after.w, server.base + residual), {**metrics, "residual": residual.norm()}
