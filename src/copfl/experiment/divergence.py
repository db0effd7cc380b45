"""Training that failed: all clients diverged, some did, or no model beats a constant answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data.federation import Federation
from copfl.data.samples import CLASSIFICATION
from copfl.engine.rounds import Round
from copfl.errors import RunError
from copfl.experiment import records

ROUNDS = 3  # a run ends after so many rounds without a finite update
TRAINED = 10  # rounds before accuracy at chance is worth a warning
REMEDY = "use a lower learning rate (--lr), or look for extreme values in the data"


@dataclass
class DivergenceCheck:
    """Called after every round; a RunError once no client's update is finite any more."""

    federation: Federation
    rounds: int  # of the whole run
    folder: Path | None = None
    lost: list[Round] = field(default_factory=list)  # the latest rounds, in which every client diverged
    finite: bool = False  # whether there was a round with a finite update

    def __call__(self, round: Round, seconds: float) -> None:
        diverged = round.clients["healthy"] == 0
        if "test_loss" in round.clients:  # a huge model may be finite, and its output not
            diverged |= np.isnan(round.clients["test_loss"]) & (self.federation.test.sizes[round.ids] > 0)
        self.lost = [*self.lost, round] if diverged.all() else []
        self.finite |= not diverged.all()
        if len(self.lost) < ROUNDS and (self.finite or round.number + 1 < self.rounds):
            return
        clients = named(sorted({int(n) for one in self.lost for n in one.ids}))
        first, last = self.lost[0].number + 1, round.number + 1
        when = f"round {first}" if first == last else f"rounds {first} to {last}"
        kept = (
            ""
            if self.folder is None
            else f". {self.folder} has the rounds so far; resumed, it diverges again"
        )
        raise RunError(
            f"training diverged: in {when}, no client had a finite model ({clients}){kept}. "
            f"Start a new run: {REMEDY}"
        )


def named(clients: Sequence[int]) -> str:
    """Such as "clients 0, 3, 4"; of many, the first ones and the number of the others."""
    shown = ", ".join(map(str, clients[:10]))
    more = f" and {len(clients) - 10} more" if len(clients) > 10 else ""
    return f"client{'s' * (len(clients) > 1)} {shown}{more}"


def warnings_of(lines: list[dict[str, Any]], federation: Federation) -> list[str]:
    """A sentence for clients that diverged, and one for accuracy at chance; none if training went well."""
    found = []
    if diverged := _diverged(lines, federation):
        found.append(
            f"{named(diverged)} of {federation.clients} diverged: the last update was not finite; {REMEDY}"
        )
    if len(lines) >= TRAINED and (chance := _chance(lines, federation)):
        accuracy, constant = (f"{100 * value:.1f} %" for value in chance)
        found.append(
            f"after {len(lines)} rounds accuracy is at chance: {accuracy} on average, where always answering "
            f"a client's most frequent class gives {constant}; try other learning rates (--lr), more rounds "
            "or another model"
        )
    return found


def _diverged(lines: list[dict[str, Any]], federation: Federation) -> list[int]:
    """The clients whose last update or last evaluation was not finite."""
    healthy = records.latest(lines, "healthy", federation.clients)
    lost = {int(n) for n in np.flatnonzero(healthy == 0)}
    evaluated = [line for line in lines if "test_loss" in line["per_client"]]
    for line in evaluated[-1:]:
        losses = zip(line["clients"], line["per_client"]["test_loss"], strict=True)
        lost |= {n for n, loss in losses if loss is None and federation.test.sizes[n]}
    return sorted(lost)


def _chance(lines: list[dict[str, Any]], federation: Federation) -> tuple[float, float] | None:
    """The mean accuracy and that of constant answers, where they are within two standard errors."""
    if federation.dataset.kind != CLASSIFICATION:
        return None
    classes, partition = len(federation.dataset.classes), federation.partition
    labels = partition.tested(federation.dataset).y
    accuracy = records.latest(lines, "accuracy", federation.clients)
    counts: NDArray[np.int64] = np.stack(
        [np.bincount(labels[part], minlength=classes) for part in partition.test]
    )
    sizes = counts.sum(1)
    judged = ~np.isnan(accuracy) & ((counts > 0).sum(1) > 1)  # of one class, any answer is constant
    if not judged.any():
        return None
    constant = counts.max(1)[judged] / sizes[judged]
    error = math.sqrt((constant * (1 - constant) / sizes[judged]).sum()) / len(constant)
    mean, usual = float(accuracy[judged].mean()), float(constant.mean())
    return (mean, usual) if mean <= usual + 2 * error else None
