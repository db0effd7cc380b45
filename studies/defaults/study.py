"""Trains every candidate in every setting, on validation samples: python studies/defaults/study.py DATA OUT.jsonl.

A candidate is an algorithm, a server optimizer and a learning rate of Adam. A quarter of each client's
training samples replaces its test samples, so no test sample takes part in any choice. Runs whose record is
in OUT already are left out, so a study that was stopped goes on.
"""

from __future__ import annotations

import itertools
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copfl.bench.settings import SETTINGS, BenchSetting, arrays, samples_per_client

sys.path.append(str(Path(__file__).parents[1]))
from parallel import run_jobs, study_parser  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from copfl.experiment.result import Result
    from copfl.settings.schema import Run

VALIDATION = 0.25
RATES = (1e-3, 3e-3, 1e-2)
SERVERS = ("mean", "momentum", "fedexp", "adam")
ONCE = (1,)  # local epochs
STEADY = ("constant",)
USUAL = (0,)  # batch size: the setting's
SHORT_LIST = {
    "local": ("mean",),
    "fedpac": ("momentum", "fedexp"),
    "fedrod": ("momentum", "fedexp"),
    "fedper": ("momentum",),
    "fedavg_ft": ("momentum", "fedexp"),
}


class Tried(NamedTuple):
    """What an algorithm is combined with."""

    servers: tuple[str, ...]
    epochs: tuple[int, ...] = ONCE
    schedules: tuple[str, ...] = STEADY  # of the learning rate over the rounds
    batches: tuple[int, ...] = USUAL
    head_speeds: tuple[float, ...] = (0.0,)  # of FedPAC; 0: its default


SUITES: dict[str, dict[str, Tried]] = {
    "servers": {
        "local": Tried(("mean",)),
        "fedavg_ft": Tried(SERVERS),
        "fedper": Tried(SERVERS),
        "fedrod": Tried(SERVERS),
        "fedpac": Tried(("mean", "momentum", "fedexp")),
        "feddbe": Tried(("mean", "fedexp")),
        "ditto": Tried(("mean", "fedexp")),
        "scaffold": Tried(("mean",)),
        "copfl": Tried(("mean", "momentum", "fedexp")),
    },
    "epochs": {
        "local": Tried(("mean",), (3,)),
        "fedpac": Tried(("momentum", "fedexp"), (2,)),
        "fedper": Tried(("momentum", "fedexp"), (3,)),
        "fedrod": Tried(("momentum", "fedexp"), (3,)),
        "fedavg_ft": Tried(("momentum", "fedexp"), (3,)),
    },
    "batches": {name: Tried(servers, batches=(0, 8)) for name, servers in SHORT_LIST.items()},
    "cosine": {
        name: Tried(servers, schedules=("cosine",), batches=(8,)) for name, servers in SHORT_LIST.items()
    },
    "heads": {
        "fedpac": Tried(("fedexp", "momentum"), ONCE, ("constant", "cosine"), (8,), (1.0, 3.0)),
    },
    "adapters": {
        name: Tried(servers, schedules=("constant", "cosine")) for name, servers in SHORT_LIST.items()
    },
}


class Job(NamedTuple):
    setting: str
    algorithm: str
    server: str
    lr: float
    epochs: int
    schedule: str
    batch: int
    head_speed: float
    seed: int


def jobs(suite: str, names: list[str], seeds: list[int]) -> list[Job]:
    """Ordered so that a study that is stopped early has complete candidates in the first seeds."""
    return [
        Job(name, algorithm, server, lr, epochs, schedule, batch, speed, seed)
        for seed in seeds
        for algorithm, tried in SUITES[suite].items()
        for server, epochs, schedule, batch, speed, name, lr in itertools.product(*tried, names, RATES)
    ]


# Beside the rule: what was best in some part of the development settings, and the paper's method.
COMPETITORS = (
    ("fedpac", "momentum", 1e-3, "constant", 0),
    ("fedpac", "momentum", 1e-2, "constant", 0),
    ("fedper", "momentum", 1e-3, "constant", 0),
    ("fedrod", "fedexp", 1e-3, "cosine", 8),
    ("fedavg_ft", "fedexp", 1e-3, "constant", 8),
    ("fedavg_ft", "momentum", 1e-2, "constant", 0),
    ("copfl", "mean", 1e-3, "constant", 0),
)


def confirmation(names: list[str], seeds: list[int], folder: Path) -> list[Job]:
    """The rule of copfl.settings.first_choice, training alone in the same way, and the competitors."""
    from copfl.settings.first_choice import Known, first_choice

    rules, others = [], []
    for seed in seeds:
        for name in names:
            setting = SETTINGS[name]
            known = Known(
                "classification",
                samples_per_client(setting, folder),
                setting.rounds,
                setting.model[0],
                "hf:" in setting.model[0],
            )
            choice = first_choice(known)
            how = (choice.training.lr, 1, choice.training.schedule, choice.training.batch)
            rules += [
                Job(name, choice.algorithm, choice.server, *how, choice.options["head_speed"], seed),
                Job(name, "local", "mean", *how, 0.0, seed),
            ]
            others += [Job(name, *c[:3], 1, *c[3:], 0.0, seed) for c in COMPETITORS]
    return rules + others


def record(job: Job, folder: Path, device: str, validation: float) -> dict[str, Any]:
    """Every client's accuracy after local training: the mean of the last third of the evaluations, at most five."""
    from copfl.algorithms import ALGORITHMS as CLASSES
    from copfl.core import Adam
    from copfl.experiment.preparation import prepare
    from copfl.experiment.training import execute
    from copfl.parts.phases import Phases
    from copfl.parts.pwpm import Pwpm
    from copfl.parts.server_steps import SERVER_STEPS
    from copfl.wrappers.addons import with_addons
    from copfl.wrappers.server_optimizer import with_server_optimizer

    setting, started = SETTINGS[job.setting], time.monotonic()
    options: dict[str, Any] = {"epochs": job.epochs}
    if job.algorithm == "copfl":  # its form before named.md
        options = {"growth": Pwpm(), "phases": Phases()}
    if job.head_speed:
        options["head_speed"] = job.head_speed
    algorithm = CLASSES[job.algorithm](optimizer=Adam(lr=job.lr), **options)
    algorithm = with_server_optimizer(algorithm, SERVER_STEPS[job.server]())
    algorithm = with_addons(algorithm, lr_schedule=job.schedule, lr_rounds=setting.rounds)
    run = run_of(setting, algorithm, job.batch, job.seed, folder, device)
    result = execute(prepare(run, validation=validation), None)
    return {**job._asdict(), **summary(result), "seconds": round(time.monotonic() - started, 2)}


def run_of(setting: BenchSetting, algorithm: Any, batch: int, seed: int, folder: Path, device: str) -> Run:
    """The settings of a run of this algorithm in this setting."""
    from copfl.settings.complete import complete
    from copfl.settings.user_code import as_dataset

    scheme, scheme_options = setting.partition
    model, model_options = setting.model
    of_run = {
        "rounds": setting.rounds,
        "seed": seed,
        "device": device,
        "threads": 1,
        "workers": 1,
        "eval_models": "final",
    }
    if setting.clients:
        of_run["clients"] = setting.clients
    of_run["batch"] = batch or setting.batch or 32
    layers = {
        "run": of_run,
        "partition": {"name": scheme, **scheme_options},
        "model": {"name": model, **model_options},
        **setting.extra,
    }
    return complete(layers, values={"algorithm": algorithm, "data": as_dataset(arrays(setting.data, folder))})


def summary(result: Result) -> dict[str, list[float]]:
    """Each client's accuracy at the end, and the mean over the clients in about 20 rounds."""
    accuracy = np.asarray(result.accuracy)
    last = accuracy[-max(1, min(5, len(accuracy) // 3)) :].mean(0)
    means = np.nanmean(accuracy, 1)[:: max(1, len(accuracy) // 20)]
    return {
        "accuracy": [round(float(value), 5) for value in last],
        "curve": [round(float(value), 4) for value in means],
    }


def main() -> None:
    parser = study_parser(__doc__, "data")
    parser.add_argument("--suite", default="servers", choices=[*SUITES, "confirm"])
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--seeds", default="100,101,102")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    names = args.settings.split(",")
    is_last = args.suite == "confirm"  # on test samples
    planned = confirmation(names, seeds, args.data) if is_last else jobs(args.suite, names, seeds)
    validation = 0.0 if is_last else VALIDATION
    of_job = partial(record, folder=args.data, device=args.device, validation=validation)
    run_jobs(planned, of_job, args.out, args.processes, args.budget)


if __name__ == "__main__":
    main()
