"""COWA, contribution-oriented weighted aggregation: a client counts for what the others lack without it.

Two scores, both worked out by the client itself from the broadcast: how far its update points away from the others'
(Eq. 9), and how badly the model without it does on its data (Eq. 10). Their sum is its weight in the mean (Eq. 11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.batches import training_split, validation_split
from copfl.core.task import Data, Plan, Task
from copfl.errors import UsageError, one_of
from copfl.kernels.fused import elementwise, of_many_steps

SCORES = ("both", "gradient", "prediction", "none")
WITHOUT = ("exact", "paper")
PREFER = ("deviation", "agreement")
TRUST = ("all", "learned", "held_out")
SCALES = ("none", "mean")


class Scores(NamedTuple):
    gradient: Tensor  # Gamma^grad, in [0, 2]
    prediction: Tensor  # Gamma^data, >= 0
    total: Tensor  # Gamma, the unnormalised weight; 0 leaves the client out of the round

    def metrics(self) -> dict[str, Tensor]:
        """Both, under the names that they have among a turn's figures."""
        return {"gradient_score": self.gradient, "prediction_score": self.prediction}


@dataclass(frozen=True)
class Cowa:
    """Which scores make the weight.

    score    "both" (the paper), "gradient", "prediction", or "none" (everybody counts the same)
    without  how the client is taken out of the server's step and model. "exact" (default): entry by entry, from those
             that shared it, with the client's own last upload. "paper" (Paper): whole vectors, and in Eq. (9) the
             current update, although that is not yet in the server's step, so every cosine is pushed down
    prefer   "deviation": a higher score counts more (Paper: the equations). "agreement": the reverse, 1 + cos and
             exp(-loss) (Paper: the introduction's words)
    trust    "all": a score is taken as it is (Paper). Then wrong labels and noise count as something new. "learned":
             the score times exp(-loss of the client's own model on its own data), in (0, 1]: who deviates must have
             learned what it deviates for; which wrong labels are in time, by heart. "held_out": the loss is taken on
             every fifth sample, which the client does not train on: wrong labels stay unlikely, and it has less to
             learn from
    scale    "none": the two scores are added as they are (Paper). "mean": each over its mean in the round before, so
             that neither outweighs the other by its unit
    smooth   the share of its last weight that a client keeps; 0: none (Paper)
    """

    score: str = "both"
    leave_one_out: str = "exact"
    prefer: str = "deviation"
    trust: str = "all"
    scale: str = "none"
    smooth: float = 0.0

    def __post_init__(self) -> None:
        one_of(SCORES, score=self.score)
        one_of(WITHOUT, leave_one_out=self.leave_one_out)
        one_of(PREFER, prefer=self.prefer)
        one_of(TRUST, trust=self.trust)
        one_of(SCALES, scale=self.scale)
        if not 0 <= self.smooth < 1:
            raise UsageError(
                f"smooth={self.smooth} must be at least 0 and below 1: it is a share of the last weight"
            )

    def weigh(
        self,
        update: Tensor,
        others: Tensor,
        loss: Tensor,
        own_loss: Tensor | None = None,
        means: Tensor | None = None,
    ) -> Scores:
        """Gamma_n out of this client's update, the others' update and the loss of the others' model, Eqs. (9)-(11).

        `own_loss`, of the client's own model on the same data, is looked at only where trust has to be earned; `means`
        [2] are those of both scores, where they are scaled.
        """
        closeness, finite = cosine(update, others), torch.isfinite(loss)
        loss = torch.where(finite, loss, 0)
        if self.prefer == "deviation":
            gradient, prediction = 1 - closeness, loss
        else:
            gradient, prediction = 1 + closeness, torch.exp(-loss)
        shown = gradient, prediction
        if means is not None:
            gradient, prediction = (torch.where(m > 0, s / m, s) for s, m in zip(shown, means, strict=True))
        total = {
            "both": gradient + prediction,
            "gradient": gradient,
            "prediction": prediction,
            "none": torch.ones_like(loss),
        }[self.score]
        if self.trust != "all" and own_loss is not None:
            total = total * torch.exp(-torch.where(torch.isfinite(own_loss), own_loss, torch.inf))
        # Where all scores are zero the clients count the same instead of not at all; a client without a finite
        # loss or update is left out.
        healthy = torch.isfinite(update).all() & (finite | (self.score in ("gradient", "none")))
        return Scores(*shown, torch.where(healthy, total.clamp(min=1e-6), 0))

    def trainable(self, plan: Plan) -> Plan:
        """The plan without the samples that trust is earned on."""
        return training_split(plan) if self.trust == "held_out" else plan

    def others(
        self, broadcast: Tensor, seen: Tensor, own: Tensor, mask: Tensor, weights: Tensor, update: Tensor,
        counted: Tensor, total: Tensor, ever: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """delta_{-n} and w_{-n}, the server's last step and model without the client; `total` is the sum of Gamma."""
        if self.leave_one_out == "paper":
            share = counted / torch.where(total > 0, total, 1)  # alpha_n^k
            return whole_without(broadcast, seen, own, update, share, ever)
        return exactly_without(broadcast, seen, own, mask, weights, counted, ever)

    def judge(
        self,
        task: Task,
        w: Tensor,
        update: Tensor,
        others: tuple[Tensor, Tensor],
        data: Data,
        means: Tensor | None = None,
    ) -> Scores:
        """Gamma_n of the client that ended in w, out of the `others` without it: delta_{-n} and w_{-n}, [d] each."""
        step, model = others
        loss, _ = task.evaluate(torch.cat([model, w[task.d :]]), data)
        if self.trust == "all":
            return self.weigh(update, step, loss, None, means)
        own_loss, _ = task.evaluate(w, validation_split(data) if self.trust == "held_out" else data)
        return self.weigh(update, step, loss, own_loss, means)

    def smoothed(self, score: Tensor, last: Tensor) -> Tensor:
        """The score with a part of the last one in it; who has none, or is left out, is not smoothed."""
        if self.smooth == 0:
            return score
        return torch.where((score > 0) & (last > 0), self.smooth * last + (1 - self.smooth) * score, score)

    def told(self, scores: Scores) -> Tensor | None:
        """[2], what the server needs to know of both scores; None: nothing."""
        return torch.stack([scores.gradient, scores.prediction]) if self.scale == "mean" else None

    def first_means(self, like: Tensor) -> Tensor | None:
        """[2], no means of both scores yet; None: they are not scaled."""
        return like.new_zeros(2) if self.scale == "mean" else None


def first_bounds(max_weight: float, clients: int, like: Tensor) -> Tensor | None:
    """[2], what scores are held between in the first round, where everybody counts the same; None: they are not."""
    if max_weight * clients < 1 - 1e-9:
        raise UsageError(
            f"max_weight={max_weight}: the weights of {clients} clients add up to 1, so it must be at least "
            f"{1 / clients:.3g}"
        )
    return None if max_weight == 1 else like.new_ones(2)


def bounds_of(score: Tensor, clients: Tensor, max_weight: float, before: Tensor) -> Tensor:
    """[2], a span around the mean score in which none of so many clients can take more than `most`.

    It stays as it was where nobody came.
    One at the upper bound among n - 1 at the lower one has the share high / (high + (n - 1) low), which is `most` where
    high / low = most (n - 1) / (1 - max_weight).
    """
    ratio = (max_weight * (clients - 1) / (1 - max_weight)).clamp(min=1)
    mean = score / clients.clamp(min=1)
    return torch.where(score > 0, torch.stack([mean / ratio.sqrt(), mean * ratio.sqrt()]), before)


def held(score: Tensor, bounds: Tensor | None) -> Tensor:
    """The score, between the bounds; a client that is left out, or claims less than nothing, has none."""
    if bounds is None:
        return score
    return torch.where(score > 0, torch.minimum(torch.maximum(score, bounds[0]), bounds[1]), 0)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """cos(a, b), and 0 where one of them is zero: no direction, no opinion."""
    lengths = a.norm() * b.norm()
    return torch.where(lengths > 0, (a * b).sum() / lengths.clamp(min=torch.finfo(a.dtype).tiny), 0).clamp(
        -1, 1
    )


def leave_one_out(mean: Tensor, own: Tensor, weights: Tensor, weight: Tensor, fallback: Tensor) -> Tensor:
    """The weighted mean without one member: (W mean - a own) / (W - a), entry by entry.

    `weights` holds W, the sum of the weights of the members that share the entry; `weight` a, this member's, zero where
    it does not share it; `fallback` stands where nobody else shares it.
    """
    rest = weights - weight
    alone = rest <= 1e-6 * weights
    return torch.where(alone, fallback, (weights * mean - weight * own) / torch.where(alone, 1, rest))


def whole_without(
    broadcast: Tensor, seen: Tensor, own: Tensor, update: Tensor, share: Tensor, ever: Tensor
) -> tuple[Tensor, Tensor]:
    """delta_{-n} and w_{-n} of Eqs. (9) and (10) by the letter: (x - alpha x_n) / (1 - alpha), x the step or the model.

    `seen` is the broadcast that the client last trained from, `own` what it made of it, `update` what it is taken out
    of the step with, and `share` its alpha in the last mean.
    """
    step, one = torch.where(ever, seen - broadcast, 0), torch.ones_like(share)  # delta^k = w^{k-1} - w^k
    return (
        leave_one_out(step, update, one, share, torch.zeros_like(step)),
        leave_one_out(broadcast, own, one, share, seen),
    )


def exactly_without(
    broadcast: Tensor, seen: Tensor, own: Tensor, mask: Tensor, weights: Tensor, counted: Tensor, ever: Tensor
) -> tuple[Tensor, Tensor]:
    """delta_{-n} and w_{-n}, entry by entry, from those that shared the entry in the last round.

    `weights` holds the sum of Gamma behind each entry, `counted` is the client's own in that mean, 0 if it was not in
    it, and `mask` what it did not share.
    """
    step, model = elementwise(_exactly_without, broadcast, seen, own, mask, weights, counted, ever)
    return step, model


@of_many_steps
def _exactly_without(
    broadcast: Tensor, seen: Tensor, own: Tensor, mask: Tensor, weights: Tensor, counted: Tensor, ever: Tensor
) -> tuple[Tensor, Tensor]:
    weight = torch.where(mask, 0, counted)
    step = torch.where(ever, seen - broadcast, 0)
    anybody = weights > 0
    return (
        leave_one_out(step, seen - own, weights, weight, torch.where(anybody, 0, step)),
        leave_one_out(broadcast, own, weights, weight, torch.where(anybody, seen, broadcast)),
    )
