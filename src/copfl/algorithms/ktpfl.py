"""KT-pFL (Zhang et al., NeurIPS 2021): clients teach each other by their answers to public samples, not by weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl import tree
from copfl.algorithms.algorithm import Figures, Turn
from copfl.errors import UsageError, at_least
from copfl.optim import Optimizer, Sgd, State, begin, kept, train
from copfl.task import PASS, Batch, Data, Objective, Pass, Plan, Task, mean_of_real


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
    """Distil towards the own teacher on the public samples, train on the own samples, answer the public samples.

    Paper: the coefficients c_i of client i descend |own answers - sum_j c_ij answers_j|^2 + penalty |c_i - 1/N|^2 (both
    means over their entries), a step a round. The released code searches for a step size and then takes a softmax of
    5 c, which shrinks what was learnt round after round; here the step is 1/L, the largest that cannot overshoot, and
    the rows are projected back onto the simplex. The models may not differ in shape here.
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
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature} must be a number above 0")

    @property
    def passes(self) -> int:
        return self.epochs

    def server_init(self, task: Task, clients: int) -> Server:
        answers = task.first.new_zeros(clients, _public(task).shape[0], task.classes)
        known = torch.zeros_like(answers[:, 0, 0], dtype=torch.bool)
        return Server(answers, known, answers.new_full((clients, clients), 1 / clients), answers)

    def client_init(self, task: Task) -> Client:
        return Client(task.first, kept(self.optimizer, self.optimizer.init(task.first[: task.d])))

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return Down(server.teachers[ids], server.known.any().expand(len(ids)))

    def personal(self, task: Task, client: Client, down: Down) -> Tensor:
        return client.w

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> Turn[Client, Upload]:
        lesson, pages = self._lesson(task, down)
        w, moments = client.w, begin(self.optimizer, client.moments, client.w[: task.d])
        passes = (pages,) * self.distil_epochs
        w, moments, taught = train(task, self.optimizer, w, moments, lesson, passes, objective=self._distance())
        moments = begin(self.optimizer, moments, w[: task.d])  # each phase starts afresh, unless states are kept
        w, moments, loss = train(task, self.optimizer, w, moments, data, plan)
        after = Client(w, kept(self.optimizer, moments))
        figures = {"loss": loss, "weight": torch.ones_like(loss), "distance": taught}
        return Turn(after, Upload(self._answers(task, w)), w, figures)

    def _lesson(self, task: Task, down: Down) -> tuple[Data, Pass]:
        """The public samples with the teacher's answers for labels, in steps of `batch`; none is real if not ready."""
        public = _public(task)
        order = torch.arange(public.shape[0], device=public.device)
        steps = (Batch(index, down.ready.expand(len(index)), None, None) for index in torch.split(order, self.batch))
        return Data(public, down.teacher, order[-1] + 1), tuple(steps)

    def _distance(self) -> Objective:
        """KL(teacher || own answers), softened."""

        def loss(logits: Tensor, features: Tensor, teacher: Tensor, real: Tensor | None) -> Tensor:
            logs = F.log_softmax(logits / self.temperature, 1)
            return mean_of_real((torch.xlogy(teacher, teacher) - teacher * logs).sum(1), real)

        return loss

    def _answers(self, task: Task, w: Tensor) -> Tensor:
        """The softened probabilities for the public samples [p, C]."""
        parts = [task.forward(w, task.numbers(x))[0] for x in torch.split(_public(task), PASS)]
        return F.softmax(torch.cat(parts) / self.temperature, 1)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        row = (upload.answers, torch.ones_like(upload.answers[0, 0]))
        return Total(*tree.placed(row, id, server.known.shape[0]))

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Figures]:
        """One step of the coefficients; those who did not take part are quoted with their last answers."""
        reported = total.reported > 0
        answers = torch.where(reported[:, None, None], total.answers, server.answers)
        known = server.known | reported
        flat, n = answers.flatten(1), known.sum().clamp(min=1)
        even = known.to(flat.dtype) / n
        flat = torch.where(known[:, None], flat - even @ flat, 0)  # rows add up to 1: only differences count
        gram = flat @ flat.T / flat.shape[1]
        c = torch.where(known[:, None], server.coefficients, even)
        slope = 2 * (c - torch.eye(len(c), device=c.device, dtype=c.dtype)) @ gram + 2 * self.penalty / n * (c - even)
        steepest = 2 * torch.linalg.eigvalsh(gram)[-1] + 2 * self.penalty / n
        c = torch.where(known.any(), onto_simplex(c - slope / steepest.clamp(min=1e-30), known), server.coefficients)
        teachers = torch.einsum("ij,jpc->ipc", c, answers)
        return Server(answers, known, c, teachers), {"own_coefficient": c.diagonal().mean()}


def onto_simplex(rows: Tensor, allowed: Tensor) -> Tensor:
    """The nearest rows [m, n] that are not negative, add up to 1, and are zero where not allowed [n]."""
    values = torch.where(allowed, rows, -torch.inf)
    ordered, _ = values.sort(1, descending=True)
    count = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    excess = (torch.where(torch.isfinite(ordered), ordered, 0).cumsum(1) - 1) / count
    last = (ordered > excess).sum(1, keepdim=True).clamp(min=1) - 1
    return (values - excess.gather(1, last)).clamp(min=0)


def _public(task: Task) -> Tensor:
    if task.public is None or not len(task.public):
        raise UsageError(
            "ktpfl needs public samples that no client holds, and there are none; leave some training samples over "
            "(fewer clients, or fewer samples a client), or give some, such as task_of(..., public=samples)"
        )
    return task.public


def ktpfl(
    optimizer: Optimizer = Sgd(),
    epochs: int = 1,
    distil_epochs: int = 1,
    temperature: float = 10.0,
    penalty: float = 0.7,
    batch: int = 32,
    public: int = 500,
) -> KTpFL:
    """Published: temperature 10, penalty .7, one epoch over 5000 public samples, up to 10 of training, Sgd(lr=0.02)."""
    return KTpFL(optimizer, epochs, distil_epochs, temperature, penalty, batch, public)
