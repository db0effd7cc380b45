"""The runs of the study: each method on each split of each federation, a line of records.jsonl.gz each."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import copfl
from copfl.experiment.probabilities import Probabilities
from copfl.rivals import file as rivals_file

DATA = "studies.tables.federations:natural"
DEFAULT, CHOOSE, FIRST = "default", "choose", "levels"  # the first of each have the rivals, too
BUDGET = "2m"  # of a choice

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
            rivals = rivals_file.read(Path(out) / "chosen")
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
