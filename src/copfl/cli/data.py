"""`copfl data`: describe the user's data, check which data sets exist, and download one."""

import os
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli import options
from copfl.cli.options import argument, option
from copfl.errors import DataError, UsageError
from copfl.settings.toml import assignment

app = typer.Typer(help="Data sets: fetch and check them.", rich_markup_mode=None)
app.callback(invoke_without_command=True)(options.help_without_command)


@app.command()
def check(
    *,
    name: Annotated[str | None, argument("A data set, a file or a folder; default: all data sets.")] = None,
    data_dir: options.DataDir = None,
) -> None:
    """Check which files of a data set exist, and that they are complete."""
    from copfl.data.sets import datasets

    if name is not None:
        print(datasets.check(name, _folder(data_dir)))
        return
    for known in datasets.DATASETS:
        try:
            print(datasets.check(known, _folder(data_dir)), flush=True)
        except DataError as error:
            print(f"not usable: {error}", flush=True)


@app.command(cls=options.Command)
def describe(
    *,
    name: Annotated[str, argument("A file, a folder, hf:NAME, or a data set's name.")],
    target: Annotated[str | None, option("Data", "The column of a table to predict.")] = None,
    client: Annotated[str | None, option("Data", "The column that names the client.")] = None,
    text: Annotated[str | None, option("Data", "The column of the texts to learn from.")] = None,
    group: Annotated[
        str | None, option("Data", "The column that says which rows belong together, such as a patient.")
    ] = None,
    time: Annotated[
        str | None, option("Data", "The column of the date: the last rows are test rows.")
    ] = None,
    event: Annotated[
        str | None, option("Data", "Of survival, the column that says whether the event was seen.")
    ] = None,
    start: Annotated[
        str | None, option("Data", "Of survival, the column of the time after which a row is at risk.")
    ] = None,
    settings: Annotated[
        list[str] | None, option("Data", "Any option as data.KEY=VALUE; repeatable.", "--set -s")
    ] = None,
    data_dir: options.DataDir = None,
) -> None:
    """Print what is understood of a data set: samples, targets, clients, missing values, who has what."""
    from copfl.data.sets.overview import overview
    from copfl.data.tables.files import READERS
    from copfl.settings import named_code
    from copfl.settings.data import data_of, data_record

    line = {"name": name, "target": target, "client": client, "text": text, "group": group, "time": time}
    line |= {"event": event, "start": start, "dir": None if data_dir is None else str(data_dir)}
    table = {key: value for key, value in line.items() if value is not None}
    table |= {key: value for kind, key, value in map(assignment, settings or []) if kind == "data"}
    refusal = ""
    try:
        named_code.name(named_code.modules_in(table))
        dataset = data_of(data_record(table))
    except DataError as error:
        if Path(name).suffix not in READERS or "missing" in table:
            raise
        dataset = data_of(data_record({**table, "missing": "fill"}))  # what else is wrong is an error again
        refusal = f"\n\nA run needs one more option: {error}"
    print(f"{overview(dataset)}{refusal}")


@app.command()
def get(
    *,
    name: Annotated[str, argument("A data set with a published address.")],
    data_dir: options.DataDir = None,
    url: Annotated[str | None, option("Data", "Another address of the same file.")] = None,
) -> None:
    """Download a data set and check it; an interrupted download continues."""
    from copfl.data.sets import download

    folder = _folder(data_dir)
    if folder is None:
        raise UsageError(
            "name the folder to put it in: --data-dir DIR, or the environment variable COPFL_DATA"
        )
    with options.progress(name, "DownloadColumn") as bar:
        job = bar.add_task(name, total=None)

        def show(done: int, total: int | None) -> None:
            bar.update(job, completed=done, total=total)

        path = download.get(name, folder, show, url=url)
    print(path)
    if not download.is_pinned(name):
        print("No checksum of it is published, so the file was not compared with one.")


def _folder(data_dir: Path | None) -> Path | None:
    named = os.environ.get("COPFL_DATA")
    return data_dir or (Path(named) if named else None)
