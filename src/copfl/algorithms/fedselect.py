"""FedSelect (Tamirisa et al., CVPR 2024): the entries of each tensor that changed most become personal."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Masked, Metrics, Plan, State, Task, begin, descend, fresh, kept
from copfl.parts.averaging import Averaging, Down, Server, weighted_mean
from copfl.parts.phases import Phases
from copfl.parts.pwpm import Pwpm, personal_fraction


class Client(NamedTuple):
    w: Tensor  # [D], after its last training
    uploaded: Tensor  # [D] bool, the mask of its last upload: what the next global model does not replace
    mask: Tensor  # [D] bool, the mask it trains with next; a newly personal entry takes one last average
    moments: State
    reference: Tensor  # [d], its weights at the last growth of the mask
    rounds: Tensor  # [] int64, how many it took part in


class Upload(NamedTuple):
    shared: Masked


class Total(NamedTuple):
    w: Tensor  # [D], sum of (1 - m) w
    sharers: Tensor  # [D], sum of (1 - m)


@dataclass(frozen=True)
class Growth(Pwpm):
    """PWPM's growth, with FedSelect's budget: a tensor that is not above it grows, and may exceed it once."""

    def within_budget(self, wanted: Tensor, room: Tensor) -> Tensor:
        return wanted * (room >= 0)


@dataclass(frozen=True)
class FedSelect(Averaging):
    """Personal epoch, shared epoch, every few rounds a larger mask; an entry is the mean of its sharers.

    `epochs` counts pairs of a personal and a shared epoch.

    Published: rate .25, budget .8, every 3 rounds, 15 epochs of Sgd(lr=0.05, momentum=0, weight_decay=0). The
    default optimizer and epochs are those of the other algorithms here: methods are compared, not optimizers.

    Paper: the released code trains with batch norm in evaluation mode from the second round on, by accident.
    Here training is training.
    """

    rate: float = 0.25  # the fraction of each tensor's shared entries that turns personal
    budget: float = 0.8  # a mask above this fraction of a tensor grows no more
    interval: int = 3  # rounds between growths
    count: str = "all"  # "moving": rate and budget count only the entries that training changes
    state_per_phase: bool = False  # the personal and the shared epochs have an optimizer state each

    weights: ClassVar[str] = "equal"  # type: ignore[misc]  # no option: sharers always weigh the same
    phases = ("epochs", "epochs")

    def __post_init__(self) -> None:
        super().__post_init__()
        Phases(state_per_phase=self.state_per_phase).check_state(self.optimizer)
        _ = self.growth  # its options are checked where it is built

    @property
    def growth(self) -> Growth:
        return Growth(
            self.rate,
            self.budget,
            candidates="tensor",
            count=self.count,
            warmup=self.interval,
            interval=self.interval,
        )

    def server_init(self, task: Task, clients: int) -> Server:
        return Server(task.initial)

    def client_init(self, task: Task) -> Client:
        local, never = task.local(), torch.zeros_like(task.initial[0], dtype=torch.int64)
        return Client(task.initial, local, local, fresh(self.optimizer, task), task.initial[: task.d], never)

    def global_statistics(self, task: Task, client: Client) -> Tensor:
        return client.w[task.d :]

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return torch.where(client.uploaded, client.w, down.w)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w, mask = self.personal_model(task, client, down), client.mask
        personal = mask[: task.d]
        states = [begin(self.optimizer, client.moments, w[: task.d])] * (2 if self.state_per_phase else 1)
        losses: list[Tensor] = []
        for number, batches in enumerate(plan):  # personal, shared, ... each continues the last
            active, own = ~personal if number % 2 else personal, number % len(states)
            w, states[own], loss = descend(task, self.optimizer, w, states[own], data, batches, active=active)
            losses.append(loss)
        change = w[: task.d] - client.reference
        grown = self.growth.grow(task.layout, personal, change, client.rounds)
        reference = torch.where(self.growth.due(client.rounds), w[: task.d], client.reference)
        moments = kept(self.optimizer, self.optimizer.forget(states[0], grown & ~personal))
        after = Client(w, mask, torch.cat([grown, mask[task.d :]]), moments, reference, client.rounds + 1)
        metrics = {"loss": torch.stack(losses).mean(), "weight": torch.ones_like(losses[0])}
        metrics |= personal_fraction(personal, change)
        return ClientOutput(after, Upload(Masked(torch.where(mask, 0, w), mask)), w, metrics)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return Total(upload.shared.values, (~upload.shared.personal).to(server.w.dtype))

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """The mean over the sharers; without any an entry keeps its value (zero in the released code)."""
        averaged = (total.sharers > 0)[: task.d].to(server.w.dtype).mean()
        return Server(weighted_mean(total.w, total.sharers, server.w)), {"averaged": averaged}
