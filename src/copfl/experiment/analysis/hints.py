"""Hints about a model and samples that rarely learn: no logits, unscaled inputs; and training that failed.

`prepare` collects the hints, and training ends with an error where every client diverges.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from copfl.core.task import Task
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.groups import number_of_groups
from copfl.data.samples import CLASSIFICATION, MULTILABEL, NEXT_TOKEN, Dataset, by_name, each
from copfl.data.sets.overview import skew
from copfl.engine.rounds import Round
from copfl.errors import RunError, how_to_set
from copfl.experiment import records
from copfl.experiment.analysis.convergence import still_falls
from copfl.experiment.analysis.gains import constant_answers
from copfl.measures.metrics import METRICS
from copfl.stats import mean_of_known

SAMPLES, OUTPUTS = 1000, 4  # from which the inputs are judged, and the outputs
USUAL, MUCH = 0.95, 1.4  # of sentences, and how much longer the longest must be for a hint
SMALL, LARGE = 0.01, 20.0  # standard deviations; models and learning rates are made for about 1
ROUNDS = 3  # a run ends after so many rounds without a finite update
TRAINED = 10  # rounds before accuracy at chance is worth a warning
EXPLODED = 2.0  # the training loss of a round, as a multiple of that of the first
FAR, HOPELESS = 5.0, 1000.0  # training losses, as multiples of an untrained model's: too high, and the end


def hints(task: Task, dataset: Dataset) -> list[str]:
    """A sentence for each doubt about the data, the model's outputs, unscaled inputs and skewed classes.

    Args:
        task: With the model.
        dataset: What it is trained on.
    """
    samples = each(lambda array: array[:: max(1, len(array) // SAMPLES)], dataset.train.x)
    x = task.numbers(each(lambda array: torch.tensor(array, device=task.device), samples))
    by_accuracy = task.metrics[0].name == "accuracy"
    doubts = (
        _outputs(task, each(lambda tensor: tensor[:OUTPUTS], x)),
        _inputs(by_name(x)),
        skew(dataset) if by_accuracy else "",
    )
    return [*dataset.warnings, *filter(None, doubts)]


def regrouped(federation: FederatedData) -> list[str]:
    """A sentence where sites by nature are joined or divided, because the number of clients is another one."""
    sites, clients = number_of_groups(federation.dataset), federation.clients
    is_regrouped = (
        federation.partition.scheme == "by_group" and federation.dataset.natural and sites != clients
    )
    if not is_regrouped:
        return []
    how = "joined to" if clients < sites else "divided among"
    return [
        f"the {sites} sites of the data are {how} {clients} clients, so a client is no site; leave out the number "
        "of clients for one each"
    ]


def padding(dataset: Dataset, max_length: int) -> str:
    """The hint for sentences that are mostly much shorter than the longest, to which all are padded.

    Args:
        dataset: With token numbers in place of texts.
        max_length: That somebody chose; 0: nobody did.
    """
    mask = by_name(dataset.train.x).get("attention_mask")
    if mask is None or max_length or not len(mask):
        return ""
    lengths = mask.sum(1)
    longest, usual = mask.shape[1], int(np.quantile(lengths, USUAL, method="higher"))
    if longest < MUCH * usual:
        return ""
    return (
        f"sentences are padded to the {longest} tokens of the longest, but {USUAL:.0%} have at most {usual}; "
        f"--set model.max_length={usual} cuts the others and trains about {longest / usual:.1f} times as fast"
    )


def _outputs(task: Task, x: Any) -> str:
    """The hint for a model that returns probabilities.

    A log-softmax before a classification loss has no effect, and gets none.
    """
    if task.criterion.kind not in (CLASSIFICATION, MULTILABEL, NEXT_TOKEN):
        return ""
    with torch.no_grad():
        outputs = dataclasses.replace(task, batched=None).forward(task.initial, x)[0]
    sums = outputs.sum(-1)
    add_up = bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    if add_up and outputs.shape[-1] > 1:
        last = "a softmax"
    elif isinstance([*task.module.modules()][-1], nn.Sigmoid):
        last = "a sigmoid"
    else:
        return ""
    return (
        f"the model ends in {last}, but the loss applies one itself and expects logits, so training is slow "
        "or stops early; remove that layer and return the output of the last linear one"
    )


def _inputs(x: dict[str, Any]) -> str:
    """The hint for numbers far from a standard deviation of 1; tokens are whole numbers, and get none."""
    numbers = [tensor.double().flatten(1) for tensor in x.values() if tensor.is_floating_point()]
    spread = max((float(one.std(0, correction=0).max()) for one in numbers), default=0.0)
    if not (np.isfinite(spread) and (spread > LARGE or 0 < spread < SMALL)):
        return ""
    largest = max(float(one.abs().max()) for one in numbers)
    return (
        f"the inputs are not scaled: values reach {largest:.4g}, with a standard deviation of up to "
        f"{spread:.3g}, and models learn best where it is about 1; divide pixels by 255 or pass them as "
        "uint8, which is divided by 255, and standardise other features, (x - mean) / std"
    )


# Training that failed: the loss exploded, clients diverged or learned nothing, or no model beats a constant answer


@dataclass
class DivergenceCheck:
    """Called after every round; a RunError once no client's update is finite, or the training loss is hopeless."""

    federation: FederatedData
    rounds: int  # of the whole run
    folder: Path | None = None
    server: str = ""  # the server's step; empty: the plain mean
    lost: list[Round] = field(default_factory=list)  # the latest rounds, in which every client diverged
    finite: bool = False  # whether there was a round with a finite update
    untrained: float = math.nan  # see `untrained_loss`

    def __call__(self, round: Round, seconds: float) -> None:
        diverged = round.clients["healthy"] == 0
        means = {name: float(mean_of_known(round.clients[name])) for name in LOSSES if name in round.clients}
        if math.isnan(self.untrained):
            self.untrained = untrained_loss(means if round.number == 0 else {}, self.federation)
        diverged |= means.get("loss", 0.0) > HOPELESS * self.untrained
        if "test_loss" in round.clients:  # a huge model may be finite, and its output not
            diverged |= np.isnan(round.clients["test_loss"]) & (self.federation.test.sizes[round.ids] > 0)
        self.lost = [*self.lost, round] if diverged.all() else []
        self.finite |= not diverged.all()
        if len(self.lost) < ROUNDS and (self.finite or round.number + 1 < self.rounds):
            return
        clients = named(sorted({int(n) for one in self.lost for n in one.ids}))
        first, last = self.lost[0].number + 1, round.number + 1
        when = f"round {first}" if first == last else f"rounds {first} to {last}"
        what = f"no client had a finite model ({clients})"
        if any((one.clients["healthy"] > 0).any() for one in self.lost):
            loss = min(float(mean_of_known(one.clients["loss"])) for one in self.lost)
            what = (
                f"the training loss was {loss:.3g} or more, where an untrained model has {self.untrained:.3g}"
            )
        where = f". {self.folder} has the rounds so far; resumed, it diverges again" if self.folder else ""
        raise RunError(
            f"training diverged: in {when}, {what}{where}. Start a new run: {_remedy(self.server)}"
        )


LOSSES = ("loss", "test_loss_before", "test_loss_global")


def untrained_loss(first: Mapping[str, float | None], federation: FederatedData) -> float:
    """The loss of an untrained model: as it was measured, of classes at least a uniform answer's.

    Args:
        first: The means of the first round; before it a client's model and the global one are untrained.
        federation: The clients.

    Returns:
        The loss; nan if it was not measured and the targets are no classes.
    """
    dataset = federation.dataset
    uniform = math.log(max(2, len(dataset.classes))) if dataset.kind == CLASSIFICATION else math.nan
    measured = [loss for name in LOSSES[1:] if (loss := first.get(name)) is not None and math.isfinite(loss)]
    return max([loss for loss in (*measured, uniform) if not math.isnan(loss)], default=math.nan)


def _remedy(server: str) -> str:
    lower = how_to_set("optimizer.lr", "RATE", "--lr")
    others = f"use a lower learning rate ({lower}), or look for extreme values in the data"
    return f"{others}; {_shorter(server)}" if server else others


def _shorter(server: str) -> str:
    """How the server's step is made shorter."""
    plain = how_to_set("server.name", "mean", "--server")
    rate = how_to_set("server.lr", "RATE")
    lower = "" if server == "fedexp" else f", or a shorter one ({rate})"
    return f"the server's step ({server}) may be too long: take the plain mean ({plain}){lower}"


def named(clients: Sequence[int]) -> str:
    """Such as "clients 0, 3, 4"; of many, the first ones and the number of the others."""
    shown = ", ".join(map(str, clients[:10]))
    more = f" and {len(clients) - 10} more" if len(clients) > 10 else ""
    return f"client{'s' * (len(clients) > 1)} {shown}{more}"


def warnings_of(
    lines: list[dict[str, Any]], federation: FederatedData, server: str = "", *, rated: bool = True
) -> list[str]:
    """A sentence for clients that diverged, for a loss that exploded, and where a constant answer is as good.

    Args:
        lines: The rounds.
        federation: The clients.
        server: The name of the server's step; empty: the plain mean.
        rated: Whether the training has a learning rate; levels and trees have none.
    """
    warnings = []
    if diverged := _diverged(lines, federation):
        warnings.append(
            f"{named(diverged)} of {federation.clients} diverged: the last update was not finite; "
            f"{_remedy(server)}"
        )
    losses = [line["mean"]["loss"] for line in lines if line["mean"].get("loss") is not None]
    if server and losses and max(losses) > EXPLODED * losses[0] and losses[-1] > losses[0]:
        rise = f"the training loss rose from {losses[0]:.3g} to {max(losses):.3g} and did not recover"
        lower = how_to_set("optimizer.lr", "RATE", "--lr")
        warnings.append(f"{rise}: {_shorter(server)}, or use a lower learning rate ({lower})")
    elif losses:
        first = lines[0]["mean"] if lines[0]["round"] == 1 else {}
        untrained, lowest = untrained_loss(first, federation), min(losses[-max(1, len(losses) // 3) :])
        if max(losses) > FAR * untrained and lowest > untrained:
            warnings.append(
                f"training diverged: the training loss reached {max(losses):.3g}, and at the end it is {lowest:.3g} or "
                f"more, where an untrained model has {untrained:.3g}, so the results say nothing about the method; "
                f"{_remedy(server)}"
            )
    if len(lines) >= TRAINED and (chance := _chance(lines, federation)):
        accuracy, constant = (f"{100 * value:.1f} %" for value in chance)
        falls = still_falls(records.table(lines, "test_loss", federation.clients))
        more = "more rounds (the loss still falls), " if falls else ""
        rates = f"other learning rates ({how_to_set('optimizer.lr', 'RATE', '--lr')}), " if rated else ""
        warnings.append(
            f"after {len(lines)} rounds accuracy is not distinguishable from that of a constant answer: "
            f"{accuracy} on average, where always answering a client's most frequent class in training gives "
            f"{constant}. Try {rates}{more}another model, or a test on more samples"
        )
    return warnings


def _diverged(lines: list[dict[str, Any]], federation: FederatedData) -> list[int]:
    """The clients whose last update or last evaluation was not finite."""
    healthy = records.latest(lines, "healthy", federation.clients)
    lost = {int(n) for n in np.flatnonzero(healthy == 0)}
    evaluated = [line for line in lines if "test_loss" in line["per_client"]]
    for line in evaluated[-1:]:
        losses = zip(line["clients"], line["per_client"]["test_loss"], strict=True)
        lost |= {n for n, loss in losses if loss is None and federation.test.sizes[n]}
    return sorted(lost)


def _chance(lines: list[dict[str, Any]], federation: FederatedData) -> tuple[float, float] | None:
    """The mean accuracy and the accuracy of constant answers, where they are within two standard errors."""
    if federation.dataset.kind != CLASSIFICATION:
        return None
    accuracy = records.latest(lines, "accuracy", federation.clients)
    constant = constant_answers(federation, METRICS["accuracy"])
    tested = [federation.test.targets(n).cpu().numpy() for n in range(federation.clients)]
    different = np.array([len(np.unique(targets)) for targets in tested])
    # Of one class, any answer is constant.
    judged = ~np.isnan(accuracy) & ~np.isnan(constant) & (different > 1)
    if not judged.any():
        return None
    constant, sizes = constant[judged], federation.test.sizes
    error = math.sqrt((constant * (1 - constant) / sizes[judged]).sum()) / len(constant)
    mean, usual = float(accuracy[judged].mean()), float(constant.mean())
    return (mean, usual) if mean <= usual + 2 * error else None
