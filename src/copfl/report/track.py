"""A run's figures, each client's included, sent to where people collect them: one small interface, four trackers."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from copfl.engine.simulate import Round
from copfl.errors import RunError, UsageError, unknown

Listener = Callable[[Round, float], None]  # a round as it ends, and the seconds it took
Log = Callable[[int, dict[str, float]], None]  # a round, from 1, and its figures by name
Opened = tuple[Log, Callable[[], None]]  # and what to call at the end
Settings = Mapping[str, Mapping[str, Any]]


@contextlib.contextmanager
def tracking(names: Sequence[str], folder: Path, settings: Settings) -> Iterator[Listener]:
    """What to call with each round. Trackers open with the first one, so a run that never begins leaves nothing."""
    modules = [_module(name) for name in names]
    opened: list[Opened] = []

    def on_round(round: Round, seconds: float) -> None:
        if names and not opened:
            opened.extend(TRACKERS[n][1](m, folder, settings) for n, m in zip(names, modules, strict=True))
        for log, _ in opened:
            log(round.number + 1, figures(round, seconds))

    try:
        yield on_round
    finally:
        for _, close in opened:
            close()


def to_all(listeners: Sequence[Listener]) -> Listener:
    """One listener that tells them all."""

    def on_round(round: Round, seconds: float) -> None:
        for tell in listeners:
            tell(round, seconds)

    return on_round


def figures(round: Round, seconds: float) -> dict[str, float]:
    """Every finite figure by name: mean/accuracy, federation/shared, client-0003/weight, seconds."""
    found = {"seconds": seconds, **{f"federation/{name}": value for name, value in round.federation.items()}}
    for name, values in round.clients.items():
        known = values[[math.isfinite(v) for v in values]]
        if len(known):
            found[f"mean/{name}"] = float(known.mean())
        found |= {f"client-{n:04d}/{name}": float(v) for n, v in zip(round.ids, values, strict=True)}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def flat(settings: Settings) -> dict[str, str]:
    """The settings as plain texts: run.seed, copfl.rate, ..."""
    return {f"{title}.{key}": str(value) for title, table in settings.items() for key, value in table.items()}


def _jsonl(_: ModuleType, folder: Path, settings: Settings) -> Opened:
    file = open(folder / "track.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - closed with the run

    def log(round: int, values: dict[str, float]) -> None:
        try:
            file.write(json.dumps({"round": round, **values}, separators=(",", ":")) + "\n")
            file.flush()
        except OSError as error:
            raise RunError(f"cannot write {file.name}: {error.strerror or error}; free some space") from error

    return log, file.close


def _tensorboard(module: ModuleType, folder: Path, settings: Settings) -> Opened:
    writer = module.SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in flat(settings).items()))

    def log(round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, round)
        writer.flush()

    return log, writer.close


def _mlflow(module: ModuleType, folder: Path, settings: Settings) -> Opened:
    module.start_run(run_name=folder.name)
    module.log_params(flat(settings))
    return lambda round, values: module.log_metrics(values, step=round), module.end_run


def _wandb(module: ModuleType, folder: Path, settings: Settings) -> Opened:
    run = module.init(project="copfl", name=folder.name, dir=str(folder), config=flat(settings))
    return lambda round, values: run.log(values, step=round), run.finish


# The module that a tracker needs, and how it is opened.
TRACKERS: Mapping[str, tuple[str, Callable[[ModuleType, Path, Settings], Opened]]] = {
    "jsonl": ("json", _jsonl),
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "mlflow": ("mlflow", _mlflow),
    "wandb": ("wandb", _wandb),
}


def _module(name: str) -> ModuleType:
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    try:
        return importlib.import_module(TRACKERS[name][0])
    except ImportError as error:
        raise UsageError(
            f"--track {name} needs {name}, which is not installed; `pip install {name}` brings it"
        ) from error
