"""FedAvg, as the base of algorithms that average a fixed part of the model and keep the rest at the client.

Vectors are cut and put together, not masked: a personal entry is not in the shared vector at all, and no
shape depends on a tensor's value.
"""

from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core.algorithm import ClientOutput, Metrics
from copfl.core.layout import Runs, cut, put_together, runs
from copfl.core.optim import Optimizer, State, begin, kept, plain_sgd
from copfl.core.task import Data, Personal, Plan, Task
from copfl.core.train import Trained, fresh, train
from copfl.errors import UsageError, at_least, one_of
from copfl.kernels.fused import elementwise
from copfl.kernels.private_torch import mapped

WEIGHTS = ("samples", "equal")


class Server(NamedTuple):
    w: Tensor  # [s], the shared entries


class Down(NamedTuple):
    w: Tensor  # [s]


class Client(NamedTuple):
    personal: Tensor  # [p], the personal entries
    moments: State


class Upload(NamedTuple):
    w: Tensor  # [s]
    size: Tensor  # [], the client's weight: its number of training samples, or 1


class Total(NamedTuple):
    w: Tensor  # [s], sum of size * w
    size: Tensor


# -- personal and shared entries of w ------------------------------------------------------------------------


def _runs(task: Task, parts: tuple[str, ...]) -> Runs:
    return runs(task.layout, (*parts, "buffers") if task.buffers == "local" else parts)


def personal_of(task: Task, parts: tuple[str, ...], w: Tensor) -> Tensor:
    """The entries of w that stay with the client if these parts are personal."""
    return cut(w, _runs(task, parts), True)


def shared_of(task: Task, parts: tuple[str, ...], w: Tensor) -> Tensor:
    """The entries of w that are sent if these parts are personal."""
    return cut(w, _runs(task, parts), False)


def combined(task: Task, parts: tuple[str, ...], personal: Tensor, shared: Tensor) -> Tensor:
    """w, from its personal and its shared entries."""
    return put_together(_runs(task, parts), personal, shared)


def with_shared(task: Task, parts: tuple[str, ...], w: Tensor, shared: Tensor) -> Tensor:
    """w with its shared entries replaced."""
    return combined(task, parts, personal_of(task, parts, w), shared)


def active_part(task: Task, part: str) -> Tensor | None:
    """The mask of the parameters that one part of the model trains; None, which means all, for "all"."""
    return None if part == "all" else task.where(part)[: task.d]


def layers(task: Task, parts: tuple[str, ...]) -> list[tuple[int, int, bool]]:
    """Start, stop and whether it is trained of each layer (module) in the shared vector."""
    layout, local = task.layout, task.local(*parts).cpu()
    ends = list(accumulate(layout.sizes))
    shared = [place for place, end in enumerate(ends) if not local[end - 1]]
    start, spans = 0, []

    def layer(place: int) -> tuple[str, bool]:
        return layout.names[place].rpartition(".")[0], place < layout.trained

    for (_, trained), members in groupby(shared, layer):
        stop = start + sum(layout.sizes[place] for place in members)
        spans.append((start, stop, trained))
        start = stop
    return spans


def weighted_mean(total: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """total / weight, entry by entry; the value before where the weight is zero."""
    averaged = weight > 0
    if not (weight.dim() or weight.is_cuda or mapped()) and averaged:  # one pass less over a long vector
        return total / weight
    return torch.where(averaged, total / torch.where(averaged, weight, 1), before)


def _product(w: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (w * weight,)


# -- the algorithm -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Averaging:
    """The mean of the shared entries; a subclass overrides what it changes.

    weights  "samples": in proportion to a client's training samples. "equal": all clients weigh the same
    """

    optimizer: Optimizer = field(default_factory=plain_sgd)
    epochs: int = 1
    weights: str = field(default="samples", kw_only=True)

    personal: ClassVar[tuple[str, ...]] = ()  # the parts of the model that stay with the client
    minimum: ClassVar[tuple[tuple[str, float], ...]] = ()  # options and their smallest allowed values
    phases: ClassVar[tuple[str, ...]] = ("epochs",)  # the options that add up to the epochs of an update
    needs: ClassVar[tuple[str, ...]] = ()  # patterns of parameters without which it refuses a model
    fine_tuned: ClassVar[bool] = False  # whether a new client continues from its own model, see next_message

    def __post_init__(self) -> None:
        for name, low in {"epochs": 1, **dict(self.minimum)}.items():
            at_least(low, **{name: getattr(self, name)})
        one_of(WEIGHTS, weights=self.weights)

    @property
    def total_epochs(self) -> int:
        return sum(getattr(self, phase) for phase in self.phases)

    def parts(self, task: Task) -> tuple[str, ...]:
        """The personal parts of this task's model."""
        return self.personal

    def server_init(self, task: Task, clients: int) -> Any:
        return Server(shared_of(task, self.parts(task), task.initial))

    def client_init(self, task: Task) -> Any:
        return Client(personal_of(task, self.parts(task), task.initial), fresh(self.optimizer, task))

    def downlink(self, server: Any, ids: Tensor) -> Any:
        """The shared entries alone; what else a server's record has stays with the server."""
        return Down(server.w.expand(len(ids), -1))

    def personal_model(self, task: Task, client: Any, down: Any) -> Any:
        return self.global_model(task, client, down)

    def client_update(self, task: Task, client: Any, down: Any, data: Data, plan: Plan) -> ClientOutput:
        w = self.global_model(task, client, down)
        return self.output(task, self.fit(task, w, client.moments, data, plan), data)

    def summand(self, task: Task, server: Any, id: Tensor, upload: Any) -> Any:
        return Total(elementwise(_product, upload.w, upload.size)[0], upload.size)

    def server_update(self, task: Task, server: Any, total: Any) -> tuple[Any, Metrics]:
        """The mean by the clients' weights; a round without uploads changes nothing."""
        w = weighted_mean(total.w, total.size, server.w)
        return Server(w), {"shared": (~task.where(*self.parts(task)))[: task.d].to(w.dtype).mean()}

    def global_statistics(self, task: Task, client: Any) -> Tensor:
        """Those of the model that the client trained from the global one, after its personal entries."""
        if "personal" not in client._fields:
            raise UsageError(
                f"{type(self).__name__} has a Client of its own without `personal`, so nothing says which batch-norm "
                "statistics its client has for the global model; give Client the field `personal`, with what "
                "`personal_of` returns, or give the algorithm the method global_statistics(self, task, client), "
                "which returns them as a vector [len(task.initial) - task.d]"
            )
        personal: Tensor = client.personal
        return personal[len(personal) - (len(task.initial) - task.d) :]

    def next_message(self, task: Task, down: Any, upload: Any) -> Any:
        return down._replace(w=upload.w) if self.fine_tuned else down

    # -- steps of a local update -----------------------------------------------------------------------------

    def global_model(self, task: Task, client: Any, down: Any) -> Tensor:
        """The global model with the client's personal entries."""
        return combined(task, self.parts(task), client.personal, down.w)

    def fit(self, task: Task, w: Tensor, state: State, data: Data, epochs: Plan, **options: Any) -> Trained:
        """`train`, from the optimizer state in the client's record to the next state in the record."""
        state = begin(self.optimizer, state, w[: task.d])
        ends = not self.optimizer.keep
        w, state, loss = train(task, self.optimizer, w, state, data, epochs, ends, **options)
        return Trained(w, kept(self.optimizer, state), loss)

    def weight(self, data: Data, like: Tensor) -> Tensor:
        """The client's weight in the mean, see `weights`."""
        samples = data.size.to(like.dtype)
        return samples if self.weights == "samples" else torch.ones_like(samples)

    def output(
        self, task: Task, trained: Trained, data: Data, predicts: Personal | None = None
    ) -> ClientOutput:
        """The output after this training; `predicts` is the evaluated model if not the trained one."""
        w, state, loss = trained
        client = Client(personal_of(task, self.parts(task), w), kept(self.optimizer, state))
        upload = Upload(shared_of(task, self.parts(task), w), self.weight(data, w))
        metrics = {"loss": loss, "weight": upload.size}
        return ClientOutput(client, upload, w if predicts is None else predicts, metrics)


@dataclass(frozen=True)
class PartlyPersonal(Averaging):
    """Averaging whose personal parts are an option."""

    personal: tuple[str, ...] = ()  # type: ignore[misc]
