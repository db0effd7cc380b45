"""What should an algorithm train with where it is named and nothing else is set? CO-PFL's form, the batch, the rate.

    python studies/defaults/named.py FILES OUT.jsonl --parts copfl,named,...   # on validation samples
    python studies/defaults/named.py FILES OUT.jsonl --parts confirm               # the decision, on test samples

`copfl`: forms of CO-PFL, each with two optimizers and two steps of the server. `named`: every algorithm as it
is, and with the batch and the rate of copfl.settings.first_choice. `targets`: values and labels instead of
classes. `confirm` trains the form that has the highest mean over the development settings, beside today's and
the published one. Runs whose record is in OUT already are left out, so a study that was stopped goes on.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.bench.settings import SETTINGS, TABLE, BenchSetting, arrays, samples_per_client

sys.path.append(str(Path(__file__).parents[1]))
from parallel import run_jobs, study_parser  # type: ignore[import-not-found]

VALIDATION = 0.25
BY_BENEFIT = {"rate": 0.05, "budget": 0.3, "criterion": "benefit", "candidates": "reselect"}
PUBLISHED = {"candidates": "all", "count": "all", "merge": "union", "leave_one_out": "paper"}
# CO-PFL's defaults when the forms were compared, which the study then changed; a form says where it differs.
FORMER = {"head": "shared", "budget": 0.5, "training": "in_turn"}
DIFFERENCES: dict[str, dict[str, Any]] = {
    "interpretation": {},
    "paper": PUBLISHED,
    "plus": {"warmup": "75%", **BY_BENEFIT},
    "warmup50": {"warmup": "50%", **BY_BENEFIT},
    "head": {"head": "personal", "rate": 0.0},
    "head-together": {"head": "personal", "rate": 0.0, "training": "together"},
    "head-change": {"head": "personal"},
    "head-benefit": {"head": "personal", "warmup": "50%", **BY_BENEFIT},
    "head-benefit-together": {
        "head": "personal",
        "warmup": "50%",
        "training": "together",
        **BY_BENEFIT,
    },
    "held-out": {"criterion": "held_out", "until": "33%", "training": "together"},
    "held-out-long": {"criterion": "held_out", "until": "67%", "training": "together"},
    "head-held-out": {"head": "personal", "criterion": "held_out", "until": "33%", "training": "together"},
    "head-equal-together": {"head": "personal", "rate": 0.0, "training": "together", "score": "none"},
}
FORMS = {name: {**FORMER, **options} for name, options in DIFFERENCES.items()}
RULE = {"head_speed": 3.0}  # of FedPAC in copfl.settings.first_choice
# Only for the confirmation: they take long.
EXPENSIVE = ("cifar-4-long", "clinc-dirichlet", "cifar-dirichlet", "cifar-dirichlet-50")
LORA = ("lora-skew", "lora-dirichlet")
DEVELOPMENT = [name for name in SETTINGS if name not in EXPENSIVE + LORA]
SMALL = [
    "tumours",
    "digits-5-few",
    "signals",
    "digits-2",
    "banking-skew",
    "cifar-4",
    "table-shift",
    "features-skew",
]
NEEDS_MORE = (
    "fedex_lora",
    "ffa_lora",
    "fedsa_lora",
    "flex_lora",
    "feddpa",
    "ktpfl",
)  # adapters, public samples
DEVELOPMENT_SEED, CONFIRMATION_SEEDS = 600, [700, 701, 702, 703, 704]


# -- federations whose targets are no classes ----------------------------------------------------------------


def _in_groups(values: NDArray[Any], groups: int, noise: float, seed: int = 0) -> NDArray[Any]:
    """Equal groups by a column with noise, as hospitals that differ in it."""
    noisy = values + np.random.default_rng(seed).normal(0, noise * values.std(), len(values))
    return np.argsort(np.argsort(noisy)) * groups // len(values)


def _scaled(x: NDArray[Any]) -> NDArray[Any]:
    return ((x - x.mean(0)) / x.std(0)).astype(np.float32)


def diabetes(by_age: bool) -> dict[str, Any]:
    """442 patients: the progression after a year, in five clinics, equal or by age."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    age = data.data[:, 0] if by_age else np.zeros(len(data.data))
    return {"x": _scaled(data.data), "y": data.target.astype(np.float32), "group": _in_groups(age, 5, 0.5)}


def tumour_values(labels: bool) -> dict[str, Any]:
    """The worst area, or whether five worst values are above their medians, from the mean values; six hospitals."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer().data
    x, worst = table[:, :10], table[:, 20:]
    above = (worst[:, 3:8] > np.median(worst[:, 3:8], axis=0)).astype(np.float32)
    y = above if labels else worst[:, 3].astype(np.float32)
    return {"x": _scaled(x), "y": y, "group": _in_groups(x[:, 0], 6, 1.0)}


def alcohol() -> dict[str, Any]:
    """The alcohol of 178 wines from the other columns; the three cultivars are the clients."""
    from sklearn.datasets import load_wine

    data = load_wine()
    return {"x": _scaled(data.data[:, 1:]), "y": data.data[:, 0].astype(np.float32), "group": data.target}


def sites(labels: bool) -> dict[str, Any]:
    """Generated: twelve sites of 60 to 400 rows with shifted columns; the function of Friedman, or five labels."""
    from sklearn.datasets import make_friedman1, make_multilabel_classification

    rng = np.random.default_rng(2)
    if labels:
        x, y = make_multilabel_classification(2400, 20, n_classes=5, random_state=2)
        x = _scaled(x)
    else:
        x, y = make_friedman1(2400, 10, noise=1.0, random_state=2)
    site = rng.choice(12, len(x), p=rng.dirichlet(np.full(12, 2.0)))
    columns = x.shape[1]
    shifted = (
        x * rng.uniform(0.6, 1.4, (12, columns))[site] + rng.normal(0, 0.5 * x.std(), (12, columns))[site]
    )
    return {"x": shifted.astype(np.float32), "y": y.astype(np.float32), "group": site}


def digit_labels() -> dict[str, Any]:
    """scikit-learn's digits: even, above four, with a loop, prime, divisible by three; ten clients by digit."""
    from sklearn.datasets import load_digits

    x, digit = load_digits(return_X_y=True)
    rng = np.random.default_rng(3)
    shares = rng.dirichlet(np.full(10, 0.3), 10)
    group = np.array([rng.choice(10, p=shares[d]) for d in digit])
    sets = ({0, 2, 4, 6, 8}, {5, 6, 7, 8, 9}, {0, 6, 8, 9}, {2, 3, 5, 7}, {0, 3, 6, 9})
    y = np.array([[d in members for members in sets] for d in digit], np.float32)
    return {"x": (x.reshape(-1, 1, 8, 8) * 15.9375).astype(np.uint8), "y": y, "group": group}


TARGETS = {
    "diabetes": partial(diabetes, False),
    "diabetes-age": partial(diabetes, True),
    "tumour-area": partial(tumour_values, False),
    "alcohol": alcohol,
    "friedman": partial(sites, False),
    "tumour-labels": partial(tumour_values, True),
    "digit-labels": digit_labels,
    "labels": partial(sites, True),
}


@lru_cache
def federation(name: str, folder: Path) -> tuple[BenchSetting, dict[str, Any], str, float]:
    """A setting with its samples, the kind of its targets, and the training samples of a client."""
    if name in SETTINGS:
        setting = SETTINGS[name]
        return setting, arrays(setting.data, folder), "classification", samples_per_client(setting, folder)
    data = TARGETS[name]()
    model = ("cnn", {}) if data["x"].ndim == 4 else TABLE
    setting = BenchSetting(name, ("by_group", {}), 0, 40, model)
    kind = "multilabel" if data["y"].ndim == 2 else "regression"
    return setting, data, kind, 0.8 * len(data["y"]) / len(np.unique(data["group"]))


# -- the runs ------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    setting: str
    algorithm: str
    form: str  # of CO-PFL; "" for other algorithms
    optimizer: str  # "usual": SGD, which algorithms had before this study
    server: str
    factor: float  # of the rule's rate; 0: the rate before this study
    batch: str  # "rule", or "usual": 32, as before this study
    seed: int
    split: str  # "validation" or "test"


def copfl_jobs(server: str, optimizer: str, settings: list[str]) -> Iterator[Job]:
    """Every form of CO-PFL, and others beside it; a study that is stopped early has complete candidates."""
    candidates = [("copfl", form) for form in FORMS]
    if optimizer == "adam":
        candidates += [("fedper", ""), ("local", "") if server == "mean" else ("fedpac", "rule")]
    for algorithm, form in candidates:
        for name in settings:
            yield Job(name, algorithm, form, optimizer, server, 1.0, "rule", DEVELOPMENT_SEED, "validation")


def named_jobs(optimizer: str, batch: str) -> Iterator[Job]:
    """Every algorithm as it was ("usual"), or with the rule's batch and rate (Adam)."""
    from copfl.algorithms import ALGORITHMS

    factor = 1.0 if optimizer == "adam" else 0.0
    for name in SMALL:
        for algorithm in ALGORITHMS:
            if algorithm not in (*NEEDS_MORE, "copfl"):
                yield Job(
                    name, algorithm, "", optimizer, "mean", factor, batch, DEVELOPMENT_SEED, "validation"
                )


def target_jobs(factors: tuple[float, ...], seed: int) -> Iterator[Job]:
    candidates = [("local", "mean"), ("fedper", "fedexp"), ("fedper", "mean"), ("fedavg_ft", "fedexp")]
    candidates += [
        ("fedavg_ft", "mean"),
        ("ditto", "mean"),
        ("ditto", "fedexp"),
        ("apfl", "mean"),
        ("fedrep", "fedexp"),
    ]
    for factor in factors:
        for algorithm, server in candidates:
            for name in TARGETS:
                yield Job(name, algorithm, "", "adam", server, factor, "rule", seed, "validation")


def confirmation(out: Path, seeds: list[int]) -> Iterator[Job]:
    """The best form under the plain mean and under FedExP's step, today's, the published one, and others."""
    finalists = [(*best, server) for server in ("mean", "fedexp") if (best := best_form(out, server))]
    print("chosen on validation samples:", finalists, flush=True)
    candidates = [("copfl", form, optimizer, server, 1.0, "rule") for form, optimizer, server in finalists]
    candidates += [
        ("copfl", "interpretation", "mamo", "mean", 0.0, "usual"),
        ("copfl", "paper", "mamo", "mean", 1.0, "rule"),
        ("local", "", "adam", "mean", 1.0, "rule"),
        ("fedper", "", "adam", "mean", 1.0, "rule"),
    ]
    for seed in seeds:
        for name in SETTINGS:
            if name not in LORA:
                for candidate in candidates:
                    yield Job(name, *candidate, seed, "test")


def confirmed_names(seeds: list[int]) -> Iterator[Job]:
    """Every algorithm as it is and by the rule, on test samples."""
    for seed in seeds:
        for job in (*named_jobs("usual", "usual"), *named_jobs("adam", "rule")):
            yield job._replace(seed=seed, split="test")


def confirmed_targets(seeds: list[int]) -> Iterator[Job]:
    """Training alone and the candidates for targets that are no classes, on test samples."""
    for seed in seeds:
        for job in target_jobs((1.0, 1 / 3), seed):
            if job.algorithm in ("local", "fedper", "fedavg_ft", "ditto"):
                yield job._replace(split="test")


def best_form(out: Path, server: str) -> tuple[str, str] | None:
    """The form and optimizer of the highest mean over the settings in which all candidates have a record.

    A candidate of which less than two thirds was run, because the study was stopped, is none; equal weights
    are a control.
    """
    values: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for line in out.read_text("utf-8").splitlines():
        record = json.loads(line)
        is_candidate = record["algorithm"] == "copfl" and record["form"] != "head-equal-together"
        is_candidate = is_candidate and record["split"] == "validation"
        if is_candidate and record["server"] == server and record["factor"] == 1.0 and "error" not in record:
            mean = float(np.nanmean(np.array(record["values"], float)))
            values[record["form"], record["optimizer"]][record["setting"]] = mean
    values = {
        c: by_setting for c, by_setting in values.items() if 3 * len(by_setting) >= 2 * len(DEVELOPMENT)
    }
    if not values:
        return None
    common = set.intersection(*(set(by_setting) for by_setting in values.values()))
    return max(values, key=lambda c: float(np.mean([values[c][s] for s in common])))


def record(job: Job, folder: Path, device: str) -> dict[str, Any]:
    """Every client's primary metric after local training: the mean of its last evaluations."""
    from copfl.comparison.results.results import last_evaluations
    from copfl.experiment.preparation import prepare
    from copfl.experiment.training import execute
    from copfl.settings import presets
    from copfl.settings.complete import complete
    from copfl.settings.first_choice import Known, training_of
    from copfl.settings.user_code import as_dataset

    started = time.monotonic()
    setting, data, kind, samples = federation(job.setting, folder)
    (scheme, scheme_options), (model, model_options) = setting.partition, setting.model
    rule = training_of(Known(kind, samples, setting.rounds, model))
    run: dict[str, Any] = {"rounds": setting.rounds, "seed": job.seed, "device": device}
    run |= {"threads": 1, "workers": 1, "eval_models": "final", "save_models": False}
    if setting.clients:
        run["clients"] = setting.clients
    run["batch"] = rule.batch if job.batch == "rule" else 32
    options = dict(FORMS.get(job.form, RULE)) if job.form else {}
    optimizer: dict[str, Any] = {"name": "sgd" if job.optimizer == "usual" else job.optimizer}
    before = {"sgd": 0.1, "mamo": 1e-4 if job.form == "paper" else 1e-3}
    optimizer["lr"] = rule.lr * job.factor if job.factor else before[optimizer["name"]]
    if job.optimizer == "mamo" and job.form == "paper":
        optimizer["change"] = "zero"
    if job.algorithm == "copfl" and job.optimizer == "adam" and options.get("training") != "together":
        options["state_per_phase"] = True  # one step count for both phases would shorten the second's steps
    layers: dict[str, dict[str, Any]] = {
        "algorithm": {"name": job.algorithm, **options},
        "optimizer": optimizer,
        "server": {"name": job.server} if job.server != "mean" else {},
        "addons": {"lr_schedule": rule.schedule} if job.factor and rule.schedule != "constant" else {},
        "run": run,
        "partition": {"name": scheme, **scheme_options},
        "model": {"name": model, **model_options},
        **setting.extra,
    }
    completed = complete(presets.counted(layers, setting.rounds), values={"data": as_dataset(data)})
    experiment = prepare(completed, validation=VALIDATION if job.split == "validation" else 0.0)
    result = execute(experiment, None)
    metric = result.primary
    every = result.metric_or_nan(metric.name)
    return {
        "metric": metric.name,
        "values": [None if np.isnan(v) else round(float(v), 5) for v in last_evaluations(every)],
        "curve": [round(float(v), 4) for v in np.nanmean(every, 1)[:: max(1, len(every) // 10)]],
        "rate": completed.optimizer.lr,
        "samples_in_step": completed.run.batch,
        "seconds": round(time.monotonic() - started, 2),
    }


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--parts", default="copfl,named,named-rule,targets")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    planned: dict[str, Callable[[], Iterator[Job]]] = {
        "copfl": lambda: copfl_jobs("mean", "adam", DEVELOPMENT),
        "copfl-mamo": lambda: copfl_jobs("mean", "mamo", DEVELOPMENT),
        "copfl-fedexp": lambda: copfl_jobs("fedexp", "adam", DEVELOPMENT),
        "named": lambda: named_jobs("usual", "usual"),
        "named-rule": lambda: named_jobs("adam", "rule"),
        "targets": lambda: target_jobs((1.0,), DEVELOPMENT_SEED),
        "targets-rates": lambda: target_jobs((1 / 3, 3.0), DEVELOPMENT_SEED),
        "confirm": lambda: confirmation(args.out, CONFIRMATION_SEEDS),
        "confirm-named": lambda: confirmed_names(CONFIRMATION_SEEDS[:1]),
        "confirm-targets": lambda: confirmed_targets(CONFIRMATION_SEEDS[:3]),
    }
    jobs = [job for part in args.parts.split(",") for job in planned[part]()]
    of_job = partial(record, folder=args.files, device=args.device)
    run_jobs(jobs, of_job, args.out, args.processes, args.budget)


if __name__ == "__main__":
    main()
