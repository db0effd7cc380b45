"""The meaning of a model's outputs for each kind of target: the training loss, and predictions.

A criterion's functions have no branch on a tensor's value, so they run under vmap. They are elementwise in the
samples, but for Cox's: there a sample's loss is among those of the same batch that are at risk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.errors import UsageError, above, one_of
from copfl.kernels.fused import as_rows

PADDING = -100  # a target token that does not count, as in torch's cross-entropy
log_softmax: Callable[[Tensor], Tensor] = partial(F.log_softmax, dim=-1)


@dataclass(frozen=True)
class Criterion:
    """The loss of targets of one kind, and the predictions that are evaluated and mixed."""

    kind: str  # of copfl.data.samples.KINDS
    losses: Callable[[Tensor, Tensor], Tensor]  # outputs [b, ...], targets [b, ...] -> [b], in training
    # outputs -> log-probabilities (classes, tokens), probabilities (labels), values (regression), or risks (survival)
    predictions: Callable[[Tensor], Tensor]
    # predictions [k, b, ...] of k models, weights [k] or [k, b] -> [b, ...]
    mixed: Callable[[Tensor, Tensor], Tensor]
    test_losses: Callable[[Tensor, Tensor], Tensor]  # predictions, targets -> [b]
    correct: Callable[[Tensor, Tensor], Tensor] | None  # predictions, targets -> [b] in 0..1, for an accuracy
    # Of survival in discrete time: predictions are the probabilities that the event has happened by these times.
    cuts: tuple[float, ...] = ()

    @property
    def logarithmic(self) -> bool:
        """Whether predictions are log-probabilities; what is mixed are the probabilities."""
        return self.kind in ("classification", "next_token")

    def counted(self, y: Tensor, valid: Tensor | None) -> Tensor | None:
        """Which samples are in a mean, [b]; None: all. A sequence without a target token has no loss."""
        if self.kind != "next_token":
            return valid
        has_token = (y != PADDING).any(-1)
        return has_token if valid is None else valid & has_token

    def at_risk(self, y: Tensor, valid: Tensor | None) -> Tensor:
        """The targets, those of samples that are not valid before all times: they are at risk at no event."""
        if valid is None or self.kind != "survival":
            return y
        before = -1 - torch.arange(y.shape[1], dtype=y.dtype, device=y.device)  # the start before the time
        return torch.where(valid[:, None], y, before)


def classification(class_weights: Sequence[float] = (), label_smoothing: float = 0.0) -> Criterion:
    """One class per sample, by cross-entropy; `class_weights` multiply the losses of their class."""
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing={label_smoothing:g} must be at least 0 and below 1")
    if any(weight < 0 for weight in class_weights):
        raise UsageError(f"class_weights={list(class_weights)} must not be negative")
    losses = partial(_cross_entropy, tuple(class_weights), label_smoothing)
    return Criterion("classification", losses, log_softmax, _mixed_logs, _nll, _right)


def multilabel(label_weights: Sequence[float] = ()) -> Criterion:
    """Any number of labels per sample, each 0 or 1, by binary cross-entropy."""
    losses = partial(_binary_cross_entropy, tuple(label_weights))
    return Criterion("multilabel", losses, torch.sigmoid, _mean, _binary_nll, _labels_right)


def regression(
    loss: str = "squared", delta: float = 1.0, mean: Sequence[float] = (), std: Sequence[float] = ()
) -> Criterion:
    """One or several numbers per sample; the loss is "squared", "absolute" or "huber" with its `delta`.

    With the targets' `mean` and `std`, a model's outputs and the losses are of standardised targets;
    predictions are in the units of the targets.
    """
    one_of(REGRESSION_LOSSES, loss=loss)
    above(0, delta=delta)
    scale = tuple(zip(mean, std, strict=True))
    losses = partial(_scaled_distances, partial(_distances, loss, delta), scale)
    test_losses = partial(_distances_in_scale, partial(_distances, loss, delta), scale)
    return Criterion("regression", losses, partial(_in_units, scale), _mean, test_losses, None)


def with_losses(criterion: Criterion, losses: Callable[[Tensor, Tensor], Tensor]) -> Criterion:
    """The criterion with another training loss: outputs [b, ...], targets [b, ...] -> [b].

    In a regression the targets are standardised as the outputs are.
    """
    if criterion.kind == "regression":
        given = criterion.losses
        assert isinstance(given, partial)
        losses = partial(_scaled_distances, losses, given.args[1])
    return replace(criterion, losses=losses)


def is_log_likelihood(criterion: Criterion) -> bool:
    """Whether the training loss is squared error or plain cross-entropy, without weights and smoothing."""
    losses, plain = criterion.losses, CRITERIA[criterion.kind]().losses
    if not isinstance(losses, partial) or not isinstance(plain, partial):
        return losses is plain
    first, usual = losses.args[0], plain.args[0]
    if criterion.kind == "regression":  # whatever the scale
        return isinstance(first, partial) and (first.func, first.args[0]) == (usual.func, usual.args[0])
    return (losses.func, losses.args) == (plain.func, plain.args)


def is_absolute(criterion: Criterion) -> bool:
    """Whether the training loss is the absolute error of values."""
    losses = criterion.losses
    if not isinstance(losses, partial) or losses.func is not _scaled_distances:
        return False
    distances = losses.args[0]
    return isinstance(distances, partial) and distances.func is _distances and distances.args[0] == "absolute"


def standardised_targets(criterion: Criterion, y: Tensor) -> Tensor:
    """The values of a regression in the units of a model's outputs."""
    assert isinstance(criterion.losses, partial)
    return _standardised(criterion.losses.args[1], y)


def next_token() -> Criterion:
    """The next token at each place of a sequence, by cross-entropy; targets of -100 do not count."""
    return Criterion("next_token", _token_losses, log_softmax, _mixed_logs, _token_nll, _tokens_right)


def survival(loss: str = "cox", ties: str = "efron", cuts: Sequence[float] = ()) -> Criterion:
    """The time until an event, [time, 1 if the event was seen and 0 if the time was censored]; more is riskier.

    Args:
        loss: "cox" has one output, the logarithm of a hazard, and minus the log partial likelihood within the batch:
            a client is a stratum of its own. "discrete_time" has an output for each interval, the logit of its hazard
            (Gensheimer and Narasimhan 2019).
        ties: Of events at the same time in Cox's likelihood, "efron" or "breslow".
        cuts: Of discrete time, the ends of the intervals, in the unit of the times. What is predicted is the
            probability that the event has happened by each of them.
    """
    one_of(SURVIVAL_LOSSES, loss=loss)
    one_of(("efron", "breslow"), ties=ties)
    if loss == "cox":
        if cuts:
            raise UsageError('cuts are of the objective "discrete_time"; Cox\'s has none')
        losses = partial(_partial_likelihood, ties)
        return Criterion("survival", losses, _as_they_are, _mean, losses, None)
    ends = tuple(float(cut) for cut in cuts)
    is_ascending = all(b > a for a, b in pairwise((0.0, *ends)))
    if not ends or not is_ascending or math.isinf(ends[-1]):
        raise UsageError(
            f"cuts={list(ends)} must be one or several times above 0, each later than the one before: "
            "discrete_time has an interval up to each of them"
        )
    return Criterion(
        "survival",
        partial(_interval_losses, ends),
        _incidences,
        _mean,
        partial(_incidence_losses, ends),
        None,
        ends,
    )


CRITERIA: dict[str, Callable[..., Criterion]] = {
    "classification": classification,
    "multilabel": multilabel,
    "regression": regression,
    "next_token": next_token,
    "survival": survival,
}
REGRESSION_LOSSES = ("squared", "absolute", "huber")
SURVIVAL_LOSSES = ("cox", "discrete_time")
LOSSES = {  # by the kind of the targets
    "classification": ("cross_entropy",),
    "multilabel": ("binary_cross_entropy",),
    "regression": REGRESSION_LOSSES,
    "next_token": ("cross_entropy",),
    "survival": SURVIVAL_LOSSES,
}


def mean_of_valid(values: Tensor, valid: Tensor | None) -> Tensor:
    """The mean over the valid samples; 0 where there are none."""
    if valid is None:
        return values.mean()
    weight = valid.to(values.dtype)
    return (values * weight).sum() / weight.sum().clamp(min=1)


# Classes


def _cross_entropy(weights: tuple[float, ...], smoothing: float, logits: Tensor, y: Tensor) -> Tensor:
    losses = _nll(log_softmax(logits), y)
    if smoothing:
        losses = F.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)
    if not weights:
        return losses
    if len(weights) != logits.shape[-1]:
        raise UsageError(f"class_weights has {len(weights)} numbers for {logits.shape[-1]} classes")
    # Comparisons with constants: a recorded program must not copy a table from the host.
    return losses * sum((y == n) * weight for n, weight in enumerate(weights))


def _nll(logs: Tensor, y: Tensor) -> Tensor:
    """F.nll_loss, bit for bit; under vmap that one first imports sympy, which takes a second."""
    return -logs.gather(1, y[:, None])[:, 0]


def _mixed_logs(logs: Tensor, weights: Tensor) -> Tensor:
    """The logarithm of the weighted mean of probabilities; a model of weight 0 has no part in it."""
    return torch.logsumexp(logs + _beside(torch.where(weights > 0, weights, 0).log(), logs), 0)


def _beside(weights: Tensor, values: Tensor) -> Tensor:
    """The weights with as many axes as the values."""
    return weights.view(*weights.shape, *[1] * (values.dim() - weights.dim()))


def _right(logs: Tensor, y: Tensor) -> Tensor:
    return logs.argmax(1) == y


# Labels


def _binary_cross_entropy(weights: tuple[float, ...], logits: Tensor, y: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none")  # [b, labels]
    if not weights:
        return losses.mean(1)
    if len(weights) != logits.shape[-1]:
        raise UsageError(f"label_weights has {len(weights)} numbers for {logits.shape[-1]} labels")
    return torch.stack(
        [column * weight for column, weight in zip(losses.unbind(1), weights, strict=True)]
    ).mean(0)


def _binary_nll(probabilities: Tensor, y: Tensor) -> Tensor:
    inside = probabilities.clamp(1e-12, 1 - 1e-7)
    y = y.to(inside.dtype)
    return -(y * inside.log() + (1 - y) * (1 - inside).log()).mean(1)


def _labels_right(probabilities: Tensor, y: Tensor) -> Tensor:
    return ((probabilities > 0.5) == (y > 0.5)).to(probabilities.dtype).mean(1)


# Numbers


Scale = tuple[tuple[float, float], ...]  # mean and deviation of each target; none: they are used as they are


def _columns(values: Tensor, scale: Scale, change: Callable[[Tensor, float, float], Tensor]) -> Tensor:
    """The values [b, ...] with each target changed; numbers instead of a tensor, as a recorded program must
    not copy from the host."""
    if not scale:
        return values
    if len(scale) == 1:
        return change(values, *scale[0])
    parts = zip(values.unbind(1), scale, strict=True)
    return torch.stack([change(column, *of_column) for column, of_column in parts], 1)


def _in_units(scale: Scale, outputs: Tensor) -> Tensor:
    return _columns(outputs, scale, lambda column, mean, std: column * std + mean)


def _standardised(scale: Scale, y: Tensor) -> Tensor:
    return _columns(y, scale, lambda column, mean, std: (column - mean) / std)


def _scaled_distances(
    losses: Callable[[Tensor, Tensor], Tensor], scale: Scale, outputs: Tensor, y: Tensor
) -> Tensor:
    return losses(outputs, _standardised(scale, y.to(outputs.dtype)).reshape(outputs.shape))


def _distances_in_scale(
    losses: Callable[[Tensor, Tensor], Tensor], scale: Scale, values: Tensor, y: Tensor
) -> Tensor:
    return _scaled_distances(losses, scale, _standardised(scale, values), y)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * _beside(weights, values)).sum(0)


def _distances(loss: str, delta: float, outputs: Tensor, y: Tensor) -> Tensor:
    if loss == "squared":
        losses = (outputs - y) ** 2
    elif loss == "absolute":
        losses = (outputs - y).abs()
    else:
        losses = F.huber_loss(outputs, y, reduction="none", delta=delta)
    return losses.flatten(1).mean(1)


# Tokens: outputs [b, t, words], targets [b, t], already shifted by one


def _token_losses(logits: Tensor, y: Tensor) -> Tensor:
    return _token_nll(log_softmax(logits), y)


def _token_nll(logs: Tensor, y: Tensor) -> Tensor:
    counted = y != PADDING
    losses = -logs.gather(-1, torch.where(counted, y, 0)[..., None])[..., 0]
    return torch.where(counted, losses, 0).sum(-1) / counted.sum(-1).clamp(min=1)


def _tokens_right(logs: Tensor, y: Tensor) -> Tensor:
    counted = y != PADDING
    right = (logs.argmax(-1) == y) & counted
    return right.sum(-1).to(logs.dtype) / counted.sum(-1).clamp(min=1)


# Times until an event: targets [b, 2] are the time, from 0 on, and whether the event was seen then; [b, 3] have the
# time, too, after which a sample is at risk


def _as_they_are(outputs: Tensor) -> Tensor:
    return outputs


class _Relative(torch.autograd.Function):
    """Values of which only the differences count: what is added to all of them has a gradient of exactly zero.

    By rounding alone the gradient's sum would be some 1e-9, of which Adam makes steps of full size. So a constant that
    nothing determines would move, and elsewhere on every machine. The gradient is rounded to multiples of one power of
    two, few enough that every sum of them is exact, in any order.
    """

    @staticmethod
    def forward(values: Tensor) -> Tensor:  # [..., b]
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        large = 4 * grad.abs().sum(-1, keepdim=True)
        unit = large * (1 + torch.finfo(grad.dtype).eps) - large
        rounded = (grad + large) - large
        rank = rounded.abs().argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        rest = rounded.sum(-1, keepdim=True)  # a unit less of the largest, which notice it least
        rounded = rounded - torch.where(rank < (rest.abs() / unit).floor(), rest.sign() * unit, 0)
        return rounded - torch.where(rank == 0, rounded.sum(-1, keepdim=True), 0)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], values: Tensor) -> tuple[Tensor, int]:
        return _relative(as_rows(info.batch_size, in_dims, [values])[0]), 0


_relative: Callable[[Tensor], Tensor] = _Relative.apply


def _partial_likelihood(ties: str, outputs: Tensor, y: Tensor) -> Tensor:
    """Of each event, minus the logarithm of its share in the hazards of those at risk; of a censored time 0.

    With Efron's rule, the l-th of d events at one time has l / d of their own hazards taken away.
    """
    risk, time, seen = _relative(outputs[:, 0]), y[:, 0], y[:, 1] > 0.5
    at_risk = time >= time[:, None]  # [event, sample]
    if y.shape[1] > 2:
        at_risk = at_risk & (y[:, 2] < time[:, None])
    weight = at_risk.to(risk.dtype)
    if ties == "efron":
        tied = ((time == time[:, None]) & seen).to(risk.dtype)
        earlier = tied.tril(-1).sum(1) / tied.sum(1).clamp(min=1)
        weight = weight - earlier[:, None] * tied
    return torch.where(seen, torch.logsumexp(risk + weight.log(), 1) - risk, 0)


def _interval_losses(ends: tuple[float, ...], logits: Tensor, y: Tensor) -> Tensor:
    """Minus the log-likelihood of the intervals that a sample went through, and of its event."""
    total = logits.new_zeros(len(y))
    for logit, begin, end in zip(logits.unbind(1), (-1.0, *ends), ends, strict=False):
        survived, ended = _passage(y, begin, end)
        total = (
            total + torch.where(survived, F.softplus(logit), 0) + torch.where(ended, F.softplus(-logit), 0)
        )
    return total


def _passage(y: Tensor, begin: float, end: float) -> tuple[Tensor, Tensor]:
    """Whether a sample was there at the end of this interval without its event, and whether its event was in it.

    A sample that began to be at risk within an interval counts in it, so that each patient of several rows counts once.
    """
    time, seen = y[:, 0], y[:, 1] > 0.5
    survived, ended = (time > end) | ((time == end) & ~seen), seen & (time > begin) & (time <= end)
    return (survived & (y[:, 2] < end), ended) if y.shape[1] > 2 else (survived, ended)


def _incidences(logits: Tensor) -> Tensor:
    """The probability that the event has happened by the end of each interval."""
    return -torch.expm1(-F.softplus(logits).cumsum(1))


def _incidence_losses(ends: tuple[float, ...], incidences: Tensor, y: Tensor) -> Tensor:
    """`_interval_losses` of what is predicted, which may be of a mixture of models."""
    before, likelihood = torch.zeros_like(incidences[:, 0]), torch.ones_like(incidences[:, 0])
    entered, is_counted = likelihood, torch.zeros_like(y[:, 0], dtype=torch.bool)
    for incidence, begin, end in zip(incidences.unbind(1), (-1.0, *ends), ends, strict=False):
        survived, ended = _passage(y, begin, end)
        entered = torch.where(
            (survived | ended) & ~is_counted, 1 - before, entered
        )  # who is first at risk here
        is_counted = is_counted | survived | ended
        likelihood = torch.where(survived, 1 - incidence, likelihood)
        likelihood = torch.where(ended, incidence - before, likelihood)
        before = incidence
    return -(likelihood.clamp(min=1e-12) / entered.clamp(min=1e-12)).log()
