"""Every candidate of `copfl choose` in twelve federations: python studies/choose/study.py FILES OUT.jsonl.

FILES is what studies/defaults/prepare.py writes. A race sees three seeds, in which a fifth of each client's
training samples is kept for validation. What a choice is worth is measured with two other seeds, on all
training samples and on test samples. analyse.py races on these curves, without training. The plan of the race
was found with the seeds of DEVELOPMENT.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.bench.settings import SETTINGS, arrays, samples_per_client

sys.path.append(str(Path(__file__).parents[1]))
from parallel import run_jobs, study_parser  # type: ignore[import-not-found]

CHOSEN = (
    "digits-2",
    "digits-5-few",
    "digits-dirichlet",
    "digits-iid",
    "digits-unequal",
    "digits-shift",
    "tumours",
    "signals",
    "cifar-2",
    "banking-skew",
    "clinc-skew",
    "features-skew",
)
DEVELOPMENT, CONFIRMATION = 400, 410  # first seeds
RACED, TESTED = (0, 1, 2), (3, 4)  # added to the first seed
VALIDATION = 0.2
RATES = (1e-3, 3e-3, 1e-2)
# With a step of the server, at every rate; the other algorithms have the plain mean and the rate of the first
# choice.
STEPS = (
    ("fedpac", "fedexp", 3.0),
    ("fedpac", "momentum", 0.0),
    ("fedrod", "fedexp", 0.0),
    ("fedrod", "momentum", 0.0),
    ("fedper", "fedexp", 0.0),
    ("fedper", "momentum", 0.0),
    ("fedavg_ft", "fedexp", 0.0),
    ("fedavg_ft", "momentum", 0.0),
    ("local", "mean", 0.0),
)
ADAPTERS = ("feddpa", "fedex_lora", "fedsa_lora", "ffa_lora", "flex_lora")  # no setting has adapters


class Job(NamedTuple):
    setting: str
    algorithm: str
    server: str
    head_speed: float  # of FedPAC; 0: its default
    lr: float
    seed: int


def jobs(names: list[str], seeds: list[int], folder: Path) -> list[Job]:
    from copfl.algorithms import ALGORITHMS

    result = []
    for seed in seeds:
        for name in names:
            usual = rule(name, folder).lr
            result += [Job(name, *step, lr, seed) for step in STEPS for lr in RATES]
            plain = [algorithm for algorithm in ALGORITHMS if algorithm not in (*ADAPTERS, "local")]
            result += [Job(name, algorithm, "mean", 0.0, usual, seed) for algorithm in plain]
    return result


def rule(name: str, folder: Path) -> Any:
    """How the first choice trains in a setting; all candidates have its batch size and schedule."""
    from copfl.settings.first_choice import Known, training_of

    setting = SETTINGS[name]
    samples = samples_per_client(SETTINGS[name], folder)
    return training_of(Known("classification", samples, setting.rounds, setting.model[0]))


def record(job: Job, folder: Path, device: str) -> dict[str, Any]:
    """The mean accuracy of the clients in every round, on validation samples; in the tested seeds on test samples."""
    from copfl.algorithms import ALGORITHMS
    from copfl.core import Adam
    from copfl.experiment.preparation import prepare
    from copfl.experiment.training import execute
    from copfl.parts.phases import Phases
    from copfl.parts.pwpm import Pwpm
    from copfl.parts.server_steps import SERVER_STEPS
    from copfl.settings.complete import complete
    from copfl.settings.user_code import as_dataset
    from copfl.wrappers.addons import with_addons
    from copfl.wrappers.server_optimizer import with_server_optimizer

    setting, started = SETTINGS[job.setting], time.monotonic()
    usual = rule(job.setting, folder)
    options: dict[str, Any] = {"head_speed": job.head_speed} if job.head_speed else {}
    if job.algorithm == "copfl":  # its form when the records were made
        options = {"growth": Pwpm(), "phases": Phases()}
    algorithm = ALGORITHMS[job.algorithm](optimizer=Adam(lr=job.lr), **options)
    if job.server != "mean":
        algorithm = with_server_optimizer(algorithm, SERVER_STEPS[job.server]())
    algorithm = with_addons(algorithm, lr_schedule=usual.schedule, lr_rounds=setting.rounds)
    scheme, scheme_options = setting.partition
    model, model_options = setting.model
    of_run = {
        "rounds": setting.rounds,
        "seed": job.seed,
        "device": device,
        "threads": 1,
        "workers": 1,
        "eval_models": "final",
        "batch": usual.batch,
    }
    layers = {
        "run": of_run | ({"clients": setting.clients} if setting.clients else {}),
        "partition": {"name": scheme, **scheme_options},
        "model": {"name": model, **model_options},
        **setting.extra,
    }
    run = complete(layers, values={"algorithm": algorithm, "data": as_dataset(arrays(setting.data, folder))})
    held_out = VALIDATION if job.seed % 10 in RACED else 0.0
    accuracy = np.asarray(execute(prepare(run, validation=held_out), None).accuracy)
    return {
        "curve": [round(float(value), 5) for value in np.nanmean(accuracy, 1)],
        "seconds": round(time.monotonic() - started, 2),
    }


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--settings", default=",".join(CHOSEN))
    parser.add_argument("--seeds", default=",".join(str(CONFIRMATION + seed) for seed in RACED + TESTED))
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    planned = jobs(args.settings.split(","), [int(seed) for seed in args.seeds.split(",")], args.files)
    of_job = partial(record, folder=args.files, device=args.device)
    run_jobs(planned, of_job, args.out, args.processes, args.budget)


if __name__ == "__main__":
    main()
