"""`copfl run`, `copfl resume` and `copfl schema`. Torch is imported only when one of them needs it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from copfl.cli import options
from copfl.cli.options import Tables, argument, option
from copfl.errors import Stopped, stoppable, to_resume
from copfl.experiment import process
from copfl.experiment.known_runs import check_folder
from copfl.settings import first_look, toml
from copfl.telling import Log, heard

if TYPE_CHECKING:
    from copfl.engine.rounds import Round
    from copfl.experiment.experiment import Experiment
    from copfl.experiment.folder import RunFolder
    from copfl.experiment.training import Given

CHOICES = ("algorithm", "data")  # where one of them is named, the run is not the demo
PRESETS = (
    "paper: CO-PFL as published; plus: with training add-ons; adapters: for pretrained models; demo: plus on "
    "a small federation of digits. Default: demo where neither algorithm, data nor a file is named, else "
    "none."
)


@options.training()
def run(
    line: Tables,
    *,
    config: Annotated[
        Path | None, option("Training", "A run.toml; options on the line override it.", "--config -c")
    ] = None,
    preset: Annotated[str | None, option("Training", PRESETS)] = None,
    out: Annotated[
        Path | None, option("Output", "Run folder; default: a new one under runs/.", "--out -o")
    ] = None,
    track: options.Track = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    as_json: options.Json = False,
) -> None:
    """Train a federation; without options, CO-PFL on digits, where personalisation pays.

    With data and no algorithm, it is what suits the data (docs/results.md).
    """
    begin = time.monotonic()
    # Errors in a file, and about the digits, come before torch is imported.
    of_file = None if config is None else toml.read_file(config)
    line_alone = not (preset or config)
    if line_alone and "name" not in line.get("data", {"name": ""}):
        first_look.look_at_data({"name": "digits", **line["data"]})
    with process.importing():
        from copfl.choosing.first_run import completed_run
        from copfl.engine import ranks
        from copfl.experiment import folder as run_folder
        from copfl.experiment.choice import CHOICE, text_of
        from copfl.experiment.preparation import prepare
        from copfl.experiment.run import follow
        from copfl.settings.first_choice import why

    # On the command line only: a Python program without a main guard would start itself in each process.
    layers: list[Tables] = [{"run": {"workers": 0, "local_baseline": True, "find_rounds": "auto"}}]
    is_demo = line_alone and not any("name" in line.get(kind, {}) for kind in CHOICES)
    if of_file is not None:
        layers.append(of_file)
    if ranks.started():
        layers.append({"run": {"workers": 1, "find_rounds": "off"}})  # one process would search for all
    show = Show(track or [], quiet, as_json, begin, verbose)
    with ranks.group():
        if ranks.follower():
            return follow()
        preset = "demo" if is_demo else preset or ""
        with heard(show.preparing):
            description, given = completed_run(*layers, line, preset=preset)
            prepared = prepare(description)
        named = bool(preset) or any(layer.get("algorithm", {}).get("name") for layer in (*layers, line))
        if show.progress and not named:
            choice = given.get(CHOICE)
            reason = why(description) if choice is None else text_of(choice)
            print(
                f"No algorithm is named, so this is {description.method_text}: {reason} "
                "(docs/results.md). `copfl choose` compares methods on your data.",
                file=sys.stderr,
            )
        target = out or run_folder.fresh(Path("runs"), prepared.title.replace(" on ", "-"))
        with run_folder.claimed(target, new=True) as folder:
            _train(prepared, folder, show, given)


def resume(
    *,
    run: Annotated[Path, argument("The run folder.")],
    rounds: Annotated[
        int | None, option("Federation", "Continue to this many rounds in all.", "--rounds -r")
    ] = None,
    track: options.Track = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    as_json: options.Json = False,
) -> None:
    """Continue a stopped run.

    Its rounds.jsonl and models are byte for byte those of a run that was never stopped.
    """
    begin = time.monotonic()
    check_folder(run)  # before torch is imported
    with process.importing():
        from copfl.engine import ranks
        from copfl.experiment import folder as run_folder
        from copfl.experiment.run import follow, reopen

    show = Show(track or [], quiet, as_json, begin, verbose)
    with ranks.group():
        if ranks.follower():
            return follow()
        with run_folder.claimed(run, new=False) as folder:
            with heard(show.preparing):
                prepared = reopen(folder, rounds)
            _train(prepared, folder, show, {})


def schema() -> None:
    """Print the JSON Schema of run.toml, with which an editor completes and checks it."""
    from copfl.settings.json_schema import json_schema

    print(json.dumps(json_schema(), indent=1))


class Show(NamedTuple):
    """What of a run is shown, and where."""

    trackers: list[str]
    quiet: bool
    as_json: bool
    begin: float  # of the command, by the monotonic clock
    verbose: bool = False

    @property
    def progress(self) -> bool:
        return not (self.quiet or self.as_json)

    @property
    def preparing(self) -> Log | None:
        """Prints what is being prepared; the first round of a large model may come minutes later."""
        return _preparing if self.progress else None


def _train(prepared: Experiment, folder: RunFolder, show: Show, given: Given) -> None:
    """Trains with progress on stderr, logs every round to the trackers, and prints the result."""
    from copfl.engine import ranks
    from copfl.experiment.progress import bar
    from copfl.experiment.run import lead
    from copfl.experiment.trackers import tracking
    from copfl.experiment.training import rounds_alone, train
    from copfl.report import summary

    try:
        with stoppable(), contextlib.ExitStack() as stack:
            alone = None
            listeners = [stack.enter_context(tracking(show.trackers, folder.path, prepared.run.tables()))]
            if show.progress:
                rounds, what = prepared.settings.rounds, (prepared.task.metrics[0], rounds_alone(prepared))
                if sys.stderr.isatty():
                    shown = stack.enter_context(bar(rounds, sys.stderr, *what))
                    listeners.append(shown.on_round)
                    alone = shown.on_round_alone
                else:
                    stack.enter_context(heard(options.logger(quiet=False)))

            def on_round(round: Round, seconds: float) -> None:
                for listener in listeners:
                    listener(round, seconds)

            leading = lead(prepared) if ranks.joined() else ""
            if show.progress:
                _warn([*prepared.hints, *filter(None, [leading])])
            result = train(prepared, folder, on_round, alone, given)
    except Stopped:
        how = f"{to_resume(folder.path)} continues from its last checkpoint" if folder.begun else ""
        raise Stopped(how) from None
    if show.as_json:
        print(json.dumps(summary.as_json(result)))
    elif not show.quiet:
        summary.show(result, sys.stdout, time.monotonic() - show.begin, verbose=show.verbose)
    if show.progress:
        _warn(result.warnings[len(prepared.hints) :])


def _preparing(line: str) -> None:
    print(f"preparing: {line}", file=sys.stderr, flush=True)


def _warn(warnings_found: list[str]) -> None:
    for warning in warnings_found:
        print(f"copfl: warning: {warning}", file=sys.stderr, flush=True)
