"""`copfl run` and `copfl resume`. Torch is imported only when one of them is called."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from copfl.cli import options

if TYPE_CHECKING:
    from copfl.engine.rounds import Round
    from copfl.experiment.folder import RunFolder
    from copfl.experiment.run import Experiment

CHOICES = ("algorithm", "data")  # where one of them is named, the run is not the demo


def run(
    *,
    tables: options.Tables,
    algorithm: str | None = None,
    seed: int | None = None,
    config: Path | None = None,
    preset: str | None = None,
    local_baseline: bool | None = None,
    out: Path | None = None,
    track: list[str] | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Train a federation; without options, CO-PFL on digits, where personalisation pays."""
    from copfl.engine import ranks
    from copfl.experiment import config as configure
    from copfl.experiment import folder as run_folder
    from copfl.experiment import presets
    from copfl.experiment.run import follow, prepare

    # On the command line only: a Python program without a main guard would start itself in each process.
    layers: list[options.Tables] = [{"run": {"workers": 0, "local_baseline": True}}]
    line = options.tables_of(algorithm=algorithm, seed=seed)
    named = [kind for given in (line, tables) for kind in given if kind in CHOICES and "name" in given[kind]]
    if preset is None and config is None and not named:
        preset = "demo"
    if preset is not None:
        layers.append(presets.preset(preset))
    if config is not None:
        layers.append(configure.read_file(config))
    if ranks.started():
        layers.append({"run": {"workers": 1}})
    if local_baseline is not None:
        line.setdefault("run", {})["local_baseline"] = local_baseline
    with ranks.group():
        if ranks.follower():
            return follow()
        prepared = prepare([*layers, line, tables], tell=None if quiet or as_json else _tell)
        target = out or run_folder.fresh(Path("runs"), prepared.title.replace(" on ", "-"))
        with run_folder.claimed(target, new=True) as folder:
            _train(prepared, folder, track or [], quiet, as_json)


def resume(
    run: Path,
    *,
    rounds: int | None = None,
    track: list[str] | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Continue a stopped run.

    Its rounds.jsonl and models are byte for byte those of a run that was never stopped.
    """
    from copfl.engine import ranks
    from copfl.experiment import folder as run_folder
    from copfl.experiment.run import follow, reopen

    with ranks.group():
        if ranks.follower():
            return follow()
        with run_folder.claimed(run, new=False) as folder:
            prepared = reopen(folder, rounds, tell=None if quiet or as_json else _tell)
            _train(prepared, folder, track or [], quiet, as_json)


def _train(prepared: Experiment, folder: RunFolder, track: list[str], quiet: bool, as_json: bool) -> None:
    """Trains with progress on stderr, logs every round to the trackers, and prints the result."""
    from copfl.engine import ranks
    from copfl.errors import Stopped, stoppable
    from copfl.experiment.progress import bar, lines
    from copfl.experiment.run import lead, train
    from copfl.experiment.trackers import tracking
    from copfl.report import summary

    try:
        with stoppable(), contextlib.ExitStack() as stack:
            baseline = None
            listeners = [stack.enter_context(tracking(track, folder.path, prepared.tables))]
            if not (quiet or as_json):
                what = (prepared.settings.rounds, sys.stderr, prepared.task.metrics[0])
                terminal = sys.stderr.isatty()
                listeners.append(stack.enter_context(bar(*what)) if terminal else lines(*what))
                baseline = lines(*what, title="training alone, round")

            def on_round(round: Round, seconds: float) -> None:
                for listener in listeners:
                    listener(round, seconds)

            leading = lead(prepared) if ranks.joined() else ""
            if not (quiet or as_json):
                _warn([*prepared.hints, *filter(None, [leading])])
            result = train(prepared, folder, on_round, baseline)
    except Stopped:
        how = f"`copfl resume {folder.path}` continues from its last checkpoint" if folder.begun else ""
        raise Stopped(how) from None
    if as_json:
        print(json.dumps(summary.as_json(result)))
    elif not quiet:
        summary.show(result, sys.stdout)
    if not (quiet or as_json):
        _warn(result.warnings[len(prepared.hints) :])


def _tell(line: str) -> None:
    """Prints what is being prepared; the first round of a large model may come minutes later."""
    if line:
        print(f"preparing: {line}", file=sys.stderr, flush=True)


def _warn(found: list[str]) -> None:
    for warning in found:
        print(f"copfl: warning: {warning}", file=sys.stderr, flush=True)
