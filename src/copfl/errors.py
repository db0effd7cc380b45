"""The exceptions of copfl.

CopflError            the user can fix it; the command line prints its message and exits with 2
├── UsageError        an option, a name or a value that is not allowed
├── DataError         a data set that is missing, damaged, or does not fit the request
├── RunError          a run folder that is missing, damaged, in use, or of another run
└── WireError         a message that is damaged, or of another run, round, model or version
Stopped               by Ctrl-C; its message explains how to continue
CopflWarning          what the user should know about a result, at the user's line

A message states what was wrong with the input, what is allowed, and what to do.
"""

import contextlib
import difflib
import importlib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

# The packages of each extra that a user needs; those that develop copfl have others.
EXTRAS = {
    "adapters": ("transformers", "peft"),
    "cluster": ("submitit", "distributed"),
    "flower": ("flwr", "httpx", "cryptography", "pycryptodome", "uvicorn", "prometheus-client"),
    "hf": ("datasets",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "pandas": ("pandas",),
    "plots": ("matplotlib",),
    "privacy": ("dp-accounting",),
    "report": ("jinja2",),
    "search": ("optuna",),
    "tensorboard": ("tensorboard",),
    "vision": ("torchvision", "timm"),
}


class CopflError(Exception):
    """An error that the user can fix."""


class UsageError(CopflError):
    """An option, a name or a value that is not allowed."""


class DataError(CopflError):
    """A data set that is missing, damaged, or does not fit the request."""


class PartError(DataError):
    """Of one part of a table. With other options the rest can be read, and what else is wrong be found."""

    def __init__(self, message: str, **further: str) -> None:
        super().__init__(message)
        self.further = further  # options of the table; columns to drop are added to those that are dropped


class RunError(CopflError):
    """A run folder that is missing, damaged, in use, or of another run."""


class WireError(CopflError):
    """A message that is damaged, or of another run, round, model or version."""


class CopflWarning(RuntimeWarning):
    """What the user should know about the data, the training or a result."""


AGAIN = "the same command continues from here"


class Stopped(BaseException):
    """The user pressed Ctrl-C; like KeyboardInterrupt not an Exception, so that no handler catches it."""


@contextlib.contextmanager
def stoppable(how_to_continue: str = "") -> Iterator[None]:
    """Raises Stopped on Ctrl-C, also where the interrupt makes torch raise an error of its own.

    Interrupted while it enters or leaves vmap, torch loses count of its levels and fails.
    """
    try:
        yield
    except Stopped:
        raise
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__context__
        if cause is None:
            raise
        raise Stopped(how_to_continue) from None


@contextlib.contextmanager
def raised_as(kind: type[CopflError], message: str, *caught: type[Exception]) -> Iterator[None]:
    """An error of this kind in place of those caught, whose text replaces {} in the message."""
    try:
        yield
    except caught as error:
        text = getattr(error, "strerror", None) or (repr(error) if isinstance(error, KeyError) else error)
        raise kind(message.replace("{}", str(text))) from error


OF_THE_SHELL = re.compile(r"""[\s"'`$&|;<>()*?!#\\]""")  # no argument has these unless it is in quotes
COMMAND_LINE = "COPFL_COMMAND_LINE"  # set in the environment, and so in child processes, by the command line
# The modules of the user's that may be imported now, see `settings.named_code`: a command that is advised names them.
NAMED: ContextVar[frozenset[str]] = ContextVar("NAMED", default=frozenset())


@contextlib.contextmanager
def on_command_line() -> Iterator[None]:
    """Inside, messages name options of the command line instead of arguments in Python."""
    before = os.environ.get(COMMAND_LINE)
    os.environ[COMMAND_LINE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[COMMAND_LINE]


def how_to_set(key: str, value: object, flag: str = "") -> str:
    """A setting as the user gives it: `--lr 0.1` or `--set optimizer.lr=0.1`, in Python `lr=0.1`."""
    table, _, name = key.rpartition(".")
    if COMMAND_LINE in os.environ:
        as_typed = str(value).lower() if isinstance(value, bool) else str(value)
        argument = as_typed if flag else f"{key}={as_typed}"
        written = shlex.quote(argument) if OF_THE_SHELL.search(argument) else argument
        return f"{flag or '--set'} {written}"
    text = repr(value) if isinstance(value, str) else str(value)
    if name == "name":
        return f"{table}={text}"
    if name == "kind":
        return f"task={text}"
    if key in (
        "data.target",
        "data.client",
        "data.text",
        "data.group",
        "data.time",
        "data.event",
        "data.start",
    ):
        return f"{name}={text}"
    if table in ("algorithm", "data", "model", "partition"):
        return f"{table}_options={{{name!r}: {text}}}"
    if table in ("task", "server"):
        return f"{table}={{{name!r}: {text}}}"
    return f"{name}={text}"


def option(name: str) -> str:
    """An argument without a value, as the user writes it: `--out`, in Python `out=`.

    Args:
        name: Its name in Python.
    """
    return f"--{name.replace('_', '-')}" if COMMAND_LINE in os.environ else f"{name}="


def in_words(of_command_line: str, of_python: str) -> str:
    """What the user reads: the first on the command line, the second in Python."""
    return of_command_line if COMMAND_LINE in os.environ else of_python


def to_resume(folder: object) -> str:
    """How to continue a run, as the user writes it: `copfl resume runs/a`, in Python `copfl.resume('runs/a')`.

    Args:
        folder: Of the run.
    """
    modules = f", code={own}" if (own := named_modules()) else ""
    return in_words(f"`copfl resume {folder}{with_code()}`", f"`copfl.resume({str(folder)!r}{modules})`")


def to_repeat(folder: object, **settings: object) -> str:
    """How to run the settings of a run folder again, as the user writes it.

    Args:
        folder: Of the run.
        settings: Of [run], that are other ones.
    """
    path = f"{folder}/run.toml"
    words = "".join(f" --set run.{name}={str(value).lower()}" for name, value in settings.items())
    layer = f", {{'run': {settings}}}" if settings else ""
    modules = f", code={own}" if (own := named_modules()) else ""
    in_python = f"`copfl.run(copfl.complete(tomllib.load(open({path!r}, 'rb')){layer}){modules})`"
    return in_words(f"`copfl run -c {path}{words}{with_code()}`", in_python)


def named_modules() -> list[str]:
    """The user's modules that this command named, without those of the program itself."""
    return sorted(module for module in NAMED.get() if module.partition(".")[0] not in ("copfl", "__main__"))


def with_code() -> str:
    """The options that a command needs to read a folder of this one, such as " --code mymodule"; mostly empty."""
    return "".join(f" --code {module}" for module in named_modules())


def warn(text: str) -> None:
    """A CopflWarning at the line of the user that called copfl.

    Args:
        text: What the user should know.
    """
    ours = (str(Path(__file__).parent), contextlib.__file__)
    frame, level = sys._getframe(), 1  # Python 3.12 has skip_file_prefixes
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, CopflWarning, stacklevel=level)


def library(name: str, why: str = "") -> Any:
    """An imported library of EXTRAS; UsageError says how to install it."""
    top = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: of an operator library of another torch
        needed = f"{why} needs {top}, which" if why else top
        reason = " ".join(str(error).split())[:150]
        # huggingface_hub, which is not listed, comes with transformers.
        extra = next((extra for extra, packages in EXTRAS.items() if top in packages), "adapters")
        install = f"install it with `pip install 'copfl[{extra}]'`"
        raise UsageError(f"{needed} cannot be imported ({reason}); {install}") from error


def unknown(kind: str, given: object, known: Iterable[str]) -> UsageError:
    """The error for an unknown name, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else "."
    return UsageError(f'no {kind} "{given}"{hint} Known: {", ".join(names) or "none"}')


def at_least(low: float, **numbers: float) -> None:
    """UsageError for a number that is too small, infinite or nan."""
    for name, number in numbers.items():
        if not low <= number < float("inf"):
            raise UsageError(f"{name}={number} must be a number of at least {low}")


def above(low: float, **numbers: float) -> None:
    """UsageError for a number that is not larger than this, infinite or nan."""
    for name, number in numbers.items():
        if not low < number < float("inf"):
            raise UsageError(f"{name}={number} must be a number above {low}")


def below_one(**numbers: float) -> None:
    """UsageError for a number that is not in [0, 1)."""
    for name, number in numbers.items():
        if not 0 <= number < 1:
            raise UsageError(f"{name}={number} must be at least 0 and below 1")


def fraction_of(what: str, **numbers: float) -> None:
    """UsageError for a number that is not in (0, 1]."""
    for name, number in numbers.items():
        if not 0 < number <= 1:
            raise UsageError(f"{name}={number} must be above 0 and at most 1: it is a fraction of {what}")


def one_of(known: Collection[str], **names: str) -> None:
    """UsageError for an unknown name."""
    for kind, given in names.items():
        if given not in known:
            raise unknown(kind, given, known)
