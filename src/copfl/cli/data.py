"""`copfl data`: describe the user's data, check which data sets exist, and download one."""

import os
from pathlib import Path

import typer

from copfl.cli import options
from copfl.errors import DataError, UsageError

app = typer.Typer(help="Data sets: fetch and check them.", rich_markup_mode=None)
app.callback(invoke_without_command=True)(options.help_without_command)


@options.command(app, "data", cls=None)
def check(given: options.Given) -> None:
    """Check which files of a data set exist, and that they are complete."""
    from copfl.data import datasets

    if given.name is not None:
        print(datasets.check(given.name, _folder(given.data_dir)))
        return
    for known in datasets.DATASETS:
        try:
            print(datasets.check(known, _folder(given.data_dir)), flush=True)
        except DataError as error:
            print(f"not usable: {error}", flush=True)


@options.command(app, "data")
def describe(given: options.Given) -> None:
    """Print what is understood of a data set: samples, targets, clients, missing values, who has what."""
    from copfl.data.overview import overview
    from copfl.data.tables import READERS
    from copfl.experiment.components import build_data, resolve_data

    tables = options.tables_of(data_dir=given.data_dir, settings=given.settings)
    data = {**given.only("name target client text"), **tables.get("data", {})}
    if Path(given.name).suffix in READERS:
        data.setdefault("missing", "fill")  # so that they are counted; a run refuses them
    print(overview(build_data(resolve_data(data))))


@options.command(app, "data", cls=None)
def get(given: options.Given) -> None:
    """Download a data set and check it; an interrupted download continues."""
    from copfl.data import download

    folder = _folder(given.data_dir)
    if folder is None:
        raise UsageError(
            "name the folder to put it in: --data-dir DIR, or the environment variable COPFL_DATA"
        )
    with options.progress(given.name, "DownloadColumn") as bar:
        job = bar.add_task(given.name, total=None)

        def show(done: int, total: int | None) -> None:
            bar.update(job, completed=done, total=total)

        path = download.get(given.name, folder, show, url=given.url)
    print(path)
    if not download.is_pinned(given.name):
        print("No checksum of it is published, so the file was not compared with one.")


def _folder(data_dir: Path | None) -> Path | None:
    named = os.environ.get("COPFL_DATA")
    return data_dir or (Path(named) if named else None)
