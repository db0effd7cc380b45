"""`copfl data`: describe the user's data, check which data sets exist, and download one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli import options
from copfl.cli.options import DATA, DataDir, option

app = typer.Typer(help="Data sets: fetch and check them.", rich_markup_mode=None)
app.callback(invoke_without_command=True)(options.help_without_command)


@app.command("check")
def check(
    name: Annotated[
        str | None,
        typer.Argument(help="A data set, a file or a folder; default: all data sets."),
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


@app.command("describe", cls=options.Command)
def describe(
    name: Annotated[str, typer.Argument(help="A file, a folder, hf:NAME, or a data set's name.")],
    target: Annotated[str | None, option(DATA, "The column of a table to predict.", "--target")] = None,
    client: Annotated[str | None, option(DATA, "The column that names the client.", "--client")] = None,
    text: Annotated[str | None, option(DATA, "The column of the texts to learn from.", "--text")] = None,
    settings: Annotated[
        list[str] | None, option(DATA, "Any option as data.KEY=VALUE; repeatable.", "--set", "-s")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Print what is understood of a data set: samples, targets, clients, missing values, who has what."""
    from copfl.data.overview import overview
    from copfl.data.tables import READERS
    from copfl.experiment.components import build_data, resolve_data

    given = {"name": name, "target": target, "client": client, "text": text}
    tables = options.tables_of(data_dir=data_dir, settings=settings)
    data = {**{key: value for key, value in given.items() if value is not None}, **tables.get("data", {})}
    if Path(name).suffix in READERS:
        data.setdefault("missing", "fill")  # so that they are counted; a run refuses them
    print(overview(build_data(resolve_data(data))))


@app.command("get")
def get(
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
    with options.progress(name, "DownloadColumn") as bar:
        job = bar.add_task(name, total=None)
        path = download.get(
            name, folder, lambda done, total: bar.update(job, completed=done, total=total), url=url
        )
    print(path)
    if not download.is_pinned(name):
        print("No checksum of it is published, so the file was not compared with one.")


def _folder(data_dir: Path | None) -> Path | None:
    named = os.environ.get("COPFL_DATA")
    return data_dir or (Path(named) if named else None)
