"""Some clients predict with a model that they trained alone; what they send, and what others get, is unchanged."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Plan, Task
from copfl.core.payload import nbytes
from copfl.wrappers.base import Wrapper


class Down(NamedTuple):
    """The message of the algorithm inside, and what the client has already."""

    down: Any
    model: Tensor  # [D], that it trained alone; of the other clients anything
    has_model: Tensor  # [] bool


@dataclass(frozen=True)
class OwnModels(Wrapper):
    """The algorithm, with clients that keep a model of their own.

    clients  their numbers
    models   [clients, D], their vectors
    """

    clients: tuple[int, ...]
    models: Tensor = field(repr=False, compare=False)

    wraps: ClassVar[tuple[str, ...]] = ("down",)

    def downlink(self, server: Any, ids: Tensor) -> Down:
        is_of = ids[:, None] == torch.tensor(self.clients, device=ids.device)  # [ids, clients]
        return Down(super().downlink(server, ids), self.models[is_of.int().argmax(1)], is_of.any(1))

    def client_update(self, task: Task, client: Any, down: Down, data: Data, plan: Plan) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        if not isinstance(output.trained, Tensor):
            raise TypeError("a client has one model, and not a mixture")
        metrics = dict(output.metrics)  # the model is not sent
        metrics.setdefault("bytes_down", metrics["weight"].new_zeros(()) + nbytes(down.down))
        trained = torch.where(down.has_model, down.model, output.trained)
        return output._replace(trained=trained, metrics=metrics)
