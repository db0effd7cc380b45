"""Trains every candidate in every setting, on validation samples: python studies/defaults/study.py DATA OUT.jsonl.

A candidate is an algorithm, a server optimizer and a learning rate of Adam. A quarter of each client's training
samples replaces its test samples, so no test sample takes part in any choice. Runs whose record is in OUT
already are left out, so a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from settings import SETTINGS, arrays  # type: ignore[import-not-found]

VALIDATION = 0.25
RATES = (1e-3, 3e-3, 1e-2)
SERVERS = ("mean", "momentum", "fedexp", "adam")
ONCE = (1,)  # local epochs
# The algorithms, with the server optimizers and the local epochs that each is tried with.
SUITES: dict[str, dict[str, tuple[tuple[str, ...], tuple[int, ...]]]] = {
    "servers": {
        "local": (("mean",), ONCE),
        "fedavg_ft": (SERVERS, ONCE),
        "fedper": (SERVERS, ONCE),
        "fedrod": (SERVERS, ONCE),
        "fedpac": (("mean", "momentum", "fedexp"), ONCE),
        "feddbe": (("mean", "fedexp"), ONCE),
        "ditto": (("mean", "fedexp"), ONCE),
        "scaffold": (("mean",), ONCE),
        "copfl": (("mean", "momentum", "fedexp"), ONCE),
    },
    "epochs": {
        "local": (("mean",), (3,)),
        "fedpac": (("momentum", "fedexp"), (2,)),
        "fedper": (("momentum", "fedexp"), (3,)),
        "fedrod": (("momentum", "fedexp"), (3,)),
        "fedavg_ft": (("momentum", "fedexp"), (3,)),
    },
}


class Job(NamedTuple):
    setting: str
    algorithm: str
    server: str
    lr: float
    epochs: int
    seed: int


def jobs(suite: str, names: list[str], seeds: list[int]) -> list[Job]:
    """Ordered so that a study that is stopped early has complete candidates in the first seeds."""
    return [
        Job(name, algorithm, server, lr, count, seed)
        for seed in seeds
        for algorithm, (servers, epochs) in SUITES[suite].items()
        for server, count, name, lr in itertools.product(servers, epochs, names, RATES)
    ]


def record(job: Job, folder: Path, device: str) -> dict[str, Any]:
    """Every client's accuracy after local training: the mean of the last third of the evaluations, at most five."""
    from copfl.algorithms import ALGORITHMS as CLASSES
    from copfl.core import Adam
    from copfl.experiment.preparation import prepare
    from copfl.experiment.run import execute
    from copfl.parts.server_steps import SERVER_STEPS
    from copfl.settings.complete import complete
    from copfl.settings.user_code import as_dataset
    from copfl.wrappers.server_optimizer import with_server_optimizer

    setting, started = SETTINGS[job.setting], time.monotonic()
    epochs = {} if job.algorithm == "copfl" else {"epochs": job.epochs}
    algorithm = CLASSES[job.algorithm](optimizer=Adam(lr=job.lr), **epochs)
    algorithm = with_server_optimizer(algorithm, SERVER_STEPS[job.server]())
    scheme, options = setting.partition
    model, model_options = setting.model
    of_run = {
        "rounds": setting.rounds,
        "seed": job.seed,
        "device": device,
        "threads": 1,
        "workers": 1,
        "eval_models": "final",
    }
    layers = {
        "run": of_run | ({"clients": setting.clients} if setting.clients else {}),
        "partition": {"name": scheme, **options},
        "model": {"name": model, **model_options},
        **setting.extra,
    }
    run = complete(layers, values={"algorithm": algorithm, "data": as_dataset(arrays(setting.data, folder))})
    experiment = prepare(run, validation=VALIDATION)
    result = execute(experiment, None)
    accuracy = np.asarray(result.accuracy)
    last = accuracy[-max(1, min(5, len(accuracy) // 3)) :].mean(0)
    return {
        **job._asdict(),
        "accuracy": [round(float(value), 5) for value in last],
        "curve": [
            round(float(value), 4) for value in np.nanmean(accuracy, 1)[:: max(1, len(accuracy) // 20)]
        ],
        "seconds": round(time.monotonic() - started, 2),
    }


def work(queue: Any, results: Any, folder: Path, device: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    while (job := queue.get()) is not None:
        try:
            results.put(record(job, folder, device))
        except Exception as error:
            results.put({**job._asdict(), "error": f"{type(error).__name__}: {error}"[:500]})
            traceback.print_exc()
    results.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--suite", default="servers", choices=SUITES)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--seeds", default="100,101,102")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no run is started")
    args = parser.parse_args()
    done = set()
    if args.out.exists():
        lines = [json.loads(line) for line in args.out.read_text("utf-8").splitlines()]
        done = {Job(*(line[name] for name in Job._fields)) for line in lines if "error" not in line}
    seeds = [int(seed) for seed in args.seeds.split(",")]
    waiting = [job for job in jobs(args.suite, args.settings.split(","), seeds) if job not in done]
    context = multiprocessing.get_context("spawn")
    queue, results = context.Queue(maxsize=args.processes), context.Queue()
    processes = [
        context.Process(target=work, args=(queue, results, args.data, args.device))
        for _ in range(args.processes)
    ]
    for process in processes:
        process.start()
    started, finished = time.monotonic(), 0
    with args.out.open("a", encoding="utf-8") as file:

        def drain(block: bool) -> int:
            ended = 0
            while block or not results.empty():
                line = results.get()
                if line is None:
                    ended += 1
                    return ended
                file.write(json.dumps(line) + "\n")
                file.flush()
            return ended

        for job in waiting:
            if time.monotonic() - started > args.budget:
                break
            queue.put(job)
            finished += 1
            drain(False)
        for _ in processes:
            queue.put(None)
        ended = 0
        while ended < len(processes):
            ended += drain(True)
    for process in processes:
        process.join()
    print(f"{finished} of {len(waiting)} runs in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
