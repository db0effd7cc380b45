"""The coefficients of a linear model with levels and their standard errors, in the units of the columns.

The summary of a run shows them, and a result has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.algorithms.levels import Server
from copfl.data.samples import CLASSIFICATION, Dataset
from copfl.parts.mixed_model import contrasts_of
from copfl.tables import Table, as_text, number

INTERCEPT = "(intercept)"
CONVERGED = 1e-4  # the largest change of a coefficient in the last round; they are of standardised columns


class Coefficient(NamedTuple):
    """What one more unit of a column adds to a value or to log odds; of a category, its presence."""

    target: str  # the value, label or class
    column: str  # a category is written column=category
    value: float
    error: float  # standard error, given the variances

    @property
    def ratio(self) -> float:
        """z: the value in standard errors; nan where there is no error."""
        return self.value / self.error if self.error > 0 else math.nan


class SiteSpread(NamedTuple):
    """How far the sites and the rows of a site are apart, in the units of the value or in log odds."""

    target: str
    intercepts: float  # τ, the standard deviation of the sites' intercepts
    residuals: float | None  # σ; None of classes and labels


class Coefficients(NamedTuple):
    """The common part of a linear model with levels."""

    coefficients: tuple[Coefficient, ...]
    spreads: tuple[SiteSpread, ...]
    last_change: float  # of a coefficient, in the last round

    def __repr__(self) -> str:
        return as_text(table(self))

    @property
    def converged(self) -> bool:
        return self.last_change <= CONVERGED


def coefficients_of(
    server: object, dataset: Dataset, records: Sequence[dict[str, Any]]
) -> Coefficients | None:
    """The coefficients of a run; None if it was of another algorithm.

    Args:
        server: The server's record after the last round.
        dataset: The names and encoders of its columns, and the scale of its values.
        records: Of the rounds.
    """
    last = records[-1]["federation"] if records else {}
    if not isinstance(server, Server) or "coefficient_change" not in last:  # alone, sites have no common ones
        return None
    back = _to_units(dataset, server.coefficients.shape[-1]).to(server.scale)
    problems, outputs, columns = server.coefficients.shape
    contrasts = torch.eye(outputs).to(server.scale)
    names: Sequence[str] = dataset.classes
    if dataset.kind == CLASSIFICATION:
        contrasts = contrasts_of(outputs + 1, server.scale.device, server.scale.dtype)
        if outputs == 1:  # log odds of the second class against the first
            contrasts, names = contrasts[1:] - contrasts[:1], dataset.classes[1:]
    means, deviations = dataset.target_scale
    coefficients: list[Coefficient] = []
    spreads: list[SiteSpread] = []
    for problem in range(problems):
        whole = torch.einsum("kq,cp->kcqp", contrasts, back).reshape(-1, outputs * columns)
        values = (whole @ server.coefficients[problem].flatten()).view(-1, columns)
        variances = (whole @ server.covariance[problem] * whole).sum(1).view(-1, columns)
        unit = deviations[problem] if deviations else 1.0
        start = means[problem] if means else 0.0
        targets = names if dataset.kind == CLASSIFICATION else names[problem : problem + 1]
        for target, row, errors in zip(targets, unit * values, unit * variances.sqrt(), strict=True):
            cells = zip(_columns(dataset, columns), row.tolist(), errors.tolist(), strict=True)
            coefficients += [Coefficient(target, c, v + start * (c == INTERCEPT), e) for c, v, e in cells]
        scale = float(server.scale[problem])
        ratio = server.variances.log_ratio[problem].exp().tolist()  # none where nothing varies
        apart = unit * math.sqrt(scale * ratio[0]) if ratio else 0.0
        of = "log odds" if dataset.kind == CLASSIFICATION else names[problem]
        spreads.append(SiteSpread(of, apart, unit * math.sqrt(scale) if deviations else None))
    return Coefficients(tuple(coefficients), tuple(spreads), float(last["coefficient_change"]))


def _columns(dataset: Dataset, count: int) -> list[str]:
    """The names of the features, and of the intercept."""
    encoders = dataset.table.columns if dataset.table is not None else ()
    names: list[str] = []
    for encoder in encoders:
        missing = [f"{encoder.name} is missing"] if encoder.indicator else []
        names += [f"{encoder.name}={category}" for category in encoder.categories] or [encoder.name, *missing]
    return [*(names if len(names) == count - 1 else [f"x{n}" for n in range(count - 1)]), INTERCEPT]


def _to_units(dataset: Dataset, count: int) -> Tensor:
    """[P, P]: coefficients in the units of the columns, from coefficients of standardised columns."""
    whole, column = torch.eye(count, dtype=torch.float64), 0
    encoders = dataset.table.columns if dataset.table is not None else ()
    if sum(encoder.width for encoder in encoders) != count - 1:
        return whole
    for encoder in encoders:
        if not encoder.categories:
            whole[column, column] = 1 / encoder.std
            whole[-1, column] = -encoder.mean / encoder.std
        column += encoder.width
    return whole


def table(coefficients: Coefficients) -> Table:
    """The coefficients for readers, with their standard errors."""
    several = len({one.target for one in coefficients.coefficients}) > 1
    rows = [
        [
            *([one.target] if several else []),
            one.column,
            f"{one.value:.4g}",
            f"{one.error:.3g}",
            number(one.ratio, ".1f"),
        ]
        for one in coefficients.coefficients
    ]
    head = [*(["target"] if several else []), "column", "coefficient", "standard error", "z"]
    notes = ["Per unit of a column, common to all sites; a category counts as 1."]
    for spread in coefficients.spreads:
        residuals = "" if spread.residuals is None else f", of rows within a site {spread.residuals:.3g}"
        notes.append(
            f"Standard deviation of the sites' intercepts ({spread.target}): {spread.intercepts:.3g}{residuals}."
        )
    if not coefficients.converged:
        notes.append(
            f"Not converged: the last round changed a coefficient by {coefficients.last_change:.2g}. Train more rounds."
        )
    target = "" if several else f" of {coefficients.coefficients[0].target}"
    return Table(f"Coefficients{target}", head, rows, notes)
