"""Options that several commands share, the settings that they describe, and help in titled groups."""

import functools
import inspect
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar

import click
import typer
from typer.core import TyperCommand

from copfl.experiment.config import setting

Tables = dict[str, dict[str, Any]]  # by title, as in a run.toml
F = TypeVar("F", bound=Callable[..., None])

TABLE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "options.toml").read_text("utf-8"))
PANELS = ("Arguments", "Data", "Model", "Training", "Federation", "Robustness", "Output", "Options")
TYPES: dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": float, "path": Path}
TYPES |= {"strs": list[str], "paths": list[Path]}
SETTINGS = {name: row[4] for name, row in TABLE["training"].items()}  # TABLE.KEY by option
SETTINGS |= {"algorithm": "algorithm.name", "seed": "run.seed"}


class Given(SimpleNamespace):
    """The values of a command's options, by name."""

    def only(self, names: str) -> dict[str, Any]:
        """Those of these names that are on the line."""
        values = {name: getattr(self, name) for name in names.split()}
        return {name: value for name, value in values.items() if value is not None}


def command(app: typer.Typer, group: str = "commands", **how: Any) -> Callable[[F], F]:
    """Adds a function to the commands of `app`, with its options as options.toml describes them.

    It is called with their values, and, if it has an argument `tables`, with the settings that the options of
    every training describe.
    """

    def add(function: F) -> F:
        own = TABLE[group][function.__name__]
        trains = "tables" in inspect.signature(function).parameters
        training_rows = TABLE["training"] if trains else {}
        rows = {**TABLE["shared"], **training_rows, **TABLE[group].get("shared", {}), **own}
        options = [_parameter(name, rows[name]) for name in own["options"].split()]
        names = ("data_dir", *TABLE["training"], "settings") if trains else ()
        training = [_parameter(name, rows[name]) for name in names]
        every = [*options, *training]

        @functools.wraps(function)
        def called(**values: Any) -> None:
            settings = {option.name: values.pop(option.name) for option in training}
            function(Given(**values), **({"tables": tables_of(**settings)} if training else {}))

        called.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        called.__annotations__ = {option.name: option.annotation for option in every}
        app.command(**{"cls": Command, **how})(called)
        return function

    return add


def _parameter(name: str, row: Sequence[str]) -> inspect.Parameter:
    """A row as the parameter that typer reads: its type, its default, its place and its text in the help."""
    panel, names, text, kind, *_ = row
    word, _, default = kind.partition("=")
    hint = TYPES[word.rstrip("!?")]
    value: Any = None if not default else default == "on" if hint is bool else hint(default)
    if kind == "bool":
        value = False
    required = word.endswith("!")
    shown: Any = typer.Argument(help=text)
    if panel != "Arguments":
        shown = typer.Option(*names.split(), help=text, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else value,
        annotation=Annotated[hint if required or value is not None else hint | None, shown],
    )


def tables_of(*, data_dir: Path | None = None, settings: list[str] | None = None, **options: Any) -> Tables:
    """The tables of run.toml that the options of `SETTINGS` describe; --set overrides them."""
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
