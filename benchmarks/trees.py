"""Trees by sums beside scikit-learn's and LightGBM's, with all rows in one place and the same parameters.

    python benchmarks/trees.py [--seeds 5]     errors on eleven tables of scikit-learn, statsmodels and copfl
    python benchmarks/trees.py --speed         seconds of one processor, on rows that are drawn
    python benchmarks/trees.py --large         the same for a million rows at 1,000 sites
    python benchmarks/trees.py --memory        the largest memory of a process, by sites and by those of a chunk

All grow TREES trees of DEPTH levels with RATE, λ = 1 and at least 20 rows in a leaf, on at most 63 bins of a column;
no rows or columns are left out. LightGBM grows leaf after leaf, here up to all leaves of these levels. Of several
classes all have a tree for each. A seed is another 30 % of test rows. The error is the RMSE of values, and the log
loss of classes. `results/trees.json` is the record of both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightgbm
import numpy as np
import statsmodels.api as sm
import torch
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import log_loss, root_mean_squared_error

from copfl.algorithms import Trees
from copfl.algorithms.trees import BEFORE
from copfl.core import Task, task_of, tree
from copfl.core.criteria import classification, regression
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.data.sets.datasets import load
from copfl.engine.mapping import vmap
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.models.trees import Trees as Model
from copfl.models.trees import trees_of_step
from copfl.tables import Table, as_markdown

RECORD = Path(__file__).parents[1] / "results" / "trees.json"
TREES, DEPTH, RATE, LEAST, BINS, TESTED = 100, 4, 0.1, 20, 63, 0.3
SHAPES = ((12, 400, 14), (100, 1000, 50))  # sites, rows of each, columns
LARGE = (1000, 1000, 50)
CHUNK = 1000  # sites that are computed together
MEMORY = ((100, 25), (100, 100), (200, 25), (200, 100), (400, 25), (400, 100))  # sites, and those of a chunk
FEW_TREES = 4  # memory does not depend on their number
Numbers = NDArray[np.float64]


class Data(NamedTuple):
    x: Numbers
    y: NDArray[Any]  # int64: classes

    @property
    def classes(self) -> int:
        """0: values."""
        return int(self.y.max()) + 1 if self.y.dtype == np.int64 else 0

    def rows(self, index: NDArray[Any]) -> Data:
        return Data(self.x[index], self.y[index])


# -- tables --------------------------------------------------------------------------------------------------


def of_sklearn(name: str) -> Data:
    found = getattr(datasets, f"load_{name}")()
    return Data(found.data, found.target.astype(np.int64 if hasattr(found, "target_names") else np.float64))


def of_statsmodels(name: str, target: str, change: Callable[[Any], Any] = lambda y: y.astype(float)) -> Data:
    table = getattr(sm.datasets, name).load_pandas().data.dropna()
    return Data(table.drop(columns=target).to_numpy(np.float64), np.asarray(change(table[target].to_numpy())))


def of_copfl(name: str) -> Data:
    train, test = (getattr(load(name), split) for split in ("train", "test"))
    parts = [train, test] if test is not train else [train]
    x = np.concatenate([np.asarray(p.x, np.float64) for p in parts])
    return Data(x, np.concatenate([np.asarray(p.y, np.int64) for p in parts]))


TABLES: dict[str, Callable[[], Data]] = {
    "diabetes": lambda: of_sklearn("diabetes"),
    "affairs, hours": lambda: of_statsmodels("fair", "affairs"),
    "doctor's visits": lambda: of_statsmodels("randhie", "mdvis", lambda y: np.log1p(y.astype(float))),
    "schools": lambda: of_statsmodels("star98", "NABOVE"),
    "strikes and wages": lambda: of_statsmodels("anes96", "income"),
    "breast cancer": lambda: of_sklearn("breast_cancer"),
    "wine": lambda: of_sklearn("wine"),
    "digits": lambda: of_sklearn("digits"),
    "vote": lambda: of_statsmodels("anes96", "vote", lambda y: y.astype(np.int64)),
    "affairs, any": lambda: of_statsmodels("fair", "affairs", lambda y: (y > 0).astype(np.int64)),
    "heart disease": lambda: of_copfl("heart"),
}

# -- models --------------------------------------------------------------------------------------------------


class Fitted(NamedTuple):
    answer: Numbers  # of the test rows: values, or probabilities of classes
    seconds: float  # of one processor, for the fit


def federated(sites: list[Data], test: Data, trees: int | None = None, chunk: int = CHUNK) -> Fitted:
    """copfl's trees, grown by the sums of these sites."""
    trees = trees or TREES
    classes = max(site.classes for site in sites)
    x, y = np.concatenate([s.x for s in sites]), np.concatenate([s.y for s in sites])
    mean, deviation = x.mean(0), x.std(0) + 1e-12
    criterion = classification() if classes else regression(mean=[y.mean()], std=[y.std()])
    samples, held_out = (Samples(((a - mean) / deviation).astype(np.float32), b) for a, b in ((x, y), test))
    cuts = np.cumsum([len(site.y) for site in sites])[:-1]
    parts = tuple(np.split(np.arange(len(y)), cuts))
    names = tuple(f"c{n}" for n in range(max(1, classes)))
    dataset = Dataset("table", samples, held_out, names, kind=criterion.kind)
    federation = FederatedData(dataset, Partition(parts, tuple(p[:1] * 0 for p in parts), "sites", {}))
    rows = trees * trees_of_step(criterion.kind, len(names))
    task: Task = task_of(Model((x.shape[1],), len(names), rows, DEPTH), len(names), criterion=criterion)
    how = Trees(RATE, 1.0, LEAST, BINS, intercept=False)
    state, rounds, start = begin(how, task, len(sites)), BEFORE + trees * DEPTH, time.process_time()
    for _ in simulate(
        Simulation(how, task, federation, vmap(chunk)), state, rounds=rounds, eval_every=rounds
    ):
        pass
    seconds = time.process_time() - start
    record = tree.row(state.clients.rows(torch.arange(1)), 0)
    down = tree.row(how.downlink(state.server, torch.arange(1)), 0)
    with torch.no_grad():
        said = task.predict(how.personal_model(task, record, down), torch.from_numpy(held_out.x)).numpy()
    return Fitted(np.exp(said) if classes else said[:, 0], seconds)


def ours(train: Data, test: Data) -> Fitted:
    return federated([train], test)


def sklearns(train: Data, test: Data) -> Fitted:
    how: dict[str, Any] = {
        "learning_rate": RATE, "max_iter": TREES, "max_depth": DEPTH, "max_leaf_nodes": None, "min_samples_leaf": LEAST,
        "l2_regularization": 1.0, "max_bins": BINS, "early_stopping": False,
    }  # fmt: skip
    kind = HistGradientBoostingClassifier if train.classes else HistGradientBoostingRegressor
    start = time.process_time()
    model = kind(**how).fit(train.x, train.y)
    seconds = time.process_time() - start
    return Fitted(model.predict_proba(test.x) if train.classes else model.predict(test.x), seconds)


def lightgbms(train: Data, test: Data) -> Fitted:
    how: dict[str, Any] = {
        "learning_rate": RATE, "n_estimators": TREES, "max_depth": DEPTH, "num_leaves": 2**DEPTH, "reg_lambda": 1.0,
        "min_child_samples": LEAST, "min_child_weight": 0.0, "max_bin": BINS, "n_jobs": 1, "verbose": -1,
    }  # fmt: skip
    kind = lightgbm.LGBMClassifier if train.classes else lightgbm.LGBMRegressor
    start = time.process_time()
    model = kind(**how).fit(train.x, train.y)
    seconds = time.process_time() - start
    answer = model.predict_proba(test.x) if train.classes else model.predict(test.x)
    return Fitted(np.asarray(answer), seconds)


MODELS = {"copfl": ours, "scikit-learn": sklearns, "LightGBM": lightgbms}


def error(fitted: Fitted, test: Data) -> float:
    if not test.classes:
        return float(root_mean_squared_error(test.y, fitted.answer))
    return float(log_loss(test.y, fitted.answer, labels=range(fitted.answer.shape[1])))


# -- the record ----------------------------------------------------------------------------------------------


def errors(seeds: int, tables: list[str], models: list[str]) -> dict[str, dict[str, list[float]]]:
    """Of each table and model, the error of each seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in tables:
        data, found[name] = TABLES[name](), {model: [] for model in models}
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(data.y))
            test, train = np.split(order, [round(TESTED * len(order))])
            for model in models:
                fit = MODELS[model]
                found[name][model].append(error(fit(data.rows(train), data.rows(test)), data.rows(test)))
        print(name, {model: round(float(np.mean(e)), 4) for model, e in found[name].items()}, flush=True)
    return found


def drawn(sites: int, rows: int, columns: int) -> tuple[Data, list[Data]]:
    """Rows that are drawn, and those of each site."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sites * rows, columns))
    y = (x[:, 0] * (x[:, 1] > 0) + x[:, 2] + rng.normal(size=len(x)) > 0).astype(np.int64)
    data = Data(x, y)
    return data, [data.rows(index) for index in np.split(np.arange(len(y)), sites)]


def peak() -> float:
    """The largest memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def grown(sites: int, chunk: int) -> None:
    """Prints the memory of a process with 1,000 rows of 50 columns at each site, and with their trees."""
    _, parts = drawn(sites, 1000, 50)
    before = peak()
    federated(parts, parts[0], FEW_TREES, chunk)
    print(json.dumps({"sites": sites, "chunk": chunk, "rows_mib": before, "peak_mib": peak()}))


def memories() -> list[dict[str, float]]:
    """The memory of a new process for each number of sites and chunk."""
    found: list[dict[str, float]] = []
    for sites, chunk in MEMORY:
        words = [sys.executable, __file__, "--grown", str(sites), str(chunk)]
        found.append(json.loads(subprocess.run(words, check=True, capture_output=True).stdout))
        print(found[-1], flush=True)
    return found


def speeds(shapes: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Seconds of one processor for all trees, of rows that are drawn."""
    found = []
    for sites, rows, columns in shapes:
        data, parts = drawn(sites, rows, columns)
        test = parts[0]
        seconds = {"copfl": federated(parts, test).seconds, "LightGBM": lightgbms(data, test).seconds}
        found.append({"sites": sites, "rows": rows, "columns": columns, **seconds})
        print(found[-1], flush=True)
    return found


def error_table(found: dict[str, dict[str, list[float]]]) -> Table:
    """The mean errors, and the mean difference of each seed to the others' with its standard deviation, in percent."""
    rows = []
    for name, models in found.items():
        mine = np.array(models["copfl"])
        row = [name, *(f"{np.mean(values):.4g}" for values in models.values())]
        for other in list(MODELS)[1:]:
            percent = 100 * (mine / np.array(models[other]) - 1)
            row.append(f"{percent.mean():+.1f} ± {percent.std(ddof=1):.1f}")
        rows.append(row)
    head = ["table", *MODELS, *(f"to {other}, %" for other in list(MODELS)[1:])]
    return Table("", head, rows, [])


def speed_table(found: list[dict[str, Any]]) -> Table:
    rows = []
    for one in found:
        seconds = [one["copfl"], one["LightGBM"]]
        shape = [f"{one[key]:,}" for key in ("sites", "rows", "columns")]
        rows.append([*shape, *(f"{number:.1f}" for number in (*seconds, seconds[0] / seconds[1]))])
    return Table("", ["sites", "rows of each", "columns", "copfl, s", "LightGBM, s", "ratio"], rows, [])


def memory_table(found: list[dict[str, float]]) -> Table:
    rows = []
    for one in found:
        trees = one["peak_mib"] - one["rows_mib"]
        rows.append(
            [f"{one['sites']:.0f}", f"{one['chunk']:.0f}", f"{trees:.0f}", f"{trees / one['sites']:.2f}"]
        )
    return Table("", ["sites of 1,000 rows", "sites of a chunk", "MiB for the trees", "MiB a site"], rows, [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tables", nargs="*", help="of TABLES; by default all, others stay in the record")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--grown", nargs=2, type=int, metavar=("SITES", "CHUNK"), help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true", help="the tables of the record, without fits")
    chosen = parser.parse_args()
    if chosen.grown:
        grown(*chosen.grown)
        return
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not chosen.page:
        if chosen.memory:
            record["memory"] = memories()
        elif chosen.large:
            record["large"] = speeds((LARGE,))
        elif chosen.speed:
            record["speed"] = speeds(SHAPES)
        else:
            before, tables = record.get("errors", {}), chosen.tables or list(TABLES)
            found = errors(chosen.seeds, tables, chosen.models.split(","))
            record["errors"] = before | {name: before.get(name, {}) | found[name] for name in tables}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    if "errors" in record:
        print(as_markdown(error_table(record["errors"])))
    if "speed" in record:
        print(as_markdown(speed_table(record["speed"])))
    if "large" in record:
        print(as_markdown(speed_table(record["large"])))
    if "memory" in record:
        print(as_markdown(memory_table(record["memory"])))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
