"""CO-PFL: contribution-oriented personalised federated learning, Algorithms 1 and 2 of the paper."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from copfl import tree
from copfl.algorithms.algorithm import Figures, Turn
from copfl.elementwise import elementwise, of_many_steps
from copfl.errors import UsageError, unknown
from copfl.optim import Optimizer, State, begin, kept, train
from copfl.parts.cowa import Cowa, bounds_of, held, held_out, kept_back, leave_one_out
from copfl.parts.mamo import Mamo
from copfl.parts.pwpm import Pwpm, personal_share
from copfl.task import Data, Plan, Task
from copfl.tree import Masked

MERGES = ("sharers", "union", "union_kept")
PHASES = ("restart", "sequence")


class Server(NamedTuple):
    w: Tensor  # [D], w^k
    weights: Tensor  # [D], the sum of Gamma over those in the last round's mean of each entry; 0 where there was none
    score: Tensor  # [], the sum of Gamma over the last round's clients
    union: Tensor  # [D] bool, m_0^k: personal for at least one client
    round: Tensor  # [] int64, k
    bounds: Tensor | None = None  # [2], what a score is held between in the next round; None: it is not held


class Down(NamedTuple):
    w: Tensor
    weights: Tensor
    score: Tensor
    union: Tensor
    round: Tensor
    bounds: Tensor | None = None


class Client(NamedTuple):
    w: Tensor  # [D], w_n as its last training left it; on its shared entries, what it uploaded
    mask: Tensor  # [D] bool, m_n, True = personal; local statistics are personal from the start
    moments: State  # u_n, v_n and their step counts
    seen: Tensor  # [D], the broadcast of the last round it took part in
    score: Tensor  # [], its Gamma in that round
    round: Tensor  # [] int64, that round; -1 before the first


class Upload(NamedTuple):
    shared: Masked  # g_n, and the mask
    score: Tensor  # [], Gamma_n


class Total(NamedTuple):
    w: Tensor  # [D], sum of Gamma (1 - m) w
    weight: Tensor  # [D], sum of Gamma (1 - m)
    personal: Tensor  # [D], how many clients hold the entry as personal
    score: Tensor  # [], sum of Gamma
    clients: Tensor  # []


@dataclass(frozen=True)
class COPFL:
    """Masked local training (MAMO), growing masks (PWPM), contribution weights (COWA).

    merge   "sharers": every entry is the mean over the clients that share it (default). "union" (Paper: Algorithm 1,
            line 6): an entry that anybody holds as personal is never averaged again, which at ten clients is nearly
            every entry after three rounds. "union_kept": the same, and clients keep their own value there.
    phases  "restart": both halves train from the same point and are put together (Paper: Algorithm 2, default).
            "sequence": the shared half trains on from where the personal half ended (FedSelect).
    most    no client gets more than this share of the weight; 1: no bound (Paper). Scores are then held between two
            bounds around the last round's mean, whose ratio leaves no client more than that. The server holds them
            again: it need not trust what clients say of themselves
    """

    optimizer: Optimizer = field(default_factory=Mamo)
    growth: Pwpm = field(default_factory=Pwpm)
    contribution: Cowa = field(default_factory=Cowa)
    epochs: int = 1
    merge: str = "sharers"
    phases: str = "restart"
    most: float = 1.0

    def __post_init__(self) -> None:
        if self.merge not in MERGES:
            raise unknown("merge", self.merge, MERGES)
        if self.phases not in PHASES:
            raise unknown("phases", self.phases, PHASES)
        if self.epochs < 1:
            raise UsageError(f"epochs={self.epochs} must be at least 1")
        if not 0 < self.most <= 1:
            raise UsageError(f"most={self.most} must be above 0 and at most 1: it is a share of the weight")

    @property
    def passes(self) -> int:
        return 2 * self.epochs

    def server_init(self, task: Task, clients: int) -> Server:
        if self.most * clients < 1 - 1e-9:
            raise UsageError(
                f"most={self.most}: shares of {clients} clients add up to 1, so it must be at least {1 / clients:.3g}"
            )
        zeros, nobody = torch.zeros_like(task.first), torch.zeros_like(task.first, dtype=torch.bool)
        start = torch.zeros((), dtype=torch.int64, device=task.device)
        bounds = None if self.most == 1 else zeros.new_ones(2)  # at first everybody counts the same
        return Server(task.first, zeros, zeros.new_zeros(()), nobody, start, bounds)

    def client_init(self, task: Task) -> Client:
        moments = kept(self.optimizer, self.optimizer.init(task.first[: task.d]))
        never = torch.full((), -1, dtype=torch.int64, device=task.device)
        return Client(task.first, task.home(), moments, task.first, task.first.new_zeros(()), never)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        n = len(ids)
        return tree.each(lambda field: field.expand(n, *field.shape), Down(*server))

    def personal(self, task: Task, client: Client, down: Down) -> Tensor:
        """w_n^k: own values where personal, the broadcast elsewhere."""
        own = client.mask | (down.union & (client.round >= 0)) if self.merge == "union_kept" else client.mask
        return elementwise(_either, own, client.w, down.w)[0]

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> Turn[Client, Upload]:
        """Algorithm 2."""
        trust = self.contribution.trust
        plan = kept_back(plan) if trust == "held_out" else plan
        start = self.personal(task, client, down)
        personal = client.mask[: task.d]
        moments = begin(self.optimizer, client.moments, start[: task.d])
        # MAMO: the personal half, then the shared half, Eqs. (3)-(5).
        first, moments, _ = train(task, self.optimizer, start, moments, data, plan[: self.epochs], active=personal)
        again = start if self.phases == "restart" else first
        second, moments, loss = train(task, self.optimizer, again, moments, data, plan[self.epochs :], active=~personal)
        trained = torch.arange(len(start), device=start.device) < task.d
        w, update = elementwise(_merged, client.mask & trained, first, second, start)  # statistics: of the last phase
        # PWPM: what changed most turns personal, Eqs. (6)-(8).
        update = update[: task.d]
        grown = self.growth.grow(task.layout, personal, update, down.round)
        moments = self.optimizer.forget(moments, grown & ~personal)
        mask = torch.cat([grown, client.mask[task.d :]])
        # COWA: what the others lack without this client, Eqs. (9)-(10).
        step, model = self._without(task, client, down, update)
        loss_without, _ = task.evaluate(torch.cat([model, w[task.d :]]), data)
        judged = held_out(data) if trust == "held_out" else data
        own_loss = None if trust == "all" else task.evaluate(w, judged)[0]
        scores = self.contribution.weigh(update, step, loss_without, own_loss)
        score = held(scores.total, down.bounds)
        share, moving = personal_share(grown, update)
        figures = {
            "loss": loss,
            "weight": score,
            "gradient_score": scores.gradient,
            "prediction_score": scores.prediction,
            "personal_share": share,
            "personal_share_of_moving": moving,
        }
        after = Client(w, mask, kept(self.optimizer, moments), down.w, score, down.round)
        (shared,) = elementwise(_without_personal, mask, w)
        return Turn(after, Upload(Masked(shared, mask), score), w, figures)

    def _without(self, task: Task, client: Client, down: Down, update: Tensor) -> tuple[Tensor, Tensor]:
        """The server's last step and its model without this client, [d] each: delta_{-n} and w_{-n}."""
        d = task.d
        broadcast, seen, own = down.w[:d], client.seen[:d], client.w[:d]
        step = torch.where(client.round >= 0, seen - broadcast, 0)  # delta^k = w^{k-1} - w^k
        counted = torch.where(client.round == down.round - 1, client.score, 0)  # in the last mean it was, or not
        if self.contribution.without == "letter":
            share = (counted / torch.where(down.score > 0, down.score, 1)).expand_as(own)  # alpha_n^k
            ones = torch.ones_like(share)
            return (
                leave_one_out(step, update, ones, share, torch.zeros_like(step)),
                leave_one_out(broadcast, own, ones, share, seen),
            )
        inputs = (broadcast, seen, own, client.mask[:d], down.weights[:d], counted, client.round >= 0)
        without_step, without_model = elementwise(_exactly_without, *inputs)
        return without_step, without_model

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        score = held(upload.score, server.bounds)
        w, weight, personal = elementwise(_weighed, *upload.shared, score)
        return Total(w, weight, personal, score, torch.ones_like(score))

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Figures]:
        """Algorithm 1, lines 4-6."""
        heard = total.weight > 0
        mean = torch.where(heard, total.w / torch.where(heard, total.weight, 1), server.w)
        union = server.union | (total.personal > 0)  # masks only grow, and absent clients keep theirs
        averaged = heard if self.merge == "sharers" else heard & ~union
        w = torch.where(averaged, mean, server.w)
        d, clients = task.d, total.clients.clamp(min=1)
        figures = {
            "shared": 1 - (total.personal[:d] / clients).mean(),  # of all clients' parameters, what is still shared
            "averaged": averaged[:d].to(w.dtype).mean(),  # of the server's parameters, what this round changed
            "shared_by_all": (total.personal[:d] == 0).to(w.dtype).mean(),
        }
        weights = torch.where(averaged, total.weight, 0)  # where nothing was averaged nobody can be taken out
        bounds = None if server.bounds is None else bounds_of(total.score, total.clients, self.most, server.bounds)
        return Server(w, weights, total.score, union, server.round + 1, bounds), figures


@of_many_steps
def _exactly_without(
    broadcast: Tensor, seen: Tensor, own: Tensor, mask: Tensor, weights: Tensor, counted: Tensor, ever: Tensor
) -> tuple[Tensor, Tensor]:
    """delta_{-n} and w_{-n}, entry by entry, from those that shared the entry in the last round."""
    weight = torch.where(mask, 0, counted)
    step = torch.where(ever, seen - broadcast, 0)
    anybody = weights > 0
    return (
        leave_one_out(step, seen - own, weights, weight, torch.where(anybody, 0, step)),
        leave_one_out(broadcast, own, weights, weight, torch.where(anybody, seen, broadcast)),
    )


def _either(choice: Tensor, yes: Tensor, no: Tensor) -> tuple[Tensor]:
    return (torch.where(choice, yes, no),)


def _merged(personal: Tensor, first: Tensor, second: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Both halves put together, and how far they came: w and start - w, Eqs. (6) and (8)."""
    w = torch.where(personal, first, second)
    return w, start - w


def _without_personal(personal: Tensor, w: Tensor) -> tuple[Tensor]:
    return (torch.where(personal, 0, w),)


def _weighed(values: Tensor, personal: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gamma (1 - m) w, Gamma (1 - m) and m."""
    counts = torch.where(personal, 0, score)
    return counts * values, counts, personal.to(values.dtype)


def copfl(
    optimizer: Optimizer = Mamo(),
    rate: float = 0.25,
    budget: float = 0.5,
    among: str = "shared",
    limit: str = "exact",
    count: str = "moving",
    warmup: int = 0,
    every: int = 1,
    score: str = "both",
    without: str = "exact",
    prefer: str = "deviation",
    trust: str = "all",
    merge: str = "sharers",
    phases: str = "restart",
    epochs: int = 1,
    most: float = 1.0,
) -> COPFL:
    """CO-PFL with all its readings as keywords: the parts' own, see Mamo, Pwpm, Cowa and COPFL."""
    growth = Pwpm(rate, budget, among, limit, count, warmup, every)
    return COPFL(optimizer, growth, Cowa(score, without, prefer, trust), epochs, merge, phases, most)
