"""A run's figures, each client's included, sent to where people collect them: one small interface, four trackers.

The folder's `track.json` remembers the trackers, so that a run that is resumed goes on in the same places. The rounds
since its last checkpoint are then played again, to the same figures; a tracker that can takes the old ones back first.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from copfl.engine.simulate import Round
from copfl.errors import RunError, UsageError, unknown
from copfl.files import write_bytes

MEMORY = "track.json"
Listener = Callable[[Round, float], None]  # a round as it ends, and the seconds it took
Log = Callable[[int, dict[str, float]], None]  # a round, from 1, and its figures by name
Opened = tuple[Log, Callable[[], None], str]  # and what to call at the end, and its own name for the run
Settings = Mapping[str, Mapping[str, Any]]


class Place(NamedTuple):
    """What a tracker is to know of the run."""

    folder: Path
    settings: Settings
    first: int  # the first round that it will be told, from 1
    name: str | None  # what it calls this run, if it was told of it before


@contextlib.contextmanager
def tracking(names: Sequence[str], folder: Path, settings: Settings) -> Iterator[Listener]:
    """What to call with each round. Trackers open with the first one, so a run that never begins leaves nothing.

    Those that the run had before are told too.
    """
    known = remembered(folder)
    modules = {name: _module(name) for name in dict.fromkeys([*names, *known])}
    opened: list[Opened] = []

    def on_round(round: Round, seconds: float) -> None:
        if modules and not opened:
            for name, module in modules.items():
                opened.append(
                    TRACKERS[name][1](module, Place(folder, settings, round.number + 1, known.get(name)))
                )
            called = {name: one for name, (_, _, one) in zip(modules, opened, strict=True)}
            write_bytes(folder / MEMORY, json.dumps(called).encode(), durable=False)
        for log, _, _ in opened:
            log(round.number + 1, metrics(round, seconds))

    try:
        yield on_round
    finally:
        for _, close, _ in opened:
            close()


def remembered(folder: Path) -> dict[str, str]:
    """The trackers that were told of this run, and what each calls it."""
    try:
        found = json.loads((folder / MEMORY).read_text("utf-8"))
        return {str(name): str(one) for name, one in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(
            f"{folder / MEMORY} cannot be read ({error}); delete it and name the trackers by --track"
        ) from error


def to_all(listeners: Sequence[Listener]) -> Listener:
    """One listener that tells them all."""

    def on_round(round: Round, seconds: float) -> None:
        for tell in listeners:
            tell(round, seconds)

    return on_round


def metrics(round: Round, seconds: float) -> dict[str, float]:
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


def _jsonl(_: ModuleType, place: Place) -> Opened:
    path = place.folder / "track.jsonl"
    if path.exists():  # a line cut short, and those of rounds that come again
        lines = path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["round"] < place.first]
        write_bytes(path, "".join(kept).encode(), durable=False)
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed with the run

    def log(round: int, values: dict[str, float]) -> None:
        try:
            file.write(json.dumps({"round": round, **values}, separators=(",", ":")) + "\n")
            file.flush()
        except OSError as error:
            raise RunError(f"cannot write {file.name}: {error.strerror or error}; free some space") from error

    return log, file.close, path.name


def _tensorboard(module: ModuleType, place: Place) -> Opened:
    again = None if place.name is None else place.first
    writer = module.SummaryWriter(str(place.folder / "tensorboard"), purge_step=again)
    writer.add_text(
        "settings", "\n".join(f"    {name} = {value}" for name, value in flat(place.settings).items())
    )

    def log(round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, round)
        writer.flush()

    return log, writer.close, "tensorboard"


def _mlflow(module: ModuleType, place: Place) -> Opened:
    if place.name is None:
        run = module.start_run(run_name=place.folder.name)
        module.log_params(flat(place.settings))
    else:
        run = module.start_run(run_id=place.name)  # its parameters stand, and may not be written again
    return lambda round, values: module.log_metrics(values, step=round), module.end_run, str(run.info.run_id)


def _wandb(module: ModuleType, place: Place) -> Opened:
    again = {} if place.name is None else {"id": place.name, "resume": "allow"}
    run = module.init(
        project="copfl", name=place.folder.name, dir=str(place.folder), config=flat(place.settings), **again
    )
    return lambda round, values: run.log(values, step=round), run.finish, str(run.id)


# The module that a tracker needs, and how it is opened.
TRACKERS: Mapping[str, tuple[str, Callable[[ModuleType, Place], Opened]]] = {
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
