"""COWA, contribution-oriented weighted aggregation: a client's weight is what the others lack without it.

Each client computes two scores from the global model: how far its update deviates from the others' (Eq. 9),
and the loss of the model without it on its data (Eq. 10). Their sum is its weight in the mean (Eq. 11).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core.batches import training_split, validation_split
from copfl.core.task import Data, Plan, Task
from copfl.errors import UsageError, fraction_of, one_of
from copfl.kernels.fused import elementwise

SCORES = ("both", "gradient", "prediction", "none")
LEAVE_ONE_OUT = ("exact", "paper")
TRUST = ("all", "held_out")
NEGLIGIBLE = 2**-7  # of the weights: less is the rounding error of a message in fp16 or bf16


class Others(NamedTuple):
    step: Tensor  # [d], delta_{-n}, the server's last step without the client
    model: Tensor  # [d], w_{-n}, the global model without the client


class Scores(NamedTuple):
    gradient: Tensor  # Gamma^grad, in [0, 2]
    prediction: Tensor  # Gamma^pred, >= 0
    total: Tensor  # Gamma, the unnormalised weight; 0 excludes the client from the round

    def metrics(self) -> dict[str, Tensor]:
        scores = {"gradient_score": self.gradient, "prediction_score": self.prediction}
        return {"weight": self.total, **scores}


class Reports(NamedTuple):
    """The scores as reported, before the bounds, of the clients that have one above 0."""

    log_score: Tensor  # [], the sum of their logarithms
    clients: Tensor  # [], their number


@dataclass(frozen=True)
class Cowa:
    """The scores that make the weight.

    score          "both" (Paper), "gradient", "prediction", or "none" (equal weights)
    leave_one_out  how the client is removed from the server's step and model. "exact" (default): entry by
                   entry, from the clients that shared it, with the client's last upload. "paper" (Paper):
                   whole vectors, and in Eq. (9) the current update, which is not yet in the server's step, so
                   every cosine is too low
    trust          "all": a score is used as it is (Paper), so wrong labels and noise count as a contribution.
                   "held_out": the score times exp(-loss of the client's model on every fifth sample), which
                   the client does not train on
    max_weight     the largest weight of a client in the mean; 1: no bound (Paper). The server clips the
                   reported scores, so it does not depend on honest clients. In the first round, which has no
                   scores to compare with, all weights are equal
    """

    score: str = "both"
    leave_one_out: str = "exact"
    trust: str = "all"
    max_weight: float = 1.0

    def __post_init__(self) -> None:
        one_of(SCORES, score=self.score)
        one_of(LEAVE_ONE_OUT, leave_one_out=self.leave_one_out)
        one_of(TRUST, trust=self.trust)
        fraction_of("the weight", max_weight=self.max_weight)

    def trainable(self, plan: Plan) -> Plan:
        """The plan without the held-out samples."""
        return training_split(plan) if self.trust == "held_out" else plan

    def others(self, client: Any, down: Any, update: Tensor) -> Others:
        """delta_{-n} and w_{-n}, the server's last step and model without the client.

        The records of CO-PFL have the last mean and the client's part in it.
        """
        d = len(update)
        models, ever = (down.w[:d], client.seen[:d], client.w[:d]), client.round >= 0
        # A client that missed the last round has no weight in its mean.
        weight = torch.where(client.round == down.round - 1, client.score, 0)
        if self.leave_one_out == "paper":
            alpha = weight / torch.where(down.score > 0, down.score, 1)
            return whole_without(*models, update, alpha, ever)
        sharing = client.mask[:d], down.weights[:d], weight
        return Others(*elementwise(_exactly_without, *models, *sharing, ever))

    def judge(self, task: Task, w: Tensor, update: Tensor, others: Others, data: Data) -> Scores:
        """Gamma_n of the client whose training ended in w, before any bounds."""
        loss, _ = task.evaluate(torch.cat([others.model, w[task.d :]]), data)
        own_loss = task.evaluate(w, validation_split(data))[0] if self.trust == "held_out" else None
        return self.weigh(update, others.step, loss, own_loss)

    def weigh(self, update: Tensor, step: Tensor, loss: Tensor, own_loss: Tensor | None = None) -> Scores:
        """Gamma_n from the update, the others' step and the loss of the others' model, Eqs. (9)-(11).

        `own_loss` is the loss of the client's own model on the held-out samples, where there are any.
        """
        closeness, finite = cosine(update, step), torch.isfinite(loss)
        loss = torch.where(finite, loss, 0)
        gradient, prediction = 1 - closeness, loss
        total = {
            "both": gradient + prediction,
            "gradient": gradient,
            "prediction": prediction,
            "none": torch.ones_like(loss),
        }[self.score]
        if own_loss is not None:
            total = total * torch.exp(-torch.where(torch.isfinite(own_loss), own_loss, torch.inf))
        # Where all scores are zero the clients weigh the same; without a finite loss or update: excluded.
        healthy = torch.isfinite(update).all() & (finite | (self.score in ("gradient", "none")))
        return Scores(gradient, prediction, torch.where(healthy, total.clamp(min=1e-6), 0))

    # -- a bound on each client's weight ---------------------------------------------------------------------

    def initial_bounds(self, clients: int, like: Tensor) -> Tensor | None:
        """[2], the bounds on a score in the first round, where all weights are equal; None: no bounds."""
        if self.max_weight * clients < 1 - 1e-9:
            raise UsageError(
                f"max_weight={self.max_weight}: the weights of {clients} clients add up to 1, so it must be "
                f"at least {1 / clients:.3g}"
            )
        return None if self.max_weight == 1 else like.new_ones(2)

    def next_bounds(self, reports: Reports | None, before: Tensor | None) -> Tensor | None:
        """[2], bounds around the geometric mean of the scores that keep each weight at most `max_weight`.

        One client at the upper bound among n - 1 at the lower one has the weight high / (high + (n - 1) low),
        which is `max_weight` where high / low = max_weight (n - 1) / (1 - max_weight). The mean is of the
        scores as reported: that of clipped ones would follow the true scale of the scores only slowly, and
        clip all of them to the same value until then. It is geometric, so that one enormous report does not
        make it enormous. Without clients the bounds stay.
        """
        if reports is None or before is None:
            return None
        ratio = (self.max_weight * (reports.clients - 1) / (1 - self.max_weight)).clamp(min=1)
        mean = (reports.log_score / reports.clients.clamp(min=1)).exp()
        bounds = torch.stack([mean / ratio.sqrt(), mean * ratio.sqrt()]).to(before.dtype)
        return torch.where(reports.clients > 0, bounds, before)


def report_of(score: Tensor, bounds: Tensor | None) -> Reports | None:
    """The part of one client in the `Reports`; None where there are no bounds."""
    if bounds is None:
        return None
    log_score = torch.where(score > 0, score.clamp(min=torch.finfo(score.dtype).tiny).log(), 0)
    return Reports(log_score, (score > 0).to(score.dtype))


def bounded(score: Tensor, bounds: Tensor | None) -> Tensor:
    """The score, clipped to the bounds; 0 where it is not positive."""
    if bounds is None:
        return score
    return torch.where(score > 0, torch.minimum(torch.maximum(score, bounds[0]), bounds[1]), 0)


# -- leave-one-out -------------------------------------------------------------------------------------------


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """cos(a, b), and 0 where one of them is zero."""
    lengths = a.norm() * b.norm()
    value = torch.where(lengths > 0, (a * b).sum() / lengths.clamp(min=torch.finfo(a.dtype).tiny), 0)
    return value.clamp(-1, 1)


def leave_one_out(mean: Tensor, own: Tensor, weights: Tensor, weight: Tensor, fallback: Tensor) -> Tensor:
    """The weighted mean without one member: (W mean - a own) / (W - a), entry by entry.

    `weights` is W, the sum of the weights of the members that share the entry; `weight` is a, this member's,
    zero where it does not share it. `fallback` is the value where no other member shares it.
    """
    rest = weights - weight
    alone = rest <= NEGLIGIBLE * weights
    return torch.where(alone, fallback, (weights * mean - weight * own) / torch.where(alone, 1, rest))


def whole_without(
    w: Tensor, seen: Tensor, uploaded: Tensor, update: Tensor, alpha: Tensor, ever: Tensor
) -> Others:
    """delta_{-n} and w_{-n} of Eqs. (9), (10) as published: (x - alpha x_n) / (1 - alpha), x step or model.

    `w` is the global model, `seen` the one that the client last trained from, `uploaded` what it then sent.
    `update` is its part of the step, `alpha` its weight in the last mean; `ever` is False for a new client.
    """
    step, one = torch.where(ever, seen - w, 0), torch.ones_like(alpha)  # delta^k = w^{k-1} - w^k
    return Others(
        leave_one_out(step, update, one, alpha, torch.zeros_like(step)),
        leave_one_out(w, uploaded, one, alpha, seen),
    )


def _exactly_without(
    w: Tensor, seen: Tensor, uploaded: Tensor, mask: Tensor, weights: Tensor, weight: Tensor, ever: Tensor
) -> tuple[Tensor, Tensor]:
    """delta_{-n} and w_{-n}, entry by entry, from the clients that shared the entry."""
    weight = torch.where(mask, 0, weight)
    step = torch.where(ever, seen - w, 0)
    averaged = weights > 0
    return (
        leave_one_out(step, seen - uploaded, weights, weight, torch.where(averaged, 0, step)),
        leave_one_out(w, uploaded, weights, weight, torch.where(averaged, seen, w)),
    )
