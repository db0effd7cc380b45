"""Comparisons that take a moment: a data set of two clouds, two clients, a few rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from copfl.comparison.results.tables import Comparison
from copfl.comparison.results.writing import as_json
from copfl.settings.toml import Tables


def clouds(path: Path, test_seed: int = 1) -> Path:
    """A .npz file of two classes that overlap; the test samples follow from another seed."""
    arrays: dict[str, Any] = {}
    for suffix, seed, count in (("", 0, 80), ("_test", test_seed, 60)):
        rng = np.random.default_rng(seed)
        y = np.arange(count) % 2
        arrays[f"x{suffix}"] = (rng.normal(size=(count, 4)) + y[:, None]).astype(np.float32)
        arrays[f"y{suffix}"] = y
    np.savez(path, **arrays)
    return path


def base(data: Path, **run: Any) -> Tables:
    """The tables of every run."""
    return {
        "data": {"name": str(data)},
        "model": {"name": "mlp", "width": 4},
        "partition": {"name": "iid"},
        "run": {"clients": 2, "rounds": 3, "batch": 20, "engine": "vmap", "rivals": False, **run},
    }


def numbers(found: Comparison) -> Any:
    """All that a comparison found but the time it took."""
    content = json.loads(json.dumps(as_json(found)))
    for row in content["rows"]:
        for part in ("mean", "spread", "per_seed"):
            del row[part]["seconds"]
    return content


def line(data: Path, out: Path, *more: str) -> list[str]:
    """The words of `copfl compare` for the same."""
    model = f"--dataset {data} --partition iid --model mlp --set model.width=4"
    run = f"--clients 2 --rounds 3 --batch-size 20 --engine vmap --out {out} --no-plots"
    return ["compare", *model.split(), *run.split(), *more]
