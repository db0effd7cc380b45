"""The options of commands: options of settings are derived from the records, and shared ones are here.

A command is a function with a real signature. One that trains has a parameter `line: Tables`, which
`training` replaces by an option for every setting that has names such as "--lr", and by --set for the others.
"""

import contextlib
import functools
import inspect
import logging
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import click
import typer
from typer.core import TyperCommand

from copfl.settings.record import declared
from copfl.settings.schema import KINDS
from copfl.settings.toml import Tables as Tables
from copfl.settings.toml import assignment
from copfl.telling import heard

Function = Callable[..., None]
F = TypeVar("F", bound=Function)

WHOLE = 1000  # characters of a sentence in the help of a group, which is not cut off
PANELS = ("Arguments", "Data", "Model", "Training", "Federation", "Robustness", "Output", "Options")


def option(panel: str, help: str, names: str = "") -> Any:
    """An option of a command.

    Args:
        panel: Its group in the help, one of PANELS.
        help: A sentence, with the default.
        names: Such as "--out -o"; empty: the parameter's.
    """
    return typer.Option(*names.split(), help=help, rich_help_panel=panel, show_default=False)


CHECKS = "copfl.checks"  # in the context of a command: what it does first


def argument(help: str, check: str = "") -> Any:
    """An argument of a command.

    Args:
        help: A sentence.
        check: The function of `federation.protocol.app_folder` that raises a CopflError where the folder is none of
            the command's: before what the command does is imported.
    """

    def checked(context: typer.Context, folder: Path) -> Path:
        context.meta.setdefault(CHECKS, []).append((check, folder))
        return folder

    return typer.Argument(help=help, callback=checked if check else None)


Out = Annotated[
    Path | None,
    option("Output", "Folder of runs and tables; finished runs in it are used again.", "--out -o"),
]
Quiet = Annotated[bool, option("Output", "Print nothing but errors.", "--quiet -q")]
Verbose = Annotated[
    bool, option("Output", "Print everything that was found out, and not only what decides.", "--verbose -v")
]
Json = Annotated[bool, option("Output", "Print the result as one JSON object.", "--json")]
RunPath = Annotated[Path, argument("A run folder.")]
Seeds = Annotated[str | None, option("Training", "Seeds, such as 0,1,2 or 0-4; default: 0,1,2.")]
Last = Annotated[
    int | None, option("Output", "Average over the last N evaluations; default: the last third, at most 5.")
]
Jobs = Annotated[
    int | None,
    option("Training", "Runs at a time; default: one per core, on a GPU as its memory allows.", "--jobs -j"),
]
On = Annotated[
    str | None,
    option("Training", "A cluster: slurm, slurm:PARTITION or dask:ADDRESS; default: this machine."),
]
Plots = Annotated[bool, option("Output", "Draw pictures with matplotlib.  [default: plots]")]
DataDir = Annotated[
    Path | None, option("Data", "Folder of the data sets; default: the environment variable COPFL_DATA.")
]
Client = Annotated[
    str | None,
    option(
        "Model", 'The client whose model is used: its number, from 0, its name in the data, or "0 (name)".'
    ),
]
OfServer = Annotated[
    bool, option("Model", "The global model instead, as a new client receives it; default: off.", "--global")
]
BeforeTraining = Annotated[
    bool,
    option(
        "Model",
        "The client's model after the last aggregation, before it trains again, from the run's checkpoint "
        "and data; default: off, the one that the table scores.",
        "--before-training",
    ),
]
Track = Annotated[list[str] | None, option("Output", "Tracker: tensorboard, mlflow or wandb; repeatable.")]


# Options of settings


class SettingOption(NamedTuple):
    """A setting as an option: the parameter that typer reads, and the table and key that it sets."""

    parameter: inspect.Parameter
    kind: str
    key: str


def settings(
    command: str, kinds: Mapping[str, type[Any]] = KINDS, helps: Mapping[str, str] | None = None
) -> Iterator[SettingOption]:
    """The settings of these tables that are options of a command, in the order of the records.

    Args:
        command: The name of its function.
        kinds: The tables.
        helps: The text of a path, with its default, where it has another meaning in the command.
    """
    for kind, record in kinds.items():
        hints = typing.get_type_hints(record)
        for field in declared(record):
            about = field.metadata
            if not about["names"] or command in about["not_in"].split():
                continue
            hint = hints[field.name]
            alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            names = about["names"]
            type_on_line = next((plain for plain in (bool, int, float) if plain in alternatives), str)
            default = about["shown"] or ("none" if field.default in (None, "", ()) else f"{field.default}")
            if type_on_line is bool and not about["shown"]:
                default = "on" if field.default else "off"
            text = f"{about['help'].rstrip('.')}; default: {default}."
            text = (helps or {}).get(f"{kind}.{field.name}", text)
            parameter = inspect.Parameter(
                names.partition("/")[0].split()[0].lstrip("-").replace("-", "_"),
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[type_on_line | None, option(about["panel"], text, names)],
            )
            yield SettingOption(parameter, kind, field.name)


MORE = Annotated[
    list[str] | None,
    option(
        "Training", "Any setting as TABLE.KEY=VALUE, such as algorithm.rate=0.15; repeatable.", "--set -s"
    ),
]


CODE = Annotated[
    list[str] | None,
    option(
        "Model",
        "A module of code that a file or folder here may name, such as mypackage.nets; repeatable; default: none, as "
        "that runs it.",
        "--code",
    ),
]
_CODE = inspect.Parameter("code", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=CODE)


def _replaced(function: F, without: str, more: Iterable[inspect.Parameter], call: Callable[..., None]) -> F:
    """The command `call`, with the parameters of `function` but for one, and more."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != without]
    hints = typing.get_type_hints(function, include_extras=True)
    every = [
        p.replace(annotation=hints.get(p.name, p.annotation), kind=p.KEYWORD_ONLY)
        for p in (*parameters, *more)
    ]
    called = functools.wraps(function)(call)
    called.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in every}
    return called  # type: ignore[return-value]


def reading(function: F) -> F:
    """Adds --code to a command that reads folders or files: the only way in which they get to run code."""

    def called(code: list[str] | None, **values: Any) -> None:
        from copfl.settings import named_code

        named_code.name(code or [])
        function(**values)

    return _replaced(function, "", [_CODE], called)


def training(
    *,
    kinds: Mapping[str, type[Any]] = KINDS,
    helps: Mapping[str, str] | None = None,
    has_rows: bool = False,
) -> Callable[[F], F]:
    """Replaces the parameter `line` of a command by the options of its `settings`.

    Args:
        kinds: The tables of settings.
        helps: Other helps, by option.
        has_rows: Whether a table may have the name of an algorithm, whose settings it has; the command checks it.
    """

    def with_options(function: F) -> F:
        derived = list(settings(function.__name__, kinds, helps))
        more = inspect.Parameter("more", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=MORE)

        def called(**values: Any) -> None:
            from copfl.settings import first_look, named_code

            line: Tables = {}
            for one in derived:
                if (value := values.pop(one.parameter.name)) is not None:
                    line.setdefault(one.kind, {})[one.key] = value
            for kind, key, value in map(assignment, values.pop("more") or []):
                line.setdefault(kind, {})[key] = value
            first_look.look({kind: line[kind] for kind in line if kind in kinds or not has_rows}, kinds)
            named_code.name(values.pop("code") or [], named_code.modules_in(line))
            function(line=line, **values)

        return _replaced(function, "line", [*(one.parameter for one in derived), more, _CODE], called)

    return with_options


def check_algorithms(rows: Iterable[str]) -> None:
    """SettingError for a misspelled algorithm; without torch, so their options are not checked here.

    Args:
        rows: Such as "copfl,fedavg:lr=0.1".
    """
    from copfl.settings import first_look

    words = [word.strip() for row in rows if not set("[\"'") & set(row) for word in row.split(",")]
    for name, _, options in (word.partition(":") for word in words):
        if name != "all" and ("=" in options or not options):  # else "module:attribute"
            first_look.check_algorithm_name(name)


class Command(TyperCommand):
    """A command whose help lists its options in titled groups, as plain text in a terminal and in a pipe."""

    def invoke(self, ctx: click.Context) -> Any:
        for check, folder in ctx.meta.pop(CHECKS, ()):
            from copfl.federation.protocol import app_folder

            getattr(app_folder, check)(folder)
        return super().invoke(ctx)

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


class PanelGroup(typer.core.TyperGroup):
    """A group of commands whose help lists them under the titles of their panels, with whole sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, click.Command]]] = {}
        for name in self.list_commands(ctx):
            if (command := self.get_command(ctx, name)) is not None and not command.hidden:
                panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(
                    (name, command)
                )
        longest = max((len(name) for lines in panels.values() for name, _ in lines), default=0)
        for title, lines in panels.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(longest), command.get_short_help_str(WHOLE)) for name, command in lines]
                )


def add_panels(app: typer.Typer, panels: Mapping[str, Iterable[Function]]) -> None:
    """Adds commands to a group, in this order.

    Args:
        app: The group.
        panels: The commands, by the title under which the help lists them.
    """
    for title, functions in panels.items():
        for function in functions:
            app.command(cls=Command, rich_help_panel=title)(function)


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
    """A progress bar of rich with one of its columns that count; without a terminal it shows nothing.

    Args:
        title: Before the bar.
        count: The column that counts.
        hidden: Whether nothing is shown.
        transient: Whether the bar leaves no trace when it is done.
    """
    from rich import progress as rich
    from rich.console import Console

    columns = rich.TextColumn(title), rich.BarColumn(20), getattr(rich, count)()
    left = rich.TimeRemainingColumn(compact=True)
    disable = hidden or not sys.stderr.isatty()
    console = Console(stderr=True)
    return rich.Progress(*columns, left, console=console, transient=transient, disable=disable)


@contextlib.contextmanager
def counted(title: str, unit: str, hidden: bool) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A function that takes how much there is to do, and gives one that takes how much more is done.

    In a terminal it is a bar that leaves no trace, elsewhere a line from time to time.

    Args:
        title: Of the work.
        unit: What is counted, such as "round".
        hidden: Whether nothing is shown.
    """
    is_terminal = sys.stderr.isatty()  # asked before rich takes its place
    shown = progress(f"{title}, {unit}", "MofNCompleteColumn", hidden, transient=True)
    with shown as bar, heard(None if is_terminal else logger(hidden)):
        job = bar.add_task(title, total=None)

        def start(total: int) -> Callable[[int], None]:
            if not is_terminal:
                from copfl.experiment.progress import counted as by_lines

                return by_lines(title, unit, total, logging.getLogger(__name__).debug)
            bar.update(job, total=total)
            return functools.partial(bar.advance, job)

        yield start
