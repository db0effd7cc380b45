"""A run that goes on: `copfl.resume(...)`, and the processes of torchrun.

`copfl.run` is in `copfl.choosing.run`.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.engine import ranks
from copfl.errors import RunError, unknown, warn
from copfl.experiment import folder as run_folder
from copfl.experiment import records
from copfl.experiment.experiment import Experiment
from copfl.experiment.folder import RunFolder
from copfl.experiment.preparation import prepare
from copfl.experiment.process import left_as_found
from copfl.experiment.result import Result
from copfl.experiment.training import OnRound, baseline_of, simulation_of, train
from copfl.settings import named_code, user_code
from copfl.settings.complete import complete
from copfl.settings.values import check_same, modules_of_values
from copfl.telling import Log, heard_by_log, to_somebody


@left_as_found()
@heard_by_log()
def resume(
    path: str | Path,
    *,
    rounds: int | None = None,
    code: named_code.Modules = (),
    on_round: OnRound | None = None,
    log: Log | None = to_somebody,
    **values: Any,
) -> Result:
    """Continues a stopped run, to the same bytes as without the stop.

    Args:
        path: The run folder.
        rounds: Continue to this many rounds in all; by default to those of the run.
        code: Modules of yours that the folder may name, such as "mypackage.nets"; it executes no other code.
        on_round: Called with each round as it ends, and its seconds.
        log: Gets a line about each step; by default it is on stderr in a terminal or a notebook.
        values: What was passed to `run` as a value must be passed again, and be the same: `algorithm`, `model`,
            `optimizer`, `dataset` with its columns and `task`. A folder of `Result.save` has the data.
    """
    named_code.name(code)
    with run_folder.claimed(Path(path), new=False) as folder:
        return warned(train(reopen(folder, rounds, **values), folder, on_round))


def warned(result: Result) -> Result:
    for warning in result.warnings:
        warn(warning)
    return result


def reopen(folder: RunFolder, rounds: int | None = None, **values: Any) -> Experiment:
    """The experiment of a run folder; with `rounds`, continued to this many rounds in all.

    Args:
        folder: Of the run.
        rounds: Of the run in all; None: as before.
        values: What the program passes again, as of `resume`.
    """
    named_code.name(modules_of_values(values))
    now = ({} if rounds is None else {"rounds": rounds}) | ({"workers": 1} if ranks.joined() else {})
    written = folder.tables()  # first: it says so, if this is no run folder
    own = {"partition": folder.partition(), **folder.values(), **_passed_again(values)}
    run = complete(written, {"run": now}, values=own)
    check_same(written, run.tables())
    experiment = prepare(run)
    if rounds is not None and rounds < (done := len(records.read(folder.path / "rounds.jsonl"))):
        raise RunError(f"{folder.path} has {done} rounds already; rounds={rounds} must be at least as many")
    return experiment


def _passed_again(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a program passes again, by kind: `dataset` is the data, with the columns of a data frame."""
    own = {"data" if name == "dataset" else name: value for name, value in values.items()}
    options: dict[str, Any] = {**own.pop("data_options", {})}
    if "task" in own:
        options["kind"] = own.pop("task")
    columns = ("target", "client", "text", "group", "time", "event", "start")
    options |= {name: own.pop(name) for name in columns if name in own}
    kinds = ("algorithm", "dataset", "model", "optimizer", "partition")
    for kind in own:
        if kind not in (*kinds, "data"):
            raise unknown("value of a run", kind, kinds)
    if "data" in own:
        own["data"] = user_code.as_dataset(own["data"], **options)
    return own


def follow() -> None:
    """A rank of torchrun other than 0: it trains its part of the run that rank 0 leads, see `lead`."""
    run, partition, fingerprints = ranks.announce()
    chosen = dataclasses.replace(run.partition, value=partition)
    e = prepare(dataclasses.replace(run, partition=chosen))
    for what, own in e.fingerprints().items():
        if own != fingerprints[what]:
            raise RunError(
                f"the {what} of rank {os.environ['RANK']} are not those of rank 0; every machine needs the "
                "same version of copfl, the same data under --data-dir, and the same code"
            )
    e.training.compute()
    ranks.serve(simulation_of(e))
    alone = baseline_of(e) if e.settings.local_baseline else None
    if alone is not None and alone is not e:
        ranks.serve(simulation_of(alone))


def lead(e: Experiment) -> str:
    """Rank 0: tells the other ranks what to train; the result is a warning, or empty."""
    ranks.announce((e.run, e.federation.partition, e.fingerprints()))
    processes, parts = ranks.started(), math.ceil(e.settings.participants / e.engine.chunk)
    if processes <= parts:
        return ""
    smaller = math.ceil(e.settings.participants / processes)
    return (
        f"{processes - parts} of {processes} processes have nothing to train: the {e.settings.participants} "
        f"clients of a round are trained in {parts} batch(es) of {e.engine.chunk}. With "
        f"--set run.chunk={smaller} each has a batch; the result then differs from this one in rounding"
    )
