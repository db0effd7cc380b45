"""GPFL (Zhang et al., ICCV 2023): shared class embeddings condition the features; the head is personal."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Experts, Plan, State, Task, at_least, begin, kept, train
from copfl.parts.averaging import Averaging, Down, Server, Upload, combined, personal_of, shared_of
from copfl.parts.classes import class_shares
from copfl.parts.valve import Valved, head_shape, initial, parts_of, size_of


class Client(NamedTuple):
    personal: Tensor  # [p], the head and local statistics
    moments: State  # of the parameters, the embeddings and the valve
    shares: Tensor  # [C], of its samples' classes; even before the first round


@dataclass(frozen=True)
class GPFL(Averaging):
    """Body, class embeddings E and valve are averaged. The valve opens for g, the mean of E, in the loss of
    the embeddings, and for q_n, the mean of E by the client's classes, in the loss of its head and in
    predictions.

    E, g and q_n are those that the client received.
    """

    # Paper: the authors' program forms g and q_n from the client's embeddings of the round before; FL4Health
    # from the received ones, as here, but divides q_n by the number of classes. The distance to the
    # embeddings is a norm over the whole batch, as in the authors' program, so it depends on the batch size.
    strength: float = 1e-2  # lambda; the authors' value for a CNN, 1e-4 for a ResNet-18
    decay: float = 0.1  # mu, of the embeddings and the valve; the authors' value for a CNN, 0 for a ResNet-18

    personal = ("head",)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, strength=self.strength, decay=self.decay)

    def server_init(self, task: Task, clients: int) -> Server:
        return Server(torch.cat([shared_of(task, self.personal, task.initial), initial(task)]))

    def client_init(self, task: Task) -> Client:
        trained = torch.cat([task.initial[: task.d], initial(task)])
        classes, _ = head_shape(task)
        even = task.initial.new_full((classes,), 1 / classes)
        own = personal_of(task, self.personal, task.initial)
        return Client(own, kept(self.optimizer, self.optimizer.init(trained)), even)

    def _received(self, task: Task, client: Client, down: Down) -> tuple[Tensor, Tensor]:
        """w with the client's head, and the vector of the embeddings and the valve."""
        shared = len(down.w) - size_of(task)
        w = combined(task, self.personal, client.personal, down.w[:shared])
        return w, down.w[shared:]

    def personal_model(self, task: Task, client: Client, down: Down) -> Experts:
        w, own = self._received(task, client, down)
        return _through(task, w, own, client.shares @ parts_of(task, own).embeddings)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        (w, own), d = self._received(task, client, down), task.d
        embeddings, shares = parts_of(task, own).embeddings, class_shares(task, data)
        of_all, of_client = embeddings.mean(0), shares @ embeddings  # g and q_n
        valved = Valved(task, of_all, of_client, embeddings, self.strength, self.decay)
        both = torch.cat([w[:d], own, w[d:]])
        state = begin(self.optimizer, client.moments, both[: valved.d])
        both, state, loss = train(valved, self.optimizer, both, state, data, plan)
        w, own = torch.cat([both[:d], both[valved.d :]]), both[d : valved.d]
        upload = Upload(torch.cat([shared_of(task, self.personal, w), own]), self.weight(data, w))
        after = Client(personal_of(task, self.personal, w), kept(self.optimizer, state), shares)
        model = _through(task, w, own, of_client)
        return ClientOutput(after, upload, model, {"loss": loss, "weight": upload.size})


def _through(task: Task, w: Tensor, own: Tensor, condition: Tensor) -> Experts:
    """The model whose head sees the features through the valve, open for this condition."""
    return Experts(w[None], w.new_ones(1), valve=parts_of(task, own).valve(condition))
