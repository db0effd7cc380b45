"""The curves of survival at each site, measured once, when the run ends: what probabilities of it are worth.

A risk becomes a probability by the baseline hazard of the site, from the site's training samples. The integrated Brier
score judges these probabilities on the test samples, beside Kaplan and Meier's curve of the training samples, which is
the same for all.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from copfl import files, foreign
from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.core.metrics import Array
from copfl.core.survival import (
    baseline_hazard,
    integrated_brier,
    kaplan_meier,
    medians,
    medians_in_intervals,
    risks,
    survival_at,
    survival_in_intervals,
)
from copfl.core.task import Data, Personal, Task
from copfl.data.clients.federation import FederatedData
from copfl.data.samples import SURVIVAL
from copfl.experiment.bundle.description import Hazard
from copfl.experiment.models.client_models import ClientModels
from copfl.stats import Numbers, mean_of_known
from copfl.tables import plain

FILE = "survival.json"
MOST_STEPS = 500  # of a stored hazard
GRID = 50  # times at which the Brier score is computed
MIDDLE = (0.1, 0.9)  # of the training times: outside, few samples are known
THIRDS = ("low risk", "medium risk", "high risk")


class Observed(NamedTuple):
    """Kaplan and Meier's curve of some test samples, with 95 % intervals."""

    name: str
    samples: int
    times: tuple[float, ...]
    survival: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class Survival(NamedTuple):
    """The clients' probabilities of survival on their test samples, [clients]; nan where nothing is known."""

    brier: Numbers  # the integrated Brier score
    reference: Numbers  # that of Kaplan and Meier's curve of the training samples
    thirds: tuple[Observed, ...]  # by predicted risk within each client; of the test samples of all clients
    hazards: tuple[Hazard | None, ...]  # of the bundles; not in the file

    def __repr__(self) -> str:
        """The means over the clients, and which fields have more."""
        own, curve = (float(mean_of_known(values)) for values in (self.brier, self.reference))
        more = ", ".join(self._fields)
        return f"integrated Brier score {own:.3f}, of Kaplan and Meier's curve {curve:.3f}; has {more}"

    @property
    def gains(self) -> Numbers:
        """By how much the score is lower than that of the curve, [clients]."""
        return self.reference - self.brier


def hazard_of(task: Task, model: Personal, train: Data) -> Hazard | None:
    """The baseline hazard of a model at a site; None in discrete time, and where no event was seen.

    Args:
        task: What is learned.
        model: The site's.
        train: Its training samples.
    """
    if task.criterion.cuts or not int(train.size):
        return None
    with torch.no_grad():
        predictions, targets = predicted(task, tree.each(lambda t: t.to(task.device), model), train)
    if not np.isfinite(predictions).all():
        return None
    curve = baseline_hazard(risks(predictions), targets)
    if not len(curve.times) or not np.isfinite(curve.values).all():
        return None
    kept = np.unique(np.linspace(0, len(curve.times) - 1, MOST_STEPS).round().astype(np.int64))
    kept = kept[np.diff(curve.values[kept], prepend=0) > 0]  # a step that rounding removes is none
    if not len(kept):
        return None
    longest = float(targets[:, 0].max())
    return Hazard(tuple(curve.times[kept].tolist()), tuple(curve.values[kept].tolist()), longest)


def survival_of(predictions: Array, times: Numbers, cuts: Sequence[float], hazard: Hazard | None) -> Numbers:
    """[n, k], the probability that there is no event up to each of k times; nan where it is not known.

    Args:
        predictions: Of a model of survival, [n, outputs].
        times: [k].
        cuts: Of discrete time; none: the predictions are risks.
        hazard: Of the site, for risks.
    """
    if cuts:
        return survival_in_intervals(times, predictions, cuts)
    if hazard is None:
        return np.full((len(predictions), len(times)), np.nan)
    found = survival_at(times, risks(predictions), hazard.curve)
    return np.where(times <= hazard.followed, found, np.nan)


def medians_of(predictions: Array, cuts: Sequence[float], hazard: Hazard | None) -> Numbers:
    """[n], when the probability that there is no event falls to a half; infinite where it does not, nan: not known.

    Args:
        predictions, cuts, hazard: As of `survival_of`.
    """
    if cuts:
        return medians_in_intervals(predictions, cuts)
    if hazard is None:
        return np.full(len(predictions), np.nan)
    return medians(risks(predictions), hazard.curve)


def measured(task: Task, federation: FederatedData, models: ClientModels) -> Survival | None:
    """The probabilities of the clients' models; None where targets are no times until an event.

    Args:
        task: What the rounds trained.
        federation: Its samples.
        models: The model of each client; one that is not kept is not measured.
    """
    if task.criterion.kind != SURVIVAL:
        return None
    brier, reference = (np.full(federation.clients, np.nan) for _ in range(2))
    hazards: list[Hazard | None] = [None] * federation.clients
    thirds: list[tuple[Array, Array]] = []  # of the test samples, which third, and their targets
    for n in range(federation.clients):
        if (kept := models.get(n)) is None:
            continue
        model = tree.each(lambda t: t.to(task.device), kept.model)
        train, test = (tree.row(split.rows([n]), 0) for split in (federation.train, federation.test))
        with torch.no_grad():
            hazards[n] = hazard_of(task, model, train)
            if not int(test.size) or not int(train.size):
                continue
            found, targets = predicted(task, model, test)
        known = train.y[: int(train.size)].cpu().numpy()
        brier[n], reference[n] = _scores(found, targets, known, task.criterion.cuts, hazards[n])
        place = np.argsort(np.argsort(risks(found), kind="stable"))
        thirds.append((((place + 0.5) / len(found) * len(THIRDS)).astype(np.int64), targets))
    return Survival(brier, reference, _observed(thirds), tuple(hazards))


def _scores(
    predictions: Array, targets: Array, known: Array, cuts: Sequence[float], hazard: Hazard | None
) -> tuple[float, float]:
    """The integrated Brier score of a model, and of the curve of the training samples; nan: not defined."""
    low, high = np.quantile(known[:, 0], MIDDLE)
    high = min(high, float(targets[:, 0].max()), *cuts[-1:])
    if not low < high:
        return np.nan, np.nan
    times = np.linspace(low, high, GRID)
    own = survival_of(predictions, times, cuts, hazard)
    curve = np.repeat(kaplan_meier(known).survival.at(times)[None], len(targets), axis=0)
    of_curve = integrated_brier(curve, times, targets, known)
    return (integrated_brier(own, times, targets, known) if np.isfinite(own).all() else np.nan), of_curve


def _observed(parts: Sequence[tuple[Array, Array]]) -> tuple[Observed, ...]:
    """The curve of each third."""
    if not parts:
        return ()
    number, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    found = []
    for third, name in enumerate(THIRDS):
        if len(own := targets[number == third]):
            curve = kaplan_meier(own)
            columns = (curve.survival.times, curve.survival.values, curve.low, curve.high)
            found.append(Observed(name, len(own), *(tuple(column.tolist()) for column in columns)))
    return tuple(found)


def as_json(found: Survival) -> dict[str, Any]:
    """For survival.json and the summary of a run."""
    thirds = [one._asdict() for one in found.thirds]
    return dict(plain({"brier": found.brier, "reference": found.reference, "thirds": thirds}))


def write(found: Survival, folder: Path) -> None:
    """Writes the file of a run folder."""
    files.write_bytes(folder / FILE, (json.dumps(as_json(found)) + "\n").encode())


def read(folder: Path) -> Survival | None:
    """The content of the file in a run folder, without the hazards; None where there is none."""
    return foreign.of_run(folder / FILE, _survival)


def _survival(content: dict[str, Any]) -> Survival:
    thirds = tuple(
        Observed(
            str(one["name"]),
            int(one["samples"]),
            *(tuple(map(float, one[name])) for name in Observed._fields[2:]),
        )
        for one in content["thirds"]
    )
    if any(len({len(column) for column in one[2:]}) > 1 for one in thirds):
        raise ValueError("a curve has columns of different lengths")
    brier, reference = (np.array(content[name], np.float64) for name in ("brier", "reference"))
    return Survival(brier, reference, thirds, ())


def in_words(found: Survival) -> list[str]:
    """The means over clients, in a sentence; none where nothing is known."""
    both = ~np.isnan(found.gains)
    if not both.any():
        return []
    own, curve = (float(mean_of_known(values[both])) for values in (found.brier, found.reference))
    beside = f"Kaplan and Meier's curve of each client's training samples: {curve:.3f}"
    score = f"integrated Brier score {own:.3f} ({beside}; lower is better)"
    sentence = f"Probabilities of survival, mean over clients: {score}"
    worse = int((found.gains[both] <= 0).sum())
    clients = f"{worse} client{'s' * (worse > 1)} of {int(both.sum())}"
    return [f"{sentence}.", *([f"{clients}: no better than that curve."] if worse else [])]
