"""The runs of the study: each method on each split of each federation, a line of records.jsonl.gz each."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import copfl
from copfl.core import Task, tree
from copfl.core.evaluation import predicted
from copfl.core.task import Personal
from copfl.experiment.analysis.against_rivals import RIVALS
from copfl.experiment.probabilities import Probabilities
from copfl.rivals.site import judged_by

DATA = "studies.tables.federations:natural"
DEFAULT, CHOOSE, FIRST = "default", "choose", "levels"  # the first of each have the rivals, too
BUDGET = "2m"  # of a choice
OWN, ALONE, SHARED = (
    "trees, own",
    "trees, alone",
    "trees, shared",
)  # a run with own trees has both, the others are 0

METHODS: dict[str, Mapping[str, Any]] = {
    FIRST: {"algorithm": "levels"},
    "levels, slopes": {"algorithm": "levels", "algorithm_options": {"varying": "all"}},
    "one linear model": {"algorithm": "levels", "algorithm_options": {"varying": "none"}},
    "trees": {"algorithm": "trees"},
    "network: FedPer": {"algorithm": "fedper", "find_rounds": "first"},
    "network: fine-tuned": {"algorithm": "fedavg_ft", "find_rounds": "first"},
    "network: Ditto or FedPAC": {"model": "mlp", "find_rounds": "first"},
    DEFAULT: {},
    CHOOSE: {},
    OWN: {"algorithm": "trees", "algorithm_options": {"own": 20}, "model_options": {"trees": 120}},
    ALONE: {"algorithm": "trees", "algorithm_options": {"alone": True}},
}


class Job(NamedTuple):
    federation: str
    split: int
    method: str


def record(job: Job, folder: Path | None) -> dict[str, Any]:
    """By model, its metrics at each site; what its probabilities are worth, and its seconds of a processor.

    Args:
        job: What is trained.
        folder: The folder of the data.
    """
    warnings.simplefilter("ignore")
    started = time.process_time()
    if job.method in (OWN, ALONE):
        return _of_trees(job, folder)
    of_data = {"federation": job.federation, "seed": job.split}
    if job.method == CHOOSE:
        with tempfile.TemporaryDirectory() as out:
            choice = copfl.choose(
                dataset=DATA,
                budget=BUDGET,
                base_tables={
                    "data": {**of_data, **({} if folder is None else {"dir": str(folder)})},
                    "run": {"threads": 1, "seed": job.split},
                },
                out=out,
                code=["studies.tables.federations"],
            )
            rivals = RIVALS.read(Path(out) / "chosen")
            trained, probabilities = choice.rival or choice.chosen, None
    else:
        options: dict[str, Any] = {"threads": 1, "workers": 1, "seed": job.split, **METHODS[job.method]}
        if folder is not None:
            options["data_dir"] = folder
        result = copfl.run(options.pop("algorithm", None), DATA, data_options=of_data, **options)
        rivals, probabilities = result.rivals, result.probabilities
        chosen = result.choice
        trained = result.experiment.run.algorithm.name if chosen is None else chosen.federation
    if rivals is None:
        raise ValueError("a run on a table has rivals")
    alone = {name: of_kind.tested for name, of_kind in rivals.values.items()}
    values = {job.method: alone.get(trained, rivals.personal)}
    if job.method in (FIRST, DEFAULT):
        values |= alone
    seconds = round(time.process_time() - started, 2)
    return {
        "values": {name: _rounded(of_sites) for name, of_sites in values.items()},
        "trained": trained,
        "seconds": seconds,
        **({} if probabilities is None else {"probabilities": _judged(probabilities)}),
    }


def _of_trees(job: Job, folder: Path | None) -> dict[str, Any]:
    """Trees with a site's own, the same without these, and how many each site kept; or trees of each site alone."""
    started = time.process_time()
    options: dict[str, Any] = (
        {**METHODS[job.method], "data_dir": folder} if folder else {**METHODS[job.method]}
    )
    result = copfl.run(
        dataset=DATA,
        data_options={"federation": job.federation, "seed": job.split},
        threads=1,
        workers=1,
        seed=job.split,
        rivals=False,
        local_baseline=False,
        eval_every=1000,
        **options,
    )
    experiment = result.experiment
    task, sites = experiment.task, range(experiment.clients)
    own = METHODS[job.method]["algorithm_options"].get("own", 0)
    metrics = judged_by(task.criterion.kind, task.metrics)
    models = {job.method: [_vector(result.client_model(site)) for site in sites]}
    values = [task.layout.split(model[: task.d])["ensemble.value"] for model in models[job.method]]
    if own:
        models[SHARED] = [_without(task, model, own) for model in models[job.method]]
    found: dict[str, dict[str, list[float]]] = {}
    with torch.no_grad():
        for name, of_sites in models.items():
            test = [tree.row(experiment.federation.test.rows([site]), 0) for site in sites]
            answers = [predicted(task, model, data) for model, data in zip(of_sites, test, strict=True)]
            found[name] = {m.name: [m.of(*of_site) for of_site in answers] for m in metrics}
    return {
        "values": {name: _rounded(of_sites) for name, of_sites in found.items()},
        "trained": "trees",
        "seconds": round(time.process_time() - started, 2),
        "kept": [int((value[len(value) - own :] != 0).any(-1).any(-1).sum()) for value in values],
    }


def _vector(model: Personal) -> Tensor:
    if not isinstance(model, Tensor):
        raise TypeError("a model of trees is one vector")
    return model


def _without(task: Task, model: Tensor, own: int) -> Tensor:
    """The model whose last trees, those of a site, say 0."""
    tensors = {name: tensor.clone() for name, tensor in task.layout.split(model[: task.d]).items()}
    tensors["ensemble.value"][-own:] = 0
    return task.layout.join(tensors)


def _judged(found: Probabilities) -> dict[str, float]:
    """The calibration error of all test rows together, and at how many sites the class frequencies are better."""
    rows = sum(bin.samples for bin in found.calibration)
    gaps = sum(bin.samples * abs(bin.confidence - bin.accuracy) for bin in found.calibration)
    return {
        "calibration_error": float(f"{gaps / rows:.5g}"),
        "sites": int(np.isfinite(found.log_loss).sum()),
        "above": int((found.log_loss > found.reference).sum()),
        "shown_above": len(found.worse),
    }


def _rounded(by_metric: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """For JSON; null is nan."""
    return {
        name: [None if np.isnan(v) else float(f"{v:.5g}") for v in values]
        for name, values in by_metric.items()
    }
