"""Everything copfl raises on purpose.

CopflError            what a person can mend; the command line prints its message and exits with 2
├── UsageError        an option, a name or a value that is not allowed
├── DataError         a data set that is missing, damaged, or does not fit what was asked of it
├── RunError          a run folder that is missing, damaged, in use, or of another run
└── WireError         a message that is damaged, or of another run, round, model or version
Stopped               by Ctrl-C; its message says how to go on

A message says what was wrong with what was given, what is allowed, and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Iterable, Iterator


class CopflError(Exception):
    """What a person can mend."""


class UsageError(CopflError):
    """An option, a name or a value that is not allowed."""


class DataError(CopflError):
    """A data set that is missing, damaged, or does not fit what was asked of it."""


class RunError(CopflError):
    """A run folder that is missing, damaged, in use, or of another run."""


class WireError(CopflError):
    """A message that is damaged, or of another run, round, model or version."""


AGAIN = "the same command goes on from here"


class Stopped(BaseException):
    """Somebody pressed Ctrl-C; like KeyboardInterrupt it is no Exception, so that nobody takes it for a failure."""


@contextlib.contextmanager
def stoppable(how_to_go_on: str = "") -> Iterator[None]:
    """Raises Stopped on Ctrl-C, also where torch was met in a place that then fails itself.

    Interrupted while it enters or leaves vmap, torch loses count of its levels and raises an error of its own.
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
        raise Stopped(how_to_go_on) from None


def unknown(kind: str, given: object, known: Iterable[str]) -> UsageError:
    """The error for a name nobody knows, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else "."
    return UsageError(f'no {kind} "{given}"{hint} Known: {", ".join(names) or "none"}')


def at_least(low: float, **numbers: float) -> None:
    """Raises the error for a number that is too small, or none at all."""
    for name, number in numbers.items():
        if not low <= number < float("inf"):
            raise UsageError(f"{name}={number} must be a number of at least {low}")


def above(low: float, **numbers: float) -> None:
    """Raises the error for a number that is not larger than this, or none at all."""
    for name, number in numbers.items():
        if not low < number < float("inf"):
            raise UsageError(f"{name}={number} must be a number above {low}")


def fraction_of(what: str, **numbers: float) -> None:
    """Raises the error for a number that is no share of anything, or nothing of it."""
    for name, number in numbers.items():
        if not 0 < number <= 1:
            raise UsageError(f"{name}={number} must be above 0 and at most 1: it is a share of {what}")


def one_of(known: Collection[str], **names: str) -> None:
    """Raises the error for a name nobody knows."""
    for kind, given in names.items():
        if given not in known:
            raise unknown(kind, given, known)
