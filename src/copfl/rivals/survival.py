"""The rivals of survival at one site: Kaplan and Meier's curve, the same for all rows, and Cox's model with a ridge.

Answers are risks [n, 1]. Those of the curve are 0: it knows nothing of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from copfl.measures.losses import event_losses
from copfl.measures.metrics import Metric
from copfl.measures.survival import Curve, starts, summed_at_risk, times_and_events
from copfl.rivals.effort import VALIDATED_ROWS
from copfl.rivals.estimators import folds_of
from copfl.rivals.records import CONSTANT, LINEAR, Array, Rival, SiteRows
from copfl.stats import Numbers, mean_of_known

STEPS, HALVINGS = 30, 30
SMALL = 1e-8  # a change of the log-likelihood that ends the steps


class Cox(NamedTuple):
    """A linear model of the logarithm of the hazard; the mean risk of the rows that it learned from is 0."""

    mean: Numbers  # [columns]
    coefficients: Numbers  # [columns]

    def __call__(self, x: Array) -> Numbers:
        return np.asarray((x - self.mean) @ self.coefficients)


def log_likelihood(risk: Numbers, targets: Array) -> float:
    """The partial one, with Breslow's rule for ties.

    Args:
        risk: [n], logarithms of hazards.
        targets: Of the rows.
    """
    _, seen = times_and_events(targets)
    top = risk.max()
    return float((risk - np.log(_total_at_risk(np.exp(risk - top), targets)) - top)[seen].sum())


def _total_at_risk(hazards: Numbers, targets: Array) -> Numbers:
    """[n], the sum of the hazards of those at risk at each row's time: at least its own, whatever rounding does."""
    return np.asarray(np.maximum(summed_at_risk(hazards, targets, times_and_events(targets)[0]), hazards))


def ridge_cox(x: Array, targets: Array, ridge: float) -> Cox:
    """Cox's model by Newton's method: the log-likelihood less ridge / 2 times the squared coefficients.

    Args:
        x: [n, columns]; the ridge is for columns that are divided by their deviation.
        targets: Of the rows.
        ridge: Above 0.
    """
    mean, deviation = x.mean(0), x.std(0)
    deviation = np.where(deviation > 1e-12, deviation, 1.0)
    z, (time, seen), start = (x - mean) / deviation, times_and_events(targets), starts(targets)
    order = np.argsort(time)
    beta = np.zeros(z.shape[1])

    def value(beta: Numbers) -> float:
        return log_likelihood(z @ beta, targets) - ridge / 2 * float(beta @ beta)

    now = value(beta)
    for _ in range(STEPS):
        risk = z @ beta
        w = np.exp(risk - risk.max())
        total = _total_at_risk(w, targets)
        # Of those at risk, at each event.
        means = summed_at_risk(w[:, None] * z, targets, time[seen]) / total[seen, None]
        # How much of each row's hazard has passed: the sum of 1 / total over the events while it was at risk.
        hazard = Curve(time[order], np.cumsum(np.where(seen, 1 / total, 0)[order]))
        passed = hazard.at(time) if start is None else hazard.at(time) - hazard.at(start)
        gradient = (z[seen] - means).sum(0) - ridge * beta
        curvature = (z * (w * passed)[:, None]).T @ z - means.T @ means + ridge * np.eye(len(beta))
        step, before = np.linalg.solve(curvature, gradient), now
        for halving in range(HALVINGS):
            if (now := value(beta + step / 2**halving)) >= before:
                beta = beta + step / 2**halving
                break
        if now - before < SMALL:
            break
    return Cox(mean, beta / deviation)


def survival_rivals(rows: SiteRows, metric: Metric, ridges: Sequence[float], seed: int) -> dict[str, Rival]:
    """Each kind of model by its name, the simplest first; the targets of the test rows are not used.

    Args:
        rows: The site's; at least one to train on.
        metric: The primary one.
        ridges: Of which the cross-validated likelihood chooses; none: no Cox model.
        seed: Of the folds.
    """

    def rival(inside: Numbers, model: Cox) -> Rival:
        known = ~np.isnan(inside)
        validated = metric.of(inside[known, None], rows.y[known])
        loss = float(mean_of_known(event_losses(inside, rows.y)))
        return Rival(validated, model(rows.x_test)[:, None], inside[:, None], (model,), loss)

    constant = Cox(np.zeros(rows.x.shape[1]), np.zeros(rows.x.shape[1]))
    rivals = {CONSTANT: rival(np.zeros(len(rows.y)), constant)}
    if not ridges:
        return rivals
    if rows.y[:, 1].sum() < 2:  # nothing to choose a ridge by
        return rivals | {LINEAR: rivals[CONSTANT]}
    used = np.linspace(0, len(rows.y) - 1, min(len(rows.y), VALIDATED_ROWS)).astype(np.int64)
    x, y = rows.x[used], rows.y[used]
    folds = folds_of(len(y), seed, None if rows.unit is None else rows.unit[used])
    answers, likelihoods = np.full((len(ridges), len(used)), np.nan), np.zeros(len(ridges))
    for fold in np.unique(folds).tolist():
        inside = folds != fold
        if not y[inside, 1].any():
            continue
        for n, ridge in enumerate(ridges):
            model = ridge_cox(x[inside], y[inside], ridge)
            answers[n, ~inside] = model(x[~inside])
            # Verweij and van Houwelingen 1993: what the rows of this fold add to the likelihood of all.
            likelihoods[n] += log_likelihood(model(x), y) - log_likelihood(model(x[inside]), y[inside])
    best = int(likelihoods.argmax())
    of_rows = np.full(len(rows.y), np.nan)
    of_rows[used] = answers[best]
    return rivals | {LINEAR: rival(of_rows, ridge_cox(rows.x, rows.y, ridges[best]))}
