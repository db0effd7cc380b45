"""Fed-POE (Ghari and Shen 2024): an ensemble of a local model, the global model and earlier ones."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import Data, Experts, Plan, State, Task, training_split, tree, validation_split
from copfl.core.algorithm import ClientOutput, Metrics
from copfl.errors import UsageError
from copfl.parts.averaging import Averaging, Total, combined, shared_of
from copfl.parts.mixtures import Logs, even, fallen, losses, losses_of_halves, shares


class Server(NamedTuple):
    w: Tensor  # [s]
    bank: Tensor  # [M, s], earlier means
    birth: Tensor  # [M] int64, the round each was stored in; -1: none yet
    round: Tensor  # [] int64


Down = Server  # the server sends its whole record


class Client(NamedTuple):
    local: Tensor  # [D], trained on its own samples alone
    personal: Tensor  # batch-norm statistics of the global model, where they are local
    moments: State
    local_moments: State
    logs: Logs
    birth: Tensor  # [M], of the stored means it has weighed
    rounds: Tensor  # [], how many it took part in


@dataclass(frozen=True)
class FedPOE(Averaging):
    """Weights fall by exp(-rate * loss) with each expert's loss in every round; probabilities are mixed.

    Paper: a sample of a stream is predicted before it is learnt. Rounds go over the same samples, so every
    `held`-th is never trained on and serves to weigh the experts (0: the training samples do). The server
    stores all its models and a client draws some; here it stores the last few and every client uses them all.
    """

    rate: float = 0.1  # eta_c; the paper's 1 / sqrt(T) for 100 rounds
    stored: int = 2  # M
    period: int = 20  # rounds between two stored models
    holdout: int = 5

    minimum = (("rate", 0), ("stored", 1), ("period", 1), ("holdout", 0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.holdout == 1:
            raise UsageError("holdout=1 leaves no sample to train on; it must be 0, or at least 2")

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return tree.repeat(server, len(ids))

    def server_init(self, task: Task, clients: int) -> Server:
        w = shared_of(task, self.personal, task.initial)
        return Server(w, w.repeat(self.stored, 1), self._birth(task), torch.zeros_like(self._birth(task)[0]))

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        logs, never = even(task.initial, self.stored), task.initial.new_zeros(())
        return Client(task.initial, personal, moments, moments, logs, self._birth(task), never)

    def _birth(self, task: Task) -> Tensor:
        """0 for the first model, which is stored from the start; -1 for the empty places."""
        return -(torch.arange(self.stored, device=task.device) > 0).long()

    def personal_model(self, task: Task, client: Client, down: Down) -> Experts:
        """The ensemble; the mean alone for a new client, which has weighed no expert yet."""
        experts = self._experts(task, client.local, client.personal, down.w, down, client.logs)
        only_mean = (torch.arange(len(experts.share), device=task.device) == 1).to(experts.share.dtype)
        return experts._replace(share=torch.where(client.rounds > 0, experts.share, only_mean))

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        logs = self._weighed(task, client, down, data)
        plan = training_split(plan, self.holdout) if self.holdout else plan
        start = self.global_model(task, client, down)
        trained = self.fit(task, start, client.moments, data, plan)
        local = self.fit(task, client.local, client.local_moments, data, plan)
        (personal, moments), upload, _, metrics = self.output(task, trained, data)
        experts = self._experts(task, local.w, personal, upload.w, down, logs)
        metrics |= {"local_weight": experts.share[0], "global_weight": experts.share[1]}
        after = Client(local.w, personal, moments, local.state, logs, down.birth, client.rounds + 1)
        return ClientOutput(after, upload, experts, metrics)

    def _experts(
        self, task: Task, local: Tensor, personal: Tensor, mean: Tensor, down: Down, logs: Logs
    ) -> Experts:
        models = [combined(task, self.personal, personal, shared) for shared in (mean, *down.bank)]
        return Experts(torch.stack([local, *models]), shares(logs, down.birth >= 0))

    def _weighed(self, task: Task, client: Client, down: Down, data: Data) -> Logs:
        """The log-weights after each expert's loss on the samples that are held out."""
        models = self.personal_model(task, client, down).w
        unseen = validation_split(data, self.holdout) if self.holdout else data
        single = losses(task, models, unseen)
        # A model that was stored since is weighed as if it had been stored from the start. It has this weight
        # before the bank, of which it is a part, is evaluated.
        caught_up = -self.rate * client.rounds * single[2:]
        bank = torch.where(down.birth == client.birth, client.logs.bank, caught_up)
        logs = client.logs._replace(bank=bank)
        halves = losses_of_halves(task, models, logs, down.birth >= 0, unseen)
        return fallen(logs, single, halves, self.rate)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        mean, metrics = super().server_update(task, server, total)
        after = server.round + 1
        due, place = after % self.period == 0, after // self.period % self.stored
        here = (torch.arange(self.stored, device=after.device) == place) & due
        bank = torch.where(here[:, None], mean.w, server.bank)
        return Server(mean.w, bank, torch.where(here, after, server.birth), after), metrics
