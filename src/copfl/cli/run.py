"""`copfl run` and `copfl resume`. Torch is imported only when one of them is called."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from copfl.cli import options
from copfl.errors import Stopped, stoppable
from copfl.experiment import config, presets

if TYPE_CHECKING:
    from copfl.engine.rounds import Round
    from copfl.experiment.folder import RunFolder
    from copfl.experiment.run import Experiment

CHOICES = ("algorithm", "data")  # where one of them is named, the run is not the demo


def run(given: options.Given, tables: options.Tables) -> None:
    """Train a federation; without options, CO-PFL on digits, where personalisation pays."""
    from copfl.engine import ranks
    from copfl.experiment import folder as run_folder
    from copfl.experiment.run import follow, prepare

    # On the command line only: a Python program without a main guard would start itself in each process.
    layers: list[options.Tables] = [{"run": {"workers": 0, "local_baseline": True}}]
    line = options.tables_of(algorithm=given.algorithm, seed=given.seed)
    named = any("name" in layer.get(kind, {}) for layer in (line, tables) for kind in CHOICES)
    is_demo = given.preset is None and given.config is None and not named
    if is_demo or given.preset is not None:
        layers.append(presets.preset("demo" if is_demo else given.preset))
    if given.config is not None:
        layers.append(config.read_file(given.config))
    if ranks.started():
        layers.append({"run": {"workers": 1}})
    if given.local_baseline is not None:
        line.setdefault("run", {})["local_baseline"] = given.local_baseline
    with ranks.group():
        if ranks.follower():
            return follow()
        prepared = prepare([*layers, line, tables], tell=_tell if _shows(given) else None)
        target = given.out or run_folder.fresh(Path("runs"), prepared.title.replace(" on ", "-"))
        with run_folder.claimed(target, new=True) as folder:
            _train(prepared, folder, given)


def resume(given: options.Given) -> None:
    """Continue a stopped run.

    Its rounds.jsonl and models are byte for byte those of a run that was never stopped.
    """
    from copfl.engine import ranks
    from copfl.experiment import folder as run_folder
    from copfl.experiment.run import follow, reopen

    with ranks.group():
        if ranks.follower():
            return follow()
        with run_folder.claimed(given.run, new=False) as folder:
            prepared = reopen(folder, given.rounds, tell=_tell if _shows(given) else None)
            _train(prepared, folder, given)


def _shows(given: options.Given) -> bool:
    """Whether the progress is printed."""
    return not (given.quiet or given.as_json)


def _train(prepared: Experiment, folder: RunFolder, given: options.Given) -> None:
    """Trains with progress on stderr, logs every round to the trackers, and prints the result."""
    from copfl.engine import ranks
    from copfl.experiment.progress import bar, lines
    from copfl.experiment.run import lead, train
    from copfl.experiment.trackers import tracking
    from copfl.report import summary

    try:
        with stoppable(), contextlib.ExitStack() as stack:
            baseline = None
            listeners = [stack.enter_context(tracking(given.track or [], folder.path, prepared.tables))]
            if _shows(given):
                what = (prepared.settings.rounds, sys.stderr, prepared.task.metrics[0])
                terminal = sys.stderr.isatty()
                listeners.append(stack.enter_context(bar(*what)) if terminal else lines(*what))
                baseline = lines(*what, title="training alone, round")

            def on_round(round: Round, seconds: float) -> None:
                for listener in listeners:
                    listener(round, seconds)

            leading = lead(prepared) if ranks.joined() else ""
            if _shows(given):
                _warn([*prepared.hints, *filter(None, [leading])])
            result = train(prepared, folder, on_round, baseline)
    except Stopped:
        how = f"`copfl resume {folder.path}` continues from its last checkpoint" if folder.begun else ""
        raise Stopped(how) from None
    if given.as_json:
        print(json.dumps(summary.as_json(result)))
    elif not given.quiet:
        summary.show(result, sys.stdout)
    if _shows(given):
        _warn(result.warnings[len(prepared.hints) :])


def _tell(line: str) -> None:
    """Prints what is being prepared; the first round of a large model may come minutes later."""
    if line:
        print(f"preparing: {line}", file=sys.stderr, flush=True)


def _warn(found: list[str]) -> None:
    for warning in found:
        print(f"copfl: warning: {warning}", file=sys.stderr, flush=True)
