"""KT-pFL (Zhang et al., NeurIPS 2021): clients distil from each other's predictions on public samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import ClientOutput, Metrics
from copfl.core.optim import Optimizer, Sgd, State, begin, kept
from copfl.core.task import Data, Plan, Task
from copfl.core.train import fresh, train
from copfl.errors import above, at_least
from copfl.parts.quadratic import onto_simplex
from copfl.parts.transfer import coefficients_after, distillation, lesson, public_of, softened


class Server(NamedTuple):
    answers: Tensor  # [N, p, C], the last softened answers of each client
    known: Tensor  # [N] bool, who has ever answered
    coefficients: Tensor  # [N, N], c: how much client i learns from client j; rows add up to 1
    teachers: Tensor  # [N, p, C], each client's own mixture of all answers


class Down(NamedTuple):
    teacher: Tensor  # [p, C]
    ready: Tensor  # [] bool, whether there is one


class Client(NamedTuple):
    w: Tensor  # [D], never leaves
    moments: State


class Upload(NamedTuple):
    answers: Tensor  # [p, C]


class Total(NamedTuple):
    answers: Tensor  # [N, p, C], a row per client
    reported: Tensor  # [N]


@dataclass(frozen=True)
class KTpFL:
    """Distil from the client's teacher on public samples, train on its data, predict the public samples.

    Published: temperature 10, penalty .7, one epoch over 5000 public samples, up to 10 of training,
    Sgd(lr=0.02).

    Paper: the released code searches for a step size of the coefficients and then takes a softmax of 5 c,
    which shrinks what was learnt; here the step is 1/L, and rows are projected back onto the simplex. All
    models have one shape.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    distil_epochs: int = 1  # over the public samples
    temperature: float = 10.0
    penalty: float = 0.7  # rho
    batch: int = 32  # public samples in a step
    public: int = 500  # how many public samples a run sets aside, out of those that no client holds

    def __post_init__(self) -> None:
        at_least(0, epochs=self.epochs, distil_epochs=self.distil_epochs, penalty=self.penalty)
        at_least(1, batch=self.batch, public=self.public)
        above(0, temperature=self.temperature)

    @property
    def total_epochs(self) -> int:
        return self.epochs

    def server_init(self, task: Task, clients: int) -> Server:
        answers = task.initial.new_zeros(clients, public_of(task).shape[0], task.classes)
        known = torch.zeros_like(answers[:, 0, 0], dtype=torch.bool)
        return Server(answers, known, answers.new_full((clients, clients), 1 / clients), answers)

    def client_init(self, task: Task) -> Client:
        return Client(task.initial, fresh(self.optimizer, task))

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return Down(server.teachers[ids], server.known.any().expand(len(ids)))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return client.w

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        public, w = public_of(task), client.w
        taught, batches = lesson(public, down.teacher, down.ready, self.batch)
        moments, objective = (
            begin(self.optimizer, client.moments, w[: task.d]),
            distillation(self.temperature),
        )
        epochs = (batches,) * self.distil_epochs
        w, moments, distance = train(task, self.optimizer, w, moments, taught, epochs, objective=objective)
        moments = begin(
            self.optimizer, moments, w[: task.d]
        )  # a new state for each phase, unless states are kept
        w, moments, loss = train(task, self.optimizer, w, moments, data, plan)
        after = Client(w, kept(self.optimizer, moments))
        metrics = {"loss": loss, "weight": torch.ones_like(loss), "distillation_loss": distance}
        return ClientOutput(after, Upload(softened(task, w, public, self.temperature)), w, metrics)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        row = (upload.answers, torch.ones_like(upload.answers[0, 0]))
        return Total(*tree.placed(row, id, server.known.shape[0]))

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """One step of the coefficients; clients that did not take part enter with their last answers."""
        reported = total.reported > 0
        answers = torch.where(reported[:, None, None], total.answers, server.answers)
        known = server.known | reported
        stepped = coefficients_after(server.coefficients, answers, known, self.penalty)
        c = torch.where(known.any(), onto_simplex(stepped, known), server.coefficients)
        teachers = torch.einsum("ij,jpc->ipc", c, answers)
        return Server(answers, known, c, teachers), {"own_weight": c.diagonal().mean()}
