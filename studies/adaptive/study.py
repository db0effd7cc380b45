"""Trains the variants with gates beside the first choice: python -m studies.adaptive.study FILES OUT.jsonl.

All of them have the batch size, the rate and the schedule of copfl.settings.first_choice, and FedExP's step of the
server. Runs whose record is in OUT already are left out, so a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from copfl.algorithms import ALGORITHMS
from copfl.bench.settings import SETTINGS, samples_per_client
from copfl.core import Adam
from copfl.parts.server_steps import SERVER_STEPS
from copfl.settings.first_choice import FirstChoice, Known, first_choice
from copfl.wrappers.addons import with_addons
from copfl.wrappers.server_optimizer import with_server_optimizer
from studies.adaptive.block_gate import BlockGate
from studies.adaptive.fedpac_gate import FedPACGate
from studies.adaptive.fedrod_gate import FedRoDGate
from studies.defaults.study import VALIDATION, summary, trained
from studies.parallel import run_jobs

NAMES = [name for name in SETTINGS if not name.startswith("lora")]


class Variant(NamedTuple):
    """What is trained."""

    algorithm: Callable[..., Any]
    options: Mapping[str, Any] = MappingProxyType({})
    server: str = "fedexp"
    schedule: str = ""  # "": the rule's
    ema: float = 0.0
    explore: float = 0.0  # the share of the rounds in which samples are held out and gates are fitted


PAC, GATED = ALGORITHMS["fedpac"], {"head_speed": 3.0}
ALL = {**GATED, "body_gate": True, "end_gates": True}
VARIANTS = {
    # Today's first choice and its competitors.
    "default": Variant(PAC, GATED),
    "local": Variant(ALGORITHMS["local"], server="mean"),
    "fedper": Variant(ALGORITHMS["fedper"]),
    "fedrod": Variant(ALGORITHMS["fedrod"]),
    "fedavg_ft": Variant(ALGORITHMS["fedavg_ft"]),
    "fedpac-momentum": Variant(PAC, GATED, "momentum"),
    # Controls without a gate.
    "default-ema": Variant(PAC, GATED, ema=0.8),
    "default-cosine": Variant(PAC, GATED, schedule="cosine"),
    # The gates.
    "rod-gate": Variant(FedRoDGate, explore=0.5),
    "block-gate": Variant(BlockGate, explore=0.5),
    "pac-start": Variant(FedPACGate, GATED, explore=0.5),
    "pac-start-cosine": Variant(FedPACGate, GATED, schedule="cosine", explore=0.5),
    "pac-start-ema": Variant(FedPACGate, GATED, ema=0.8, explore=0.5),
    "pac-start-quarter": Variant(FedPACGate, GATED, explore=0.25),
    "pac-end": Variant(FedPACGate, {**GATED, "start_gates": False, "end_gates": True}, explore=0.5),
    "pac-body": Variant(FedPACGate, {**GATED, "body_gate": True}, explore=0.5),
    "pac-all": Variant(FedPACGate, ALL, explore=0.5),
    "pac-all-ema": Variant(FedPACGate, ALL, ema=0.8, explore=0.5),
    "pac-all-cosine": Variant(FedPACGate, ALL, schedule="cosine", explore=0.5),
    "pac-all-smooth": Variant(FedPACGate, {**ALL, "memory": 0.7}, explore=0.5),
    "pac-all-common": Variant(FedPACGate, {**ALL, "common": True}, explore=0.5),
    "pac-all-quarter": Variant(FedPACGate, ALL, explore=0.25),
    "pac-both": Variant(FedPACGate, {**GATED, "end_gates": True}, explore=0.5),
}


class Job(NamedTuple):
    setting: str
    variant: str
    seed: int


def choice_of(name: str, folder: Path) -> FirstChoice:
    """The rule's settings for this federation."""
    setting = SETTINGS[name]
    samples = samples_per_client(setting, folder)
    return first_choice(Known("classification", samples, setting.rounds, setting.model[0]))


def record(job: Job, folder: Path, device: str, validation: float) -> dict[str, Any]:
    """The accuracies of a run, and its gates at the end."""
    started, setting, variant = time.monotonic(), SETTINGS[job.setting], VARIANTS[job.variant]
    choice, options = choice_of(job.setting, folder), dict(variant.options)
    if variant.explore:
        options["explore"] = round(variant.explore * setting.rounds)
    algorithm = variant.algorithm(optimizer=Adam(lr=choice.lr), **options)
    algorithm = with_server_optimizer(algorithm, SERVER_STEPS[variant.server]())
    schedule = variant.schedule or choice.schedule
    algorithm = with_addons(algorithm, ema=variant.ema, lr_schedule=schedule, lr_rounds=setting.rounds)
    result = trained(setting, algorithm, choice.batch, job.seed, folder, device, validation)
    last = result.records[-1]
    numbers = {
        name: np.round(value, 3).tolist()
        for name, value in {**last["federation"], **last["per_client"]}.items()
        if name.startswith(("gate_", "start_", "end_", "mu_"))
    }
    return {
        **job._asdict(),
        **summary(result),
        "gates": numbers,
        "seconds": round(time.monotonic() - started, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--runs", required=True, help="SEED:VARIANT,VARIANT;SEED:... in the order of the runs"
    )
    parser.add_argument("--settings", default=",".join(NAMES))
    parser.add_argument("--test", action="store_true", help="on test samples instead of validation samples")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no run is started")
    args = parser.parse_args()
    jobs = [
        Job(name, variant, int(seed))
        for seed, _, variants in (part.partition(":") for part in args.runs.split(";"))
        for variant in variants.split(",")
        for name in args.settings.split(",")
    ]
    validation = 0.0 if args.test else VALIDATION
    of_job = partial(record, folder=args.data, device=args.device, validation=validation)
    run_jobs(jobs, of_job, args.out, args.processes, args.budget)


if __name__ == "__main__":
    main()
