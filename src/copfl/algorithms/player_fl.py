"""PLayer-FL (Elhussein and Gürsoy, MLSys 2026): layers up to a measured transition are shared."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import (
    ClientOutput,
    Data,
    Masked,
    Metrics,
    Plan,
    State,
    Task,
    UsageError,
    begin,
    descend,
    fresh,
    has_valid,
    kept,
    train,
    tree,
)
from copfl.errors import at_least
from copfl.parts.averaging import Averaging, weighted_mean
from copfl.parts.layers import layer_count, layer_of_entries, means_of_layers


class Server(NamedTuple):
    w: Tensor  # [D]
    transition: Tensor  # [] int64, the first personal layer; the number of layers before it is known
    known: Tensor  # [] bool


Down = Server  # the server sends its whole record


class Client(NamedTuple):
    w: Tensor  # [D], after its last training
    mask: Tensor  # [D] bool, True = personal, as in its last upload
    moments: State
    started: Tensor  # [] bool, whether it has trained before


class Upload(NamedTuple):
    shared: Masked  # zero from the transition on
    size: Tensor  # []
    sensitivity: Tensor  # [L], of its layers in the first round; then zero


class Total(NamedTuple):
    w: Tensor  # [D], sum of size * w
    size: Tensor
    sensitivity: Tensor  # [L], sum of size * sensitivity


@dataclass(frozen=True)
class PLayerFL(Averaging):
    """Round one trains all layers and measures s_l, the mean of (theta * gradient)^2 over a layer's entries.

    F_l = s_1 + ... + s_l of the mean over the clients; the first personal layer is the one at which F grows
    by the largest factor. From the second round on it is FedPer with these layers.
    """

    # Paper: the layer is the first whose jump exceeds a threshold, of which no source has the value; the
    # authors' program lists layers by hand. `jump` is such a threshold, on F_l / F_{l-1}; 0 takes the
    # largest. The gradient is the mean over the steps of the first epoch, which training has anyway, and
    # theta is that after it.
    jump: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, jump=self.jump)

    def server_init(self, task: Task, clients: int) -> Server:
        layers = layer_count(task.layout)
        if layers < 2:
            raise UsageError(
                "player_fl divides a model between two of its layers, and this model trains one alone; "
                "choose another algorithm, or train more layers"
            )
        unknown = torch.zeros((), dtype=torch.bool, device=task.device)
        return Server(task.initial, torch.full((), layers, device=task.device), unknown)

    def client_init(self, task: Task) -> Client:
        never = torch.zeros((), dtype=torch.bool, device=task.device)
        return Client(task.initial, task.local(), fresh(self.optimizer, task), never)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return tree.repeat(server, len(ids))

    def _personal(self, task: Task, transition: Tensor) -> Tensor:
        """[D] bool, the entries of the layers from the transition on, and local statistics."""
        return (layer_of_entries(task.layout, task.device) >= transition) | task.local()

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """Its own layers from the transition on; a new client has those of the first round's mean."""
        own = (self._personal(task, down.transition) & client.started) | task.local()
        return torch.where(own, client.w, down.w)

    def global_statistics(self, task: Task, client: Client) -> Tensor:
        return client.w[task.d :]

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w = self.personal_model(task, client, down)
        state = begin(self.optimizer, client.moments, w[: task.d])
        gradient, steps, first_loss = torch.zeros_like(w[: task.d]), w.new_zeros(()), w.new_zeros(())
        for batch in plan[0]:
            seen: list[Tensor] = []

            def watched(parameters: Tensor, grad: Tensor, seen: list[Tensor] = seen) -> Tensor:
                seen.append(grad)
                return grad

            w, state, loss = descend(task, self.optimizer, w, state, data, (batch,), adjust=watched)
            is_step = has_valid(batch)
            gradient, steps = gradient + torch.where(is_step, seen[0], 0), steps + is_step
            first_loss = first_loss + torch.where(is_step, loss, 0)
        per_step = steps.clamp(min=1)
        sensitivity = means_of_layers(task.layout, (w[: task.d] * gradient / per_step).square())
        w, state, rest_loss = train(task, self.optimizer, w, state, data, plan[1:])
        loss = (first_loss / per_step + (len(plan) - 1) * rest_loss) / len(plan)
        mask, size = self._personal(task, down.transition), self.weight(data, w)
        upload = Upload(Masked(torch.where(mask, 0, w), mask), size, torch.where(down.known, 0, sensitivity))
        after = Client(w, mask, kept(self.optimizer, state), torch.ones_like(client.started))
        return ClientOutput(after, upload, w, {"loss": loss, "weight": size})

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        size = upload.size
        return Total(size * upload.shared.values, size, size * upload.sensitivity)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """The mean of the shared layers; after the first round the transition, once."""
        mean = weighted_mean(total.w, total.size, server.w)
        w = torch.where(self._personal(task, server.transition), server.w, mean)
        has_uploads = total.size > 0
        sensitivity = weighted_mean(total.sensitivity, total.size, torch.zeros_like(total.sensitivity))
        measured = transition_of(sensitivity, self.jump)
        transition = torch.where(server.known | ~has_uploads, server.transition, measured)
        shared = layer_of_entries(task.layout, task.device)[: task.d] < transition
        metrics = {"shared": shared.to(w.dtype).mean(), "transition": transition.to(w.dtype)}
        return Server(w, transition, server.known | has_uploads), metrics

    def next_message(self, task: Task, down: Down, upload: Upload) -> Down:
        """Before the transition is known everything is shared, and a new client gets its own model back."""
        values, personal = upload.shared
        return down._replace(w=torch.where(down.known | personal, down.w, values))


def transition_of(sensitivity: Tensor, jump: float) -> Tensor:
    """[] int64 in 1..L-1, the layer at which F grows most, or the first where by a factor above `jump`."""
    information = sensitivity.cumsum(0)  # F
    factors = information[1:] / information[:-1].clamp(min=torch.finfo(sensitivity.dtype).tiny)
    largest = factors.argmax()
    if not jump:
        return largest + 1
    above = factors > jump
    return torch.where(above.any(), above.to(torch.int64).argmax(), largest) + 1
