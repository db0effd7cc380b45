"""`copfl data`: describe the user's data, check which data sets exist, and download one."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from copfl.cli import options

app = typer.Typer(help="Data sets: fetch and check them.", rich_markup_mode=None)
app.callback(invoke_without_command=True)(options.help_without_command)


@options.command(app, "data", cls=None)
def check(
    name: str | None = None,
    data_dir: Path | None = None,
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


@options.command(app, "data")
def describe(
    name: str,
    target: str | None = None,
    client: str | None = None,
    text: str | None = None,
    settings: list[str] | None = None,
    data_dir: Path | None = None,
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


@options.command(app, "data", cls=None)
def get(
    name: str,
    data_dir: Path | None = None,
    url: str | None = None,
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
