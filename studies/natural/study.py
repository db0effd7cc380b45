"""The runs of the study: a method on a split of a federation, a line of the records each."""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import copfl
from studies.natural.federations import FEDERATIONS, Federation

POOLED = "linear, all rows in one place"
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "fedper, fedexp": {"algorithm": "fedper", "server": "fedexp"},
    "fedavg_ft": {"algorithm": "fedavg_ft"},
    "apfl": {"algorithm": "apfl"},
    "ditto": {"algorithm": "ditto"},
    "training alone": {"algorithm": "local"},
}


def pooled(federation: Federation) -> dict[str, Any]:
    """The mean over sites of the accuracy of a logistic regression on the rows of all."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.preprocessing import MaxAbsScaler

    (x, y, _), (x_test, y_test, site) = federation.pooled()
    scale = MaxAbsScaler().fit(x)
    model = LogisticRegressionCV(Cs=10.0 ** np.arange(-2, 4), max_iter=500).fit(scale.transform(x), y)
    right = model.predict(scale.transform(x_test)) == y_test
    return {"accuracy": float(np.mean([right[site == one].mean() for one in np.unique(site)]))}


def trained(federation: Federation, method: str, device: str) -> dict[str, Any]:
    """The mean over sites of each model's accuracy, and what was chosen."""
    settings = {**federation.options, **METHODS[method], "device": device, "log": None}
    algorithm = settings.pop("algorithm", None)
    result = copfl.run(algorithm, federation.data, find_rounds="auto", rivals=method == "default", **settings)
    found: dict[str, Any] = {
        "accuracy": float(np.nanmean(result.final("accuracy"))),
        "algorithm": result.experiment.run.algorithm.name,
        "rounds": result.experiment.settings.rounds,
    }
    if result.rivals is not None:
        found["alone"] = {
            name: float(np.nanmean(one.tested["accuracy"])) for name, one in result.rivals.values.items()
        }
    if result.choice is not None:
        found["losses"] = result.choice.validated.means
    if result.verdict is not None:
        found["gain"] = result.verdict.these._asdict()
    return found


def record(job: tuple[str, int, str, Path, str]) -> dict[str, Any]:
    """The line of a federation, a split and a method."""
    name, split, method, folder, device = job
    begin = time.perf_counter()
    line: dict[str, Any] = {"federation": name, "split": split, "method": method}
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        federation = FEDERATIONS[name](folder, split, Path(scratch))
        try:
            line |= pooled(federation) if method == POOLED else trained(federation, method, device)
        except Exception:  # a line of the study, and not its end
            line["error"] = traceback.format_exc()
    return {**line, "seconds": round(time.perf_counter() - begin, 1)}
