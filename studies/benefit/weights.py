"""Do weights by evidence help? python studies/benefit/weights.py OUT.jsonl.

The federations of `study.py` and one without harm, for more rounds and with equal weights: these alone,
`--robust evidence`, the trimmed mean and the median. The rule was chosen with seed 0.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import study

ROUNDS, EVAL_EVERY = 120, 8
ROBUST = {"evidence": {}, "trimmed_mean": {"trim": 0.25}, "median": {}}
RULES = ("equal", *ROBUST)
AVERAGING = [name for name, (algorithm, _) in study.SETTINGS.items() if algorithm != "copfl"]
MODELS = (
    "accuracy_global",
    "accuracy_before",
    "accuracy",
)  # of the global, the received and the trained model


class Job(NamedTuple):
    setting: str
    harm: str
    seed: int
    rule: str


def record(job: Job, device: str = "cpu") -> dict[str, Any]:
    """Each client's accuracy and loss over the last third of the evaluations, and its weight in each round."""
    from copfl.experiment.training import train_rounds

    started = time.monotonic()
    e, bad = study.experiment(
        job,
        device,
        algorithm={"weights": "equal"},
        run={
            "rounds": ROUNDS,
            "eval_every": EVAL_EVERY,
            "eval_models": "all",
            "benefit": job.rule == "evidence",
        },
        robust={"name": job.rule, **ROBUST[job.rule]} if job.rule in ROBUST else {},
    )
    result = train_rounds(e, None)
    values: dict[str, Any] = {"bad": list(bad)}
    values |= {name: study.last_values(result, name) for name in (*study.LOSSES, *MODELS)}
    values["rounds_counted"] = (result.metric("weight") > 0).sum(0).tolist()
    return values | {"seconds": float(f"{time.monotonic() - started:.4g}")}


if __name__ == "__main__":
    study.run(
        record,
        __doc__,
        lambda cells: [Job(*cell, rule) for cell in cells for rule in RULES],
        AVERAGING,
        (*study.HARMS, "none"),
    )
