"""The command line. Nothing here knows how to train; torch is imported only by the commands that need it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer

from copfl.cli import audit as auditing
from copfl.cli import compare, options
from copfl.cli import federate as federating
from copfl.cli import report as reporting
from copfl.cli import reproduce as reproducing
from copfl.cli.options import FEDERATION, OUTPUT, TRAINING, AsJson, DataDir, Quiet, option

if TYPE_CHECKING:
    from copfl.engine.rounds import Round
    from copfl.experiment.config import Tables
    from copfl.experiment.folder import RunFolder
    from copfl.experiment.run import Experiment, Result

typer.core.HAS_RICH = False  # plain help: it imports nothing more, and looks the same in a pipe
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
data_app = typer.Typer(help="Data sets: fetch and check them.", rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(federating.app, name="federate")


def main() -> NoReturn:
    """Runs the command line; an error of the user is one paragraph on stderr and exit code 2."""
    from copfl.errors import CopflError, Stopped, stoppable

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for names that the terminal cannot show
    code: object = 2
    try:
        with stoppable():
            code = app(standalone_mode=False, prog_name="copfl")
            sys.stdout.flush()
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "copfl"
        message, _, hint = error.format_message().partition(" (Did you mean one of: ")
        if hint and "Did you mean" not in message:  # typer may have added it already
            message += f" Did you mean {hint.rstrip('?).')}?"
        end = "" if message.endswith(("?", ".")) else "."
        _print_error(f"{message}{end} `{command} --help` lists the options")
    except click.ClickException as error:
        _print_error(error.format_message())
    except (click.Abort, Stopped) as stopped:
        _print_error("; ".join(filter(None, ("stopped", str(stopped)))))
        code = 130
    except BrokenPipeError:  # the reader of our output has ended
        _discard_output()
        code = 0
    except CopflError as error:
        _print_error(str(error))
    except OSError as error:
        _print_error(f"{error.filename or 'the output'}: {error.strerror or error}")
        _discard_output()
    sys.exit(code if isinstance(code, int) else 0)


def _print_error(message: str) -> None:
    """Prints the message as one paragraph."""
    print("copfl: " + " ".join(message.split()), file=sys.stderr)


def _discard_output() -> None:
    """Keeps Python from writing to stdout again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command(cls=options.Command)
@options.takes_run_options
def run(
    *,
    tables: options.Tables,
    algorithm: options.Algorithm = None,
    seed: Annotated[int | None, option(TRAINING, "Seed of all randomness, from 0; default: 0.")] = None,
    config: Annotated[
        Path | None, option(TRAINING, "A run.toml; options on the line override it.", "--config", "-c")
    ] = None,
    preset: Annotated[
        str | None,
        option(TRAINING, "paper: CO-PFL as published; plus: with training add-ons; default: none."),
    ] = None,
    out: Annotated[
        Path | None, option(OUTPUT, "Run folder; default: a new one under runs/.", "--out", "-o")
    ] = None,
    track: Annotated[
        list[str] | None, option(OUTPUT, "Tracker: tensorboard, mlflow, wandb or jsonl; repeatable.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a federation; without options, CO-PFL on digits."""
    from copfl.experiment import config as configure
    from copfl.experiment import folder as run_folder
    from copfl.experiment import presets
    from copfl.experiment.run import prepare

    # On the command line only: a Python program without a main guard would start itself in each process.
    layers: list[Tables] = [{"run": {"workers": 0}}]
    if preset is not None:
        layers.append(presets.preset(preset))
    if config is not None:
        layers.append(configure.read_file(config))
    line = options.tables_of(algorithm=algorithm, seed=seed)
    prepared = prepare([*layers, line, tables])
    target = out or run_folder.fresh(Path("runs"), prepared.title.replace(" on ", "-"))
    with run_folder.claimed(target, new=True) as folder:
        result = _executed(prepared, folder, silent=quiet or as_json, track=track)
    _show(result, quiet, as_json)


@app.command(cls=options.Command)
def resume(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    *,
    rounds: Annotated[
        int | None, option(FEDERATION, "Continue to this many rounds in all.", "--rounds", "-r")
    ] = None,
    track: Annotated[
        list[str] | None, option(OUTPUT, "Another tracker; the run's own continue anyway.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Continue a stopped run.

    Its rounds.jsonl and models are byte for byte those of a run that was never stopped.
    """
    from copfl.experiment import folder as run_folder
    from copfl.experiment import run as experiment

    with run_folder.claimed(run, new=False) as folder:
        result = _executed(experiment.reopen(folder, rounds), folder, silent=quiet or as_json, track=track)
    _show(result, quiet, as_json)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, models, partitions or optimizers.")],
) -> None:
    """List algorithms, data sets and so on, one line each."""
    from copfl import models
    from copfl.algorithms import ALGORITHMS
    from copfl.data import datasets
    from copfl.data.partition import SCHEMES
    from copfl.errors import unknown
    from copfl.experiment import components

    def first_lines(registry: Any) -> dict[str, str]:
        return {name: (factory.__doc__ or "").strip().split("\n")[0] for name, factory in registry.items()}

    modules = {name: sys.modules[algorithm.__module__] for name, algorithm in ALGORITHMS.items()}
    known: dict[str, Callable[[], dict[str, str]]] = {
        "algorithms": lambda: first_lines(modules),
        "datasets": datasets.describe,
        "models": models.describe,
        "partitions": lambda: first_lines(SCHEMES),
        "optimizers": lambda: first_lines(components.OPTIMIZERS),
    }
    if what not in known:
        raise unknown("list", what, known)
    lines = known[what]()
    width = max(map(len, lines))
    for name, line in sorted(lines.items()):
        print(f"{name:{width}}  {line}")


# After the commands that every user needs.
for command in (compare.compare, compare.sweep, reproducing.reproduce):
    app.command(cls=options.Command)(command)
reporting.add_to(app)
app.command(cls=options.Command)(auditing.audit)


@data_app.command("check")
def data_check(
    name: Annotated[
        str | None,
        typer.Argument(help="A data set, an .npz file or an image folder; default: all data sets."),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Check which files of a data set exist, and that they are complete."""
    from copfl.data import datasets
    from copfl.errors import DataError

    if name is not None:
        print(datasets.check(name, _folder(data_dir)))
        return
    for known in datasets.describe():
        try:
            print(datasets.check(known, _folder(data_dir)), flush=True)
        except DataError as error:
            print(f"not usable: {error}", flush=True)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A data set with a published address.")],
    data_dir: DataDir = None,
    url: Annotated[str | None, typer.Option(help="Another address of the same file.")] = None,
) -> None:
    """Download a data set and check it; an interrupted download continues."""
    from copfl.data import download
    from copfl.errors import UsageError

    folder = _folder(data_dir)
    if folder is None:
        raise UsageError(
            "name the folder to put it in: --data-dir DIR, or the environment variable COPFL_DATA"
        )
    if not sys.stderr.isatty():
        print(download.get(name, folder, url=url))
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(name), BarColumn(20), DownloadColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        job = bar.add_task(name, total=None)
        path = download.get(
            name, folder, lambda done, total: bar.update(job, completed=done, total=total), url=url
        )
    print(path)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Personalised federated learning that knows who contributes what."""
    if version:
        from copfl import __version__

        print(__version__)
        raise typer.Exit
    _help_without_command(context)


@data_app.callback(invoke_without_command=True)
def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def _folder(data_dir: Path | None) -> Path | None:
    named = os.environ.get("COPFL_DATA")
    return data_dir or (Path(named) if named else None)


def _executed(
    prepared: Experiment, folder: RunFolder, silent: bool, track: list[str] | None = None
) -> Result:
    """The result, with a progress bar on a terminal; trackers get every round."""
    from copfl.errors import Stopped, stoppable
    from copfl.experiment.progress import Bar
    from copfl.experiment.run import execute
    from copfl.experiment.trackers import tracking

    try:
        with stoppable(), contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(tracking(track or [], folder.path, prepared.tables))]
            if not silent and sys.stderr.isatty():
                listeners.append(stack.enter_context(Bar(prepared.loop.rounds, sys.stderr)))

            def on_round(round: Round, seconds: float) -> None:
                for listener in listeners:
                    listener(round, seconds)

            return execute(prepared, folder, on_round)
    except Stopped:
        how = f"`copfl resume {folder.path}` continues from its last checkpoint" if folder.begun else ""
        raise Stopped(how) from None


def _show(result: Result, quiet: bool, as_json: bool) -> None:
    from copfl.report import summary

    if as_json:
        print(json.dumps(summary.as_json(result)))
    elif not quiet:
        summary.show(result, sys.stdout)
