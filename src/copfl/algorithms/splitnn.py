"""Split learning (Gupta and Raskar 2018), in parallel: the client runs the first layers, the server runs the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from copfl.algorithms.averaging import Client, Down, Server, Total, Upload
from copfl.algorithms.fedavg import FedAvg
from copfl.core.algorithm import ClientOutput, Metrics
from copfl.core.optim import Optimizer, Sgd
from copfl.core.task import Data, Plan, Task
from copfl.errors import at_least, unknown

FLOAT, LABEL = 4, 8  # bytes on the wire


@dataclass(frozen=True)
class SplitNN:
    """What is modelled: the weights, exactly; the messages of a step, by their size.

    In a step the client sends the cut's output and the labels, the server finishes the pass and sends back the gradient
    at the cut. By the chain rule both halves then move as if the whole model had been trained in one place, so that is
    what is computed. The clients work at the same time, each with its own copy of the server's half for the length of a
    round; the server then takes the mean of the copies, weighted by samples (SplitFed's first variant, and every copy's
    optimizer starts where its client's does). The clients' halves are never averaged: they stay personal.

    The copies stay at the server. So `bytes_up` and `bytes_down` do not count them but what crosses the cut: 4 bytes a
    number, 8 a label. With the cut before the head the arithmetic is LG-FedAvg's; what travels is not.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    cut: str = ""  # the last module that the client runs; "": all but the head

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)

    @property
    def total_epochs(self) -> int:
        return self.epochs

    def server_init(self, task: Task, clients: int) -> Server:
        return self._mean(task).server_init(task, clients)

    def client_init(self, task: Task) -> Client:
        return self._mean(task).client_init(task)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return self._mean(task).personal_model(task, client, down)

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        turn = self._mean(task).client_update(task, client, down, data, plan)
        width, visits = (
            self._width(task, self.personal_model(task, client, down), data),
            data.size * self.epochs,
        )
        up, back = (FLOAT * width + LABEL) * visits, FLOAT * width * visits
        return turn._replace(metrics={**turn.metrics, "bytes_up": up if width else back, "bytes_down": back})

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return self._mean(task).summand(task, server, id, upload)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        return self._mean(task).server_update(task, server, total)

    def _mean(self, task: Task) -> FedAvg:
        return FedAvg(self.optimizer, self.epochs, personal=held(task, self.cut))

    def _width(self, task: Task, w: Tensor, data: Data) -> int:
        """How many numbers cross the cut for one sample; none if the server runs nothing."""
        if set(held(task, self.cut)) >= set(task.layout.names[: task.layout.trained]):
            return 0
        sizes: list[int] = []
        module = task.module.get_submodule(self.cut)
        hook = module.register_forward_hook(lambda _, inputs, output: sizes.append(output.numel()))
        try:
            alone = replace(task, batched=None)  # only the model itself has the module to look at
            _, features = alone.forward(w, task.numbers(data.x[:1]))
        finally:
            hook.remove()
        return sizes[-1] if self.cut else features.numel()


def held(task: Task, cut: str) -> tuple[str, ...]:
    """The names of the parameters that the client holds: those of the modules up to the cut, in the model's order."""
    modules = [name for name, _ in task.module.named_modules()]
    if cut and cut not in modules:
        raise unknown("module", cut, (name for name in modules if name))
    end = cut or task.layout.head
    within = [place for place, name in enumerate(modules) if name == end or name.startswith(end + ".")]
    last = max(within) if cut else min(within) - 1
    names = task.layout.names[: task.layout.trained]
    return tuple(name for name in names if modules.index(name.rpartition(".")[0]) <= last)


def splitnn(optimizer: Optimizer = Sgd(), epochs: int = 1, cut: str = "") -> SplitNN:
    """The client holds the layers up to the module `cut`, such as cut="stem"; without one, all but the head."""
    return SplitNN(optimizer, epochs, cut)
