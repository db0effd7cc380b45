"""Losses of cheap candidates: of a study's rows by folds, and of the other rows by models of the whole study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.data.samples import REGRESSION
from copfl.rivals.effort import FOLDS
from copfl.rivals.estimators import folds_of, quietly
from studies.tables.federations import natural

Array = NDArray[Any]

TABLES = (
    "heart",
    "contraception",
    "prenatal",
    "infections",
    "tumours",
    "pupils",
    "attainment",
    "attainment-primary",
)
NAMES = (*TABLES, "icu", "mail")
MAILS = 1_500  # of 8,430, so that the study stays short
WORDS = 2**11
TREES = 10  # at most: one for ten rows
LEAST = 1e-6  # of a probability
NEWTON, STEPS = 150, 5  # columns at most, and steps, of a dense logistic regression by Newton's method
FEWEST = 4  # rows of a site
LEVELS, SLOPES = 0.1, 0.3  # variance of a site's level, and of its slopes, in units of the residual variance
CONSTANT, LINEAR, NEAREST = "constant", "linear alone", "neighbours alone"
ALONE = (CONSTANT, LINEAR, NEAREST)
POOLED, WITH_LEVELS, WITH_SLOPES = "forest of all", "levels", "levels, slopes"
TOGETHER = (WITH_LEVELS, WITH_SLOPES, POOLED)


class Federation(NamedTuple):
    x: Array  # [n, columns] of deviation 1
    y: Array  # [n], 0 or 1, or values
    site: Array  # [n]
    is_rmse: bool


class Halves(NamedTuple):
    """Of each candidate the losses of the rows of each site."""

    study: dict[str, list[Array]]  # of rows that were held out, in five folds
    pairs: dict[str, list[Array]]  # of the same rows, by models that lack two folds
    truth: dict[str, list[Array]]  # of the other half, by models of the whole study
    fold: list[Array]  # of the five


def federation(name: str, folder: Path | None) -> Federation:
    """One of NAMES.

    Args:
        name: Of the federation.
        folder: That has the folders `natural` and `natural2`.
    """
    if name in TABLES:
        data = natural(folder, federation=name)
        x, y, site = (
            np.concatenate([getattr(split, part) for split in (data.train, data.test)])
            for part in ("x", "y", "group")
        )
        return _large_sites(x, y, site, data.kind == REGRESSION)
    import pandas

    if folder is None:
        raise ValueError(f"{name} needs the folder of its file")
    if name == "icu":
        table = pandas.read_csv(folder / "natural2" / "icu.csv")
        columns = table.drop(columns=["stay", "unit", "died"]).select_dtypes("number")
        columns = columns.fillna(columns.median())
        return _large_sites(
            columns.to_numpy(float), table["died"].to_numpy(), pandas.factorize(table["unit"])[0], False
        )
    from sklearn.feature_extraction.text import HashingVectorizer

    table = pandas.read_parquet(folder / "natural2" / "mail.parquet").sample(MAILS, random_state=0)
    x = HashingVectorizer(n_features=WORDS, alternate_sign=False).transform(table["text"]).toarray()
    return _large_sites(x, (table["kind"] == "spam").to_numpy(), pandas.factorize(table["mailbox"])[0], False)


def _large_sites(x: Array, y: Array, site: Array, is_rmse: bool) -> Federation:
    """The sites whose halves have two rows at least."""
    _, member, sizes = np.unique(site, return_inverse=True, return_counts=True)
    kept = sizes[member] >= FEWEST
    x = np.asarray(x, np.float64)[kept]
    spread = x.std(0)
    x = ((x - x.mean(0)) / np.where(spread > 0, spread, 1))[:, spread > 0]
    renamed = np.unique(member[kept], return_inverse=True)[1]
    return Federation(x, np.asarray(y, np.float64)[kept], renamed, is_rmse)


def halves(data: Federation, seed: int, candidates: Sequence[str] = (*TOGETHER, *ALONE)) -> Halves:
    """The losses of one division of the rows.

    Args:
        data: The rows.
        seed: Of the division, and of the folds.
        candidates: Which of them.
    """
    rng = np.random.default_rng(seed)
    count = int(data.site.max()) + 1
    is_study = np.zeros(len(data.y), bool)
    for site in range(count):
        rows = rng.permutation(np.flatnonzero(data.site == site))
        is_study[rows[: len(rows) // 2]] = True
    study, truth = np.flatnonzero(is_study), np.flatnonzero(~is_study)
    fold = np.empty(len(study), np.int64)
    for site in range(count):
        own = np.flatnonzero(data.site[study] == site)
        fold[own] = folds_of(len(own), seed + 1000 * site)
    parts = np.minimum(np.bincount(data.site[study]), FOLDS)[data.site[study]]  # of each row's site
    found = {}
    with quietly():
        for name in candidates:
            fit = FITS[name]
            inside, times = np.zeros((2, len(study))), np.zeros((2, len(study)))
            for part in range(FOLDS):
                own = fold == part
                for number, held in enumerate((own, own | ((fold == (part + 1) % parts) & (part < parts)))):
                    answers = fit(data, study[~held], study[held], seed)
                    inside[number, held] += _losses(data, answers, study[held])
                    times[number, held] += 1
            found[name] = *(inside / times), _losses(data, fit(data, study, truth, seed), truth)
    sites = [study, study, truth]
    by_site = [
        {name: [of[n][data.site[rows] == site] for site in range(count)] for name, of in found.items()}
        for n, rows in enumerate(sites)
    ]
    held_out, pairs, other = by_site
    return Halves(held_out, pairs, other, [fold[data.site[study] == site] for site in range(count)])


def _losses(data: Federation, answers: Array, rows: Array) -> Array:
    y = data.y[rows]
    if data.is_rmse:
        return np.asarray((answers - y) ** 2)
    right = np.where(y > 0.5, answers, 1 - answers)
    return np.asarray(-np.log(np.clip(right, LEAST, 1)))


Fit = Callable[[Federation, Array, Array, int], Array]  # the answers to rows, of a model of other rows


def _alone(of_site: Callable[[Federation, Array, Array, int], Array]) -> Fit:
    """The same model at each site for itself."""

    def fit(data: Federation, known: Array, asked: Array, seed: int) -> Array:
        answers = np.empty(len(asked))
        usual = data.y[known].mean()
        for site in np.unique(data.site[asked]).tolist():
            own, at = known[data.site[known] == site], data.site[asked] == site
            if len(own) < 3 or np.ptp(data.y[own]) == 0:
                answers[at] = _frequency(data, own) if len(own) else usual
            else:
                answers[at] = of_site(data, own, asked[at], seed)
        return answers

    return fit


def _frequency(data: Federation, rows: Array) -> float:
    """The mean, or the frequency of a class with one row more of each."""
    y = data.y[rows]
    return float(y.mean() if data.is_rmse else (y.sum() + 0.5) / (len(y) + 1))


def _constant(data: Federation, known: Array, asked: Array, seed: int) -> Array:
    return np.full(len(asked), _frequency(data, known))


def _linear(data: Federation, known: Array, asked: Array, seed: int) -> Array:
    """A ridge or logistic regression with a penalty of a tenth of a row for each column."""
    return _penalised(data, known, data.x[known], data.x[asked], max(1.0, data.x.shape[1] / 10))


def _nearest(data: Federation, known: Array, asked: Array, seed: int) -> Array:
    """The mean of as many nearest rows as the root of their number; trees take a hundred times as long."""
    x, x_asked = data.x[known], data.x[asked]
    distance = (x**2).sum(1) - 2 * x_asked @ x.T
    count = max(1, round(len(known) ** 0.5))
    near = np.argpartition(distance, count - 1, axis=1)[:, :count]
    means = data.y[known][near].mean(1)
    return np.asarray(means if data.is_rmse else (count * means + _frequency(data, known)) / (count + 1))


def _trees(data: Federation, known: Array, x: Array, x_asked: Array, seed: int) -> Array:
    """The mean of a few trees, each of other rows; scikit-learn's forest takes ten times as long for a site."""
    from sklearn.tree import DecisionTreeRegressor

    rng, y = np.random.default_rng(seed), data.y[known]
    x, x_asked = x.astype(np.float32), x_asked.astype(np.float32)
    answers = np.zeros(len(x_asked))
    tried = max(1, x.shape[1] // 3) if data.is_rmse else max(1, int(np.sqrt(x.shape[1])))
    count = min(TREES, 1 + len(y) // 10)
    for tree in range(count):
        bag = rng.integers(0, len(y), len(y))
        model = DecisionTreeRegressor(min_samples_leaf=3, max_features=tried, random_state=tree)
        answers += model.fit(x[bag], y[bag]).predict(x_asked)
    if data.is_rmse:
        return answers / count
    return np.asarray((answers + _frequency(data, known)) / (count + 1))


def _penalised(data: Federation, known: Array, x: Array, x_asked: Array, penalty: float) -> Array:
    y = data.y[known]
    if data.is_rmse:
        centre, middle = x.mean(0), y.mean()
        centred = x - centre
        gram = centred.T @ centred + penalty * np.eye(x.shape[1])
        return np.asarray((x_asked - centre) @ np.linalg.solve(gram, centred.T @ (y - middle)) + middle)
    if isinstance(x, np.ndarray) and x.shape[1] <= NEWTON:
        return _logistic(x, y, x_asked, penalty)
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1 / penalty, max_iter=50, tol=1e-2).fit(x, y > 0.5)
    return np.asarray(model.predict_proba(x_asked)[:, 1])


def _logistic(x: Array, y: Array, x_asked: Array, penalty: float) -> Array:
    """A logistic regression with a ridge, by Newton's steps: a site takes a tenth of scikit-learn's time."""
    design = np.column_stack([x, np.ones(len(x))])
    ridge = penalty * np.append(np.ones(x.shape[1]), 1e-3)
    weights = np.append(np.zeros(x.shape[1]), np.log((y.sum() + 0.5) / (len(y) - y.sum() + 0.5)))
    for _ in range(STEPS):
        answers = 1 / (1 + np.exp(-design @ weights))
        curvature = design.T @ ((answers * (1 - answers))[:, None] * design) + np.diag(ridge)
        weights = weights - np.linalg.solve(curvature, design.T @ (answers - y) + ridge * weights)
    return np.asarray(1 / (1 + np.exp(-np.column_stack([x_asked, np.ones(len(x_asked))]) @ weights)))


def _with_site(slopes: bool) -> Fit:
    """A model of all rows with a level of each site, and slopes of its own where they are asked for."""

    def fit(data: Federation, known: Array, asked: Array, seed: int) -> Array:
        return _penalised(data, known, columns(data, known), columns(data, asked), 1.0)

    def columns(data: Federation, rows: Array) -> Any:
        from scipy.sparse import csr_array, hstack

        x, site, count = data.x[rows], data.site[rows], int(data.site.max()) + 1
        at = np.arange(len(rows))
        ratio = 1.0 if data.is_rmse else 4.0  # a logistic regression's residual variance is about 4
        parts = [
            csr_array(x),
            csr_array((np.full(len(rows), np.sqrt(ratio * LEVELS)), (at, site)), shape=(len(rows), count)),
        ]
        if slopes:
            width = x.shape[1]
            place = (site[:, None] * width + np.arange(width)).ravel()
            values = (np.sqrt(ratio * SLOPES / width) * x).ravel()
            parts.append(csr_array((values, (at.repeat(width), place)), shape=(len(rows), count * width)))
        whole = hstack(parts).tocsr()
        return whole.toarray() if data.is_rmse else whole

    return fit


def _pooled(data: Federation, known: Array, asked: Array, seed: int) -> Array:
    """A forest of all rows, which sees each site's mean of the targets."""
    overall = data.y[known].mean()
    count = int(data.site.max()) + 1
    sums = np.bincount(data.site[known], data.y[known], count)
    rows = np.bincount(data.site[known], minlength=count)
    # Without the row itself, whose target would be told otherwise.
    own = (sums[data.site[known]] - data.y[known] + 2 * overall) / (rows[data.site[known]] + 1)
    other = (sums[data.site[asked]] + 2 * overall) / (rows[data.site[asked]] + 2)
    x, x_asked = np.column_stack([data.x[known], own]), np.column_stack([data.x[asked], other])
    return _trees(data, known, x, x_asked, seed)


FITS: Mapping[str, Fit] = {
    CONSTANT: _alone(_constant),
    LINEAR: _alone(_linear),
    NEAREST: _alone(_nearest),
    WITH_LEVELS: _with_site(False),
    WITH_SLOPES: _with_site(True),
    POOLED: _pooled,
}
