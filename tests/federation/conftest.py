"""What nodes and servers log, for the few tests that read it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines of Flower's log from now on.

    Pytest's `caplog` has a handler of every logger in each phase of every test, which took a tenth of the time of
    small tests, so pyproject.toml leaves it out.
    """
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, kept = logging.getLogger("flwr"), Kept()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(kept)
