"""The coefficients of a linear model with levels and their standard errors, in the units of the columns.

The summary of a run shows them, and a result has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.algorithms.levels import Levels, Server
from copfl.data.samples import CLASSIFICATION, Dataset
from copfl.parts.mixed_model import contrasts_of
from copfl.tables import NONE, Table, as_text, number

INTERCEPT = "(intercept)"
CONVERGED = 1e-4  # the largest change of a coefficient in the last round; they are of standardised columns
MOST_PRIOR = 4.0  # times the variance that the prior leaves: above, the prior says more than the rows
WIDE, WIDEST = (
    1.0,
    10.0,
)  # errors of log odds per standardised unit: too wide with such a prior, and in any case


class Coefficient(NamedTuple):
    """What one more unit of a column adds to a value or to log odds; of a category, what it adds to another one.

    Value and error are of the model without the slopes' prior, None where the rows do not determine them.
    """

    target: str  # the value, label or class
    column: str  # a category is written column=category
    against: str  # the category of the same column that it is compared with; "": of numbers
    value: float | None
    error: float | None  # standard error, given the variances
    in_model: float  # with the prior

    @property
    def ratio(self) -> float:
        """z: the value in standard errors; nan where there is no error."""
        return self.value / self.error if self.error and self.value is not None else math.nan


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
    has_prior: bool  # whether the slopes of the model have one

    def __repr__(self) -> str:
        return as_text(table(self))

    @property
    def converged(self) -> bool:
        return self.last_change <= CONVERGED


def coefficients_of(
    algorithm: object, server: object, dataset: Dataset, records: Sequence[dict[str, Any]]
) -> Coefficients | None:
    """The coefficients of a run; None if it was of another algorithm.

    Args:
        algorithm: With its options.
        server: The server's record after the last round.
        dataset: The names and encoders of its columns, and the scale of its values.
        records: Of the rounds.
    """
    last = records[-1]["federation"] if records else {}
    if not isinstance(algorithm, Levels) or not isinstance(server, Server) or algorithm.alone:
        return None  # alone, sites have no common ones
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
        scale, penalised = server.scale[problem], server.coefficients[problem].flatten()
        inverse_prior = torch.zeros_like(penalised)
        if algorithm.shrink:
            is_slope = (torch.arange(len(penalised), device=penalised.device) + 1) % columns > 0
            inverse_prior = torch.where(is_slope, torch.exp(-server.variances.log_prior[problem]), 0)
        free = _without_prior(server.covariance[problem], penalised, scale, inverse_prior)
        shown = _shown(dataset, columns, free.information.diagonal()[:columns])
        targets = names if dataset.kind == CLASSIFICATION else names[problem : problem + 1]
        unit = deviations[problem] if deviations else 1.0
        start = means[problem] if means else 0.0
        for target, contrast in zip(targets, contrasts, strict=True):
            for one in shown:
                direction = torch.kron(contrast, one.direction.to(contrast))
                added = start * (one.column == INTERCEPT)
                in_model = unit * float(direction @ penalised) / one.deviation + added
                variance = _variance(direction, free, server.covariance[problem])
                is_too_wide = variance is None or (
                    one.column != INTERCEPT and deviations is None and _is_too_wide(*variance)
                )
                value = error = None
                if variance is not None and not is_too_wide:
                    value = unit * float(direction @ free.solution) / one.deviation + added
                    error = unit * math.sqrt(variance[0]) / one.deviation
                coefficients.append(Coefficient(target, one.column, one.against, value, error, in_model))
        ratio = server.variances.log_ratio[problem].exp().tolist()  # none where nothing varies
        apart = unit * math.sqrt(float(scale) * ratio[0]) if ratio else 0.0
        of = "log odds" if dataset.kind == CLASSIFICATION else names[problem]
        spreads.append(SiteSpread(of, apart, unit * math.sqrt(float(scale)) if deviations else None))
    return Coefficients(
        tuple(coefficients), tuple(spreads), float(last["coefficient_change"]), algorithm.shrink
    )


class _Free(NamedTuple):
    """The solution of a problem's equations without a prior, on the directions that the rows determine."""

    solution: Tensor  # [d]
    covariance: Tensor  # [d, d]
    information: Tensor  # [d, d], A in units of 1/σ²
    unknown: Tensor  # [d, k], the directions that the rows do not determine


def _without_prior(covariance: Tensor, solution: Tensor, scale: Tensor, inverse_prior: Tensor) -> _Free:
    """The solution of A β = c, from that of (A + R) β = c and its covariance σ² (A + R)⁻¹.

    Of values it is exact for the variances; of classes it is a step of Newton's method from the solution with prior.
    """
    rounding = torch.finfo(solution.dtype).eps
    if inverse_prior.any():
        whole = scale * torch.linalg.inv(covariance)
        information = whole - torch.diag_embed(inverse_prior)
        inverse, unknown = _inverse(information, rounding**0.5)
        return _Free(inverse @ (whole @ solution), scale * inverse, information, unknown)
    information, unknown = _inverse(covariance / scale, 1e3 * rounding)
    return _Free(solution, covariance, information, unknown)


def _inverse(matrix: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """The inverse of a symmetric matrix on the directions in which it is not zero, and the others [d, k].

    Args:
        matrix: [d, d].
        least: Part of the largest eigenvalue; smaller ones are zero.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    is_known = values > least * values.amax()
    inverse = (vectors * torch.where(is_known, 1 / torch.where(is_known, values, 1), 0)) @ vectors.T
    return inverse, vectors[:, ~is_known]


def _variance(direction: Tensor, free: _Free, with_prior: Tensor) -> tuple[float, float] | None:
    """The variance of a combination of coefficients, without and with the prior; None: the rows do not determine it."""
    beside = direction @ free.unknown
    if float(beside @ beside) > 1e-6 * float(direction @ direction):
        return None
    variance = float(direction @ free.covariance @ direction)
    return (variance, float(direction @ with_prior @ direction)) if variance > 0 else None


def _is_too_wide(variance: float, with_prior: float) -> bool:
    """Whether log odds may be infinite, as where all rows of a category are of one class."""
    mostly_prior = variance > MOST_PRIOR * with_prior
    return variance > (WIDE if mostly_prior else WIDEST) ** 2


class _Shown(NamedTuple):
    """A line of the table, as a combination of the coefficients of standardised columns."""

    column: str
    against: str
    direction: Tensor  # [P]
    deviation: float = 1.0  # of the column


def _shown(dataset: Dataset, count: int, information: Tensor) -> list[_Shown]:
    """The lines: numbers, categories against the first one that a row has, and the intercept at that category.

    Args:
        dataset: Its encoders.
        count: P.
        information: [P], of each feature; 0: no row has it.
    """
    eye = torch.eye(count, dtype=torch.float64)
    encoders = dataset.table.columns if dataset.table is not None else ()
    if sum(encoder.width for encoder in encoders) != count - 1:
        names = [*(f"x{n}" for n in range(count - 1)), INTERCEPT]
        return [_Shown(name, "", one) for name, one in zip(names, eye, strict=True)]
    has_rows = (information > math.sqrt(torch.finfo(information.dtype).eps) * information.amax()).tolist()
    lines, intercept, first = [], eye[-1].clone(), 0
    for encoder in encoders:
        if encoder.categories:
            places = range(first, first + len(encoder.categories))
            reference = next((place for place in places if has_rows[place]), first)
            has_others = len(places) > 1
            against = encoder.categories[reference - first] if has_others else ""
            start = has_others * eye[reference]  # beside one category there are missing ones only
            intercept += start
            lines += [
                _Shown(f"{encoder.name}={category}", against, eye[place] - start)
                for place, category in zip(places, encoder.categories, strict=True)
                if not has_others or place != reference
            ]
        else:
            lines.append(_Shown(encoder.name, "", eye[first], encoder.std))
            intercept[first] = -encoder.mean / encoder.std
            if encoder.indicator:
                lines.append(_Shown(f"{encoder.name} is missing", "", eye[first + 1]))
        first += encoder.width
    return [*lines, _Shown(INTERCEPT, "", intercept)]


def table(coefficients: Coefficients) -> Table:
    """The coefficients for readers, with their standard errors."""
    lines = coefficients.coefficients
    several = len({one.target for one in lines}) > 1
    rows = [
        [
            *([one.target] if several else []),
            one.column + (f" (against {one.against})" if one.against else ""),
            number(one.value, ".4g"),
            number(one.error, ".3g"),
            number(one.ratio, ".1f"),
            *([f"{one.in_model:.4g}"] if coefficients.has_prior else []),
        ]
        for one in lines
    ]
    head = [*(["target"] if several else []), "column", "coefficient", "standard error", "z"]
    head += ["in the model"] if coefficients.has_prior else []
    notes = ["Per unit of a column, common to all sites; a category against another one of its column."]
    if coefficients.has_prior:
        notes.append("Coefficients and errors are without the prior that shrinks the slopes of the model.")
    if any(one.value is None for one in lines):
        notes.append(f"{NONE}: the rows do not determine it.")
    for spread in coefficients.spreads:
        residuals = "" if spread.residuals is None else f", of rows within a site {spread.residuals:.3g}"
        notes.append(
            f"Standard deviation of the sites' intercepts ({spread.target}): {spread.intercepts:.3g}{residuals}."
        )
    if not coefficients.converged:
        notes.append(
            f"Not converged: the last round changed a coefficient by {coefficients.last_change:.2g}. Train more rounds."
        )
    target = "" if several else f" of {lines[0].target}"
    return Table(f"Coefficients{target}", head, rows, notes)
