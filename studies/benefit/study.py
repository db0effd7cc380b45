"""Are harmful clients found by their benefit to the others? python studies/benefit/study.py OUT.jsonl.

Twenty clients have the digits, four of them do harm of one kind. A run measures the benefit of each client;
ten more train the federation again without one client each, which is what the benefit should predict. The
estimator was chosen with seeds 0 and 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from parallel import run_jobs  # type: ignore[import-not-found]

CLIENTS, BAD, ROUNDS, EVAL_EVERY = 20, 0.2, 50, 5
HONEST = 6  # of the honest clients, as many are left out in turn as well
SKEW = ("classes", {"per_client": 4, "train_per_class": 10, "test_per_class": 10})
SETTINGS: dict[str, tuple[str, tuple[str, dict[str, Any]]]] = {  # algorithm and partition
    "fedavg, Dirichlet": ("fedavg", ("dirichlet", {"alpha": 0.5})),
    "fedavg, 4 classes": ("fedavg", SKEW),
    "fedper, 4 classes": ("fedper", SKEW),
    "copfl, 4 classes": ("copfl", SKEW),
}
# Attacks and their strength; wrong labels are in the data, so that these clients judge by them as well.
HARMS: dict[str, tuple[str, float]] = {
    "wrong labels": ("", 0.0),
    "reversed updates": ("sign_flip", 1.0),
    "noise": ("noise", 5.0),
    "free riders": ("free_rider", 0.01),
}
ALL = -1  # the run of all clients
SECURE = -2  # the same, with each upload rounded as secure aggregation does
LOSSES = ("test_loss", "test_loss_before")
OF_COPFL = {"head": "shared", "budget": 0.5, "training": "in_turn"}  # its form when the records were made


class Job(NamedTuple):
    setting: str
    harm: str
    seed: int
    without: int  # the client whose uploads do not arrive; ALL or SECURE: none


def left_out(seed: int) -> list[int]:
    """The clients without which the federation is trained again: all that do harm, and some others."""
    from copfl.wrappers.attacks import choose_attackers

    bad = choose_attackers(seed, CLIENTS, BAD)
    return [*bad, *[client for client in range(CLIENTS) if client not in bad][:HONEST]]


def experiment(job: Any, device: str, **more: dict[str, Any]) -> Any:
    """The run of a job, with the numbers of the clients that do harm.

    Args:
        job: Its setting, harm and seed; its harm may be none of HARMS.
        device: Where it is computed.
        more: Further tables of settings.
    """
    from copfl.data.samples import Samples
    from copfl.data.sets.datasets import load
    from copfl.experiment.preparation import partition, prepare
    from copfl.settings.complete import complete
    from copfl.wrappers.attacks import Attacked, choose_attackers

    algorithm, (scheme, options) = SETTINGS[job.setting]
    layers: dict[str, dict[str, Any]] = {
        "algorithm": {"name": algorithm, **(OF_COPFL if algorithm == "copfl" else {})},
        "partition": {"name": scheme, **options},
        "model": {"name": "mlp", "width": 64},
        "optimizer": {"lr": 5e-3} if algorithm == "copfl" else {"name": "adam", "lr": 2e-3},
        "run": {
            "clients": CLIENTS,
            "rounds": ROUNDS,
            "seed": job.seed,
            "batch": 16,
            "device": device,
            "precision": "fp32",
            "engine": "vmap",
            "threads": 1,
            "eval_every": EVAL_EVERY,
            "eval_models": "personal",
            "save_models": False,
        },
    }
    layers = {title: layers.get(title, {}) | more.get(title, {}) for title in layers | more}
    digits = load("digits")
    parts = partition(complete(layers, values={"data": digits}), digits)
    bad = choose_attackers(job.seed, CLIENTS, BAD) if job.harm in HARMS else ()
    attack, strength = HARMS.get(job.harm, ("", 0.0))
    if not attack:
        y, rng = digits.train.y.copy(), np.random.default_rng(job.seed)
        for client in bad:
            own = parts.train[client]
            y[own] = (y[own] + rng.integers(1, 10, len(own))) % 10
        digits = dataclasses.replace(digits, train=Samples(digits.train.x, y))
    made = prepare(complete(layers, values={"data": digits, "partition": parts}))
    if attack:
        attacked = Attacked(made.algorithm, attack, bad, strength, job.seed)
        made = dataclasses.replace(made, algorithm=attacked)
    return made, bad


def with_secure_sums(e: Any) -> Any:
    """The experiment whose server gets what secure aggregation gives it: sums of entries that are rounded to steps."""
    from copfl.audit import replay
    from copfl.core import tree
    from copfl.federation.protocol.secure_sum import Rules, dequantised, quantised

    rules = Rules(CLIENTS)

    def sent(t: Any) -> Any:
        steps = quantised(t.double().cpu().numpy().ravel(), rules)
        return t.new_tensor(dequantised(steps, rules)).reshape(t.shape)

    return replay.intercepted(e, lambda received: tree.each(sent, received.summands))


def record(job: Job, device: str = "cpu") -> dict[str, Any]:
    """Each client's test loss and accuracy before and after training, over the last third of the evaluations.

    Of a run with all clients also the halves, the losses in them, and the weights.
    """
    from copfl.audit import replay
    from copfl.core.halves import DIFFERENCE, HALF
    from copfl.experiment.training import train_rounds
    from copfl.stats import mean_of_known

    started = time.monotonic()
    made, bad = experiment(job, device, run={"benefit": job.without in (ALL, SECURE)})
    if job.without >= 0:
        result = replay.without(made, [job.without])
    else:
        result = train_rounds(made if job.without == ALL else with_secure_sums(made), None)
    values: dict[str, Any] = {"bad": list(bad)}
    values |= {name: last_values(result, name) for name in (*LOSSES, "accuracy", "accuracy_before")}
    if job.without < 0:
        values["half"] = result.metric(HALF).astype(int).tolist()
        values["difference"] = [rounded(row) for row in result.metric(DIFFERENCE)]
        values["weight"] = rounded(mean_of_known(result.metric("weight")))
    return values | {"seconds": round(time.monotonic() - started, 2)}


def last_values(result: Any, name: str) -> list[float | None]:
    """The mean of a metric over the last third of the evaluations, by client."""
    from copfl.stats import averaged, mean_of_known

    table = result.metric(name)
    known = table[~np.isnan(table).all(1)]
    return rounded(mean_of_known(known[-averaged(len(known)) :]))


def rounded(row: Any) -> list[float | None]:
    """With five significant digits; null where a number is not finite."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in row]


def jobs_of(cells: list[tuple[str, str, int]]) -> list[Job]:
    """All runs that measure the benefit first, with secure sums for one seed; then those without a client."""
    planned = [Job(*cell, ALL) for cell in cells]
    planned += [Job(*cell, SECURE) for cell in cells if cell[-1] == cells[0][-1]]
    return planned + [Job(*cell, client) for cell in cells for client in left_out(cell[-1])]


def run(
    record: Callable[..., dict[str, Any]],
    description: str,
    jobs_of: Callable[[list[tuple[str, str, int]]], list[Any]],
    settings: Sequence[str] = tuple(SETTINGS),
    harms: Sequence[str] = tuple(HARMS),
) -> None:
    """The command line of a part of the study, whose jobs are made of settings, harms and seeds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path)
    parser.add_argument("--settings", default=";".join(settings))
    parser.add_argument("--harms", default=";".join(harms))
    parser.add_argument("--seeds", default="10,11,12,13,14")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no run is started")
    args = parser.parse_args()
    cells = [
        (setting, harm, int(seed))
        for seed in args.seeds.split(",")
        for setting in args.settings.split(";")
        for harm in args.harms.split(";")
    ]
    on_device = partial(record, device=args.device)
    run_jobs(jobs_of(cells), on_device, args.out, args.processes, args.budget)


if __name__ == "__main__":
    run(record, __doc__, jobs_of)
