"""Gates between two values of a block of weights, fitted on held-out samples and shrunk to the federation's.

Client n has gates g_n [B], one per block. Its outputs for a held-out sample are z(g), the logits. With the
labels, the log-likelihood has the score s_n [B] and the expected information A_n [B, B] at the federation's
gates mu:

  g_n ~ N(mu, diag(tau^2)),   s_n(mu) ~ N(A_n (g_n - mu), V_n),   V_n the sum of the samples' squared scores

  mu'   = mu + (sum A_n + kappa I)^-1 (sum s_n - kappa (mu - mu_0))        one Newton step a round
  tau^2 = max(0, sum (s_n^2 - V_n)) / sum A_n^2                            by the method of moments, per block
  g_n   = mu + T A_n (V_n + A_n T A_n)^-1 s_n                              the best linear prediction, T = diag(tau^2)

Everything the server needs is a sum. A client with few samples has a small A_n and follows mu. The last entry
of mu scales all logits. It takes up that a model is too sure of itself on samples it has not seen, which
would otherwise be evidence against every block that was trained. Predictions do not use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.task import EVAL_BATCH, Data, Task

PRIOR_INFORMATION = 1.0  # kappa, about that of a few samples
LARGEST_STEP = 0.25  # of mu in a round
LARGEST_SPREAD = 0.25  # tau^2: gates between 0 and 1 have no larger variance
MEMORY = 0.7  # of tau^2 from round to round
SCALES = (0.05, 2.0)  # of the logits


class Prior(NamedTuple):
    """What the federation knows of the gates."""

    mean: Tensor  # [B + 1], mu; the last is the scale of the logits
    variance: Tensor  # [B + 1], tau^2


class Evidence(NamedTuple):
    """Of one client, or the sum over clients."""

    score: Tensor  # [B + 1], s at mu
    information: Tensor  # [B + 1, B + 1], A
    surplus: Tensor  # [B + 1], s^2 - V
    squares: Tensor  # [B + 1], A_bb^2


def first_prior(start: Tensor) -> Prior:
    """The prior before the first round, from mu_0 [B]."""
    mean = torch.cat([start, start.new_ones(1)])
    return Prior(mean, torch.zeros_like(mean))


def fitted(task: Task, at: Callable[[Tensor], Tensor], prior: Prior, data: Data) -> tuple[Tensor, Evidence]:
    """The client's gates g_n [B], not yet clipped, and its evidence.

    Args:
        task: The task.
        at: The weights [D] for gates [B].
        prior: That of the federation.
        data: Held-out samples.
    """
    gates, scale = prior.mean[:-1], prior.mean[-1]
    others = (gates < 0.5).to(gates.dtype)  # the far end: a secant, exact for a head
    units = torch.eye(len(gates), dtype=gates.dtype, device=gates.device)
    base, moved = at(gates), [at(gates + unit * (others - gates)) for unit in units]
    count = len(prior.mean)
    score, noise = gates.new_zeros(count), gates.new_zeros(count, count)
    information = gates.new_zeros(count, count)
    for x, y, valid in data.in_parts(EVAL_BATCH):
        x = task.numbers(x)
        plain, _ = task.forward(base, x)
        secants = [
            scale * (task.forward(w, x)[0] - plain) / (other - gate)
            for w, other, gate in zip(moved, others.unbind(), gates.unbind(), strict=True)
        ]
        slopes = torch.stack([*secants, plain])  # [B + 1, n, C], of the logits by gates and scale
        probabilities = (scale * plain).softmax(1)
        labels = (y[:, None] == torch.arange(task.classes, device=y.device)).to(plain.dtype)
        counted = valid.to(plain.dtype)
        of_samples = (slopes * (labels - probabilities)).sum(2) * counted  # [B + 1, n]
        centred = slopes - (slopes * probabilities).sum(2, keepdim=True)
        weighted = centred * (probabilities * counted[:, None])
        score = score + of_samples.sum(1)
        noise = noise + of_samples @ of_samples.T
        information = information + torch.einsum("bnc,dnc->bd", weighted, centred)
    variance = prior.variance
    spread = noise + (information * variance) @ information
    spread = spread + 1e-3 * torch.eye(count, dtype=spread.dtype, device=spread.device)
    deviation = variance * (information @ solved(spread, score))
    evidence = Evidence(
        score, information, score.square() - noise.diagonal(), information.diagonal().square()
    )
    return (prior.mean + deviation)[:-1], evidence


def solved(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix^-1 vector for a small positive definite matrix, by elimination: plain operations also under vmap."""
    size = len(vector)
    table = torch.cat([matrix, vector[:, None]], 1)
    rows = list(table.unbind())
    for pivot in range(size):
        row = rows[pivot] / rows[pivot][pivot]
        rows = [row if n == pivot else rows[n] - rows[n][pivot] * row for n in range(size)]
    return torch.stack([row[size] for row in rows])


def next_prior(prior: Prior, start: Tensor, total: Evidence) -> Prior:
    """The prior after a round, from the sum of the clients' evidence; without any it stays."""
    centre = torch.cat([start, start.new_ones(1)]).double()
    mean, kappa = prior.mean.double(), PRIOR_INFORMATION
    matrix = total.information.double() + kappa * torch.eye(
        len(mean), dtype=torch.float64, device=mean.device
    )
    step = torch.linalg.solve(matrix, total.score.double() - kappa * (mean - centre))
    mean = mean + step.clamp(-LARGEST_STEP, LARGEST_STEP)
    mean = torch.cat([mean[:-1].clamp(0, 1), mean[-1:].clamp(*SCALES)])
    moments = total.surplus.double() / total.squares.double().clamp(min=1e-6)
    variance = MEMORY * prior.variance.double() + (1 - MEMORY) * moments.clamp(0, LARGEST_SPREAD)
    has_evidence = total.squares.double().sum() > 0
    return Prior(
        torch.where(has_evidence, mean, prior.mean.double()).to(prior.mean.dtype),
        torch.where(has_evidence, variance, prior.variance.double()).to(prior.mean.dtype),
    )
