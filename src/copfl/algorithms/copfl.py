"""CO-PFL: contribution-oriented personalised federated learning, Algorithms 1 and 2 of the paper."""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import (
    ClientOutput,
    Data,
    Masked,
    Metrics,
    Optimizer,
    Plan,
    State,
    Task,
    begin,
    fresh,
    kept,
    tree,
)
from copfl.core.payload import Update
from copfl.kernels.fused import either
from copfl.parts.averaging import weighted_mean
from copfl.parts.cowa import Cowa, Reports, bounded, report_of
from copfl.parts.mamo import Mamo
from copfl.parts.phases import Phases
from copfl.parts.pwpm import Pwpm, personal_fraction, shared, sharing_metrics, weighted


class Server(NamedTuple):
    w: Tensor  # [D], w^k
    weights: Tensor  # [D], the sum of Gamma in the last mean of each entry; 0 without a mean
    score: Tensor  # [], the sum of Gamma over the last round's clients
    union: Tensor  # [D] bool, m_0^k: personal for at least one client; with a common mask, for all
    round: Tensor  # [] int64, k
    bounds: Tensor | None = None  # [2], the bounds on a score in the next round; None: no bounds


Down = Server  # Algorithm 1, line 2: the server sends its whole record


class Client(NamedTuple):
    w: Tensor  # [D], w_n after its last training; on its shared entries, what it uploaded
    mask: Tensor  # [D] bool, m_n, True = personal; local statistics are personal from the start
    moments: State  # u_n, v_n and their step counts
    seen: Tensor  # [D], the global model of the last round it took part in
    score: Tensor  # [], its Gamma in that round's mean
    round: Tensor  # [] int64, that round; -1 before the first


class Upload(NamedTuple):
    shared: Masked  # g_n and m_n, Eq. (8)
    score: Tensor  # [], Gamma_n, before any bounds


class Total(NamedTuple):
    w: Tensor  # [D], sum of Gamma (1 - m) w
    weight: Tensor  # [D], sum of Gamma (1 - m); with a common mask [], sum of Gamma
    personal: Tensor  # [D], the number of clients for which the entry is personal; with a common mask [], 0
    score: Tensor  # [], sum of Gamma
    clients: Tensor  # []
    reports: Reports | None  # the scores before the bounds; None: no bounds


@dataclass(frozen=True)
class COPFL:
    """Masked local training (MAMO), masks of what is personal (PWPM), contribution weights (COWA).

    By default the head is personal, nothing else becomes so, and all entries train at once: the best of the
    forms in studies/defaults. The preset `paper` is the published form, with masks that grow and two phases.
    """

    optimizer: Optimizer = field(default_factory=Mamo)
    growth: Pwpm = field(default_factory=lambda: Pwpm(budget=0.0, head="personal"))
    contribution: Cowa = field(default_factory=Cowa)
    phases: Phases = field(default_factory=lambda: Phases(training="together"))
    # "sharers": each entry is the mean over the clients that share it. "union" (Paper: Algorithm 1, line 6):
    # an entry that is personal for any client is never averaged again. "common": one mask for all clients, of
    # the entries that the mean changed most; the only one under which a sum hides masks, scores and weights.
    merge: str = "sharers"

    summable: ClassVar = MappingProxyType({"merge": "common"})  # the options under secure aggregation

    def __post_init__(self) -> None:
        self.growth.check_merge(self.merge)
        self.phases.check_state(self.optimizer)

    @property
    def total_epochs(self) -> int:
        return self.phases.total_epochs

    def server_init(self, task: Task, clients: int) -> Server:
        zeros, zero = torch.zeros_like(task.initial), task.initial.new_zeros(())
        bounds = self.contribution.initial_bounds(clients, zeros)
        mask = self.growth.first_mask(task) if self.merge == "common" else zeros.bool()
        return Server(task.initial, zeros, zero, mask, zero.long(), bounds)

    def client_init(self, task: Task) -> Client:
        w, zero = task.initial, task.initial.new_zeros(())
        return Client(w, self.growth.first_mask(task), fresh(self.optimizer, task), w, zero, zero.long() - 1)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        """Algorithm 1, line 2."""
        return tree.repeat(server, len(ids))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """w_n^k: the client's own entries where they are personal, else the global model's."""
        return either(self._own(task, client, down), client.w, down.w)

    def _own(self, task: Task, client: Client, down: Down) -> Tensor:
        """[D] bool, where the client continues from its own values; a new client has only its statistics."""
        if self.merge != "common":
            return client.mask
        return (down.union & (client.round >= 0)) | self.growth.first_mask(task)

    def counted(self, client: Client, down: Down, update: Update) -> Client:
        """The leave-one-out of COWA removes what is in the mean."""
        assert update.reported_weight is not None
        w = torch.where(client.mask, client.w, update.sent)
        return client._replace(w=w, score=bounded(update.reported_weight, down.bounds))

    def global_statistics(self, task: Task, client: Client) -> Tensor:
        return client.w[task.d :]

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        """Algorithm 2; Algorithm 1, line 3."""
        # Lines 1-13, MAMO: the personal entries, then the shared ones, Eqs. (3)-(5).
        start = self.personal_model(task, client, down)
        plan = self.growth.trainable(self.contribution.trainable(plan), down.round)
        is_common = self.merge == "common"
        mask, moments = client.mask, client.moments
        if is_common:
            mask = down.union
            moments = begin(self.optimizer, moments, start[: task.d])
            moments = self.optimizer.forget(moments, (mask ^ client.mask)[: task.d])
        local = self.phases.train(task, self.optimizer, start, moments, data, plan, mask)
        moments = local.moments
        # Lines 14-17, PWPM: the entries that changed most, Eq. (6), become personal, Eq. (7).
        if not is_common:
            models = {"w": local.w, "own": client.w, "received": down.w}
            mask = self.growth.next_mask(task, client.mask, local.update, data, down.round, **models)
            moments = self.optimizer.forget(moments, (mask ^ client.mask)[: task.d])
        # Lines 18-21, COWA: the others' step and loss without this client, Eqs. (9), (10); Gamma, Eq. (11).
        others = self.contribution.others(client, down, local.update)
        scores = self.contribution.judge(task, local.w, local.update, others, data)
        # Line 22: w_n and m_n as g_n, Eq. (8), and Gamma_n.
        upload, score = Upload(shared(mask, local.w), scores.total), bounded(scores.total, down.bounds)
        after = Client(local.w, mask, kept(self.optimizer, moments), down.w, score, down.round)
        metrics = {"loss": local.loss, **scores._replace(total=score).metrics()}
        metrics |= personal_fraction(mask[: task.d], local.update)
        return ClientOutput(after, upload, local.w, metrics)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        score = bounded(upload.score, server.bounds)
        one, reports = torch.ones_like(score), report_of(upload.score, server.bounds)
        if self.merge == "common":
            return Total(score * upload.shared.values, score, 0 * one, score, one, reports)
        return Total(*weighted(upload.shared, score), score, one, reports)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """Algorithm 1, lines 4-6; the sums are weighted already, and absent clients keep their masks."""
        union = server.union | (total.personal > 0)  # line 4
        averaged = total.weight > 0 if self.merge == "sharers" else (total.weight > 0) & ~union
        weights = torch.where(averaged, total.weight, 0)
        w = weighted_mean(total.w, weights, server.w)  # lines 5 and 6
        personal = total.personal
        if self.merge == "common":  # Eqs. (6) and (7) of the mean, instead of each client's update
            personal = server.union * total.clients
            change = (server.w - w)[: task.d]
            grown = self.growth.grow(task.layout, server.union[: task.d], change, server.round)
            union = torch.cat([grown, server.union[task.d :]])
        bounds = self.contribution.next_bounds(total.reports, server.bounds)
        metrics = sharing_metrics(personal[: task.d], averaged[: task.d], total.clients.clamp(min=1))
        return Server(w, weights, total.score, union, server.round + 1, bounds), metrics
