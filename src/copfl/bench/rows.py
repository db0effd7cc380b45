"""A row of the leaderboard as a record: every run of one algorithm, and what it was made with.

`bench` makes them, `standings` compares them, and studies/bench stores them.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import inspect
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from copfl import __version__, foreign
from copfl.bench import protocol
from copfl.bench.protocol import SUITES, BenchJob, BenchMachine, MeasuredRun, Suite
from copfl.errors import RunError, raised_as, unknown
from copfl.experiment.preparation import device_of
from copfl.files import write_bytes
from copfl.settings.components import factory_of
from copfl.settings.identity import digest

Environment = dict[str, str]
DAMAGED = (*foreign.DAMAGE, OSError, EOFError)


@dataclass(frozen=True)
class BenchRow:
    """One algorithm in a suite.

    Attributes:
        algorithm: Its name, with its options.
        suite: The suite's name.
        version: Of the suite.
        settings: The hash of the suite's settings and protocol.
        code: The hash of the algorithm's code.
        environment: What the runs were made with: versions and hardware.
        refused: The steps of the server that the algorithm refuses, with the reason.
        tuning: The runs on validation samples.
        runs: The runs on test samples.
    """

    algorithm: str
    suite: str
    version: str
    settings: str
    code: str
    environment: Environment
    refused: dict[str, str]
    tuning: list[MeasuredRun]
    runs: list[MeasuredRun]

    def of(self, setting: str) -> list[MeasuredRun]:
        """The runs in a setting on test samples, a seed each."""
        return [run for run in self.runs if run.job.setting == setting]

    def value(self, setting: str) -> float:
        """The accuracy in a setting: the mean over clients and seeds."""
        return float(np.mean([run.value for run in self.of(setting)]))

    @property
    def seconds(self) -> float:
        """Of all runs, one after another."""
        return sum(run.seconds for run in (*self.tuning, *self.runs))

    @property
    def as_json(self) -> dict[str, Any]:
        runs = {name: [protocol.as_json(run) for run in getattr(self, name)] for name in ("tuning", "runs")}
        return {**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, **runs}


def row_of(content: Any, where: object) -> BenchRow:
    """The row of a JSON object; RunError if it is none.

    Args:
        content: The object.
        where: It was read, for the error.
    """
    with raised_as(RunError, f"{where} is no record of `copfl bench` ({{}})", *DAMAGED):
        runs = {name: [protocol.from_json(run) for run in content[name]] for name in ("tuning", "runs")}
        return BenchRow(**{**content, **runs})


def read(path: Path) -> BenchRow:
    """The row in a file that `copfl bench` wrote."""
    with raised_as(RunError, f"{path} is no record of `copfl bench` ({{}})", *DAMAGED):
        content = foreign.read_json(path)
    return row_of(content, path)


def write(row: BenchRow, path: Path) -> None:
    """Writes the row as a file.

    Args:
        row: The record.
        path: Of the file.
    """
    write_bytes(path, json.dumps(row.as_json, indent=1).encode() + b"\n")


def stored(suite: Suite) -> list[BenchRow]:
    """The rows that copfl has of the suite; rows of another version or protocol do not count."""
    file = resources.files("copfl.bench").joinpath(f"{suite.name}.jsonl.gz")
    if not file.is_file():
        return []
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    rows = [row_of(json.loads(line), file) for line in lines]
    return [row for row in rows if row.settings == suite.hash]


def store(rows: Sequence[BenchRow], path: Path) -> None:
    """Writes rows as `stored` reads them; the same rows are the same bytes.

    Args:
        rows: The records.
        path: Of the file.
    """
    lines = [json.dumps(row.as_json, separators=(",", ":")) for row in rows]
    write_bytes(path, gzip.compress("".join(f"{line}\n" for line in lines).encode(), 9, mtime=0))


def suite_of(name: str) -> Suite:
    """The suite by its name."""
    if name not in SUITES:
        raise unknown("suite", name, SUITES)
    return SUITES[name]


def code_hash(algorithm: str) -> str:
    """Of the source of the algorithm's module, of its base classes' modules, and of copfl's version.

    Base classes in copfl count by the version.
    """
    factory: Callable[..., Any] = factory_of("algorithm", protocol.entry_of(algorithm).name)
    classes = inspect.getmro(factory) if isinstance(factory, type) else (factory,)
    names = {factory.__module__, *(one.__module__ for one in classes)}
    installed = ("copfl", *sys.stdlib_module_names)  # their versions count and not their source
    names = {n for n in names if n == factory.__module__ or n.partition(".")[0] not in installed}
    sources = [inspect.getsource(sys.modules[name]) for name in sorted(names)]
    return hashlib.sha256("\0".join([__version__, *sources]).encode()).hexdigest()[:16]


def environment(machine: BenchMachine) -> Environment:
    """The versions and the hardware, on which the rounding of a run depends."""
    device = device_of(machine.device)
    is_gpu = device.type == "cuda"
    return {
        "copfl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
    }


def _processor() -> str:
    """The name of the CPU."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def differing(first: Environment, second: Environment) -> str:
    """Such as "torch 2.11.0 and 2.13.0"; empty where nothing differs.

    Args:
        first: An environment.
        second: Another one.
    """
    keys = [key for key in first if first[key] != second.get(key)]
    return "; ".join(f"{key} {first[key]} and {second.get(key, 'unknown')}" for key in keys)


def row_hash(row: BenchRow) -> str:
    """Of every number of every run, whatever the algorithm is called and however long it took."""
    runs = [[run.job[1:], run.accuracy, run.bytes, run.start, run.hash] for run in (*row.tuning, *row.runs)]
    return digest([row.suite, row.settings, runs])


def fault(row: BenchRow) -> str:
    """What in the record cannot come from the protocol; empty if all of it can."""
    suite = suite_of(row.suite)
    if row.settings != suite.hash:
        return f"it is of version {row.version} of the suite {row.suite}, and this is version {suite.version}"
    accepted = [server for server in protocol.SERVERS if server not in row.refused]
    expected = {
        BenchJob(row.algorithm, setting, server, lr, protocol.TUNING_SEED, True)
        for setting in suite.settings
        for server in accepted
        for lr in protocol.RATES
    }
    if {run.job for run in row.tuning} != expected or len(row.tuning) != len(expected):
        return "its tuning runs are not those of the protocol"
    if [run.job for run in row.runs] != protocol.final_jobs(row.tuning):
        return (
            "its runs on test samples do not have the server's step and rate that were best on validation "
            f"samples, or not the seeds {', '.join(map(str, protocol.SEEDS))}"
        )
    return ""
