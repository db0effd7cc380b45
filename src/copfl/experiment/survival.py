"""The curves of survival at each site, measured once, when the run ends: what probabilities of it are worth.

A risk becomes a probability by the baseline hazard of the site, from the site's training samples. The integrated Brier
score judges these probabilities on the test samples, beside Kaplan and Meier's curve of the training samples, which is
the same for all.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from copfl.charts import Chart, Dots, Line, Lines, values_of
from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.core.task import Data, Personal, Task
from copfl.data.clients.federation import FederatedData
from copfl.data.samples import SURVIVAL as TIMES_UNTIL_EVENTS
from copfl.experiment.bundle.description import Hazard
from copfl.experiment.finding import Finding, Trained
from copfl.experiment.recording import Recording
from copfl.measures.metrics import Array
from copfl.measures.survival import (
    baseline_hazard,
    integrated_brier,
    kaplan_meier,
    medians,
    medians_in_intervals,
    risks,
    starts,
    survival_at,
    survival_in_intervals,
    times_and_events,
)
from copfl.sections import Section
from copfl.stats import Numbers, mean_of_known
from copfl.tables import plain

MOST_STEPS = 500  # of a stored hazard
GRID = 50  # times at which the Brier score is computed
MIDDLE = (0.1, 0.9)  # of the training times: outside, few samples are known
THIRDS = ("low risk", "medium risk", "high risk")
MOST_SITES = 8  # whose curves are shown, those of most samples
MOST_GROUPS, LEAST_IN_GROUP = 5, 10  # of risk, whose probabilities are compared with what was observed


class Observed(NamedTuple):
    """Kaplan and Meier's curve of some samples, with 95 % intervals."""

    name: str
    samples: int
    times: tuple[float, ...]
    survival: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class RiskGroup(NamedTuple):
    """Test samples of similar predicted probability that the event happens by a horizon."""

    samples: int
    predicted: float  # their mean probability
    observed: float  # by Kaplan and Meier
    low: float  # of the 95 % interval of what is observed
    high: float


class AtHorizon(NamedTuple):
    """Probabilities of the event by a horizon beside what was observed; of the test samples of all clients."""

    horizon: float
    groups: tuple[RiskGroup, ...]  # from low to high risk

    @property
    def error(self) -> float:
        """The mean distance, a sample counts as any other."""
        samples = sum(group.samples for group in self.groups)
        return sum(group.samples * abs(group.predicted - group.observed) for group in self.groups) / samples


class Survival(NamedTuple):
    """The clients' probabilities of survival on their test samples, [clients]; nan where nothing is known."""

    brier: Numbers  # the integrated Brier score
    reference: Numbers  # that of Kaplan and Meier's curve of the training samples
    thirds: tuple[Observed, ...]  # by predicted risk within each client; of the test samples of all clients
    sites: tuple[Observed, ...]  # of all samples of a client, by its number; at most MOST_SITES
    calibration: AtHorizon | None  # None: with starts, and where hardly anything is known
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
        predictions, targets = predicted(task, model, train)
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


def measured(trained: Trained) -> Survival | None:
    """The probabilities of the clients' models; None where targets are no times until an event."""
    task, federation, models = trained.task, trained.federation, trained.models
    if task.criterion.kind != TIMES_UNTIL_EVENTS:
        return None
    brier, reference = (np.full(federation.clients, np.nan) for _ in range(2))
    hazards: list[Hazard | None] = [None] * federation.clients
    thirds: list[tuple[Array, Array]] = []  # of the test samples, which third, and their targets
    judged: list[
        tuple[Array, Array]
    ] = []  # the probability that the event has happened by the horizon, and the targets
    horizon, sites = _horizon(federation), _of_sites(federation)
    for n in range(federation.clients):
        if (kept := models.get(n)) is None:
            continue
        train, test = (tree.row(split.rows([n]), 0) for split in (federation.train, federation.test))
        with torch.no_grad():
            hazards[n] = hazard_of(task, kept.model, train)
            if not int(test.size) or not int(train.size):
                continue
            found, targets = predicted(task, kept.model, test)
        known = train.y[: int(train.size)].cpu().numpy()
        brier[n], reference[n] = _scores(found, targets, known, task.criterion.cuts, hazards[n])
        place = np.argsort(np.argsort(risks(found), kind="stable"))
        thirds.append((((place + 0.5) / len(found) * len(THIRDS)).astype(np.int64), targets))
        judged.append((1 - survival_of(found, horizon, task.criterion.cuts, hazards[n])[:, 0], targets))
    return Survival(brier, reference, _observed(thirds), sites, _at_horizon(horizon, judged), tuple(hazards))


def _targets(federation: FederatedData, client: int) -> Array:
    """Of all samples of a client."""
    parts = [tree.row(split.rows([client]), 0) for split in (federation.train, federation.test)]
    return np.concatenate([part.y[: int(part.size)].cpu().numpy() for part in parts])


def _of_sites(federation: FederatedData) -> tuple[Observed, ...]:
    """The curves of the clients of most samples, by their numbers."""
    sizes = federation.train.sizes + federation.test.sizes
    largest = sorted(np.argsort(-sizes, kind="stable")[:MOST_SITES].tolist())
    return tuple(_curve(str(n), _targets(federation, n)) for n in largest if sizes[n])


def _horizon(federation: FederatedData) -> Numbers:
    """[1], the median time of the events of all training samples, or of all times where none was seen."""
    known = [tree.row(federation.train.rows([n]), 0) for n in range(federation.clients)]
    targets = np.concatenate([part.y[: int(part.size)].cpu().numpy() for part in known])
    time, seen = times_and_events(targets)
    return np.array([np.median(time[seen] if seen.any() else time)])


def _at_horizon(horizon: Numbers, parts: Sequence[tuple[Array, Array]]) -> AtHorizon | None:
    """Groups of test samples by their probabilities, each at least LEAST_IN_GROUP and followed to the horizon."""
    if not parts:
        return None
    probability, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    known = np.isfinite(probability)
    if starts(targets) is not None or not (count := min(MOST_GROUPS, int(known.sum()) // LEAST_IN_GROUP)):
        return None
    probability, targets = probability[known], targets[known]
    groups = []
    for rows in np.array_split(np.argsort(probability, kind="stable"), count):
        curve = _curve("", targets[rows])
        if targets[rows, 0].max() < horizon[0] and (not curve.survival or curve.survival[-1] > 0):
            continue  # nobody was followed so far
        place = int(np.searchsorted(curve.times, horizon[0], side="right")) - 1
        left = [1.0 if place < 0 else column[place] for column in (curve.survival, curve.high, curve.low)]
        observed, low, high = (1 - value for value in left)
        groups.append(RiskGroup(len(rows), float(probability[rows].mean()), observed, low, high))
    return AtHorizon(float(horizon[0]), tuple(groups)) if groups else None


def _scores(
    predictions: Array, targets: Array, known: Array, cuts: Sequence[float], hazard: Hazard | None
) -> tuple[float, float]:
    """The integrated Brier score of a model, and of the curve of the training samples; nan: not defined.

    With starts it is not: its weights are of samples that are followed from time 0.
    """
    if starts(targets) is not None:
        return np.nan, np.nan
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
    curves = []
    for third, name in enumerate(THIRDS):
        if len(own := targets[number == third]):
            curves.append(_curve(name, own))
    return tuple(curves)


def _curve(name: str, targets: Array) -> Observed:
    """Kaplan and Meier's curve of these samples, of at most MOST_STEPS steps."""
    curve = kaplan_meier(targets)
    columns = (curve.survival.times, curve.survival.values, curve.low, curve.high)
    kept = np.unique(
        np.linspace(0, len(curve.low) - 1, min(len(curve.low), MOST_STEPS)).round().astype(np.int64)
    )
    return Observed(name, len(targets), *(tuple(column[kept].tolist()) for column in columns))


def as_json(found: Survival) -> dict[str, Any]:
    """For survival.json and the summary of a run."""
    content: dict[str, Any] = {"brier": found.brier, "reference": found.reference}
    content |= {name: [one._asdict() for one in getattr(found, name)] for name in ("thirds", "sites")}
    if (calibration := found.calibration) is not None:
        groups = [group._asdict() for group in calibration.groups]
        content["calibration"] = {
            "horizon": calibration.horizon,
            "error": calibration.error,
            "groups": groups,
        }
    return dict(plain(content))


def _survival(content: dict[str, Any]) -> Survival:
    thirds, sites = (
        tuple(
            Observed(
                str(one["name"]),
                int(one["samples"]),
                *(tuple(map(float, one[name])) for name in Observed._fields[2:]),
            )
            for one in content[kind]
        )
        for kind in ("thirds", "sites")
    )
    if any(len({len(column) for column in one[2:]}) > 1 for one in (*thirds, *sites)):
        raise ValueError("a curve has columns of different lengths")
    brier, reference = (np.array(content[name], np.float64) for name in ("brier", "reference"))
    if any(not 0 <= int(one.name) < len(brier) for one in sites):
        raise ValueError("a curve is of a site that is not there")
    calibration = None
    if "calibration" in content:
        groups = tuple(
            RiskGroup(int(one["samples"]), *(float(one[name]) for name in RiskGroup._fields[1:]))
            for one in content["calibration"]["groups"]
        )
        if not groups or any(group.samples < 1 for group in groups):
            raise ValueError("a calibration has groups of at least one sample")
        calibration = AtHorizon(float(content["calibration"]["horizon"]), groups)
    return Survival(brier, reference, thirds, sites, calibration, ())


def in_words(found: Survival) -> list[str]:
    """The means over clients, and the calibration, a sentence each; none where nothing is known."""
    at_horizon = []
    if (calibration := found.calibration) is not None:
        share = f"{100 * calibration.error:.1f} points from Kaplan and Meier's share"
        groups = (
            f"mean over {len(calibration.groups)} groups of risk"
            if len(calibration.groups) > 1
            else "one group"
        )
        at_horizon = [f"Probabilities of the event by {calibration.horizon:g}: {share}, {groups}."]
    both = ~np.isnan(found.gains)
    if not both.any():
        return at_horizon
    own, curve = (float(mean_of_known(values[both])) for values in (found.brier, found.reference))
    beside = f"Kaplan and Meier's curve of each site's training samples: {curve:.3f}"
    score = f"integrated Brier score {own:.3f} ({beside}; lower is better)"
    sentence = f"Probabilities of survival, mean over sites: {score}"
    worse = int((found.gains[both] <= 0).sum())
    clients = f"{worse} site{'s' * (worse > 1)} of {int(both.sum())}"
    beaten = [f"{clients}: no better than that curve."] if worse else []
    return [f"{sentence}.", *beaten, *at_horizon]


def _charts(found: Survival, run: Recording) -> Iterator[Chart]:
    """Kaplan and Meier's curves by predicted risk and per client, the calibration, and each client's Brier score."""
    if not run.records:
        return
    if len(found.brier) != len(run.client_titles):
        raise ValueError("survival.json has another number of sites")
    if curves := [one for one in found.thirds if one.times]:
        about = (
            "Test samples of all sites without an event, by Kaplan and Meier, in thirds by the risk that each "
            "site's model predicts among its own; the bands are 95 % intervals. Where the risk orders the events, "
            "the curves are apart."
        )
        end = max(one.times[-1] for one in curves)
        lines = [_stairs(one, end, place) for place, one in enumerate(curves)]
        title, x_title = "Survival by predicted risk", "time"
        x = sorted({time for line in lines for time in line.x})
        yield Lines("kaplan-meier", title, about, x, "without an event, %", lines, " %", x_title=x_title)
    if curves := [one for one in found.sites if one.times]:
        some = f"the {len(curves)} largest sites" if len(run.client_titles) > len(curves) else "each site"
        about = (
            f"All samples of {some} without an event, by Kaplan and Meier. Where the curves are apart, the "
            "sites' hazards differ, whatever the model; each site has a baseline hazard of its own."
        )
        end = max(one.times[-1] for one in curves)
        lines = [
            _stairs(one._replace(name=run.client_titles[int(one.name)]), end, place)._replace(low=(), high=())
            for place, one in enumerate(curves)
        ]
        x = sorted({time for line in lines for time in line.x})
        title, x_title = "Survival per site", "time"
        yield Lines(
            "kaplan-meier-clients", title, about, x, "without an event, %", lines, " %", x_title=x_title
        )
    if (calibration := found.calibration) is not None:
        about = (
            "Test samples of all sites in groups by the probability of an event that each site's model predicts "
            f"by the time {calibration.horizon:g}, the median time of the training samples' events. Observed is Kaplan "
            "and Meier's share with its 95 % interval. Where probabilities mean what they say, the curve is on the "
            f"diagonal; the mean distance is {100 * calibration.error:.1f} points."
        )
        predicted, observed, low, high = (
            [100 * value for value in column] for column in list(zip(*calibration.groups, strict=True))[1:]
        )
        remarks = [f"{group.samples} samples" for group in calibration.groups]
        lines = [
            Line("models", observed, low, high, remarks),
            Line("as they say", predicted, colour=1, dash=1),
        ]
        title, x_title = "Calibration at a horizon", "predicted probability of the event, %"
        yield Lines(
            "calibration-horizon", title, about, predicted, "observed, %", lines, " %", x_title=x_title
        )
    if np.isfinite(found.brier).any():
        about = (
            "The integrated Brier score of each site's model on its test samples, lower is better. A model right of "
            "Kaplan and Meier's curve of the site's training samples, which is the same for all, has probabilities "
            "that are worth nothing."
        )
        series = [
            Line("personal model", values_of(found.brier), symbol=0),
            Line("Kaplan-Meier", values_of(found.reference), colour=1, symbol=1),
        ]
        yield Dots("brier", "Brier score per site", about, run.client_titles, "Brier score", series, digits=3)


def _stairs(one: Observed, end: float, place: int) -> Line:
    """The curve with both ends of every step, in %."""

    def both(values: Sequence[float]) -> list[float]:
        """From the values after each time, those before and after it, from all at the start to the end."""
        steps = [100.0, *(100 * value for value in values)]
        return [value for value in steps for _ in range(2)]

    x = [0.0, *(time for time in one.times for _ in range(2)), end]
    y, low, high = (both(values) for values in (one.survival, one.low, one.high))
    return Line(f"{one.name}, {one.samples} samples", y, low, high, colour=place, x=x)


SURVIVAL = Finding(
    file="survival.json",
    as_json=as_json,
    parse=_survival,
    measured=measured,
    sentences=lambda found, run: in_words(found),
    section=lambda found, run: Section(
        "survival", "Survival", "Does the risk order the events?", [*_charts(found, run)]
    ),
)
