"""Trains the variants with gates beside the first choice: python -m studies.adaptive.study FILES OUT.jsonl.

All of them have the batch size, the rate and the schedule of copfl.settings.first_choice, and FedExP's step
of the server. Runs whose record is in OUT already are left out, so a study that was stopped goes on.
"""

from __future__ import annotations

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
from copfl.experiment.preparation import prepare
from copfl.experiment.training import execute
from copfl.parts.server_steps import SERVER_STEPS
from copfl.settings.first_choice import Known, first_choice
from copfl.wrappers.addons import with_addons
from copfl.wrappers.server_optimizer import with_server_optimizer
from studies.adaptive.block_gate import BlockGate
from studies.adaptive.fedpac_gate import FedPACGate
from studies.adaptive.fedrod_gate import FedRoDGate
from studies.defaults.study import VALIDATION, run_of, summary
from studies.parallel import run_jobs, study_parser

NAMES = [name for name in SETTINGS if not name.startswith("lora")]


class Variant(NamedTuple):
    """What is trained."""

    algorithm: Callable[..., Any]
    options: Mapping[str, Any] = MappingProxyType({})
    server: str = "fedexp"
    schedule: str = ""  # "": the rule's
    ema: float = 0.0
    explore: float = 0.0  # the share of the rounds in which samples are held out and gates are fitted


PAC = partial(ALGORITHMS["fedpac"], head_speed=3.0)
GATED = partial(FedPACGate, head_speed=3.0)
HEADS = ("own_head", "mean_head")
OWN = ("own_head", "own_body")
VARIANTS = {
    "default": Variant(PAC),
    # Without gates; with `ema` a client predicts with a moving average of its weights.
    "default-ema": Variant(PAC, ema=0.8),
    "default-ema-0.9": Variant(PAC, ema=0.9),
    "align-0.1-ema": Variant(PAC, {"alignment": 0.1}, ema=0.8),
    "fedrod-ema": Variant(ALGORITHMS["fedrod"], ema=0.8),
    # Training alone, for as many epochs as FedPAC has: one of the head, one of the body.
    "alone-ema": Variant(partial(ALGORITHMS["local"], epochs=2), server="mean", ema=0.8),
    # Gates.
    "rod-gate": Variant(FedRoDGate, explore=0.5),
    "block-gate": Variant(BlockGate, explore=0.5),
    "pac-start": Variant(GATED, {"start_gates": HEADS}, explore=0.5),
    "pac-start-quarter": Variant(GATED, {"start_gates": HEADS}, explore=0.25),
    "pac-start-cosine": Variant(GATED, {"start_gates": HEADS}, schedule="cosine", explore=0.5),
    "pac-start-ema": Variant(GATED, {"start_gates": HEADS}, ema=0.8, explore=0.5),
    "pac-end": Variant(GATED, {"end_gates": "layers"}, explore=0.5),
    "pac-both": Variant(GATED, {"start_gates": HEADS, "end_gates": "layers"}, explore=0.5),
    "held-out-ema": Variant(GATED, ema=0.8, explore=0.5),  # no gates: what holding out costs
    "own-ema": Variant(GATED, {"start_gates": OWN, "memory": 0.7}, ema=0.8, explore=0.5),
    "end-ema": Variant(GATED, {"end_gates": "shared", "memory": 0.7}, ema=0.8, explore=0.5),
    "own-end-ema": Variant(
        GATED, {"start_gates": OWN, "end_gates": "shared", "memory": 0.7}, ema=0.8, explore=0.5
    ),
}


class Job(NamedTuple):
    setting: str
    variant: str
    seed: int


class Training(NamedTuple):
    """How a client trains by the rule of copfl.settings.first_choice."""

    lr: float
    schedule: str
    batch: int


def training_of(name: str, folder: Path) -> Training:
    """The rule's numbers for this federation."""
    setting = SETTINGS[name]
    known = Known("classification", samples_per_client(setting, folder), setting.rounds, setting.model[0])
    tables = first_choice(known).layer
    schedule = tables["addons"].get("lr_schedule", "constant")
    return Training(tables["optimizer"]["lr"], schedule, tables["run"]["batch"])


def record(job: Job, folder: Path, device: str, validation: float) -> dict[str, Any]:
    """The accuracies of a run, and its gates at the end."""
    started, setting, variant = time.monotonic(), SETTINGS[job.setting], VARIANTS[job.variant]
    training, options = training_of(job.setting, folder), dict(variant.options)
    if variant.explore:
        options["explore"] = round(variant.explore * setting.rounds)
    algorithm = variant.algorithm(optimizer=Adam(lr=training.lr), **options)
    algorithm = with_server_optimizer(algorithm, SERVER_STEPS[variant.server]())
    schedule = variant.schedule or training.schedule
    algorithm = with_addons(algorithm, ema=variant.ema, lr_schedule=schedule, lr_rounds=setting.rounds)
    run = run_of(setting, algorithm, training.batch, job.seed, folder, device)
    result = execute(prepare(run, validation=validation), None)
    last = result.records[-1]
    numbers = {
        name: np.round(value, 3).tolist()
        for name, value in {**last["federation"], **last["per_client"]}.items()
        if name.startswith(("gate_", "start_", "end_", "mu_"))
    }
    seconds = round(time.monotonic() - started, 2)
    return {**job._asdict(), **summary(result), "gates": numbers, "seconds": seconds}


def main() -> None:
    parser = study_parser(__doc__, "data")
    parser.add_argument(
        "--runs", required=True, help="SEED:VARIANT,VARIANT;SEED:... in the order of the runs"
    )
    parser.add_argument("--settings", default=",".join(NAMES))
    parser.add_argument("--test", action="store_true", help="on test samples instead of validation samples")
    parser.add_argument("--device", default="cpu")
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
