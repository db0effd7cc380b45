"""Does the default hold in federations that it was not chosen on? python studies/defaults/unseen.py FILES OUT.jsonl.

Every run is what a user gets who names the data and no algorithm: `copfl run -d DATA`. It trains each client
alone as well, for as many epochs and with the same add-ons: the column "alone" of its report. FILES gets the
tables; with --data, a folder that has banking77/ and clinc150/, there are federations of texts too. Runs
whose record is in OUT already are left out, so a study that was stopped goes on.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[1]))
from parallel import run_jobs, study_parser  # type: ignore[import-not-found]

Tables = Mapping[str, Mapping[str, Any]]


# -- federations ---------------------------------------------------------------------------------------------


def of_classes(per_client: int, train: int, clients: int = 10, rounds: int = 40, **tables: Any) -> Tables:
    """Digits, so many classes and images of each at a client."""
    scheme = {"name": "classes", "per_client": per_client, "train_per_class": train, "test_per_class": 15}
    return {"partition": scheme, "run": {"clients": clients, "rounds": rounds}, **tables}


def by_dirichlet(alpha: float, clients: int = 10, rounds: int = 40) -> Tables:
    return {
        "partition": {"name": "dirichlet", "alpha": alpha},
        "run": {"clients": clients, "rounds": rounds},
    }


def table(name: str, target: str, client: str = "", rounds: int = 40, **tables: Any) -> Tables:
    """A file that `write_files` writes; its clients are a column, or the option `partition`."""
    column = {"client": client} if client else {}
    data = {"name": f"{name}.csv", "target": target, **column}
    return {"data": data, "run": {"rounds": rounds, **tables.pop("run", {})}, **tables}


def texts(name: str, rounds: int = 40, **tables: Any) -> Tables:
    data = {"name": f"{name}.csv", "target": "intent", "text": "text"}
    if name.endswith("-sites"):
        data["client"] = "site"
    return {"data": data, "run": {"rounds": rounds, **tables.pop("run", {})}, **tables}


FEW = {"partition": {"name": "dirichlet", "alpha": 0.5}, "run": {"clients": 5}}
FEDERATIONS: dict[str, Tables] = {
    "digits": {},
    "digits-2x5": of_classes(2, 5),
    "digits-2x30": of_classes(2, 30),
    "digits-3x10": of_classes(3, 10),
    "digits-3x30": of_classes(3, 30),
    "digits-5x5": of_classes(5, 5),
    "digits-5x10": of_classes(5, 10),
    "digits-dirichlet-0.1": by_dirichlet(0.1, rounds=20),
    "digits-dirichlet-0.5": by_dirichlet(0.5, clients=20, rounds=20),
    "digits-dirichlet-5": by_dirichlet(5.0, rounds=20),
    "digits-two": of_classes(5, 10, clients=2),
    "digits-five": of_classes(2, 10, clients=5),
    "digits-two-dirichlet": by_dirichlet(0.5, clients=2, rounds=20),
    "digits-50x8": of_classes(2, 4, clients=50),
    "digits-hurry": of_classes(3, 10, rounds=5),
    "digits-ten-rounds": of_classes(3, 10, rounds=10),
    "digits-5x5-hurry": of_classes(5, 5, rounds=5),
    "digits-2x5-hurry": of_classes(2, 5, rounds=5),
    "digits-dirichlet-hurry": by_dirichlet(0.5, clients=20, rounds=5),
    "digits-wrong": of_classes(4, 10, clients=12, attack={"name": "label_flip", "fraction": 0.25}),
    "digits-large-site": table("digits-large", "digit", "site", rounds=20),
    "wine": {"data": {"name": "wine"}},
    "breast-cancer": {"data": {"name": "breast_cancer"}},
    "wine-table": table("wine", "class", partition={"name": "dirichlet"}, run={"clients": 4}),
    "cancer-sites": table("cancer", "malignant", "site"),
    "cancer-hurry": table("cancer", "malignant", "site", rounds=5),
    "iris-sites": table("iris", "species", "site"),
    "banking": texts("banking", **FEW),
    "banking-hurry": texts("banking", rounds=5, **FEW),
    "banking-classes": texts(
        "banking",
        partition={"name": "classes", "per_client": 4, "train_per_class": 10, "test_per_class": 5},
        run={"clients": 8},
    ),
    "clinc-sites": texts("clinc-sites"),
    # Values and labels.
    "diabetes": {"data": {"name": "diabetes"}},
    "diabetes-hurry": {"data": {"name": "diabetes"}, "run": {"rounds": 5}},
    "diabetes-sex": table("diabetes", "progression", "sex"),
    "iris-width": table("iris-width", "petal_width", "species"),
    "wine-labels": table("wine-labels", "strong,dark,acid", "site"),
    "digit-labels": table("digit-labels", "even,large,loop", "site"),
}


def write_files(folder: Path, data: Path | None) -> None:
    """The tables of FEDERATIONS, as a user has them."""
    from sklearn import datasets

    rng = np.random.default_rng(0)
    digits, iris, wine, cancer, diabetes = (
        getattr(datasets, f"load_{name}")()
        for name in ("digits", "iris", "wine", "breast_cancer", "diabetes")
    )
    pixels = [f"pixel{n}" for n in range(64)]
    # One site has 60 % of 500 digits, five others share the rest.
    some = rng.permutation(len(digits.target))[:500]
    site = np.where(rng.random(500) < 0.6, 0, rng.integers(1, 6, 500))
    _write(folder / "digits-large.csv", pixels, digits.data[some], digit=digits.target[some], site=site)
    # Laboratories that differ in the amount of alcohol, clinics in the texture of the tumours.
    _write(folder / "wine.csv", wine.feature_names, wine.data, **{"class": wine.target})
    texture = quantiles(cancer.data[:, 1], 5, 0.3, rng)
    _write(
        folder / "cancer.csv", cancer.feature_names, cancer.data, malignant=1 - cancer.target, site=texture
    )
    _write(
        folder / "iris.csv",
        iris.feature_names,
        iris.data,
        species=iris.target_names[iris.target],
        site=quantiles(iris.data[:, 1], 3, 0.3, rng),
    )
    female = diabetes.data[:, 1] > 0
    _write(
        folder / "diabetes.csv",
        [name for name in diabetes.feature_names if name != "sex"],
        np.delete(diabetes.data, 1, 1),
        progression=diabetes.target,
        sex=np.where(female, "f", "m"),
    )
    _write(
        folder / "iris-width.csv",
        iris.feature_names[:3],
        iris.data[:, :3],
        petal_width=iris.data[:, 3],
        species=iris.target_names[iris.target],
    )
    above = (wine.data > np.median(wine.data, axis=0)).astype(int)
    _write(
        folder / "wine-labels.csv",
        wine.feature_names[2:9],
        wine.data[:, 2:9],
        strong=above[:, 0],
        dark=above[:, 9],
        acid=above[:, 1],
        site=quantiles(wine.data[:, 12], 4, 0.5, rng),
    )
    digit, some = digits.target, rng.permutation(len(digits.target))[:600]
    labels = {"even": digit % 2 == 0, "large": digit > 4, "loop": np.isin(digit, (0, 6, 8, 9))}
    _write(
        folder / "digit-labels.csv",
        pixels,
        digits.data[some],
        **{name: is_so[some].astype(int) for name, is_so in labels.items()},
        site=quantiles(digits.data[some].sum(1), 6, 0.5, rng),
    )
    if data is not None:
        _write_texts(folder, data, rng)


def _write_texts(folder: Path, data: Path, rng: np.random.Generator) -> None:
    """A few hundred sentences: 12 intents of Banking77, and six domains of CLINC150 as sites."""
    with (data / "banking77" / "train.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    intents = sorted({intent for _, intent in rows})[::6][:12]
    chosen = [row for row in rows if row[1] in intents]
    chosen = [chosen[n] for n in rng.permutation(len(chosen))[:600]]
    _write_rows(folder / "banking.csv", ("text", "intent"), chosen)
    sentences = json.loads((data / "clinc150" / "data_full.json").read_text("utf-8"))["train"]
    domains = json.loads((data / "clinc150" / "domains.json").read_text("utf-8"))
    site_of = {intent: site for site in sorted(domains)[:6] for intent in domains[site][:6]}
    known = [(text, intent, site_of[intent]) for text, intent in sentences if intent in site_of]
    known = [known[n] for n in rng.permutation(len(known))[:720]]
    _write_rows(folder / "clinc-sites.csv", ("text", "intent", "site"), known)


def quantiles(values: NDArray[Any], groups: int, noise: float, rng: np.random.Generator) -> NDArray[Any]:
    """Equal groups by a column with noise, as sites that differ in it."""
    noisy = values + rng.normal(0, noise * values.std(), len(values))
    return np.argsort(np.argsort(noisy)) * groups // len(values)


def _write(path: Path, names: Sequence[str], x: NDArray[Any], **columns: NDArray[Any]) -> None:
    header = [name.replace(" ", "_") for name in names] + [*columns]
    _write_rows(
        path, header, zip(*x.T.tolist(), *(column.tolist() for column in columns.values()), strict=True)
    )


def _write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])


# -- the runs ------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    federation: str
    candidate: str
    seed: int


NAMED = ("local", "fedper", "fedavg_ft")  # as a user gets them who names them
AVERAGED = ("apfl", "lg_fedavg")  # the same, with the default's average of a client's weights
WITH_ALONE = ("default", "before", "epochs")  # training alone differs with these
FORMER: Tables = {  # the default before this study
    "algorithm": {"name": "fedpac", "head_speed": 3.0, "alignment": 1.0, "epochs": 1},
    "server": {"name": "fedexp"},
}
CANDIDATES: dict[str, Tables] = {  # what is changed in the default
    "default": {},
    "before": FORMER,
    "mean": {"server": {"name": "mean"}},
    "momentum": {"server": {"name": "momentum"}},
    "head-1": {"algorithm": {"head_speed": 1.0}},
    "ema-0.9": {"addons": {"ema": 0.9}},
    "align-0.1": {"algorithm": {"alignment": 0.1}},
    "cosine": {"addons": {"lr_schedule": "cosine"}},
    "epochs-2": {"algorithm": {"epochs": 2}},
    "epochs-4": {"algorithm": {"epochs": 4}},
}


def record(job: Job, folder: Path, device: str) -> dict[str, Any]:
    """The primary metric of each client at the end, and of each trained alone."""
    from copfl.experiment.preparation import prepare
    from copfl.experiment.training import train
    from copfl.settings.complete import complete

    started, tables = (
        time.monotonic(),
        {kind: dict(table) for kind, table in FEDERATIONS[job.federation].items()},
    )
    if tables.get("data", {}).get("name", "").endswith(".csv"):
        tables["data"]["name"] = str(folder / tables["data"]["name"])
    own: dict[str, Any] = {
        "seed": job.seed,
        "device": device,
        "threads": 1,
        "workers": 1,
        "eval_models": "final",
    }
    if job.candidate in (*NAMED, *AVERAGED):
        addons = {"ema": 0.8} if job.candidate in AVERAGED else {}
        run = complete(tables, {"run": own, "algorithm": {"name": job.candidate}, "addons": addons})
    else:
        own["local_baseline"] = job.candidate.startswith(WITH_ALONE)
        layers = [{}] if job.candidate == "default" else [FORMER, CANDIDATES[job.candidate]]
        run = complete(complete(tables, {"run": own}).tables(), *layers)
    run = dataclasses.replace(run, run=dataclasses.replace(run.run, eval_every=run.run.rounds))
    result = train(prepare(run), None)
    primary = result.primary
    sign = 1 if primary.higher_is_better else -1
    attacks = np.nan_to_num(result.latest("malicious")) > 0
    values = {"personal": np.where(attacks, np.nan, sign * result.final(primary.name))}
    if result.analysis is not None:
        values["alone"] = sign * result.analysis.alone
    return {
        "metric": primary.name,
        "method": run.method_text,
        **{name: [None if np.isnan(v) else round(float(v), 5) for v in row] for name, row in values.items()},
        "seconds": round(time.monotonic() - started, 2),
    }


def values_by_site(result: Any) -> dict[str, list[float | None]]:
    """Each site's metric with its personal model and, where it was trained, alone; None: it is not known."""
    sites = {"personal": result.final(result.primary.name)}
    if result.analysis is not None:
        sites["alone"] = result.analysis.alone
    return {name: [None if np.isnan(v) else round(float(v), 5) for v in row] for name, row in sites.items()}


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--data", type=Path, help="a folder with banking77/ and clinc150/")
    parser.add_argument(
        "--runs",
        default="7000,7001,7002,7003,7004:default",
        help="SEED,...:CANDIDATE,...[:FEDERATION,...];... in the order of the runs; without federations, all",
    )
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.files.mkdir(parents=True, exist_ok=True)
    if not (args.files / "wine.csv").is_file():
        write_files(args.files, args.data)
    jobs = []
    for part in args.runs.split(";"):
        seeds, candidates, *federations = (names.split(",") for names in part.split(":"))
        names = federations[0] if federations else FEDERATIONS
        jobs += [Job(f, c, int(seed)) for seed in seeds for c in candidates for f in names]
    run_jobs(
        jobs, partial(record, folder=args.files, device=args.device), args.out, args.processes, args.budget
    )


if __name__ == "__main__":
    main()
