"""CO-PFL: contribution-oriented personalised federated learning, Algorithms 1 and 2 of the paper."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Masked, Metrics, Optimizer, Plan, State, Task, fresh, kept, tree
from copfl.kernels.fused import either
from copfl.parts.averaging import weighted_mean
from copfl.parts.cowa import Cowa, bounded
from copfl.parts.mamo import Mamo
from copfl.parts.phases import Phases
from copfl.parts.pwpm import Pwpm, personal_fraction, shared, sharing_metrics, weighted


class Server(NamedTuple):
    w: Tensor  # [D], w^k
    weights: Tensor  # [D], the sum of Gamma in the last mean of each entry; 0 without a mean
    score: Tensor  # [], the sum of Gamma over the last round's clients
    union: Tensor  # [D] bool, m_0^k: personal for at least one client
    round: Tensor  # [] int64, k
    bounds: Tensor | None = None  # [2], the bounds on a score in the next round; None: no bounds


Down = Server  # Algorithm 1, line 2: the server sends its whole record


class Client(NamedTuple):
    w: Tensor  # [D], w_n after its last training; on its shared entries, what it uploaded
    mask: Tensor  # [D] bool, m_n, True = personal; local statistics are personal from the start
    moments: State  # u_n, v_n and their step counts
    seen: Tensor  # [D], the global model of the last round it took part in
    score: Tensor  # [], its Gamma in that round
    round: Tensor  # [] int64, that round; -1 before the first


class Upload(NamedTuple):
    shared: Masked  # g_n and m_n, Eq. (8)
    score: Tensor  # [], Gamma_n


class Total(NamedTuple):
    w: Tensor  # [D], sum of Gamma (1 - m) w
    weight: Tensor  # [D], sum of Gamma (1 - m)
    personal: Tensor  # [D], the number of clients for which the entry is personal
    score: Tensor  # [], sum of Gamma
    clients: Tensor  # []


@dataclass(frozen=True)
class COPFL:
    """Masked local training (MAMO) in two phases, growing masks (PWPM), contribution weights (COWA)."""

    optimizer: Optimizer = field(default_factory=Mamo)
    growth: Pwpm = field(default_factory=Pwpm)
    contribution: Cowa = field(default_factory=Cowa)
    phases: Phases = field(default_factory=Phases)
    # "sharers": each entry is the mean over the clients that share it. "union" (Paper: Algorithm 1, line 6):
    # an entry that is personal for any client is never averaged again.
    merge: str = "sharers"

    def __post_init__(self) -> None:
        self.growth.check_merge(self.merge)
        self.phases.check_state(self.optimizer)

    @property
    def total_epochs(self) -> int:
        return self.phases.total_epochs

    def server_init(self, task: Task, clients: int) -> Server:
        zeros, zero = torch.zeros_like(task.initial), task.initial.new_zeros(())
        bounds = self.contribution.initial_bounds(clients, zeros)
        return Server(task.initial, zeros, zero, zeros.bool(), zero.long(), bounds)

    def client_init(self, task: Task) -> Client:
        w, zero = task.initial, task.initial.new_zeros(())
        return Client(w, task.local(), fresh(self.optimizer, task), w, zero, zero.long() - 1)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        """Algorithm 1, line 2."""
        return tree.repeat(server, len(ids))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """w_n^k: the client's own entries where they are personal, else the global model's."""
        return either(client.mask, client.w, down.w)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        """Algorithm 2; Algorithm 1, line 3."""
        # Lines 1-13, MAMO: the personal entries, then the shared ones, Eqs. (3)-(5).
        start = self.personal_model(task, client, down)
        plan = self.growth.trainable(self.contribution.trainable(plan), down.round)
        local = self.phases.train(task, self.optimizer, start, client.moments, data, plan, client.mask)
        # Lines 14-17, PWPM: the entries that changed most, Eq. (6), become personal, Eq. (7).
        models = {"w": local.w, "own": client.w, "received": down.w}
        mask = self.growth.next_mask(task, client.mask, local.update, data, down.round, **models)
        moments = self.optimizer.forget(local.moments, (mask ^ client.mask)[: task.d])
        # Lines 18-21, COWA: the others' step and loss without this client, Eqs. (9), (10); Gamma, Eq. (11).
        others = self.contribution.others(client, down, local.update)
        scores = self.contribution.judge(task, local.w, local.update, others, data, down.bounds)
        # Line 22: w_n and m_n as g_n, Eq. (8), and Gamma_n.
        upload = Upload(shared(mask, local.w), scores.total)
        after = Client(local.w, mask, kept(self.optimizer, moments), down.w, scores.total, down.round)
        metrics = {"loss": local.loss, **scores.metrics(), **personal_fraction(mask[: task.d], local.update)}
        return ClientOutput(after, upload, local.w, metrics)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        score = bounded(upload.score, server.bounds)
        return Total(*weighted(upload.shared, score), score, torch.ones_like(score))

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """Algorithm 1, lines 4-6; the sums are weighted already, and absent clients keep their masks."""
        union = server.union | (total.personal > 0)  # line 4
        averaged = total.weight > 0 if self.merge == "sharers" else (total.weight > 0) & ~union
        weights = torch.where(averaged, total.weight, 0)
        w = weighted_mean(total.w, weights, server.w)  # lines 5 and 6
        bounds = self.contribution.next_bounds(total.score, total.clients, server.bounds)
        metrics = sharing_metrics(total.personal[: task.d], averaged[: task.d], total.clients.clamp(min=1))
        return Server(w, weights, total.score, union, server.round + 1, bounds), metrics
