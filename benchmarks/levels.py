"""A linear model with levels beside scikit-learn, on federations that exist by nature. Prints a table for each.

    python benchmarks/levels.py heart [--splits 5]
    python benchmarks/levels.py nlschools.csv:lang:class --drop rownames --categories COMB

A federation is `heart`, or FILE:TARGET:CLIENT, a table with a column of targets and one of sites. In each split, 30 %
of each site's rows are for testing. Everything sees the same rows, encoded in the same way. Of values the number is the
RMSE; of two classes accuracy in %, AUC and log loss. They are means over sites, but for the log loss, which is over all
rows; AUC is over the sites whose test rows have both classes. Ridge has its penalty by generalised cross-validation,
logistic regression has C = 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import log_loss, roc_auc_score

import copfl
from copfl.algorithms import Levels
from copfl.data.samples import REGRESSION, Dataset
from copfl.data.sets import published
from copfl.data.tables.columns import coded
from copfl.data.tables.files import read_table
from copfl.data.tables.tables import from_tables, names_of

HEART = f"{Path(published.__file__).parent / 'embedded' / 'heart.csv'}:disease:hospital"
TESTED = 0.3
Numbers = NDArray[np.float64]


def split(table: Any, client: str, seed: int) -> list[Any]:
    """The train and the test rows of each site."""
    rng, sites = np.random.default_rng(seed), coded(table.columns[client]).codes
    is_test = np.zeros(len(table), bool)
    for site in np.unique(sites):
        rows = np.flatnonzero(sites == site)
        is_test[rng.permutation(rows)[: round(TESTED * len(rows))]] = True
    return [table.take(~is_test), table.take(is_test)]


class Constant:
    """The mean value, or the share of the second class."""

    def __init__(self, y: Numbers) -> None:
        self.mean = float(y.mean())

    def predict(self, x: Numbers) -> Numbers:
        return np.full(len(x), self.mean)


def fitted(data: Dataset, x: Numbers, y: Numbers) -> Any:
    """Ridge or logistic regression; of one class a constant."""
    if data.kind == REGRESSION:
        return RidgeCV(np.logspace(-2, 4, 25)).fit(x, y)
    return LogisticRegression(max_iter=5000).fit(x, y) if len(np.unique(y)) > 1 else Constant(y)


def predicted(model: Any, x: Numbers) -> Numbers:
    """Values, or probabilities of the second class."""
    has_classes = hasattr(model, "predict_proba")
    return np.asarray(model.predict_proba(x)[:, 1] if has_classes else model.predict(x))


def by_site(data: Dataset, constant: bool) -> Numbers:
    """The predictions of a model of each site's own."""
    train, test = data.train, data.test
    answers = np.zeros(len(test))
    for site in range(len(data.groups)):
        own, x = train.group == site, test.x[test.group == site].astype(float)
        y = train.y[own].ravel().astype(float)
        if not len(x):
            continue
        model = Constant(y) if constant else fitted(data, train.x[own].astype(float), y)
        answers[test.group == site] = predicted(model, x)
    return answers


def by_levels(data: Dataset, algorithm: Levels) -> Numbers:
    """The predictions of each site's model."""
    result = copfl.run(algorithm, data)
    answers, task = np.zeros(len(data.test)), result.experiment.task
    for client, rows in enumerate(result.experiment.federation.partition.test):
        with torch.no_grad():
            found = task.predict(result.client_model(client), torch.from_numpy(data.test.x[rows]))
        answers[rows] = found[:, 0].double() if data.kind == REGRESSION else found[:, 1].double().exp()
    return answers


def scores(data: Dataset, answers: Numbers) -> list[float]:
    """RMSE; or accuracy, AUC and log loss."""
    y, every = data.test.y.ravel(), [data.test.group == site for site in range(len(data.groups))]
    groups = [own for own in every if np.any(own)]
    if data.kind == REGRESSION:
        return [float(np.mean([np.sqrt(((answers - y)[own] ** 2).mean()) for own in groups]))]
    right = (answers > 0.5) == (y == 1)
    mixed = [own for own in groups if len(np.unique(y[own])) > 1]
    return [
        float(np.mean([100 * right[own].mean() for own in groups])),
        float(np.mean([roc_auc_score(y[own], answers[own]) for own in mixed])),
        float(log_loss(y, answers.clip(1e-6, 1 - 1e-6))),
    ]


def rows_of(data: Dataset) -> dict[str, list[float]]:
    """The scores of each method in one split."""
    train, test = data.train, data.test
    x, y, new = train.x.astype(float), train.y.ravel().astype(float), test.x.astype(float)
    sites = np.eye(len(data.groups))
    beside = np.column_stack([x, sites[train.group]]), np.column_stack([new, sites[test.group]])
    answers = {
        "levels": by_levels(data, Levels()),
        "levels, varying=all": by_levels(data, Levels(varying="all")),
        "pooled": predicted(fitted(data, x, y), new),
        "pooled, with a column per site": predicted(fitted(data, beside[0], y), beside[1]),
        "each site alone": by_site(data, constant=False),
        "constant per site": by_site(data, constant=True),
    }
    return {name: scores(data, found) for name, found in answers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("federations", nargs="+", help="heart, or FILE:TARGET:CLIENT")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--drop", default="", help="columns to leave out")
    parser.add_argument("--categories", default="", help="columns of numbers that are categories")
    parser.add_argument("--task", default=None, help="such as regression, where whole numbers are values")
    options = parser.parse_args()
    for name in options.federations:
        file, target, client = (HEART if name == "heart" else name).rsplit(":", 2)
        categories = ",".join(published.HEART_CATEGORIES) if name == "heart" else options.categories
        dropped = names_of(options.drop, ())
        kept = ",".join(c for c in names_of(categories, ()) if c not in dropped)
        table, found = read_table(Path(file)), list[dict[str, list[float]]]()
        for seed in range(options.splits):
            data = from_tables(
                split(table, client, seed),
                name,
                target=target,
                client=client,
                drop=options.drop,
                categories=kept,
                missing="fill",
                kind=options.task,
            )
            found.append(rows_of(data))
        titles = ["RMSE"] if len(found[0]["levels"]) == 1 else ["accuracy", "AUC", "log loss"]
        print(
            f"\n{name}: {len(table):,} rows, {len(data.groups)} sites, mean ± standard deviation of {len(found)} splits"
        )
        lines = [
            [
                row,
                *(
                    f"{np.mean(v):.3f} ± {np.std(v):.3f}"
                    for v in zip(*(one[row] for one in found), strict=True)
                ),
            ]
            for row in found[0]
        ]
        widths = [max(map(len, column)) for column in zip(["", *titles], *lines, strict=True)]
        for line in (["", *titles], *lines):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
