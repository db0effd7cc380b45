"""Trees by sums against an oracle: numpy, all rows in one place, from the equations of docs/algorithms/trees.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from copfl.algorithms import Trees
from copfl.algorithms.trees import BEFORE
from copfl.core import task_of
from copfl.core.criteria import CRITERIA, regression
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine.mapping import vmap
from copfl.models import build
from copfl.parts.boosting import NEVER, Bins, Growth, median_of_cells, own_trees, target_of
from tests.toys import rounds_of

Floats = NDArray[np.float64]
SIZES, TREES, DEPTH = (31, 5, 64, 20), 5, 3
CELLS = 512


class Setting(NamedTuple):
    trees: int = TREES
    rate: float = 0.4
    penalty: float = 1.5
    least: int = 4


# -- the oracle ----------------------------------------------------------------------------------------------


def derivatives(kind: str, y: Floats, eta: Floats) -> tuple[Floats, Floats]:
    """-dl/deta and d2l/deta2 of each row and output, y [n, q]; of classes y is one-hot."""
    if kind == "squared":
        return y - eta, np.ones_like(y)
    if kind == "absolute":
        return np.sign(y - eta), np.ones_like(y)
    if kind == "classes":
        shifted = np.exp(eta - eta.max(1, keepdims=True))
        p = shifted / shifted.sum(1, keepdims=True)
        return y - p, y.shape[1] / (y.shape[1] - 1) * p * (1 - p)
    p = 1 / (1 + np.exp(-eta))  # labels, and the log odds of two classes
    return y - p, p * (1 - p)


def middle(residuals: Floats, unit: float) -> float:
    """The median of residuals that are known by their cells; z / (1 + |z|) is cut into equal cells."""
    z = residuals / unit
    counts = np.bincount(np.floor((z / (1 + abs(z)) + 1) * CELLS / 2).astype(int), minlength=CELLS)
    below = np.cumsum(counts)
    cell = int(np.argmax(below >= len(z) / 2))
    place = (cell + (len(z) / 2 - below[cell] + counts[cell]) / counts[cell]) / (CELLS / 2) - 1
    return float(unit * place / (1 - abs(place)))


def start(kind: str, y: Floats) -> Floats:
    """The prediction without trees, [q]."""
    mean = y.mean(0)
    if kind == "absolute":
        units = np.sqrt(np.pi / 2) * abs(y).mean(0)
        medians = [middle(c - m, unit) for c, m, unit in zip(y.T, mean, units, strict=True)]
        return np.asarray(mean + np.array(medians))
    if kind == "squared":
        return np.asarray(mean)
    return np.asarray(np.log(mean) if kind == "classes" else np.log(mean / (1 - mean)))


def boosted(kind: str, x: Floats, y: Floats, edges: Sequence[Floats], how: Setting, eta: Floats) -> Floats:
    """eta [n, q] after all trees, on bins with these edges."""
    bins = np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, x.T, strict=True)], 1)
    outputs = range(y.shape[1])
    for _ in range(how.trees):
        e, h = derivatives(kind, y, eta)
        value = np.zeros_like(y)
        for of_tree in [[output] for output in outputs] if kind == "classes" else [outputs]:
            value[:, of_tree] = grown(
                kind, (y - eta)[:, of_tree], e[:, of_tree], h[:, of_tree], bins, edges, how
            )
        eta = eta + how.rate * value
    return eta


def grown(
    kind: str,
    residuals: Floats,
    e: Floats,
    h: Floats,
    bins: NDArray[np.int64],
    edges: Sequence[Floats],
    how: Setting,
) -> Floats:
    """What one tree says of each row, before the rate."""

    def score(rows: NDArray[np.bool_]) -> float:
        return float((e[rows].sum(0) ** 2 / (h[rows].sum(0) + how.penalty)).sum())

    leaf = np.zeros(len(e), int)
    for _ in range(DEPTH):
        goes_right = np.zeros(len(e), int)
        for node in np.unique(leaf):
            here, best, chosen = leaf == node, 1e-9, np.zeros(len(e), bool)
            for column, edge in enumerate(edges):
                for b in range(len(edge)):
                    left, right = here & (bins[:, column] <= b), here & (bins[:, column] > b)
                    gain = score(left) + score(right) - score(here)
                    if min(left.sum(), right.sum()) >= how.least and gain > best + 1e-9:
                        best, chosen = gain, right
            goes_right[chosen] = 1
        leaf = 2 * leaf + goes_right
    value = np.zeros_like(e)
    for node in np.unique(leaf):
        here = leaf == node
        value[here] = e[here].sum(0) / (h[here].sum(0) + how.penalty)
        if kind == "absolute":
            units = np.sqrt(np.pi / 2) * abs(residuals).mean(0)
            medians = [middle(r, unit) for r, unit in zip(residuals[here].T, units, strict=True)]
            value[here] = np.array(medians) * here.sum() / (here.sum() + how.penalty)
    return value


# -- the federation ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    kind: str  # of the oracle
    criterion: Any
    targets: Any  # as the federation has them
    y: Floats  # as the oracle has them
    outputs: int  # of the model


def case(name: str, x: Floats, rng: np.random.Generator) -> Case:
    noise = rng.standard_t(3, size=(len(x), 2))
    score = np.stack([np.sin(2 * x[:, 0]) + x[:, 1] * (x[:, 2] > 0), x[:, 2] - x[:, 1] ** 2], 1) + 0.4 * noise
    binary = (score > 0.3).astype(np.int64)
    three = np.digitize(score[:, 0], [-0.4, 0.7])
    match name:
        case "one value" | "two values":
            y = score[:, : 1 + (name == "two values")]
            return Case("squared", regression(), y, y, y.shape[1])
        case "one value, absolute" | "two values, absolute":
            y = score[:, : 1 + name.startswith("two")]
            return Case("absolute", regression(loss="absolute"), y, y, y.shape[1])
        case "two classes":
            return Case("labels", CRITERIA["classification"](), binary[:, 0], binary[:, :1].astype(float), 2)
        case "three classes":
            return Case("classes", CRITERIA["classification"](), three, np.eye(3)[three], 3)
    return Case("labels", CRITERIA["multilabel"](), binary, binary.astype(float), 2)


TASKS = [
    "one value", "two values", "one value, absolute", "two values, absolute", "two classes", "three classes", "labels",
]  # fmt: skip


@pytest.mark.job
@pytest.mark.parametrize("name", TASKS)
def test_the_trees_of_a_federation_are_those_of_the_oracle(name: str) -> None:
    rng = np.random.default_rng(11)
    x = rng.normal(size=(sum(SIZES), 4))
    x[:, 3] = rng.integers(0, 3, len(x))
    problem, how = case(name, x, rng), Setting()
    samples = Samples(x, problem.targets)
    parts = tuple(np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1]))
    names = tuple("abc"[: problem.outputs])
    dataset = Dataset("toy", samples, samples, names, kind=problem.criterion.kind)
    federation = FederatedData(dataset, Partition(parts, parts, "by hand", {}))
    model = build("trees", (4,), problem.outputs, 0, problem.criterion.kind, trees=TREES, depth=DEPTH)
    task = task_of(model, problem.outputs, criterion=problem.criterion, dtype=torch.float64)
    algorithm = Trees(how.rate, how.penalty, how.least, bins=9, intercept=False)
    rounds = BEFORE + TREES * (DEPTH + (problem.kind == "absolute"))
    grown = rounds_of(algorithm, task, federation, rounds, vmap(8))[0].server.grown
    edges = [row[row < NEVER] for row in grown.bins.edges.numpy()]
    found = grown.forest.eta(grown.forest.leaves(torch.from_numpy(x)), torch.zeros(0).double()).numpy()
    assert (grown.forest.threshold < NEVER).sum() > 2 * TREES
    first = np.repeat(start(problem.kind, problem.y)[None], len(x), 0)
    assert found == pytest.approx(boosted(problem.kind, x, problem.y, edges, how, first), abs=1e-10)


@pytest.mark.parametrize("name", ["two values", "two classes", "three classes", "labels"])
def test_the_own_trees_of_a_site_are_those_of_the_oracle_on_its_residuals(name: str) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(60, 3))
    problem, how = case(name, x, rng), Setting(trees=3, penalty=6.0, least=3)
    edges = np.sort(rng.normal(size=(3, 6)), 1)
    eta = rng.normal(size=(60, problem.y.shape[1]))
    bins = Bins(torch.zeros(3, 17).int(), torch.from_numpy(edges))
    target = target_of(problem.criterion, problem.outputs, torch.zeros(0).double())
    growth = Growth(how.trees, DEPTH, how.rate, how.penalty, how.least)
    rows, targets, offsets = (torch.from_numpy(np.asarray(a)) for a in (x, problem.targets, eta))
    forest, said = own_trees(target, growth, bins, rows, targets, offsets, torch.ones(60).double())
    expected = boosted(problem.kind, x, problem.y, list(edges), how, eta)
    assert eta + said[-1].numpy() == pytest.approx(expected, abs=1e-10)
    again = forest.eta(forest.leaves(rows), torch.zeros(0).double())
    assert again.numpy() == pytest.approx(said[-1].numpy(), abs=1e-10)


# -- medians by sums -----------------------------------------------------------------------------------------


def test_a_median_by_cells_is_that_of_the_numbers_up_to_a_cell() -> None:
    numbers = np.random.default_rng(0).normal(size=(3, 1001))
    cells = ((numbers / (1 + abs(numbers)) + 1) * 256).astype(int)
    counts = np.stack([np.bincount(row, minlength=CELLS) for row in cells])
    found = median_of_cells(torch.from_numpy(counts).double()).numpy()
    assert found == pytest.approx(np.median(numbers, 1), abs=1 / 256)


def test_nothing_has_the_median_0() -> None:
    assert median_of_cells(torch.zeros(2, CELLS)).tolist() == [0, 0]
