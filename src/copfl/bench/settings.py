"""Federations to measure algorithms in: what one may look like before anything is trained.

The first nine are small enough for two CPU cores, and their data come with scikit-learn or are generated;
QUICK are the federations of the quick suite. The others need files that studies/defaults/prepare.py writes. FULL are
all that train a model from scratch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from copfl.errors import DataError

CIFAR_TRAIN, CIFAR_TEST = 6000, 3000
HELD_OUT = 0.2  # what copfl takes for tests of data without test samples
Arrays = dict[str, Any]  # x, y and so on, by the names of `copfl.data.arrays.from_arrays`


@dataclass(frozen=True)
class BenchSetting:
    """One federation.

    Attributes:
        data: A key of DATA.
        partition: A partition of copfl and its options.
        clients: The number of clients; 0: as many as the data have groups.
        rounds: Rounds of training.
        model: A model of copfl and its options.
        extra: Further tables of a run.
        batch: Samples in a training step; 0: copfl's default.
    """

    data: str
    partition: tuple[str, dict[str, Any]]
    clients: int
    rounds: int
    model: tuple[str, dict[str, Any]]
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    batch: int = 0


def skew(per_client: int, train: int = 50, test: int = 100) -> tuple[str, dict[str, Any]]:
    """A partition in which each client has few classes.

    Args:
        per_client: Classes of a client.
        train: Training samples of a client in each class.
        test: Test samples of a client in each class.
    """
    return "classes", {"per_client": per_client, "train_per_class": train, "test_per_class": test}


def dirichlet(alpha: float) -> tuple[str, dict[str, Any]]:
    return "dirichlet", {"alpha": alpha}


CNN: tuple[str, dict[str, Any]] = ("cnn", {})
WORDS: tuple[str, dict[str, Any]] = ("embedding", {})
TABLE: tuple[str, dict[str, Any]] = ("mlp", {})
SIGNAL: tuple[str, dict[str, Any]] = ("cnn1d", {})
MINILM: tuple[str, dict[str, Any]] = ("hf:minilm", {"task": "embedding", "max_length": 32})
LORA = {"adapter": {"name": "lora", "r": 8, "alpha": 16.0, "targets": "query+value"}}
WRONG = {"attack": {"name": "label_flip", "fraction": 0.2}}

SETTINGS: dict[str, BenchSetting] = {
    # Small enough for two CPU cores.
    "digits-2": BenchSetting("digits", skew(2, 20, 20), 20, 40, CNN),
    "digits-5-few": BenchSetting("digits", skew(5, 4, 15), 20, 40, CNN),
    "digits-dirichlet": BenchSetting("digits", dirichlet(0.3), 10, 40, CNN),
    "digits-iid": BenchSetting("digits", ("iid", {}), 10, 20, CNN),
    "digits-unequal": BenchSetting("digits", ("quantity", {"alpha": 0.5}), 15, 20, CNN),
    "digits-shift": BenchSetting(
        "digits",
        ("concept_shift", {"per_client": 4, "train_per_class": 10, "test_per_class": 20}),
        20,
        40,
        CNN,
    ),
    "tumours": BenchSetting("tumours", ("by_group", {}), 0, 20, TABLE),
    "table-shift": BenchSetting("table", ("by_group", {}), 0, 40, TABLE),
    "signals": BenchSetting("signals", ("by_group", {}), 0, 40, SIGNAL),
    # Images.
    "cifar-2": BenchSetting("cifar", skew(2), 20, 40, CNN),
    "cifar-4": BenchSetting("cifar", skew(4), 20, 40, CNN),
    "cifar-4-long": BenchSetting("cifar", skew(4), 20, 100, CNN),
    "cifar-4-wrong": BenchSetting("cifar", skew(4), 20, 40, CNN, WRONG),
    "cifar-dirichlet": BenchSetting("cifar", dirichlet(0.1), 20, 40, CNN),
    "cifar-dirichlet-50": BenchSetting("cifar", dirichlet(0.5), 50, 40, CNN),
    "cifar-5-clients": BenchSetting("cifar", dirichlet(0.3), 5, 20, CNN),
    # Texts.
    "banking-skew": BenchSetting("banking", skew(8, 20, 20), 20, 40, WORDS),
    "banking-dirichlet": BenchSetting("banking", dirichlet(0.3), 20, 40, WORDS),
    "clinc-skew": BenchSetting("clinc", skew(15, 10, 10), 20, 40, WORDS),
    "clinc-dirichlet": BenchSetting("clinc", dirichlet(0.3), 50, 100, WORDS),
    # A head on features of a pretrained encoder.
    "features-skew": BenchSetting("features", skew(8, 15, 20), 20, 40, TABLE),
    "features-dirichlet": BenchSetting("features", dirichlet(0.3), 20, 40, TABLE),
    # LoRA on MiniLM, a folder of COPFL_MODELS (benchmarks/finetuning_bases.py).
    "lora-skew": BenchSetting("banking", skew(8, 12, 15), 20, 20, MINILM, LORA, 16),
    "lora-dirichlet": BenchSetting("banking", dirichlet(0.3), 20, 20, MINILM, LORA, 16),
}
QUICK = ("digits-2", "digits-5-few", "digits-dirichlet", "digits-shift", "tumours", "table-shift", "signals")
FULL = tuple(name for name, setting in SETTINGS.items() if not setting.extra.get("adapter"))


# -- data ----------------------------------------------------------------------------------------------------


def digits() -> Arrays:
    """scikit-learn's 1,797 digits, every fourth for tests."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = (x.reshape(-1, 1, 8, 8) * 15.9375).astype(np.uint8)
    is_test = np.arange(len(y)) % 4 == 0
    return {"x": images[~is_test], "y": y[~is_test], "x_test": images[is_test], "y_test": y[is_test]}


def tumours() -> Arrays:
    """Breast cancer in six hospitals, by size of the tumour."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    noisy = data.data[:, 0] + np.random.default_rng(0).normal(0, 4, len(data.data))
    hospital = np.argsort(np.argsort(noisy)) * 6 // len(noisy)
    scaled = (data.data - data.data.mean(0)) / data.data.std(0)
    return {"x": scaled.astype(np.float32), "y": data.target, "group": hospital}


def table() -> Arrays:
    """Twelve sites of 60 to 400 rows, whose columns are shifted and whose target weighs them differently."""
    from sklearn.datasets import make_classification

    rng = np.random.default_rng(1)
    x, y = make_classification(4000, 20, n_informative=10, n_classes=4, random_state=1)
    site = rng.choice(12, len(y), p=rng.dirichlet(np.full(12, 2.0)))
    shifted = x * rng.uniform(0.6, 1.4, (12, 20))[site] + rng.normal(0, 0.7, (12, 20))[site]
    return {"x": shifted.astype(np.float32), "y": y, "group": site}


def signals() -> Arrays:
    """Twelve persons, five movements of 3 signals x 64 steps; a person has a speed and a sensor direction."""
    rng, persons = np.random.default_rng(0), 12
    person, activity = np.repeat(np.arange(persons), 60), rng.integers(0, 5, persons * 60)
    speed, turn = rng.uniform(0.7, 1.3, persons), rng.normal(0, 0.6, (persons, 3, 3)) + np.eye(3)
    time = np.arange(64) * speed[person][:, None] * (0.1 + 0.08 * activity[:, None])
    wave = np.stack([np.sin(time), np.cos(2 * time), 0.3 * activity[:, None] * np.sin(3 * time)], 1)
    x = np.einsum("nij,njt->nit", turn[person], wave) + rng.normal(0, 1.0, wave.shape)
    return {"x": x.astype(np.float32), "y": activity, "group": person}


EMBEDDED: dict[str, Callable[[], Arrays]] = {
    "digits": digits,
    "tumours": tumours,
    "table": table,
    "signals": signals,
}


@lru_cache
def arrays(name: str, files: Path | None) -> Arrays:
    """The samples of a setting: from NAME.npz or NAME.json in the folder `files`, or else an embedded set.

    Args:
        name: Such as "digits" or "cifar".
        files: The folder that studies/defaults/prepare.py wrote.
    """
    stored = files / f"{name}.npz" if files else Path()
    if stored.is_file():
        with np.load(stored) as content:
            return {
                key: array.astype(np.float32) if array.dtype == np.float16 else array
                for key, array in content.items()
            }
    sentences = stored.with_suffix(".json") if files else Path()
    if sentences.is_file():
        splits = json.loads(sentences.read_text("utf-8"))
        return {key: np.array(values) for key, values in splits.items()}
    if name not in EMBEDDED:
        where = f"{files} has no {name}.npz or {name}.json" if files else "it is not part of copfl"
        raise DataError(
            f'the data "{name}" of the full suite are missing: {where}; clone the repository, write them '
            "with `python studies/defaults/prepare.py DATA FILES --encoder FOLDER`, and name that folder "
            "with --files FILES"
        )
    return EMBEDDED[name]()


def samples_per_client(setting: BenchSetting, files: Path | None) -> float:
    """The mean number of training samples of its clients.

    Args:
        setting: The federation.
        files: The folder of the data sets that are downloaded.
    """
    scheme, options = setting.partition
    if scheme in ("classes", "concept_shift"):
        return float(options["per_client"] * options["train_per_class"])
    data = arrays(setting.data, files)
    held_out = 0 if "x_test" in data else HELD_OUT
    clients = setting.clients or len(np.unique(data["group"]))
    return len(data["y"]) * (1 - held_out) / clients
