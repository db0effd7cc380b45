"""KT-pFL (Zhang et al., NeurIPS 2021): clients distil from each other's predictions on public samples."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Plan, State, Task, above, fresh, tree
from copfl.parts.averaging import Averaging
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
class KTpFL(Averaging):
    """Distil from the client's teacher on public samples, train on its data, predict the public samples.

    Published: temperature 10, penalty .7, one epoch over 5000 public samples, up to 10 of training,
    Sgd(lr=0.02).

    All models have one shape. The base class contributes the options and `fit`; no weights are averaged.
    """

    # Paper: the released code divides both distances by the number of classes C. The distillation's gradient
    # is then C times smaller (lr / C restores it), and the penalty keeps the coefficients equal. So it scales
    # their step to a mean of 0.01 to 0.05 per coefficient, and takes a softmax of 5 c: they change sign
    # around 1/N. Here distances are sums over the classes, the step is 1/L, and rows are
    # projected onto the simplex.
    distil_epochs: int = 1  # over the public samples
    temperature: float = 10.0
    penalty: float = 0.7  # rho
    batch: int = 32  # public samples in a step
    public: int = 500  # how many public samples a run sets aside, out of those that no client holds

    weights: ClassVar[str] = "equal"  # type: ignore[misc]  # no option: nothing is averaged
    minimum = (("epochs", 0), ("distil_epochs", 0), ("penalty", 0), ("batch", 1), ("public", 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, temperature=self.temperature)

    @property
    def total_epochs(self) -> int:
        return max(1, self.epochs)  # the distillation takes its random numbers from the plan's first step

    def server_init(self, task: Task, clients: int) -> Server:
        answers = task.initial.new_zeros(clients, len(tree.leaves(public_of(task))[0]), task.classes)
        known = torch.zeros_like(answers[:, 0, 0], dtype=torch.bool)
        return Server(answers, known, answers.new_full((clients, clients), 1 / clients), answers)

    def client_init(self, task: Task) -> Client:
        return Client(task.initial, fresh(self.optimizer, task))

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return Down(server.teachers[ids], server.known.any().expand(len(ids)))

    def global_statistics(self, task: Task, client: Client) -> Tensor:
        return client.w[task.d :]

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return client.w

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        public, objective = public_of(task), distillation(self.temperature)
        taught, batches = lesson(public, down.teacher, down.ready, self.batch, plan[0][0].key)
        epochs = (batches,) * self.distil_epochs
        w, moments, distance = self.fit(task, *client, taught, epochs, objective=objective)
        w, moments, loss = self.fit(task, w, moments, data, plan[: self.epochs])
        metrics = {"loss": loss, "weight": torch.ones_like(loss), "distillation_loss": distance}
        answers = softened(task, w, public, self.temperature)
        return ClientOutput(Client(w, moments), Upload(answers), w, metrics)

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
