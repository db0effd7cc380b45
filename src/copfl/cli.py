"""The command line. Nothing here knows how to train; torch is imported only by the commands that need it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from copfl.engine.simulate import Round
    from copfl.experiment import Experiment, Result

app = typer.Typer(
    help="Personalised federated learning that knows who contributes what.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Data sets: fetch and check them.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where the data sets are [env: COPFL_DATA].")]


def main() -> NoReturn:
    """Runs the command line; what a person can mend is one paragraph on stderr and exit code 2."""
    import click

    try:
        code = app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as help:
        print(help.format_message())
        code = 2
    except click.ClickException as error:
        print(f"copfl: {error.format_message()} (`copfl --help` lists the options)", file=sys.stderr)
        code = 2
    except (click.Abort, KeyboardInterrupt):
        print("copfl: stopped; `copfl resume` goes on from the last checkpoint", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        from copfl.errors import CopflError

        if not isinstance(error, CopflError):
            raise
        print(f"copfl: {error}", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


@app.command()
def run(
    algorithm: Annotated[str | None, typer.Option("--algorithm", "-a", help="See `copfl list algorithms`.")] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", "-d", help="A name, an .npz file or an image folder.")
    ] = None,
    data_dir: DataDir = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="See `copfl list models`.")] = None,
    partition: Annotated[str | None, typer.Option(help="classes, dirichlet, iid or by_group.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or mamo; default: the algorithm's own.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    clients: Annotated[int | None, typer.Option("--clients", "-n", help="How many clients.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", "-r", help="How many rounds.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per step.")] = None,
    participation: Annotated[float | None, typer.Option(help="Share of the clients in each round.")] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random follows from it.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, one_by_one or all_at_once.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or fp64.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; default: a new one under runs/.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A run.toml; options on the line win.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="TABLE.KEY=VALUE, such as copfl.rate=0.15 or run.threads=2.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a federation; with no options, CO-PFL on the embedded digits."""
    from copfl import experiment, run_folder

    tables = _tables(config, settings or [])
    for kind, value in (
        ("algorithm", algorithm), ("data", dataset), ("model", model), ("partition", partition), ("optimizer", optimizer)
    ):  # fmt: skip
        if value is not None:
            tables.setdefault(kind, {})["name"] = value
    if data_dir is not None:
        tables.setdefault("data", {})["dir"] = str(data_dir)
    if lr is not None:
        tables.setdefault("optimizer", {})["lr"] = lr
    loop = {
        "clients": clients, "rounds": rounds, "batch": batch, "participation": participation, "seed": seed,
        "device": device, "engine": engine, "precision": precision,
    }  # fmt: skip
    tables.setdefault("run", {}).update({k: v for k, v in loop.items() if v is not None})
    prepared = experiment.prepare(tables)
    target = out or experiment.fresh_path(Path("runs"), prepared)
    with run_folder.claimed(target, new=True) as folder, _progress(prepared, quiet or as_json) as on_round:
        result = experiment.execute(prepared, folder, on_round)
    _show(result, quiet, as_json)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    rounds: Annotated[int | None, typer.Option("--rounds", "-r", help="Go on to this many rounds in all.")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped, to the same result as if it never had been."""
    from copfl import experiment

    with _progress(None, quiet or as_json) as on_round:
        result = experiment.resume(run, on_round, rounds)
    _show(result, quiet, as_json)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, models, partitions or optimizers.")],
) -> None:
    """What there is, one line each."""
    from copfl import configure, models
    from copfl.algorithms import ALGORITHMS
    from copfl.data import datasets
    from copfl.data.partition import SCHEMES
    from copfl.errors import unknown

    def first_lines(registry: Any) -> dict[str, str]:
        return {name: (factory.__doc__ or "").strip().split("\n")[0] for name, factory in registry.items()}

    known: dict[str, Callable[[], dict[str, str]]] = {
        "algorithms": lambda: first_lines(ALGORITHMS),
        "datasets": datasets.describe,
        "models": models.describe,
        "partitions": lambda: first_lines(SCHEMES),
        "optimizers": lambda: first_lines(configure.OPTIMIZERS),
    }
    if what not in known:
        raise unknown("list", what, known)
    lines = known[what]()
    width = max(map(len, lines))
    for name, line in sorted(lines.items()):
        print(f"{name:{width}}  {line}")


@data_app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help="A data set, an .npz file or an image folder.")], data_dir: DataDir = None
) -> None:
    """Say what of a data set is there, and whether it is whole."""
    from copfl.data import datasets

    print(datasets.check(name, _folder(data_dir)))


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A data set with a published address.")],
    data_dir: DataDir = None,
    url: Annotated[str | None, typer.Option(help="Another address of the same file.")] = None,
) -> None:
    """Fetch a data set from its published address; an interrupted download goes on where it stopped."""
    from copfl.data import download
    from copfl.errors import UsageError

    folder = _folder(data_dir)
    if folder is None:
        raise UsageError("name the folder to put it in: --data-dir DIR, or the environment variable COPFL_DATA")
    if not sys.stderr.isatty():
        print(download.get(name, folder, url=url))
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        job = bar.add_task(name, total=None)
        path = download.get(name, folder, lambda done, total: bar.update(job, completed=done, total=total), url=url)
    print(path)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from copfl import __version__

        print(__version__)
        raise typer.Exit


def _tables(config: Path | None, settings: list[str]) -> dict[str, dict[str, Any]]:
    """The tables of the run file, with the --set options laid over them."""
    from copfl import configure
    from copfl.errors import UsageError

    tables: dict[str, dict[str, Any]] = {}
    if config is not None:
        try:
            text = config.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {config}: {error}; give a run.toml with -c") from error
        tables = configure.read_toml(text, str(config))
    for text in settings:
        table, key, value = configure.setting(text)
        tables.setdefault(table, {})[key] = value
    return tables


def _folder(data_dir: Path | None) -> Path | None:
    named = os.environ.get("COPFL_DATA")
    return data_dir or (Path(named) if named else None)


class _progress:
    """A live bar on a terminal, nothing elsewhere."""

    def __init__(self, prepared: Experiment | None, silent: bool) -> None:
        self.prepared, self.silent = prepared, silent

    def __enter__(self) -> Any:
        self.bar = None
        if self.silent or not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("round {task.completed:.0f}/{task.total}"), BarColumn(), TextColumn("{task.description}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        total = self.prepared.loop.rounds if self.prepared else None
        self.job = self.bar.add_task("training", total=total)
        return self.show

    def show(self, round: Round, seconds: float) -> None:
        assert self.bar is not None
        parts = []
        if "accuracy" in round.clients:
            parts.append(f"accuracy {100 * round.clients['accuracy'].mean():.1f} %")
        if "shared" in round.federation:
            parts.append(f"shared {100 * round.federation['shared']:.0f} %")
        self.bar.update(self.job, completed=round.number + 1, description=", ".join(parts) or "training")

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _show(result: Result, quiet: bool, as_json: bool) -> None:
    from copfl.report import summary

    if as_json:
        print(json.dumps(summary.as_json(result)))
    elif not quiet:
        summary.show(result, sys.stdout)


if __name__ == "__main__":
    main()
