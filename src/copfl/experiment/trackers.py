"""A run's metrics, also of each client, sent to trackers: tensorboard, mlflow or wandb.

The folder's `track.json` names the trackers, so that a resumed run continues in the same places. The rounds
since the last checkpoint are trained again, to the same metrics; a tracker that can drops the old ones first.
"""

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from copfl import foreign
from copfl.engine.rounds import Round
from copfl.errors import RunError, UsageError, one_of, raised_as
from copfl.files import write_bytes

MEMORY = "track.json"
Log = Callable[[int, dict[str, float]], None]  # a round, from 1, and its metrics by name
Opened = tuple[Log, Callable[[], None], str]  # with the function that closes it, and its id of the run


class TrackedRun(NamedTuple):
    """What a tracker needs to know of the run."""

    folder: Path
    settings: dict[str, str]  # as plain text: run.seed, copfl.rate, ...
    first: int  # the first round to be logged, from 1
    id: str | None  # the tracker's id of the run, if it has logged rounds of it before


@contextlib.contextmanager
def tracking(
    names: Sequence[str], folder: Path, settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[Callable[[Round, float], None]]:
    """A function that logs a round and its seconds to these trackers, and to those that the run has already.

    They open with the first round, so a run that never begins leaves nothing.

    Args:
        names: Of the trackers.
        folder: Of the run.
        settings: Of the run.
    """
    ids = _ids(folder)
    modules = {name: _module(name) for name in dict.fromkeys([*names, *ids])}
    texts = {f"{title}.{k}": str(v) for title, table in settings.items() for k, v in table.items()}
    opened: dict[str, Opened] = {}

    def on_round(round: Round, seconds: float) -> None:
        if modules and not opened:
            for name, module in modules.items():
                opened[name] = TRACKERS[name][1](
                    module, TrackedRun(folder, texts, round.number + 1, ids.get(name))
                )
            content = json.dumps({name: str(id) for name, (_, _, id) in opened.items()})
            write_bytes(folder / MEMORY, content.encode(), durable=False)
        for log, _, _ in opened.values():
            log(round.number + 1, metrics(round, seconds))

    try:
        yield on_round
    finally:
        for _, close, _ in opened.values():
            close()


def _ids(folder: Path) -> dict[str, str]:
    """The trackers that have logged rounds of this run, and the id that each has for it."""
    try:
        return {str(k): str(v) for k, v in foreign.read_json(folder / MEMORY).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        remedy = "delete it and name the trackers by --track"
        raise RunError(f"{folder / MEMORY} cannot be read ({error}); {remedy}") from error


def metrics(round: Round, seconds: float) -> dict[str, float]:
    """Every finite metric by name: mean/accuracy, federation/shared, client-0003/weight, seconds.

    Args:
        round: As it ended.
        seconds: That it took.
    """
    result = {"seconds": seconds, **{f"federation/{name}": v for name, v in round.federation.items()}}
    for name, values in round.clients.items():
        finite = values[[math.isfinite(v) for v in values]]
        if len(finite):
            result[f"mean/{name}"] = float(finite.mean())
        result |= {f"client-{n:04d}/{name}": float(v) for n, v in zip(round.ids, values, strict=True)}
    return {name: float(value) for name, value in result.items() if math.isfinite(value)}


def _tensorboard(module: ModuleType, run: TrackedRun) -> Opened:
    writer = module.SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first if run.id else None)
    writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in run.settings.items()))

    def log(round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, round)
        writer.flush()

    return log, writer.close, "tensorboard"


def _mlflow(module: ModuleType, run: TrackedRun) -> Opened:
    if run.id is None:
        started = module.start_run(run_name=run.folder.name)
        module.log_params(run.settings)
    else:  # mlflow refuses to write the parameters again
        started = module.start_run(run_id=run.id)
    return lambda round, values: module.log_metrics(values, step=round), module.end_run, started.info.run_id


def _wandb(module: ModuleType, run: TrackedRun) -> Opened:
    known = {} if run.id is None else {"id": run.id, "resume": "allow"}
    where = {"project": "copfl", "name": run.folder.name, "dir": str(run.folder), **known}
    started = module.init(**where, config=run.settings)
    return lambda round, values: started.log(values, step=round), started.finish, started.id


# The module that a tracker needs, and the function that opens it.
TRACKERS: Mapping[str, tuple[str, Callable[[ModuleType, TrackedRun], Opened]]] = {
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "mlflow": ("mlflow", _mlflow),
    "wandb": ("wandb", _wandb),
}


def _module(name: str) -> ModuleType:
    one_of(TRACKERS, tracker=name)
    missing = f"--track {name} needs {name}; install it with `pip install {name}`"
    with raised_as(UsageError, missing, ImportError):
        return importlib.import_module(TRACKERS[name][0])
