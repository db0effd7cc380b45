"""Every kind of data in every way of using copfl, on a CPU or a GPU: what works, how long it takes, and by which path.

    python benchmarks/exam.py --out exam.json                                     # on a CPU, a few minutes
    python benchmarks/exam.py --device cuda --jobs 9 --out results/exam.json      # on a GPU, with its agreement

A cell is a kind of data in one way. It passes if it ends without an error and its rounds were computed by the engine
that the device has: a cell that falls back to a slower one fails. What a kind does not support is listed in REFUSED,
and passes if it ends in that error.

With another device than the CPU, every way of training is repeated in double precision on both. The cell "agreement"
passes if both chose the same, and no loss of a client in a round differs by more than AGREEMENT, as a part of its size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import copfl
from copfl.audit.audit import run_audit
from copfl.audit.shapley import Sampling
from copfl.engine.cuda_graph import Recorder
from copfl.errors import CopflError
from copfl.experiment import preparation
from copfl.experiment.export.formats import write
from copfl.experiment.personalisation import Personalisation
from copfl.experiment.result import Result
from copfl.settings import arguments
from copfl.settings.complete import complete
from copfl.settings.user_code import as_dataset
from copfl.telling import heard

CLIENTS, ROWS = 3, 24  # of each client, a fifth of which is test
MOST = 6  # rounds that a search looks at where two devices are compared; 0: as many as a user's
FEW = 5  # rounds where they are named: a GPU records the third after a start or a resume, and the last is another kind
AGREEMENT = 1e-6
SAME = 1e-4  # of a resumed run, in single precision on a GPU; on a CPU it has the same bytes
ENGINES = {"cpu": "vmap", "cuda": "cuda_graph"}  # without a fall back
SLOWER = "from now on"  # of the warning that a GPU's memory did not suffice

Numbers = dict[str, NDArray[np.float64]]


class Both(nn.Module):
    """Classes of two arrays."""

    def __init__(self, shape: dict[str, tuple[int, ...]], classes: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(shape["left"][0], 4), nn.Linear(shape["right"][0], 4)
        self.head = nn.Linear(8, classes)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        answer: Tensor = self.head(torch.cat([self.left(left), self.right(right)], 1).relu())
        return answer


@dataclass(frozen=True)
class Kind:
    """A kind of data, as a program passes it."""

    name: str
    data: Any
    options: dict[str, Any] = field(default_factory=dict)  # of every run
    algorithms: tuple[str, str] = ("fedavg_ft", "local")  # that are named, and compared

    @property
    def values(self) -> dict[str, Any]:
        """What is no name, and is passed again with a run's folder."""
        return {name: self.options[name] for name in ("model",) if name in self.options}


def kinds() -> list[Kind]:
    """Three clients of each kind, small and learnable."""
    rng = np.random.default_rng(0)
    count = CLIENTS * ROWS
    group, y = np.repeat(np.arange(CLIENTS), ROWS), np.arange(count) % 2
    steps = np.arange(16)

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal((count, *shape)).astype("float32")

    columns = normal(4)
    pixels = (rng.integers(0, 120, (count, 8, 8, 1)) + 100 * y[:, None, None, None]).astype("uint8")
    waves = (np.sin(steps * (1 + y[:, None, None])) + normal(2, 16) / 2).astype("float32")
    times = rng.exponential(np.exp(-columns[:, 0])) + 0.01
    words = [["good", "fine", "nice", "the", "a"], ["bad", "poor", "sad", "the", "a"]]
    texts = np.array([" ".join(rng.choice(words[label], 5)) for label in y])
    lines = ["to be or not to be", "that is the question", "abab abab abab", "cdcd cdcd"] * (count // 4)
    alike = {"group": group}
    return [
        Kind("images", {"x": pixels, "y": y, **alike}),
        Kind("signals", {"x": waves, "y": y, **alike}),
        Kind("classes", {"x": columns + y[:, None], "y": y, **alike}),
        Kind("values", {"x": columns, "y": columns @ [1, 2, 0, -1] + normal() / 9, **alike}),
        Kind(
            "labels",
            {"x": columns, "y": (columns[:, :3] > 0).astype(int), "kind": "multilabel", **alike},
            {"task": {"metrics": ["accuracy", "macro_f1"]}},  # intervals of the F1 score take seconds each
        ),
        Kind(
            "survival",
            {"x": columns, "y": np.stack([times, rng.random(count) < 0.8], 1), "kind": "survival", **alike},
        ),
        Kind("texts", {"x": texts, "y": y, **alike}),
        Kind(
            "next tokens",
            {"x": np.array(lines), "y": np.zeros((count, 2), int), "kind": "next_token", **alike},
        ),
        Kind(
            "two inputs",
            {"x": {"left": columns + y[:, None], "right": normal(2)}, "y": y, **alike},
            {"model": Both},
        ),
    ]


class Cell(NamedTuple):
    """A kind of data in one way."""

    kind: str
    way: str
    passed: bool
    seconds: float
    path: str = ""  # how the rounds were computed
    note: str = ""  # what it ended in, or what the agreement is

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return f"{self.kind:12} {self.way:16} {verdict:7} {self.seconds:6.1f} s  {self.path:24} {self.note}".rstrip()


class Failed(Exception):
    """A way that ended without an error, and should not have."""


@dataclass
class Exam:
    """One kind of data on one device; its runs are in a folder."""

    kind: Kind
    device: str
    folder: Path
    most: int = 0  # rounds that a search looks at; 0: as many as a user's
    settings: dict[str, Any] = field(default_factory=dict)  # of every run beside
    path: str = ""  # of the last run

    def run(self, algorithm: str | None, folder: str = "", **settings: Any) -> Result:
        """A run of the kind's data; fails if it fell back to a slower path."""
        out = self.folder / folder if folder else None
        how = {"rivals": False, **self.kind.options, **self.settings, **settings, "device": self.device}
        return self.checked(copfl.run(algorithm, self.kind.data, out=out, **how))

    @property
    def search(self) -> dict[str, Any]:
        """Settings of a run whose rounds are searched for."""
        return {"find_rounds": "first", "rounds": self.most} if self.most else {}

    def checked(self, result: Result) -> Result:
        """The result of a run whose rounds were computed as the device can."""
        engine, task = result.experiment.engine, result.experiment.training.task
        batched = "batched" if task.batched is not None else "mapped"
        self.path = f"{result.experiment.run.algorithm.name}, {engine.name}, {batched}"
        if engine.name != ENGINES.get(self.device.partition(":")[0], engine.name):
            raise Failed(f"the engine is {engine.name}")
        if task.batched is None:
            raise Failed("the model is mapped by vmap, and not batched")
        if isinstance(engine.call, Recorder) and len(result.seconds) >= FEW and not engine.call.recordings:
            raise Failed("no round was recorded as a CUDA graph")
        return result

    @cached_property
    def trained(self) -> Result:
        """What several ways use: FEW rounds, with the data in the folder."""
        result = self.run(self.kind.algorithms[0], rounds=FEW, **{"eval_models": "all"})
        result.save(self.folder / "trained")
        return result

    @cached_property
    def new(self) -> tuple[Any, Any]:
        """Rows of a client that did not take part."""
        x, y = (self.kind.data[name] for name in ("x", "y"))
        some = slice(0, ROWS)
        return {name: a[some] for name, a in x.items()} if isinstance(x, dict) else x[some], y[some]

    def bundle(self) -> copfl.Bundle:
        """The model of the first client."""
        assert self.trained
        return copfl.load(self.folder / "trained", 0, **self.kind.values)


def first_run(exam: Exam) -> Numbers:
    return losses(exam.run(None, "first", rivals=True, **exam.search))


def named(exam: Exam) -> Numbers:
    return losses(exam.run(exam.kind.algorithms[0], "named", **exam.search))


def named_rounds(exam: Exam) -> Numbers:
    return losses(exam.trained)


def compare(exam: Exam) -> Numbers:
    how = {"rivals": False, **exam.kind.options, **exam.settings, **exam.search, "device": exam.device}
    table = copfl.compare(
        list(exam.kind.algorithms), exam.kind.data, seeds=[0], out=exam.folder / "compare", **how
    )
    return {
        row.entry.label: np.array([list(record.clients.values()) for record in row.outcomes])
        for row in table.rows
    }


def choose(exam: Exam) -> Numbers:
    how = {"rivals": False, **exam.kind.options, **exam.settings, "device": exam.device}
    found = copfl.choose(
        list(exam.kind.algorithms),
        exam.kind.data,
        budget=4 * FEW,
        seeds=[0],
        out=exam.folder / "choose",
        rounds=FEW,
        **how,
    )
    if not found.tested:
        raise Failed("nothing was chosen, or it was not trained")
    return {}


def resume(exam: Exam) -> Numbers:
    with contextlib.suppress(Stopped):
        exam.run(exam.kind.algorithms[0], "resumed", rounds=FEW, checkpoint_every=1, on_round=_stop)
    data = {"dataset": exam.kind.data, **exam.kind.values}
    resumed = exam.checked(copfl.resume(exam.folder / "resumed", rounds=FEW, **data))
    gap = difference(losses(resumed), losses(exam.trained))
    if gap > (0 if exam.device == "cpu" else SAME):
        raise Failed(f"a resumed run differs by {gap:.1e}")
    return losses(resumed)


def auto(exam: Exam) -> Numbers:
    """A run that finds its device, by timing both where there are two."""
    lines: list[str] = []
    settings = {**exam.kind.options, "rounds": FEW, "rivals": False}
    tables = arguments.tables(exam.kind.data, settings, exam.kind.algorithms[0])
    with mock.patch.object(preparation, "WORTH_A_GPU", 0.0), heard(lines.append):
        found = preparation.on_device(complete(tables)).run.device
    if found != "cpu" and found != exam.device:
        raise Failed(f"the device is {found}")
    if torch.cuda.is_available() and not any("s on cuda" in line for line in lines):
        raise Failed("the GPU was not timed, or no line says so")
    exam.path = "; ".join(line for line in lines if line.startswith("device "))
    return {}


class Stopped(Exception):
    """Of a run, by its program."""


def _stop(round: Any, seconds: float) -> None:
    raise Stopped


def evaluate(exam: Exam) -> Numbers:
    found = exam.bundle().evaluate(*exam.new)
    if not any(map(math.isfinite, found.metrics.values())):
        raise Failed("no metric is defined")
    return {name: np.array(value) for name, value in found.metrics.items()}


def predict(exam: Exam) -> Numbers:
    bundle = exam.bundle()
    outputs = bundle.outputs(bundle.preparation.of(exam.new[0], None)[0])
    if len(bundle.predict(exam.new[0])) != ROWS or not np.isfinite(outputs).all():
        raise Failed("not every row has a prediction")
    return {"outputs": outputs}


def export(exam: Exam) -> Numbers:
    write(exam.bundle(), "safetensors", exam.folder / "model.safetensors")
    write(exam.bundle(), "bundle", exam.folder / "bundle")
    copfl.load(exam.folder / "bundle", **exam.kind.values)
    return {}


def personalize(exam: Exam) -> Numbers:
    assert exam.trained
    x, y = exam.new
    arrays = {f"x.{name}": a for name, a in x.items()} if isinstance(x, dict) else {"x": x}
    np.savez(exam.folder / "new.npz", **arrays, y=y)
    new = Personalisation.of(exam.folder / "trained", **exam.kind.values)
    own, test, _ = new.samples(exam.folder / "new.npz")
    fitted = new.fit(own, test, epochs=1)
    return {"scores": np.array([fitted.scores[-1], fitted.alone[-1]])}


def audit(exam: Exam) -> Numbers:
    assert exam.trained
    values = {"data": as_dataset(exam.kind.data), **exam.kind.values}
    found = run_audit(exam.folder / "trained", baselines=[], sampling=Sampling(2), values=values)
    return dict(found.seeds[0].values)


WAYS: dict[str, Callable[[Exam], Numbers]] = {
    "first run": first_run,
    "named": named,
    "named, rounds": named_rounds,
    "compare": compare,
    "choose": choose,
    "resume": resume,
    "evaluate": evaluate,
    "predict": predict,
    "export": export,
    "personalize": personalize,
    "audit": audit,
    "auto": auto,
}
TRAINED = ("first run", "named", "named, rounds")  # that are compared between the devices
# What a kind of data does not support, and a part of the error that it ends in.
NO_CLASSES = "the model predicts the next token of a text, which has no classes"
REFUSED = {
    ("next tokens", "evaluate"): NO_CLASSES,
    ("next tokens", "predict"): NO_CLASSES,
    ("next tokens", "personalize"): "trained on samples with targets of their own",
}


def losses(result: Result) -> Numbers:
    """Of each client in each round."""
    return {"loss": result.metric("test_loss")}


def difference(ours: Numbers, theirs: Numbers) -> float:
    """The largest one, as a part of the larger value; infinite where their shapes differ."""
    gaps = [0.0]
    for name, a in ours.items():
        b = theirs[name]
        if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
            return math.inf
        size = np.maximum(np.maximum(np.abs(a), np.abs(b)), 1)
        gaps.append(float(np.nanmax(np.abs(a - b) / size, initial=0.0)))
    return max(gaps)


def cell(exam: Exam, way: str) -> Cell:
    """The kind in one way; no error leaves it."""
    began, exam.path = time.perf_counter(), ""
    refused, note, passed = REFUSED.get((exam.kind.name, way), ""), "", True
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            WAYS[way](exam)
        if fallen := [str(one.message) for one in seen if SLOWER in str(one.message)]:
            raise Failed(fallen[0])
        if refused:
            raise Failed(f"it was expected to be refused: {refused}")
    except CopflError as error:
        note, passed = str(error), bool(refused) and refused in str(error)
    except Exception as error:  # the other cells are tried too
        note, passed = f"{type(error).__name__}: {_place(error)}{error}"[:500], False
    return Cell(exam.kind.name, way, passed, time.perf_counter() - began, exam.path, note)


def _place(error: Exception) -> str:
    """The innermost line of copfl's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "copfl" in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""


def agreement(kind: Kind, device: str, folder: Path, way: str) -> Cell:
    """The same training on a CPU and on the device, in double precision."""
    began = time.perf_counter()
    try:
        found = []
        for where in ("cpu", device):
            place = folder / where.replace(":", "") / way.replace(", ", "-")
            place.mkdir(parents=True)
            found.append(WAYS[way](Exam(kind, where, place, MOST, {"precision": "fp64"})))
        gap = difference(*found)
        note, passed = f"difference {gap:.1e}", gap < AGREEMENT
    except Exception as error:  # the other cells are tried too
        note, passed = f"{type(error).__name__}: {_place(error)}{error}"[:500], False
    return Cell(kind.name, f"agreement, {way}", passed, time.perf_counter() - began, "", note)


def examined(name: str, device: str, ways: Sequence[str], most: int = 0) -> list[Cell]:
    """The cells of one kind of data."""
    torch.set_num_threads(1)
    kind = next(kind for kind in kinds() if kind.name == name)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        exam = Exam(kind, device, Path(folder), most)
        for way in ways:
            cells.append(cell(exam, way))
            print(cells[-1], flush=True)
        for way in TRAINED if device != "cpu" else ():
            if way in ways:
                cells.append(agreement(kind, device, Path(folder), way))
                print(cells[-1], flush=True)
    return cells


def about(device: str, commit: str) -> dict[str, Any]:
    """What the record says of the machine and the code."""
    is_gpu = device != "cpu"
    if not commit:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
            commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "commit": commit or "unknown",
        "device": torch.cuda.get_device_name(torch.device(device)) if is_gpu else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "agreement": AGREEMENT,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [kind.name for kind in kinds()]
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", default=",".join(names), help="names, with commas; default: all")
    parser.add_argument("--ways", default=";".join(WAYS), help="names, with semicolons; default: all")
    parser.add_argument("--most", type=int, default=0, help="rounds of a search; default: a user's")
    parser.add_argument("--jobs", type=int, default=1, help="kinds at a time")
    parser.add_argument("--commit", default="", help="the commit, where this is no clone")
    parser.add_argument("--out", type=Path, default=Path("exam.json"))
    args = parser.parse_args()
    began = time.perf_counter()
    ask = partial(examined, device=args.device, ways=args.ways.split(";"), most=args.most)
    if args.jobs == 1:
        found = list(map(ask, args.kinds.split(",")))
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
            found = list(pool.map(ask, args.kinds.split(",")))
    cells = [one for of_kind in found for one in of_kind]
    failed = [one for one in cells if not one.passed]
    record = {**about(args.device, args.commit), "seconds": round(time.perf_counter() - began, 1)}
    rows = [{**one._asdict(), "seconds": round(one.seconds, 2)} for one in cells]
    args.out.write_text(json.dumps({**record, "failed": len(failed), "cells": rows}, indent=1) + "\n")
    print(f"{len(cells) - len(failed)} of {len(cells)} cells passed; written to {args.out}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
