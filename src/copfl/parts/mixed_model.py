"""A generalised linear mixed model by sums over sites: the working equations of a site, and their solution.

The rows of site i have the linear predictor η = β'x + u_i'z, where x ends with 1 for the intercept, and z are the
entries of x whose coefficients vary between the sites: u_i ~ N(0, σ² diag(λ)). A round is one step of penalised
iteratively reweighted least squares (Breslow and Clayton 1993): with e = y - μ and W = -∂e/∂η, the response
η + W⁻¹e has weights W, and

  G_i   = Σ [x, response]' W [x, response]              a site's working equations, bordered by the response
  M_i   = (D_i + diag(1/λ))⁻¹                           D_i: the rows and columns z of G_i
  G_i*  = G_i - G_i[:, z] M_i G_i[z, :]                 without the effects u_i, which are integrated out
  L_i   = log |I + diag(λ) D_i|

add up to everything that β and the variances depend on. Targets that are values have W = 1, and then nothing is an
approximation: the result is the mixed model's restricted maximum likelihood.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.core import tree
from copfl.core.criteria import Criterion, is_log_likelihood, standardised_targets
from copfl.errors import UsageError

LONGEST_STEP = 2.0  # of the logarithm of a variance, in a round
RATIOS, PRIORS = (-14.0, 7.0), (-10.0, 5.0)  # the least and the largest logarithm of λ and of ω²
TURNS = 30  # Newton steps for ω², which need no round
FIRST_TURNS = 12  # Newton steps for a site's own effects; of values one is exact
LARGEST_CHANGE = 4.0  # of a coefficient of a log odds, in a round and in a turn
TINY = 1e-100
COLLINEAR = 1e-11  # eigenvalues of the equations below this part of the largest are zero


class Responses(NamedTuple):
    """Targets of one kind as problems of linear predictors: `problems` are solved apart, each of `outputs` η."""

    problems: int
    outputs: int
    contrasts: Tensor | None  # [classes, outputs]: of classes, logits = contrasts · η; None: logits = η
    has_scale: bool  # whether σ² is estimated; of classes and labels it is 1
    residuals: Callable[
        [Tensor, Tensor], tuple[Tensor, Tensor]
    ]  # η [n, B, q], y -> e [n, B, q], W [n, B, q, q]


def responses(criterion: Criterion, classes: int, device: torch.device, dtype: torch.dtype) -> Responses:
    """The linear predictors of targets of this kind; UsageError if their loss is no log-likelihood.

    Args:
        criterion: Of the task.
        classes: Or labels, or values.
        device: Of the contrasts.
        dtype: Of the contrasts.
    """
    if criterion.kind in ("next_token", "survival") or not is_log_likelihood(criterion):
        raise UsageError(
            "a linear model with levels predicts values by squared error, or classes and labels by plain "
            "cross-entropy; leave out other losses, weights and smoothing, or choose another algorithm"
        )
    if criterion.kind == "classification":
        contrasts, numbers = contrasts_of(classes, device, dtype), torch.arange(classes, device=device)

        def of_classes(eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            p = torch.softmax(eta[:, 0] @ contrasts.T, -1)  # [n, K]
            e = ((y[:, None] == numbers).to(p) - p) @ contrasts
            mean = p @ contrasts
            weights = (
                torch.einsum("nk,ki,kj->nij", p, contrasts, contrasts) - mean[:, :, None] * mean[:, None]
            )
            return e[:, None], weights[:, None]

        return Responses(1, classes - 1, contrasts, False, of_classes)

    def of_labels(eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.sigmoid(eta[..., 0])
        return (y.to(p) - p)[..., None], (p * (1 - p))[..., None, None]

    def of_values(eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scaled = standardised_targets(criterion, y.to(eta)).reshape(eta.shape[:2])
        return (scaled - eta[..., 0])[..., None], torch.ones_like(eta)[..., None]

    is_values = criterion.kind == "regression"
    return Responses(classes, 1, None, is_values, of_values if is_values else of_labels)


@lru_cache(maxsize=16)  # a recorded program must not copy from the host
def contrasts_of(classes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[K, K-1]: logits that sum to zero, the log odds of any two classes having the same variance as an η.

    Of two classes the logits are -η/2 and η/2, so η is the log odds. The columns are orthogonal (Helmert).
    """
    columns = []
    for k in range(1, classes):
        column = torch.zeros(classes, dtype=torch.float64)
        column[:k], column[k] = -1.0, float(k)
        columns.append(column / column.norm() / 2**0.5)
    whole = torch.stack(columns, 1) if columns else torch.zeros(classes, 0)
    return whole.to(device, dtype)


# -- one site ------------------------------------------------------------------------------------------------


class Varying(NamedTuple):
    """Which coefficients vary between sites, as entries of the equations of one problem, [q · P]."""

    columns: Tensor  # [c], of x
    entries: Tensor  # [q c]
    group: Tensor  # [q c], which λ an entry has: 0 the intercept's, 1 that of the slopes


@lru_cache(maxsize=16)
def varying_of(outputs: int, columns: int, variances: int, device: torch.device) -> Varying:
    """Of no variance no column, of one the intercept, the last column, and of two all columns."""
    chosen = range({0: columns, 1: columns - 1, 2: 0}[variances], columns)
    entries = [i * columns + c for i in range(outputs) for c in chosen]
    groups = [int(c != columns - 1) for _ in range(outputs) for c in chosen]
    parts = (list(chosen), entries, groups)
    return Varying(*(torch.tensor(part, dtype=torch.int64, device=device) for part in parts))


class Site(NamedTuple):
    """One site's rows; those that do not count are zero in x, and `counts` is 0."""

    x: Tensor  # [n, P], the last column is 1
    y: Tensor
    counts: Tensor  # [n]


def residuals(site: Site, responses: Responses, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """e [n, B, q] and W [n, B, q, q] of a site's rows with these coefficients [B, q, P]."""
    eta = torch.einsum("np,bqp->nbq", site.x, coefficients)
    e, weights = responses.residuals(eta, site.y)
    return e * site.counts[:, None, None], weights * site.counts[:, None, None, None]


def own_effects(
    site: Site, responses: Responses, varying: Varying, common: Tensor, log_ratio: Tensor, start: Tensor
) -> Tensor:
    """[B, q, c]: u_i, the mode of a site's own effects given the common coefficients and the variances.

    Newton's steps. Of values the first is exact: an intercept is Σ residuals / (m + σ²/τ²).

    Args:
        site: Its rows.
        responses: The kind of targets.
        varying: Which coefficients vary.
        common: [B, q, P], the common coefficients.
        log_ratio: [B, t], log λ.
        start: [B, q, c], where the steps begin.
    """
    if not varying.columns.numel():
        return start
    penalty = torch.exp(-log_ratio[:, varying.group])  # [B, q c]
    z, effects = site.x[:, varying.columns], start
    for _ in range(1 if responses.has_scale else FIRST_TURNS):
        e, weights = residuals(site, responses, with_effects(varying, common, effects))
        slope = torch.einsum("nbq,nc->bqc", e, z).flatten(1) - penalty * effects.flatten(1)
        curvature = torch.einsum("nbij,nc,nd->bicjd", weights, z, z).flatten(3).flatten(1, 2)
        step = torch.linalg.solve_ex(curvature + torch.diag_embed(penalty), slope[..., None])[0][..., 0]
        largest = step.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        limit = torch.ones_like(largest) if responses.has_scale else (LARGEST_CHANGE / largest).clamp(max=1)
        effects = effects + (limit * step).view(effects.shape)
    return effects


def with_effects(varying: Varying, common: Tensor, effects: Tensor) -> Tensor:
    """[B, q, P], the coefficients of a site: the common ones, and its own effects [B, q, c] on some of them."""
    return common.index_add(2, varying.columns, effects)


class Equations(NamedTuple):
    """The working equations of a site without its own effects, or the sum of several; [B, ...] each.

    With their first and second derivatives by log λ, over pairs (a, b) with a <= b.
    """

    rows: Tensor  # [B]
    g: Tensor  # [B, 1 + t + pairs, d + 1, d + 1], G* and its derivatives
    log_volume: Tensor  # [B, 1 + t + pairs], L and its derivatives


def pairs_of(count: int) -> list[tuple[int, int]]:
    """The second derivatives of so many variables."""
    return [(a, b) for a in range(count) for b in range(a, count)]


def equations(
    site: Site, responses: Responses, varying: Varying, coefficients: Tensor, log_ratio: Tensor
) -> Equations:
    """The working equations at a site's own coefficients.

    Args:
        site: Its rows.
        responses: The kind of targets.
        varying: Which coefficients vary.
        coefficients: [B, q, P], the common ones with its own effects.
        log_ratio: [B, t], log λ.
    """
    e, weights = residuals(site, responses, coefficients)
    flat = coefficients.flatten(1)  # [B, d]
    a = torch.einsum("nbij,np,nr->bipjr", weights, site.x, site.x).flatten(3).flatten(1, 2)
    slope = torch.einsum("nbq,np->bqp", e, site.x).flatten(1)
    pulled = torch.einsum("bde,be->bd", a, flat)
    # Of classes, e' W⁻¹ e is left out: no variance depends on it, and it is large where W vanishes.
    squares = (e**2).sum((0, 2)) if responses.has_scale else 0.0
    corner = (flat * (pulled + 2 * slope)).sum(1) + squares
    c = pulled + slope
    g = torch.cat([torch.cat([a, c[:, :, None]], 2), torch.cat([c, corner[:, None]], 1)[:, None]], 1)

    rows = site.counts.sum().expand(len(log_ratio))
    if not varying.columns.numel():
        return Equations(rows, g[:, None], torch.zeros_like(corner)[:, None])
    beside, inner = g[:, :, varying.entries], a[:, varying.entries][:, :, varying.entries]
    penalty = torch.exp(-log_ratio[:, varying.group])
    whole = inner + torch.diag_embed(penalty)
    m = torch.linalg.inv_ex(whole)[0]
    count = log_ratio.shape[1]
    shares = [penalty * (varying.group == k) for k in range(count)]  # diagonals of E_k = -∂(1/λ)/∂ log λ_k
    first = [m * share[:, None] @ m for share in shares]  # ∂M/∂ log λ_k = M E_k M
    traces = [(m.diagonal(dim1=1, dim2=2) * share).sum(1) for share in shares]
    second, second_volume = [], []
    for k, other in pairs_of(count):
        mixed = first[k] * shares[other][:, None] @ m
        second.append(mixed + mixed.mT - (first[k] if k == other else 0))
        crossed = -(first[other].diagonal(dim1=1, dim2=2) * shares[k]).sum(1)
        second_volume.append(crossed + (traces[k] if k == other else 0))
    reduced = [beside @ change @ beside.mT for change in (m, *first, *second)]
    volume = torch.linalg.slogdet(whole)[1] + log_ratio[:, varying.group].sum(1)
    sizes = [(varying.group == k).sum() for k in range(count)]
    volumes = [volume, *(size - trace for size, trace in zip(sizes, traces, strict=True)), *second_volume]
    return Equations(
        rows, torch.stack([g - reduced[0], *(-r for r in reduced[1:])], 1), torch.stack(volumes, 1)
    )


def packed(one: Equations) -> Tensor:
    """All numbers of the equations as one vector; of the symmetric matrices one half."""
    size = one.g.shape[-1]
    half = one.g[..., *torch.triu_indices(size, size, device=one.g.device)]
    return torch.cat([one.rows[:, None], half.flatten(1), one.log_volume], 1).flatten()


def unpacked(vector: Tensor, problems: int, size: int, variances: int) -> Equations:
    """The inverse of `packed`.

    Args:
        vector: The numbers, or their sums.
        problems: B.
        size: d + 1.
        variances: t.
    """
    orders = 1 + variances + len(pairs_of(variances))
    half = size * (size + 1) // 2
    rows, g, log_volume = torch.split(vector.view(problems, -1), [1, orders * half, orders], 1)
    row, column = torch.triu_indices(size, size, device=vector.device)
    place = torch.zeros(size, size, dtype=torch.int64, device=vector.device)
    place[row, column] = place[column, row] = torch.arange(half, device=vector.device)
    return Equations(rows[:, 0], g.reshape(problems, orders, half)[..., place], log_volume)


# -- the federation ------------------------------------------------------------------------------------------


class Variances(NamedTuple):
    """Logarithms: of λ = τ²/σ², and of ω², the slopes' prior variance in units of σ²."""

    log_ratio: Tensor  # [B, t]
    log_prior: Tensor  # [B]
    step: Tensor  # [B, t], the last one of log λ


class Solution(NamedTuple):
    """What the sums of one round say."""

    coefficients: Tensor  # [B, d]
    covariance: Tensor  # [B, d, d], of the coefficients
    scale: Tensor  # [B], σ²
    variances: Variances  # for the next round


def solved(
    total: Equations, variances: Variances, penalised: Tensor, has_scale: bool, has_prior: bool
) -> Solution:
    """The coefficients for these variances, and the next variances: a Newton step of the restricted likelihood.

    Args:
        total: The sum over the sites, at these variances.
        variances: Those that the sites had.
        penalised: [d] bool, the entries that have a prior.
        has_scale: Whether σ² is estimated.
        has_prior: Whether the slopes have a prior N(0, σ² ω²); otherwise they are not shrunk.
    """
    problems = zip(zip(*total, strict=True), zip(*variances, strict=True), strict=True)
    solutions = [
        _solved_problem(Equations(*one), Variances(*its), penalised, has_scale, has_prior)
        for one, its in problems
    ]
    return tree.each(lambda *of_problems: torch.stack(of_problems), *solutions)


def _solved_problem(
    total: Equations, variances: Variances, penalised: Tensor, has_scale: bool, has_prior: bool
) -> Solution:
    """`solved` for one problem. -2 log restricted likelihood is, up to a constant, with R = diag(1/ω²) on slopes,

      L + log |A + R| - log |R| + (n - f) log Q      or, where σ² is 1,      ... + Q
      Q = response' response - c' (A + R)⁻¹ c        A, c and response' response: the blocks of G*

    where f coefficients have no prior. Its coordinates are log λ and, last, log ω².
    """
    (rows, g, log_volume), (log_ratio, log_prior, last_step) = total, variances
    count = len(log_ratio)
    a, c, corner = g[0, :-1, :-1], g[0, :-1, -1], g[0, -1, -1]
    inverse_prior = torch.zeros_like(c)
    spare = (
        rows
        - ((~penalised).sum() if has_prior else torch.linalg.matrix_rank(a, rtol=COLLINEAR, hermitian=True))
    ).clamp(min=1)
    if has_prior:
        log_prior = _prior(a, c, corner, penalised, spare if has_scale else None)
        inverse_prior = torch.where(penalised, torch.exp(-log_prior), 0)
    inverse = _inverse(a + torch.diag_embed(inverse_prior))
    solution = inverse @ c
    left = (corner - c @ solution).clamp(min=TINY)
    scale = left / spare if has_scale else torch.ones_like(left)

    if not count:
        return Solution(solution, scale * inverse, scale, Variances(log_ratio, log_prior, last_step))

    # Derivatives of A, of Q (with the solution's border) and of L, by each coordinate and pair of coordinates.
    border = torch.cat([-solution, torch.ones_like(corner)[None]])
    pairs = pairs_of(count)
    to_last = F.pad(torch.diag_embed(-inverse_prior), (0, 1, 0, 1))
    first = [*g[1 : 1 + count], to_last]
    second = dict(zip(pairs, g[1 + count :], strict=True)) | {(count, count): -to_last}
    first_volume = [*log_volume[1 : 1 + count], penalised.sum() if has_prior else 0.0]
    second_volume = dict(zip(pairs, log_volume[1 + count :], strict=True))
    pulls = [(one @ border)[:-1] for one in first]
    products = [inverse @ one[:-1, :-1] for one in first]
    of_left = torch.stack([border @ one @ border for one in first])
    slope = torch.stack(
        [volume + product.trace() for volume, product in zip(first_volume, products, strict=True)]
    )
    curvature, twice_left = a.new_zeros(2, count + 1, count + 1)
    for k, other in pairs_of(count + 1):
        volume = second_volume.get((k, other), torch.zeros_like(corner))
        left_of_both = -2 * pulls[k] @ inverse @ pulls[other]
        volume = volume - (products[k] * products[other].T).sum()
        if (k, other) in second:
            volume = volume + (inverse * second[k, other][:-1, :-1]).sum()
            left_of_both = left_of_both + border @ second[k, other] @ border
        curvature[k, other] = curvature[other, k] = volume
        twice_left[k, other] = twice_left[other, k] = left_of_both
    if has_scale:
        slope = slope + spare * of_left / left
        curvature = curvature + spare * (twice_left / left - of_left[:, None] * of_left / left**2)
    else:
        slope, curvature = slope + of_left, curvature + twice_left
    # With ω² at its best, a step of all coordinates is a step of the profile over it.
    moving = count + has_prior
    step = -_newton(slope[:moving], curvature[:moving, :moving])[:count]
    # Far from the solution Newton's steps can go to and fro without end. A step back is at most half as long.
    longest = torch.where(step * last_step < 0, last_step.abs() / 2, torch.inf)
    step = step.clamp(-longest, longest)
    after = Variances((log_ratio + step).clamp(*RATIOS), log_prior, step)
    return Solution(solution, scale * inverse, scale, after)


def _prior(a: Tensor, c: Tensor, corner: Tensor, penalised: Tensor, spare: Tensor | None) -> Tensor:
    """log ω² at the smallest criterion of all, by one decomposition: no round is needed.

    Args:
        a, c, corner: The equations without the prior.
        penalised: Which entries have it.
        spare: n - f where σ² is estimated.
    """
    slopes, others = penalised.nonzero()[:, 0], (~penalised).nonzero()[:, 0]
    if not len(slopes):
        return torch.zeros_like(corner)
    beside = a[others][:, slopes]
    solution = _inverse(a[others][:, others]) @ torch.cat([beside, c[others, None]], 1)
    reduced = a[slopes][:, slopes] - beside.T @ solution[:, :-1]
    target = c[slopes] - beside.T @ solution[:, -1]
    values, vectors = torch.linalg.eigh((reduced + reduced.T) / 2)
    values, squares = values.clamp(min=0), (vectors.T @ target) ** 2
    rest = corner - c[others] @ solution[:, -1]

    def parts(log_prior: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The criterion and its first two derivatives by log ω², at each of these [k]."""
        inverse = torch.exp(-log_prior)[:, None]
        whole = values + inverse
        left = (rest - (squares / whole).sum(1)).clamp(min=TINY)
        left_slope = -(squares * inverse / whole**2).sum(1)
        left_curvature = (squares * inverse / whole**2 * (1 - 2 * inverse / whole)).sum(1)
        value = whole.log().sum(1) + len(slopes) * log_prior
        slope = len(slopes) - (inverse / whole).sum(1)
        curvature = (inverse * values / whole**2).sum(1)
        if spare is None:
            return value + left, slope + left_slope, curvature + left_curvature
        ratio = left_slope / left
        return (
            value + spare * left.log(),
            slope + spare * ratio,
            curvature + spare * (left_curvature / left - ratio**2),
        )

    grid = torch.linspace(*PRIORS, 201, dtype=corner.dtype, device=corner.device)
    best = grid.gather(0, parts(grid)[0].nan_to_num(torch.inf).argmin()[None])
    for _ in range(TURNS):
        _, slope, curvature = parts(best)
        best = (best - (slope / curvature.abs().clamp(min=1e-8)).clamp(-0.2, 0.2)).clamp(*PRIORS)
    return best[0]


def _inverse(a: Tensor) -> Tensor:
    """The inverse of a symmetric matrix on the directions in which it is not zero: of collinear columns too.

    So the solution is the shortest of all, and does not move in directions that no row determines.
    """
    values, vectors = torch.linalg.eigh(a)
    is_kept = values > COLLINEAR * values.amax().clamp(min=TINY)
    inverted = torch.where(is_kept, 1 / torch.where(is_kept, values, 1), 0)
    inverse: Tensor = (vectors * inverted) @ vectors.T
    return inverse


def _newton(slope: Tensor, curvature: Tensor) -> Tensor:
    """The step to subtract: downhill, by the curvature's absolute value, of at most LONGEST_STEP.

    Where a Newton step of λ itself, and not of its logarithm, would end below zero, the variance is probably zero:
    its logarithm takes a longer step.
    """
    usable = torch.isfinite(curvature).all() & torch.isfinite(slope).all()
    values, vectors = torch.linalg.eigh(torch.where(usable, curvature, torch.eye(len(slope)).to(curvature)))
    step = vectors @ ((vectors.T @ slope) / values.abs().clamp(min=1e-8))
    own = curvature.diagonal()
    to_zero = (slope > 0) & (own > slope / 2) & (own <= 2 * slope)  # of λ: curvature own - slope, nearly 0
    step = torch.where(to_zero, 2 * LONGEST_STEP, step.clamp(-LONGEST_STEP, LONGEST_STEP))
    return torch.where(usable, step, torch.nan)
