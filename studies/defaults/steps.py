"""The rule of the first run on both sides of 20 rounds: python studies/defaults/steps.py FILES OUT.jsonl [--table].

Digits in fewer and more rounds, each with one and two epochs of FedPAC's body, with and without the average of a
client's weights; everything else is what the rule chooses. A record has the mean accuracy of the personal models
after the last round. Runs whose record is in OUT already are left out, so a study that was stopped goes on.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from parallel import run_jobs, study_parser  # type: ignore[import-not-found]
from unseen import FEDERATIONS  # type: ignore[import-not-found]

RECORDS = Path(__file__).parent / "steps.jsonl.gz"
ROUNDS = (10, 14, 17, 19, 20)
NAMES = ("digits", "digits-3x10", "digits-2x30", "digits-5x10", "digits-dirichlet-0.5")
ARMS = {
    "1;0.0": "1 epoch",
    "1;0.8": "1 epoch, average",
    "2;0.0": "2 epochs",
    "2;0.8": "2 epochs, average",
}


class Job(NamedTuple):
    federation: str
    limit: int  # rounds
    arm: str  # epochs; decay of the average
    seed: int


def record(job: Job, threads: int) -> dict[str, Any]:
    """The personal models' mean accuracy at the end, in %."""
    from copfl.experiment.preparation import prepare
    from copfl.experiment.training import train
    from copfl.settings.complete import complete

    started, (epochs, ema) = time.process_time(), job.arm.split(";")
    own = {"seed": job.seed, "threads": threads, "workers": 1, "local_baseline": False, "rounds": job.limit}
    tables = FEDERATIONS[job.federation]
    named = complete({**tables, "run": {**tables.get("run", {}), **own, "eval_every": job.limit}}).tables()
    named["algorithm"]["epochs"] = int(epochs)
    result = train(
        prepare(complete({**named, "addons": {**named.get("addons", {}), "ema": float(ema)}})), None
    )
    accuracy = 100 * float(np.nanmean(result.final(result.primary.name)))
    return {"accuracy": round(accuracy, 3), "cpu": round(time.process_time() - started, 1)}


def table() -> str:
    """The mean accuracy of each arm by rounds, over the federations and seeds of the records."""
    values: dict[tuple[str, int, int], dict[str, float]] = defaultdict(dict)
    for line in map(json.loads, gzip.decompress(RECORDS.read_bytes()).decode().splitlines()):
        values[line["federation"], line["limit"], line["seed"]][line["arm"]] = line["accuracy"]
    lines = [f"| rounds | {' | '.join(ARMS.values())} |", f"| ---: |{' ---: |' * len(ARMS)}"]
    for rounds in ROUNDS:
        rows = [[of_arm[arm] for arm in ARMS] for (_, limit, _), of_arm in values.items() if limit == rounds]
        lines.append(f"| {rounds} | {' | '.join(f'{mean:.1f}' for mean in np.mean(rows, axis=0))} |")
    return "\n".join(lines)


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--seeds", default="9600")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="prints the table of the stored records")
    args = parser.parse_args()
    if args.table:
        print(table())
        return
    seeds = [int(seed) for seed in args.seeds.split(",")]
    jobs = [Job(n, rounds, arm, seed) for seed in seeds for n in NAMES for rounds in ROUNDS for arm in ARMS]
    run_jobs(jobs, partial(record, threads=args.threads), args.out, args.processes, args.budget)


if __name__ == "__main__":
    main()
