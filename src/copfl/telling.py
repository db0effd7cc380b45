"""What copfl tells while it works: lines of the logger "copfl", for Python, notebooks and the command line alike.

A module tells by `logging.getLogger(__name__)`, and does not ask who hears it: `info` what is about to happen, and
`debug` how far it is, as often as it likes. `heard` says who hears it: a program by `log=`, a command on stderr. A
program that sets up `logging` itself hears it there, too, as much as its levels let through.
"""

import contextlib
import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Log = Callable[[str], None]
logger = logging.getLogger("copfl")
# Where one run tells of itself; a comparison has dozens of runs, and tells of them in its own words.
OF_ONE_RUN = ("copfl.experiment.preparation", "copfl.experiment.training", "copfl.experiment.progress")
FIRST, INTERVAL = 5, 30  # seconds until the first line of progress, and between two lines


class Pace:
    """When lines are printed: the first after FIRST seconds (a short run has none), then every INTERVAL."""

    def __init__(self) -> None:
        self.next = time.monotonic() + FIRST

    def is_due(self) -> bool:
        """Whether a line is to be printed now; the next one is then due after the interval."""
        now = time.monotonic()
        if now < self.next:
            return False
        self.next = now + INTERVAL
        return True


def to_somebody(line: str) -> None:
    """Prints the line on stderr; as `log=`, only where somebody looks at it: in a terminal or a notebook."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def heard(log: Log | None, but_of: tuple[str, ...] = (), at_any_pace: bool = False) -> Iterator[None]:
    """Inside, a function gets what copfl tells: each line of `info`, and of `debug` one from time to time.

    Args:
        log: Gets the lines; None: nobody does.
        but_of: Loggers whose lines it does not get.
        at_any_pace: It gets every line of `debug`, too.
    """
    if log is None or (log is to_somebody and not _is_looked_at()):
        yield
        return
    level, propagates = logger.level, logger.propagate
    handler = _Handler(log, but_of, None if at_any_pace else Pace())
    if propagates:
        handler.above = logger.getEffectiveLevel()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def heard_by_log(but_of: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: what the caller passes as `log=` hears what the function tells.

    Args:
        but_of: As of `heard`.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        usual = inspect.signature(function).parameters["log"].default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            log: Log | None = kwargs.get("log", usual)  # type: ignore[assignment]
            with heard(log, but_of):
                return function(*args, **kwargs)

        return call

    return decorated


def _is_looked_at() -> bool:
    """Whether stderr is a terminal or a notebook, and the program has not said itself who hears copfl."""
    return (sys.stderr.isatty() or hasattr(sys, "ps1")) and not logger.isEnabledFor(logging.INFO)


class _Handler(logging.Handler):
    """Gives lines to a function, and to the root's handlers what they would get without it."""

    def __init__(self, log: Log, but_of: tuple[str, ...], pace: Pace | None) -> None:
        super().__init__()
        self.log, self.but_of, self.pace = log, but_of, pace
        self.above: int | None = None  # the level from which on the root's handlers get it; None: never

    def emit(self, record: logging.LogRecord) -> None:
        if self.above is not None and record.levelno >= self.above:
            logging.root.handle(record)
        is_now = record.levelno > logging.DEBUG or self.pace is None or self.pace.is_due()
        if record.name not in self.but_of and is_now:
            self.log(record.getMessage())
