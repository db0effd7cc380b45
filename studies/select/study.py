"""What does each client's best round gain, and what do its validation samples cost?

    python studies/select/study.py FILES OUT.jsonl [--device cuda --processes 14]

FILES is what studies/defaults/prepare.py writes. Every run has all rounds and keeps each client's accuracy in
every round, on its test samples and on its validation samples, so analyse.py compares all rules on the same
runs. A run with the fraction 0 trains on all samples. Runs whose record is in OUT already are left out.
"""

from __future__ import annotations

import itertools
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.bench.settings import SETTINGS, arrays

sys.path.append(str(Path(__file__).parents[1]))
from parallel import run_jobs, study_parser  # type: ignore[import-not-found]

CHOSEN = (
    "digits-2",
    "digits-5-few",
    "digits-dirichlet",
    "digits-shift",
    "tumours",
    "table-shift",
    "signals",
    "cifar-2",
    "cifar-4",
    "cifar-dirichlet",
    "banking-skew",
    "clinc-skew",
)
RATES = {
    "fedavg": 3e-3,
    "fedper": 3e-3,
    "fedpac": 1e-3,
    "copfl": 1e-3,
    "local": 3e-3,
}  # of Adam, see ../defaults
FRACTIONS = (0.0, 0.2)


class Job(NamedTuple):
    setting: str
    algorithm: str
    fraction: float  # of the training samples, for validation
    seed: int
    rounds: int


def record(job: Job, folder: Path, device: str) -> dict[str, Any]:
    """Each client's accuracy in every round, [rounds, clients], on its test and on its validation samples."""
    from copfl.algorithms import ALGORITHMS
    from copfl.core import Adam
    from copfl.experiment.preparation import prepare
    from copfl.experiment.training import execute
    from copfl.parts.phases import Phases
    from copfl.parts.pwpm import Pwpm
    from copfl.settings.complete import complete
    from copfl.settings.user_code import as_dataset

    setting, started = SETTINGS[job.setting], time.monotonic()
    scheme, options = setting.partition
    model, model_options = setting.model
    of_run = {
        "rounds": job.rounds,
        "seed": job.seed,
        "device": device,
        "threads": 1,
        "workers": 1,
        "eval_models": "final",
        "validation": job.fraction,
        "save_models": False,
        "batch": 32,
    }
    layers = {
        "run": of_run | ({"clients": setting.clients} if setting.clients else {}),
        "partition": {"name": scheme, **options},
        "model": {"name": model, **model_options},
        **setting.extra,
    }
    of_copfl = {"growth": Pwpm(), "phases": Phases()}  # its form when the records were made
    options_of = of_copfl if job.algorithm == "copfl" else {}
    algorithm = ALGORITHMS[job.algorithm](optimizer=Adam(lr=RATES[job.algorithm]), **options_of)
    run = complete(layers, values={"algorithm": algorithm, "data": as_dataset(arrays(setting.data, folder))})
    experiment = prepare(run)
    result = execute(experiment, None)
    return {
        "test": rounded(result.accuracy),
        "validation": rounded(result.metric("accuracy_validation")) if job.fraction else [],
        "validation_loss": rounded(result.metric("validation_loss")) if job.fraction else [],
        "samples": [len(part) for part in experiment.federation.partition.validation],
        "seconds": round(time.monotonic() - started, 2),
    }


def rounded(values: Any) -> list[list[float | None]]:
    """For JSON; null is nan."""
    return [[None if np.isnan(v) else round(float(v), 5) for v in row] for row in np.asarray(values)]


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--settings", default=",".join(CHOSEN))
    parser.add_argument("--algorithms", default=",".join(RATES))
    parser.add_argument("--fractions", default=",".join(map(str, FRACTIONS)))
    parser.add_argument("--seeds", default="200,201,202")
    parser.add_argument("--rounds", type=int, default=0, help="of every run; 0: those of the setting")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    jobs = [
        Job(name, algorithm, fraction, seed, args.rounds or SETTINGS[name].rounds)
        for seed, name, algorithm, fraction in itertools.product(
            map(int, args.seeds.split(",")),
            args.settings.split(","),
            args.algorithms.split(","),
            map(float, args.fractions.split(",")),
        )
    ]
    of_job = partial(record, folder=args.files, device=args.device)
    run_jobs(jobs, of_job, args.out, args.processes, args.budget)


if __name__ == "__main__":
    main()
