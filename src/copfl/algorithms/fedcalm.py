"""A server rule after FedCALM (Zheng et al., CVPR 2025): layer by layer, a step without conflicts."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Plan, Task, tree
from copfl.parts.averaging import Client, Down, PartlyPersonal, Upload, layers
from copfl.parts.quadratic import in_box


class Server(NamedTuple):
    w: Tensor  # [s]
    weights: Tensor  # [N], each client's mean coefficient in the last step, over the layers


class Total(NamedTuple):
    w: Tensor  # [N, s], a row per client
    reported: Tensor  # [N]


@dataclass(frozen=True)
class FedCALM(PartlyPersonal):
    """In each layer: remove conflicts between updates, then give every client a gain along its own update.

    Paper: the authors published no code; stage 1 is the projection that the abstract names, stage 2 is as
    independent re-implementations read the paper. Stage 1 takes the clients in the order of their ids.

    Every two updates are compared, so the total is a table of all of them: O(N s) numbers where others need
    O(s). margin=0, limit=0 is stage 1 alone; personal=("head",) adds FedPer's personal head.
    """

    margin: float = 0.01
    limit: float = 1.0  # C: the tolerance; 0 leaves stage 1 alone

    weights: ClassVar[str] = "equal"  # type: ignore[misc]  # no option: stage 1 is a plain mean
    minimum = (("margin", 0), ("limit", 0))
    fine_tuned = True

    def server_init(self, task: Task, clients: int) -> Server:
        return Server(super().server_init(task, clients).w, task.initial.new_zeros(clients))

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        return output._replace(metrics={**output.metrics, "weight": torch.ones_like(output.metrics["loss"])})

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return Total(*tree.placed((upload.w, torch.ones_like(upload.size)), id, server.weights.shape[0]))

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        who = total.reported.nonzero()[:, 0]
        if not len(who):
            return server, {"conflicts": torch.zeros_like(server.w[:1].sum())}
        spans = layers(task, self.personal)
        parts = [total.w[who, a:b] - server.w[a:b] for a, b, _ in spans]  # [m, layer] each
        grams = torch.stack([(part.double() @ part.double().T).cpu() for part in parts])
        trained = torch.tensor([trained for *_, trained in spans])[:, None]
        best = resolved(grams, self.margin, self.limit)
        # Averaged statistics, which nobody trains, are a plain mean.
        coefficients = torch.where(trained, best, 1 / len(who)).to(server.w)  # [layers, m]
        step = torch.cat([one @ part for one, part in zip(coefficients, parts, strict=True)])
        weights = torch.zeros_like(server.weights).index_copy(0, who, coefficients.mean(0))
        conflicts = (grams < 0).double().sum((1, 2)).mean() / max(1, len(who) * (len(who) - 1))
        return Server(server.w + step, weights), {"conflicts": conflicts}


def resolved(gram: Tensor, margin: float, limit: float) -> Tensor:
    """The coefficients [L, m] of the clients' updates u_i in the step d, from inner products [L, m, m].

    Stage 1: u_i loses its part against any u_j with <u_i, u_j> < 0; the mean of what is left is the reference
    u. Stage 2: min 1/2 |d - u|^2 + limit * sum(slack_i) subject to <d, u_i> >= margin_i - slack_i, by its
    dual, in which each client has a weight 0 <= x_i <= limit and d = u + sum x_i u_i. Our margin_i is
    `margin` times |u_i| times the mean length, so that it means the same in every layer.
    """
    lengths = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    clients = torch.arange(gram.shape[1])
    mix = torch.eye(len(clients), dtype=gram.dtype).repeat(len(gram), 1, 1)  # row i: u_i in all updates
    for other in clients:
        along = (mix @ gram[:, :, other, None])[..., 0]  # [L, m]
        against = (along < 0) & (clients != other)
        mix[:, :, other] -= torch.where(against, along / (lengths[:, other, None] ** 2).clamp(min=1e-300), 0)
    reference = mix.mean(1)
    lack = margin * lengths * lengths.mean(1, keepdim=True) - (gram @ reference[..., None])[..., 0]
    return reference + in_box(gram, lack, limit)
