"""Boosted trees by sums: against boosting of all rows in one place, written from the equations; and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import copfl
from copfl.algorithms import Trees, trees
from copfl.algorithms.trees import BEFORE, Server
from copfl.core import Task, task_of, tree
from copfl.core.criteria import CRITERIA, regression
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.data.tables.columns import DataTable
from copfl.data.tables.tables import from_tables
from copfl.engine.mapping import sequential, vmap
from copfl.errors import UsageError
from copfl.models import MLP, build
from copfl.models.trees import Trees as TreesModel
from copfl.parts.boosting import CELLS, NEVER, Bins, bins_of, merged, number_of, order_of
from copfl.settings.complete import complete
from copfl.testing import check_algorithm
from tests.slow import slow
from tests.toys import rounds_of

Floats = NDArray[np.float64]
SIZES = (13, 40, 7, 60)
TREES, DEPTH, COLUMNS = 4, 3, 4
ROUNDS = BEFORE + TREES * DEPTH
KINDS = ["values", "two values", "two classes", "three classes", "labels"]


class Problem(NamedTuple):
    x: Floats
    y: NDArray[Any]
    kind: str
    outputs: int


def problem_of(name: str) -> Problem:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(sum(SIZES), COLUMNS)).round(1)
    x[:, 3] = x[:, 3] > 0.5
    score = x[:, 0] * (x[:, 1] > 0) + x[:, 3] + 0.3 * rng.normal(size=len(x))
    other = x[:, 1] - x[:, 2] + 0.3 * rng.normal(size=len(x))
    match name:
        case "values":
            return Problem(x, score, "regression", 1)
        case "two values":
            return Problem(x, np.stack([score, other], 1), "regression", 2)
        case "two classes":
            return Problem(x, (score > 0.5).astype(np.int64), "classification", 2)
        case "three classes":
            return Problem(x, np.digitize(score, [0.0, 0.8]), "classification", 3)
    return Problem(x, np.stack([score > 0.5, other > 0], 1).astype(np.int64), "multilabel", 2)


def federation_of(problem: Problem, sizes: Sequence[int] = SIZES) -> FederatedData:
    samples = Samples(problem.x, problem.y)
    parts = tuple(np.split(np.arange(len(problem.y)), np.cumsum(sizes)[:-1]))
    names = tuple("abc"[: problem.outputs])
    return FederatedData(
        Dataset("toy", samples, samples, names, kind=problem.kind), Partition(parts, parts, "by hand", {})
    )


def task_for(problem: Problem, trees: int = TREES, depth: int = DEPTH) -> Task:
    shape = (problem.x.shape[1],)
    model = build("trees", shape, problem.outputs, 0, problem.kind, trees=trees, depth=depth)
    return task_of(model, problem.outputs, criterion=CRITERIA[problem.kind](), dtype=torch.float64)


def grown(algorithm: Trees, problem: Problem, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> Any:
    return rounds_of(algorithm, task_for(problem), federation_of(problem, sizes), rounds, vmap(64))[0]


# -- all rows in one place, from the equations ---------------------------------------------------------------


def derivatives(problem: Problem, eta: Floats) -> tuple[Floats, Floats]:
    """-∂loss/∂η and ∂²loss/∂η² of every row and output."""
    y, columns = problem.y, eta.shape[1]
    if problem.kind == "regression":
        return y.reshape(eta.shape) - eta, np.ones_like(eta)
    if columns > 1 and problem.kind == "classification":
        p = np.exp(eta) / np.exp(eta).sum(1, keepdims=True)
        return np.eye(columns)[y] - p, p * (1 - p) * columns / (columns - 1)
    p = 1 / (1 + np.exp(-eta))
    return y.reshape(eta.shape) - p, p * (1 - p)


def boosted(problem: Problem, edges: list[Floats], bias: Floats, how: Trees) -> Floats:
    """η of every row after all trees; of several classes each has a tree."""
    eta = np.repeat(bias[None], len(problem.x), 0)
    each = problem.kind == "classification" and eta.shape[1] > 1
    for _ in range(TREES):
        e, h = derivatives(problem, eta)
        for part in [[n] for n in range(eta.shape[1])] if each else [slice(None)]:
            eta[:, part] += stepped(problem.x, e[:, part], h[:, part], edges, how)
    return eta


def stepped(x: Floats, e: Floats, h: Floats, edges: list[Floats], how: Trees) -> Floats:
    """What a tree adds to every row."""

    def score(rows: NDArray[np.bool_]) -> float:
        return float((e[rows].sum(0) ** 2 / (h[rows].sum(0) + how.penalty)).sum())

    nodes = [np.ones(len(x), bool)]
    for _ in range(DEPTH):
        after = []
        for rows in nodes:
            best, sides = 1e-9 * score(rows), [rows]
            for column, limits in enumerate(edges):
                for limit in limits:
                    left, right = rows & (x[:, column] <= limit), rows & (x[:, column] > limit)
                    if min(left.sum(), right.sum()) >= how.least:
                        gain = score(left) + score(right) - score(rows)
                        if gain > best + 1e-12:
                            best, sides = gain, [left, right]
            after += sides
        nodes = after
    value = np.zeros_like(e)
    for rows in nodes:
        value[rows] = how.rate * e[rows].sum(0) / (h[rows].sum(0) + how.penalty)
    return value


def eta_of(server: Server, x: Floats) -> Floats:
    forest = server.grown.forest
    return forest.eta(forest.leaves(torch.from_numpy(x)), torch.zeros(0).double()).numpy()


@pytest.mark.job
@pytest.mark.parametrize("name", KINDS)
def test_the_trees_are_those_of_all_rows_in_one_place(name: str) -> None:
    problem, how = problem_of(name), Trees(least=3, bins=8, intercept=False, rate=0.5)
    server = grown(how, problem).server
    edges = [row[row < NEVER] for row in server.grown.bins.edges.numpy()]
    expected = boosted(problem, edges, server.grown.forest.bias.numpy(), how)
    assert eta_of(server, problem.x) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_without_trees_the_prediction_is_that_of_the_frequencies(name: str) -> None:
    problem = problem_of(name)
    state, _ = rounds_of(Trees(intercept=False), task_for(problem), federation_of(problem), 1)
    task = task_for(problem)
    algorithm, record = Trees(intercept=False), tree.row(state.clients.rows(torch.arange(1)), 0)
    down = tree.row(algorithm.downlink(state.server, torch.arange(1)), 0)
    answer = task.predict(
        algorithm.personal_model(task, record, down), torch.from_numpy(problem.x[:1])
    ).numpy()[0]
    if problem.kind == "classification":
        answer, expected = np.exp(answer), np.bincount(problem.y) / len(problem.y)
    else:
        expected = problem.y.reshape(len(problem.y), -1).mean(0)
    assert answer == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_sites_together_are_one_site_with_all_rows(name: str) -> None:
    problem, how = problem_of(name), Trees(least=3, intercept=False)
    together, pooled = grown(how, problem).server, grown(how, problem, [sum(SIZES)]).server
    assert torch.equal(together.grown.bins.edges, pooled.grown.bins.edges)
    assert all(map(torch.equal, together.grown.forest, pooled.grown.forest))


def test_alone_a_site_has_the_trees_of_its_own_rows() -> None:
    problem, how = problem_of("values"), Trees(least=3, intercept=False)
    alone = grown(how.trained_alone(), problem).clients.rows(torch.arange(4))
    last = np.arange(sum(SIZES) - SIZES[-1], sum(SIZES))
    own = Problem(problem.x[last], problem.y[last], problem.kind, problem.outputs)
    expected = grown(how, own, [len(last)]).server
    assert eta_of(tree.row(alone.own, 3), own.x) == pytest.approx(eta_of(expected, own.x), abs=1e-10)


def test_the_model_is_the_sum_of_the_trees_and_both_intercepts() -> None:
    problem, how, task = problem_of("values"), Trees(least=3), task_for(problem_of("values"))
    state = grown(how, problem)
    record = tree.row(state.clients.rows(torch.arange(4)), 2)
    down = tree.row(how.downlink(state.server, torch.arange(4)), 2)
    assert float(record.intercept) != 0
    answer = task.predict(how.personal_model(task, record, down), torch.from_numpy(problem.x)).numpy()
    assert answer == pytest.approx(eta_of(state.server, problem.x) + record.intercept.numpy(), abs=1e-12)


def test_an_intercept_is_the_shrunken_sum_of_residuals() -> None:
    """Σ r / (m + σ²/τ²), with the trees and the variances that the site received."""
    problem, how = problem_of("values"), Trees(least=3)
    before = grown(how, problem, rounds=ROUNDS - 1).server
    after = grown(how, problem).clients.rows(torch.arange(4)).intercept[:, 0].numpy()
    site = np.repeat(np.arange(4), SIZES)
    residuals = problem.y - eta_of(before, problem.x)[:, 0]
    shrinkage = 1 / before.grown.log_ratio.exp().item()
    assert after == pytest.approx(np.bincount(site, residuals) / (np.array(SIZES) + shrinkage), abs=1e-10)


# -- bins ----------------------------------------------------------------------------------------------------


def test_few_different_values_have_a_bin_each() -> None:
    problem = problem_of("values")
    edges = grown(Trees(bins=8), problem, rounds=BEFORE).server.grown.bins.edges.numpy()
    assert [np.searchsorted(edges[3], value) for value in (0.0, 1.0)] == [0, 1]
    counts = np.bincount(np.searchsorted(edges[0], problem.x[:, 0]), minlength=8)
    assert counts.min() >= 8
    assert counts.max() <= 25  # 15 each, if no two values were the same


def test_bins_do_not_depend_on_the_unit_of_a_column() -> None:
    problem = problem_of("values")
    moved = problem._replace(x=1990 + 5 * problem.x)
    one, other = (
        grown(Trees(bins=8, least=3), each, rounds=BEFORE).server.grown.bins for each in (problem, moved)
    )
    first, second = (bins.of(torch.from_numpy(each.x)) for bins, each in ((one, problem), (other, moved)))
    assert torch.equal(first, second)


def test_a_constant_column_has_one_bin() -> None:
    x = torch.full((3, 1), 2.0, dtype=torch.float64)
    assert binned(x, 8).edges.min() == NEVER


def binned(x: Tensor, bins: int) -> Bins:
    """The bins of some rows, after as many counts as before the first tree."""
    found = bins_of(x.shape[1], bins, x)
    for _ in range(BEFORE):
        counts = torch.stack([torch.bincount(cell, minlength=CELLS) for cell in found.cells(x).T]).double()
        found = found.with_edges(counts).moved(counts)
    return found


@pytest.mark.parametrize(
    ("column", "least"),
    [
        ("999999", 8),  # in 1 % of the rows
        ("unit", 15),  # of a fifth of the rows it is 1,000 times as small
        ("far", 15),  # 1,000,000 more in all rows
        ("zeros", 5),  # nine of ten rows
    ],
)
def test_numbers_far_away_do_not_ruin_the_bins(column: str, least: int) -> None:
    """Of 4,000 rows of a column every bin has few, however the others lie: no split is lost."""
    numbers = np.random.default_rng(0).normal(size=4000)
    x = {
        "999999": np.where(np.arange(4000) % 100 == 0, 999_999.0, numbers),
        "unit": np.where(np.arange(4000) % 5 == 0, 1000 * (numbers + 5), numbers + 5),
        "far": 1_000_000 + numbers,
        "zeros": np.where(np.arange(4000) % 10, 0.0, numbers),
    }[column]
    x = ((x - x.mean()) / x.std())[:, None]  # as a table gives it to the model
    bins = binned(torch.from_numpy(x).float(), 32)
    rows = torch.bincount(bins.of(torch.from_numpy(x).float()).flatten(), minlength=32)
    used = rows[rows > 0]
    assert len(used) >= least
    together = 3600 if column == "zeros" else 0  # one value is in one bin
    assert used[used != together].max() <= 3 * 4000 / 32


def test_the_place_of_a_number_is_its_order() -> None:
    numbers = torch.tensor([-3e38, -1.5, -1e-40, 0.0, 1e-40, 1.0, 1.0000001, 3e38])
    order = order_of(numbers)
    assert (order[1:] > order[:-1]).all()
    assert order[3] == 0 == order_of(torch.tensor(-0.0))
    assert torch.equal(number_of(order), numbers)


@pytest.mark.parametrize("trouble", ["999999", "unit"])
def test_trees_of_a_column_with_numbers_far_away_are_as_good_as_lightgbm(trouble: str) -> None:
    """Of four sites; 1 % of 999999, or one site that has another unit."""
    import lightgbm

    rng = np.random.default_rng(1)
    x, site = rng.normal((4, 0, 0), size=(1600, 3)), np.repeat(np.arange(4), 400)
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.3 * rng.normal(size=len(x))
    if trouble == "unit":
        x[site == 3, 0] *= 1000
    else:
        x[rng.permutation(len(x))[:16], 0] = 999_999
    columns = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y, "site": [f"s{n}" for n in site]}
    data = from_tables([DataTable.of(columns)], "far", target="y", client="site")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = copfl.run("trees", data, rivals=False)
    theirs = lightgbm.LGBMRegressor(n_estimators=100, max_depth=3, learning_rate=0.1, max_bin=32, verbose=-1)
    theirs.fit(data.train.x, data.train.y)
    errors = (theirs.predict(data.test.x) - data.test.y) ** 2
    expected = np.mean([np.sqrt(errors[data.test.group == n].mean()) for n in range(4)])
    assert found.final("rmse").mean() <= 1.1 * expected


# -- bins of few rows ---------------------------------------------------------------------------------------


def test_bins_of_few_rows_are_merged_with_their_neighbours() -> None:
    """By hand: sums beside the numbers of rows."""

    def of(*counts: float) -> list[list[float]]:
        rows = torch.tensor(counts, dtype=torch.float64)
        return merged(torch.stack([10 * rows, rows]), 3).tolist()

    assert of(3, 4, 0, 5)[1] == [3, 4, 0, 5]
    assert of(3, 1, 0, 5) == [[40, 0, 0, 50], [4, 0, 0, 5]]
    assert of(1, 1, 0, 5)[1] == [0, 0, 0, 7]
    assert of(0, 0, 1, 2)[1] == [0, 0, 0, 3]
    assert of(0, 1, 0, 1)[1] == [0, 0, 0, 0]  # too few in all
    assert of(0, 3, 1)[1] == [0, 4, 0]
    assert of(9, 9, 9, 9, 1)[1] == [9, 9, 9, 10, 0]


@pytest.mark.parametrize("bins", [5, 8, 17, 32])
def test_no_sum_is_of_few_rows(bins: int) -> None:
    rng = torch.Generator().manual_seed(bins)
    counts = torch.randint(0, 4, (50, 3, bins), generator=rng).double()
    sums = torch.stack([counts * 7, counts], 2)
    out = merged(sums, 5)
    kept = out[:, :, 1]
    assert out.shape == sums.shape
    assert ((kept == 0) | (kept >= 5)).all()
    assert torch.equal(out[:, :, 0], 7 * kept)
    assert torch.equal(kept.sum(-1), counts.sum(-1) * (counts.sum(-1) >= 5))
    assert torch.equal(merged(sums, 1), sums)


# -- laws and refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        Trees(rows=0.5, columns=0.5, intercept=False),  # it draws; with its defaults: tests/test_testing.py
        *(pytest.param(how, marks=slow) for how in (Trees(least=2, group=3), Trees(alone=True))),
    ],
)
def test_laws(how: Trees) -> None:
    check_algorithm(how, rounds=6)


def test_engines_grow_the_same_trees() -> None:
    problem = problem_of("three classes")
    how = Trees(least=3, rows=0.7, columns=0.5)
    states = [
        rounds_of(how, task_for(problem), federation_of(problem), ROUNDS, mapping)[0]
        for mapping in (vmap(3), sequential())
    ]
    one, other = (eta_of(state.server, problem.x) for state in states)
    assert one == pytest.approx(other, abs=1e-10)


@dataclass(frozen=True)
class Unknown(Trees):
    """Each site by itself, as in a federation."""

    def rows_for(self, *_: Any) -> None:
        return None


# Quick: each option with each way to add up, and each kind of target with one of them. COPFL_SLOW=1: all of all.
OPTIONS: list[dict[str, Any]] = [
    *({"own": 1}, {"intercept": False}, {"rows": 0.7}, {"group": 3, "intercept": False})
]
USUAL = {(0, "three classes"), (1000, "two values")}


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "options", "paired"),
    [
        pytest.param(name, options, paired, marks=[] if (paired, name) in USUAL else slow)
        for name in ("two values", "two classes", "three classes")
        for options in OPTIONS
        for paired in (0, 1000)
    ],
)
def test_sites_that_are_added_up_together_send_the_same_bits(
    name: str, options: dict[str, Any], paired: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "PAIRED", paired)
    problem = problem_of(name)
    how = {"least": 3, "bins": 8} | options
    (one, rounds), (other, apart) = (
        rounds_of(kind(**how), task_for(problem), federation_of(problem), ROUNDS, vmap(64))
        for kind in (Trees, Unknown)
    )
    records = [
        tree.leaves((state.server, state.clients.rows(torch.arange(len(SIZES))))) for state in (one, other)
    ]
    assert all(map(torch.equal, *records))
    for a, b in zip(rounds, apart, strict=True):
        assert all(np.array_equal(a.clients[key], b.clients[key]) for key in b.clients)


def test_a_part_of_the_columns() -> None:
    problem = problem_of("values")
    forest = grown(Trees(least=3, columns=0.25), problem).server.grown.forest
    used = [
        set(row[limit < NEVER].tolist()) for row, limit in zip(forest.feature, forest.threshold, strict=True)
    ]
    assert all(len(one) == 1 for one in used)
    assert len(set.union(*used)) > 1


def test_other_models_are_refused() -> None:
    task = task_of(MLP((4,), 2), 2)
    with pytest.raises(UsageError, match="use --model trees"):
        Trees().server_init(task, 3)
    with pytest.raises(UsageError, match=r"model.name='mlp' has no trees, and trees grows trees; use trees"):
        complete({"data": {"name": "wine"}, "algorithm": {"name": "trees"}, "model": {"name": "mlp"}})
    with pytest.raises(UsageError, match=r"model.name='trees' has no gradient to train it by"):
        complete({"data": {"name": "wine"}, "algorithm": {"name": "fedavg"}, "model": {"name": "trees"}})


def test_the_model_chooses_the_algorithm_and_the_algorithm_the_model() -> None:
    by_model = complete({"data": {"name": "wine"}, "model": {"name": "trees"}})
    by_algorithm = complete({"data": {"name": "wine"}, "algorithm": {"name": "trees"}})
    assert by_model.algorithm.name == "trees"
    assert by_algorithm.model.name == "trees"
    assert by_model.run.rounds == by_algorithm.run.rounds == Trees.usual_rounds


@pytest.mark.parametrize(
    ("data", "tables", "rounds"),
    [
        ("wine", {"model": {"trees": 20}}, BEFORE + 20 * 3),
        ("wine", {"model": {"trees": 20, "depth": 2}, "algorithm": {"own": 5}}, BEFORE + 15 * 2 + 1),
        ("diabetes", {"task": {"loss": "absolute"}}, BEFORE + 100 * 4),
    ],
)
def test_a_run_has_the_rounds_that_its_trees_need(data: str, tables: dict[str, Any], rounds: int) -> None:
    algorithm = {"name": "trees"} | tables.get("algorithm", {})
    assert complete(tables | {"data": {"name": data}, "algorithm": algorithm}).run.rounds == rounds


def test_other_losses_are_refused() -> None:
    task = task_of(TreesModel((4,), 1), 1, criterion=regression(loss="huber"))
    with pytest.raises(UsageError, match="trees predict values by squared or absolute error"):
        Trees().server_init(task, 3)


def test_a_model_without_a_tree_for_each_class_is_refused() -> None:
    with pytest.raises(UsageError, match="of 3 classes each needs a tree, and the model has 2"):
        Trees().server_init(task_of(TreesModel((4,), 3, 2), 3), 3)


def test_by_settings_several_classes_have_so_many_trees_each() -> None:
    shapes = {
        kind: build("trees", (4,), 3, 0, kind, trees=5).get_parameter("ensemble.feature").shape[0]
        for kind in ("classification", "regression")
    }
    assert shapes == {"classification": 15, "regression": 5}


def test_too_many_columns_are_refused() -> None:
    task = task_of(TreesModel((100_000,), 2), 2)
    with pytest.raises(UsageError, match="use fewer columns"):
        Trees().server_init(task, 3)


@pytest.mark.parametrize(
    "option", [{"rate": 0}, {"bins": 1}, {"bins": 1000}, {"rows": 0}, {"least": 0}, {"penalty": -1}]
)
def test_options_out_of_range_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Trees(**option)
