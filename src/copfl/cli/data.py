"""`copfl data`: describe the user's data, check which data sets exist, and download one."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from copfl.cli import options
from copfl.cli.options import argument, option
from copfl.errors import DataError, PartError, UsageError
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
    task: Annotated[
        str | None,
        option(
            "Data", "classification, multilabel, regression, next_token or survival; default: by the targets."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, option("Data", "Any option as data.KEY=VALUE; repeatable.", "--set -s")
    ] = None,
    data_dir: options.DataDir = None,
) -> None:
    """Print what is understood of a data set, and everything that a run would refuse."""
    from copfl.data.sets.overview import overview
    from copfl.data.tables.doubts import site_column
    from copfl.data.tables.files import read_table
    from copfl.settings import named_code
    from copfl.settings.data import data_of, data_record

    line = {"name": name, "target": target, "client": client, "text": text, "group": group, "time": time}
    line |= {"event": event, "start": start, "kind": task, "dir": None if data_dir is None else str(data_dir)}
    table = {key: value for key, value in line.items() if value is not None}
    table |= {key: value for kind, key, value in map(assignment, settings or []) if kind == "data"}
    named_code.name(named_code.modules_in(table))
    problems: list[str] = []
    tried = dict(table)
    while True:
        try:
            dataset = data_of(data_record(tried))
            break
        except DataError as error:
            problems.append(str(error))
            more = _more(tried, error)
            if more == tried:  # what is wrong is not of one part of a table
                raise DataError(_numbered(problems)) from error
            tried = more
    if tried.get("target") != table.get(
        "target"
    ):  # another column took its place, to find what else is wrong
        sites = [] if client else [site_column(read_table(Path(name)))] if Path(name).is_file() else []
        raise DataError(_numbered([*problems, *(site.text for site in sites if site is not None)]))
    print(overview(dataset))
    if problems:
        count = "one more option" if len(problems) == 1 else f"{len(problems)} more options"
        print(f"\nA run needs {count}: {_numbered(problems)}")


def _more(table: Mapping[str, Any], error: BaseException | None) -> dict[str, Any]:
    """The options with which the rest of the table can be read; the same ones: nobody knows which."""
    while error is not None and not isinstance(error, PartError):
        error = error.__cause__
    further = {} if error is None else error.further
    both = {
        key: f"{table[key]},{new}" if key in table and key in ("drop", "categories") else new
        for key, new in further.items()
    }
    repeated = any(new in str(table.get(key, "")).split(",") for key, new in further.items())
    return dict(table) if repeated else {**table, **both}


def _numbered(problems: Sequence[str]) -> str:
    """One problem, or a list of several."""
    if len(problems) == 1:
        return problems[0]
    return "".join(f"\n{number}. {problem}" for number, problem in enumerate(problems, 1))


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
