"""The command line. Nothing here knows how to train; torch is imported only by the commands that need it."""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import click
import typer

from copfl.cli import (
    audit,
    bench,
    compare,
    data,
    doctor,
    models,
    options,
    report,
    reproduce,
    run,
)
from copfl.cli.federate import commands as federate
from copfl.cli.site import commands as site
from copfl.errors import CopflError, Stopped, UsageError, on_command_line, one_of, stoppable
from copfl.experiment import process
from copfl.foreign import printable
from copfl.settings import named_code
from copfl.settings.checking import unknown_key

typer.core.HAS_RICH = False  # plain help: it imports nothing more, and looks the same in a pipe


class Commands(typer.core.TyperGroup):
    """All commands. A signal that ends one is Stopped.

    Of a KeyboardInterrupt typer would end with 130, whatever the signal, in silence.
    """

    def invoke(self, ctx: click.Context) -> Any:
        with stoppable(), named_code.scope():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
app.add_typer(data.app, name="data")
app.add_typer(site.app, name="site")
app.add_typer(federate.app, name="federate")
add = app.command(cls=options.Command)
add(run.run)
add(options.reading(run.resume))


def main() -> NoReturn:
    """Runs the command line; an error of the user is one paragraph on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for names that the terminal cannot show
    code: object = 2
    received = _interrupted_by_signals()
    try:
        with stoppable(), on_command_line(), process.environment():
            _check_torchrun()
            code = app(standalone_mode=False, prog_name="copfl")
            sys.stdout.flush()
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "copfl"
        # Typer suggests a command, and so do some versions of click.
        message = re.sub(r"(Did you mean [^?]*\?)(\s+\1)+", r"\1", error.format_message())
        if isinstance(error, click.NoSuchOption) and error.ctx is not None:
            known = [
                name for parameter in error.ctx.command.params for name in parameter.opts if name[:2] == "--"
            ]
            message = str(unknown_key(error.option_name, None, known))
        if "unexpected extra argument" in message:
            message += ": put a value with spaces into quotes, such as 'data.drop=first name,age'"
        end = "" if message.endswith(("?", ".")) else "."
        _print_error(f"{message}{end} `{command} --help` describes the options")
    except click.ClickException as error:
        _print_error(error.format_message())
    except (click.Abort, Stopped) as stopped:
        _print_error("; ".join(filter(None, ("stopped", str(stopped)))))
        code = 128 + (received[-1] if received else signal.SIGINT)
    except BrokenPipeError:  # the reader of our output has ended
        _discard_output()
        code = 0
    except CopflError as error:
        _print_error(str(error))
    except OSError as error:
        _print_error(f"{error.filename or 'the output'}: {error.strerror or error}")
        _discard_output()
        code = 2  # also where the command had ended, and its buffered output could not be written
    sys.exit(code if isinstance(code, int) else 0)


def _interrupted_by_signals() -> list[int]:
    """The signals that arrive. One that asks the process to end has the effect of Ctrl-C."""
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, interrupt)
    return received


def _check_torchrun() -> None:
    """UsageError if torchrun started a command that is not for several processes."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.argv[1:2] not in (["run"], ["resume"]):
        command = " ".join(["copfl", *sys.argv[1:2]])
        raise UsageError(f"torchrun starts `copfl run` and `copfl resume`; start `{command}` without it")


def _print_error(message: str) -> None:
    """Prints the message as one paragraph. Of several ranks, rank 0 prints what they have in common."""
    ranks = sys.modules.get("copfl.engine.ranks")
    common = ranks is None or not ranks.joined() or message.startswith("stopped")
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0" and common:
        return
    print(printable("copfl: " + " ".join(message.split())), file=sys.stderr)


def _discard_output() -> None:
    """Keeps Python from writing to stdout again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


LISTS = ("algorithms", "datasets", "models", "optimizers", "partitions")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, models, partitions or optimizers.")],
) -> None:
    """List algorithms, data sets and so on, one line each."""
    one_of(LISTS, list=what)  # before torch is imported
    from copfl.algorithms import ALGORITHMS
    from copfl.data.clients.schemes import SCHEMES
    from copfl.data.sets import datasets
    from copfl.models import MODELS, SOURCES
    from copfl.settings.components import OPTIMIZERS

    def first_lines(registry: Any) -> dict[str, str]:
        return {name: (factory.__doc__ or "").strip().split("\n")[0] for name, factory in registry.items()}

    modules = {name: sys.modules[algorithm.__module__] for name, algorithm in ALGORITHMS.items()}
    installed = {name: f"{value} of an installed package" for name, value in named_code.plugins().items()}
    lists = {
        "algorithms": installed | first_lines(modules),
        "datasets": first_lines(datasets.DATASETS),
        "models": first_lines(MODELS) | SOURCES,
        "partitions": first_lines(SCHEMES),
        "optimizers": first_lines(OPTIMIZERS),
    }
    width = max(map(len, lists[what]))
    for name, line in sorted(lists[what].items()):
        print(f"{name:{width}}  {line}")


# After the commands that every user needs.
Command = Callable[..., None]
RUNNING: list[Command] = [compare.compare, compare.sweep, compare.choose]
READING: list[Command] = [bench.bench, report.report, models.predict, models.evaluate, models.export]
READING += [models.personalize, audit.audit]
OTHERS: list[Command] = [report.watch, doctor.doctor, run.schema]
for command in [*RUNNING, *map(options.reading, READING), *OTHERS]:
    add(command)
app.command(cls=options.Command, context_settings=reproduce.PASSED_ON)(reproduce.reproduce)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions of copfl, torch and CUDA.")
    ] = False,
) -> None:
    """Personalised federated learning: do your sites gain from training together,
    and what model does each get?
    """
    if version:
        print(doctor.version_line())
        raise typer.Exit
    options.help_without_command(context)
