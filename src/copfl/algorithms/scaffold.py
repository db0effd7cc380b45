"""SCAFFOLD (Karimireddy et al., ICML 2020): FedAvg with control variates against local drift."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import (
    ClientOutput,
    Data,
    Metrics,
    Plan,
    State,
    Task,
    Trained,
    begin,
    descend,
    has_valid,
    mean_loss,
)
from copfl.parts.averaging import Averaging
from copfl.parts.averaging import Total as Mean


class Server(NamedTuple):
    w: Tensor  # [s], x
    control: Tensor  # [d], c
    clients: Tensor  # [], N, of the whole federation


class Down(NamedTuple):
    w: Tensor  # [s]
    control: Tensor  # [d]
    corrects: Tensor  # [] bool, whether gradients are corrected


class Client(NamedTuple):
    personal: Tensor  # [p], local statistics
    moments: State
    control: Tensor  # [d], c_i


class Upload(NamedTuple):
    w: Tensor  # [s], y_i
    size: Tensor  # []
    control: Tensor  # [d], c_i+ - c_i


class Total(NamedTuple):
    w: Tensor
    size: Tensor
    control: Tensor  # [d], their sum


@dataclass(frozen=True)
class Scaffold(Averaging):
    """Every gradient is corrected by c - c_i; c_i becomes the mean of the client's gradients of this round.

    Paper: option II of Algorithm 1 sets c_i+ = c_i - c + (x - y_i) / (K η). With plain SGD this is the mean
    of the K gradients, and so it is computed here, which holds for every optimizer: c stays in the units of a
    gradient. An optimizer such as Adam gets the corrected gradient.
    """

    weights: str = field(default="equal", kw_only=True)  # the mean of y_i is over the participants

    fine_tuned = True

    def server_init(self, task: Task, clients: int) -> Server:
        # Filled on the device: also while a CUDA graph is recorded.
        count = torch.full_like(task.initial[0], clients)
        return Server(super().server_init(task, clients).w, torch.zeros_like(task.initial[: task.d]), count)

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        return Client(personal, moments, torch.zeros_like(task.initial[: task.d]))

    def downlink(self, server: Server, ids: Tensor) -> Down:
        corrects = torch.ones(len(ids), dtype=torch.bool, device=server.w.device)
        return Down(server.w.expand(len(ids), -1), server.control.expand(len(ids), -1), corrects)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w = self.global_model(task, client, down)
        moments = begin(self.optimizer, client.moments, w[: task.d])
        gradients, steps, losses = torch.zeros_like(client.control), w.new_zeros(()), []
        correction = torch.where(down.corrects, down.control - client.control, 0)
        batches = [batch for epoch in plan for batch in epoch]
        for batch in batches:
            seen: list[Tensor] = []

            def corrected(parameters: Tensor, grad: Tensor, seen: list[Tensor] = seen) -> Tensor:
                seen.append(grad)
                return grad + correction  # line 10

            w, moments, loss = descend(task, self.optimizer, w, moments, data, (batch,), adjust=corrected)
            is_step = has_valid(batch)
            gradients, steps = gradients + torch.where(is_step, seen[0], 0), steps + is_step
            losses.append(loss)
        control = torch.where(steps > 0, gradients / steps.clamp(min=1), client.control)  # line 12
        trained = Trained(w, moments, mean_loss(losses, batches))
        (personal, moments), (shared, size), model, metrics = self.output(task, trained, data)
        upload = Upload(shared, size, control - client.control)
        return ClientOutput(Client(personal, moments, control), upload, model, metrics)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return Total(upload.size * upload.w, upload.size, upload.control)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """Lines 16 and 17: c moves by the participants' sum over the number of all clients."""
        averaged, metrics = super().server_update(task, server, Mean(total.w, total.size))
        control = server.control + total.control / server.clients
        return Server(averaged.w, control, server.clients), metrics

    def next_message(self, task: Task, down: Down, upload: Upload) -> Down:
        """A new client goes on from its own model, without corrections: no other client moves that model.

        c - c_i would take its own last gradients out of every step, and the client would never learn.
        """
        return Down(upload.w, down.control, torch.zeros_like(down.corrects))
