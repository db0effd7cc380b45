"""Options that several commands share, the settings that they describe, and help in titled groups."""

from __future__ import annotations

import functools
import inspect
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
import typer
from typer.core import TyperCommand

Tables = dict[str, dict[str, Any]]  # by title, as in a run.toml
F = TypeVar("F", bound=Callable[..., None])

TABLE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "options.toml").read_text("utf-8"))
PANELS = ("Arguments", "Data", "Model", "Training", "Federation", "Robustness", "Output", "Options")
TYPES: dict[str, type] = {"str": str, "bool": bool, "int": int, "float": float}
SETTINGS = {name: row[3] for name, row in TABLE["training"].items()}  # TABLE.KEY by option
SETTINGS |= {"algorithm": "algorithm.name", "seed": "run.seed"}
ANY = ["Training", "--set -s", "Any setting as TABLE.KEY=VALUE, such as copfl.rate=0.15; repeatable."]


def command(app: typer.Typer, group: str = "commands", **how: Any) -> Callable[[F], F]:
    """Adds a function to the commands of `app`, with its options as options.toml describes them.

    The function may have an argument `tables`: the settings that the options of every training describe.
    """

    def add(function: F) -> F:
        documented = {"shared": {}, function.__name__: {}, **TABLE.get(group, {})}
        rows = {**TABLE["shared"], **documented["shared"], **documented[function.__name__]}
        given = inspect.signature(function, eval_str=True).parameters
        options = [
            p.replace(annotation=_option(p.annotation, rows[p.name]))
            for p in given.values()
            if p.name != "tables"
        ]
        training = _training_options() if "tables" in given else {}
        optional = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=None)
        options += [optional(name, annotation=hint) for name, hint in training.items()]

        @functools.wraps(function)
        def called(**values: Any) -> None:
            settings = {name: values.pop(name) for name in training}
            function(**values, **({"tables": tables_of(**settings)} if training else {}))

        called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in options}
        app.command(**{"cls": Command, **how})(called)
        return function

    return add


def _option(hint: Any, row: Sequence[str]) -> Any:
    """The type of a parameter with its place and its text in the help."""
    panel, names, text, *_ = row
    if panel == "Arguments":
        return Annotated[hint, typer.Argument(help=text)]
    return Annotated[hint, typer.Option(*names.split(), help=text, rich_help_panel=panel, show_default=False)]


def _training_options() -> dict[str, Any]:
    types = {"data_dir": _option(Path | None, TABLE["shared"]["data_dir"])}
    for name, row in TABLE["training"].items():
        types[name] = _option(TYPES[row[4] if len(row) > 4 else "str"] | None, row)
    return {**types, "settings": _option(list[str] | None, ANY)}


def tables_of(*, data_dir: Path | None = None, settings: list[str] | None = None, **options: Any) -> Tables:
    """The tables of run.toml that the options of `SETTINGS` describe; --set overrides them."""
    from copfl.experiment.config import setting

    values = [(*SETTINGS[name].split("."), value) for name, value in options.items()]
    values += [("data", "dir", None if data_dir is None else str(data_dir)), *map(setting, settings or [])]
    tables: Tables = {}
    for title, key, value in values:
        if value is not None:
            tables.setdefault(title, {})[key] = value
    return tables


class Command(TyperCommand):
    """A command whose help lists its options in titled groups, as plain text in a terminal and in a pipe."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in PANELS}
        for parameter in self.get_params(ctx):
            line = parameter.get_help_record(ctx)
            usual = "Arguments" if isinstance(parameter, click.Argument) else "Options"
            if line is not None:
                groups[getattr(parameter, "rich_help_panel", None) or usual].append(line)
        for title, lines in groups.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


def help_without_command(context: typer.Context) -> None:
    """Prints the help of a group of commands that was called without one."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def logger(quiet: bool) -> Callable[[str], None]:
    """A function that prints a line about the work that is done, to stderr; nothing, if `quiet`."""
    return lambda text: None if quiet else print(text, file=sys.stderr, flush=True)


def data_name(tables: Tables) -> str:
    """The name of the data set, for the name of a folder."""
    return Path(str(tables.get("data", {}).get("name", "digits"))).stem.replace(":", "-")


def progress(title: str, count: str, hidden: bool = False, *, transient: bool = False) -> Any:
    """A progress bar of rich with one of its columns that count; without a terminal it shows nothing."""
    from rich import progress as rich
    from rich.console import Console

    columns = rich.TextColumn(title), rich.BarColumn(20), getattr(rich, count)()
    left = rich.TimeRemainingColumn(compact=True)
    disable = hidden or not sys.stderr.isatty()
    console = Console(stderr=True)
    return rich.Progress(*columns, left, console=console, transient=transient, disable=disable)
