"""`copfl compare` and `copfl sweep`. Torch is imported only when one of them is called."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from copfl.comparison.rows import Comparison
    from copfl.experiment.config import Tables

Seeds = Annotated[str | None, typer.Option("--seeds", help="Such as 0,1,2 or 0-4; default: 0,1,2.")]
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", "-d", help="A name, an .npz file, an image folder or module:function."),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where the data sets are; default: the variable COPFL_DATA.")
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="See `copfl list models`; or your own, module:Class.")
]
Scheme = Annotated[
    str | None, typer.Option("--partition", help="classes, dirichlet, iid, by_group, or a file.")
]
Optim = Annotated[
    str | None, typer.Option("--optimizer", help="sgd, adam or mamo for all; default: each one's own.")
]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate for all.")]
Clients = Annotated[int | None, typer.Option("--clients", "-n", help="How many clients.")]
Rounds = Annotated[int | None, typer.Option("--rounds", "-r", help="How many rounds.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Samples per step.")]
Participation = Annotated[
    float | None, typer.Option("--participation", help="Share of the clients in each round.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or auto.")]
Engine = Annotated[str | None, typer.Option("--engine", help="As in `copfl run`.")]
Precision = Annotated[str | None, typer.Option("--precision", help="As in `copfl run`.")]
Last = Annotated[int | None, typer.Option("--last", help="Looks that a value is the mean of; default: 5.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", help="Runs side by side; default: one per core, on a GPU one.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder; runs that are there are used again.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="TABLE.KEY=VALUE for all whom it concerns: copfl.rate=0.15."),
]
Plots = Annotated[bool, typer.Option(help="Draw pictures, if matplotlib is installed.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def compare(
    algorithms: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithms", "-a", help="Such as copfl,copfl:score=none,fedavg:optimizer=adam:lr=0.001,local."
        ),
    ] = None,
    seeds: Seeds = None,
    tune: Annotated[
        list[str] | None,
        typer.Option("--tune", help="KEY=VALUE,VALUE: tried on a part of the training samples."),
    ] = None,
    tune_seeds: Annotated[str | None, typer.Option(help="Seeds to tune on; default: the first.")] = None,
    validation: Annotated[
        float | None, typer.Option(help="Share of the training samples; default: 0.2.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The row to compare with; default: the first.")
    ] = None,
    dataset: Dataset = None,
    data_dir: DataDir = None,
    model: Model = None,
    partition: Scheme = None,
    optimizer: Optim = None,
    lr: Rate = None,
    clients: Clients = None,
    rounds: Rounds = None,
    batch: Batch = None,
    participation: Participation = None,
    device: Device = None,
    engine: Engine = None,
    precision: Precision = None,
    settings: Settings = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="A file with [[entry]] and [compare]; the line wins."),
    ] = None,
    last: Last = None,
    jobs: Jobs = None,
    out: Out = None,
    plots: Plots = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare algorithms on the same clients, each tuned alike; what is there already is used again."""
    from copfl.comparison import compare as comparing
    from copfl.comparison import entries
    from copfl.errors import AGAIN, stoppable

    line = _tables(
        settings, dataset, data_dir, model, partition, optimizer, lr,
        clients=clients, rounds=rounds, batch=batch, participation=participation,
        device=device, engine=engine, precision=precision,
    )  # fmt: skip
    file = entries.File([], {}, {}) if config is None else entries.read_file(config)
    base = _merged(file.base, line)
    rows = file.entries if not algorithms else entries.entries_of(algorithms)
    given: dict[str, Any] = {
        "seeds": None if seeds is None else entries.seeds_of(seeds),
        "tune": None if tune is None else entries.values_of(tune, "--tune"),
        "tune_seeds": None if tune_seeds is None else entries.seeds_of(tune_seeds, "--tune-seeds"),
        "validation": validation,
        "reference": reference,
        "last": last,
    }
    options = {**file.options, **{name: value for name, value in given.items() if value is not None}}
    folder = out or Path("runs") / f"compare-{_name(base)}"
    with stoppable(AGAIN):
        found = comparing.compare(
            rows, base_tables=base, out=folder, jobs=_jobs(jobs, base), say=_say(quiet), **options
        )
    _show(found, folder, plots, quiet, as_json)


def sweep(
    over: Annotated[
        list[str] | None,
        typer.Option("--over", help="KEY=VALUE,VALUE such as copfl.rate=0.05,0.25; twice for a grid."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", "-a", help="See `copfl list algorithms`.")
    ] = None,
    seeds: Seeds = None,
    dataset: Dataset = None,
    data_dir: DataDir = None,
    model: Model = None,
    partition: Scheme = None,
    optimizer: Optim = None,
    lr: Rate = None,
    clients: Clients = None,
    rounds: Rounds = None,
    batch: Batch = None,
    participation: Participation = None,
    device: Device = None,
    engine: Engine = None,
    precision: Precision = None,
    settings: Settings = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A run.toml; the line wins.")] = None,
    last: Last = None,
    jobs: Jobs = None,
    out: Out = None,
    plots: Plots = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run one algorithm in every cell of a grid; what is there already is used again."""
    from copfl.comparison import compare as comparing
    from copfl.comparison import entries
    from copfl.errors import AGAIN, stoppable
    from copfl.experiment import config as configure

    line = _tables(
        settings, dataset, data_dir, model, partition, optimizer, lr,
        clients=clients, rounds=rounds, batch=batch, participation=participation,
        device=device, engine=engine, precision=precision,
    )  # fmt: skip
    file = {} if config is None else configure.read_file(config)
    file.get("run", {}).pop("seed", None)  # a run.toml has one; here they are named apart
    named = {} if algorithm is None else {"algorithm": {"name": algorithm}}
    base = _merged(file, _merged(line, named))
    values = entries.values_of(over or [], "--over")
    options: dict[str, Any] = {} if last is None else {"last": last}
    chosen = [0, 1, 2] if seeds is None else entries.seeds_of(seeds)
    folder = out or Path("runs") / f"sweep-{_name(base)}"
    with stoppable(AGAIN):
        found = comparing.sweep(
            values, chosen, base, folder, jobs=_jobs(jobs, base), say=_say(quiet), **options
        )
    _show(found, folder, plots, quiet, as_json)


def _tables(
    settings: list[str] | None,
    dataset: str | None,
    data_dir: Path | None,
    model: str | None,
    partition: str | None,
    optimizer: str | None,
    lr: float | None,
    **run: object,
) -> Tables:
    """What the line says of every run."""
    from copfl.experiment import config as configure

    given: dict[str, dict[str, Any]] = {
        "data": {"name": dataset, "dir": None if data_dir is None else str(data_dir)},
        "model": {"name": model},
        "partition": {"name": partition},
        "optimizer": {"name": optimizer, "lr": lr},
        "run": run,
    }
    tables = {title: {k: v for k, v in table.items() if v is not None} for title, table in given.items()}
    tables = {title: table for title, table in tables.items() if table}
    for text in settings or []:
        title, key, value = configure.setting(text)
        tables.setdefault(title, {})[key] = value
    return tables


def _merged(first: Tables, second: Tables) -> Tables:
    """Both; where both say something, the second, and options of what it chose otherwise are gone."""
    result = dict(first)
    for title, table in second.items():
        before = first.get(title, {})
        result[title] = {
            **(before if table.get("name", before.get("name")) == before.get("name") else {}),
            **table,
        }
    return result


def _name(base: Tables) -> str:
    """What the default folder is called after."""
    return Path(str(base.get("data", {}).get("name", "digits"))).stem.replace(":", "-")


def _jobs(jobs: int | None, base: Tables) -> int:
    from copfl.engine.autotune import processors

    run = base.get("run", {})
    if jobs is not None:
        return jobs
    # On a GPU one run after the other in one process: start-up is paid once, and runs side by side share its memory.
    return (
        max(1, processors() // max(1, int(run.get("workers", 1)))) if run.get("device", "cpu") == "cpu" else 1
    )


def _say(quiet: bool) -> Callable[[str], None] | None:
    return None if quiet else lambda text: print(text, file=sys.stderr, flush=True)


def _show(found: Comparison, folder: Path, plots: bool, quiet: bool, as_json: bool) -> None:
    from copfl import charts
    from copfl.comparison import plots as pictures
    from copfl.comparison import tables

    drawn = pictures.write(found, folder) if plots else []
    if plots and not charts.available() and not quiet:
        print(f"copfl: {charts.MISSING}", file=sys.stderr)
    if as_json:
        print(json.dumps(tables.as_json(found)))
    elif not quiet:
        names = ", ".join([*tables.FILES, *(path.name for path in drawn)])
        print(f"{tables.as_text(found)}\n\nFolder: {folder}, with {names}")
