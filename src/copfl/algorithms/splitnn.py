"""Split learning (Gupta and Raskar 2018): the client runs the first layers, the server the rest."""

from dataclasses import dataclass, replace

from torch import Tensor

from copfl.core import ClientOutput, Data, Plan, Task, tree
from copfl.core.batches import visited
from copfl.errors import unknown
from copfl.parts.averaging import Averaging, Client, Down

FLOAT, LABEL = 4, 8  # bytes on the wire


@dataclass(frozen=True)
class SplitNN(Averaging):
    """The weights are computed exactly; the messages of a step enter by their size.

    In a step the client sends the cut's output and the labels; the server completes the forward pass and
    returns the gradient at the cut. By the chain rule both halves are then trained like one model, so one
    model is trained here. The clients work in parallel, each with a copy of the server's half for the length
    of a round; the server then takes the mean of the copies, weighted by samples (SplitFed's first variant,
    and every copy's optimizer starts from its client's state). The clients' halves are never averaged: they
    are personal.

    The copies stay at the server. So `bytes_up` and `bytes_down` count what crosses the cut instead: 4 bytes
    a number, 8 a label. With the cut before the head the arithmetic is LG-FedAvg's; the messages are not.
    """

    # Paper: the clients train one after the other, each from the last one's half; here in parallel.
    cut: str = ""  # the last module that the client runs, such as "stem"; "": all but the head

    def parts(self, task: Task) -> tuple[str, ...]:
        return client_parameters(task, self.cut)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        start = self.global_model(task, client, down)
        width, visits = self._width(task, start, data), visited(plan)
        up, back = (FLOAT * width + LABEL) * visits, FLOAT * width * visits
        crossing = {"bytes_up": up if width else back, "bytes_down": back}
        return output._replace(metrics={**output.metrics, **crossing})

    def _width(self, task: Task, w: Tensor, data: Data) -> int:
        """How many numbers cross the cut for one sample; none if the server runs nothing."""
        if set(self.parts(task)) >= set(task.layout.names[: task.layout.trained]):
            return 0
        sizes: list[int] = []
        module = task.module.get_submodule(self.cut)
        hook = module.register_forward_hook(lambda _, inputs, output: sizes.append(output.numel()))
        try:
            plain = replace(task, batched=None)  # the hook needs the module itself
            _, features = plain.forward(w, task.numbers(tree.each(lambda t: t[:1], data.x)))
        finally:
            hook.remove()
        return sizes[-1] if self.cut else features.numel()


def client_parameters(task: Task, cut: str) -> tuple[str, ...]:
    """The names of the client's parameters: those of the modules up to the cut, in the model's order."""
    modules = [name for name, _ in task.module.named_modules()]
    if cut and cut not in modules:
        raise unknown("module", cut, (name for name in modules if name))
    end = cut or task.layout.head
    within = [place for place, name in enumerate(modules) if name == end or name.startswith(end + ".")]
    last = max(within) if cut else min(within) - 1
    names = task.layout.names[: task.layout.trained]
    return tuple(name for name in names if modules.index(name.rpartition(".")[0]) <= last)
