"""docs/architecture.md lists the functions that `--lr` visits; here the number is followed through a run."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

import copfl
from copfl.cli import run as command
from copfl.cli.main import app
from copfl.core.optim import Sgd
from copfl.settings.record import declared
from copfl.settings.schema import Optimizer

SOURCE = Path(copfl.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## The way of a setting")[2].partition("\n## ")[0]
PLACES = re.findall(r"^\d+\. `([\w.]+)`", SECTION, re.MULTILINE)
CHECKS = re.findall(r"`([\w.]+)`", SECTION.partition("only check it:")[2].partition("\n\n")[0])
OPENED = SECTION.partition("opens 28 functions more:")[2].partition("\nThen the")[0]
CALLERS = re.findall(r"`([\w.]+)`(?= >|\.$)", SECTION.partition("From there on")[2], re.MULTILINE)
RATE = 0.012345
LINE = [
    "run",
    "-a",
    "fedavg",
    "--optimizer",
    "sgd",
    "--lr",
    f"{RATE}",
    "--rounds",
    "1",
    "--set",
    "run.workers=1",
    "-q",
]


def has_rate(value: Any) -> bool:
    """Whether the value is the rate, as a number or as text, or has it inside."""
    if isinstance(value, str):
        return f"{RATE}" in value
    if isinstance(value, Mapping):
        return any(map(has_rate, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_rate, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(has_rate(getattr(value, f.name, None)) for f in dataclasses.fields(value))
    return isinstance(value, float) and value == RATE


@cache
def name_of(code: CodeType) -> str:
    """Such as "settings.complete.complete"; "" outside copfl. What a function defines inside is part of it."""
    path = Path(code.co_filename)
    if not path.is_relative_to(SOURCE) or code.co_name.startswith("<"):
        return ""
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    return f"{module}.{code.co_qualname.partition('.<locals>')[0]}"


def callers(frame: FrameType | None) -> list[FrameType]:
    return [] if frame is None else [frame, *callers(frame.f_back)]


class Way(NamedTuple):
    """The functions that receive the number until the optimizer has it, in the order in which they last receive it.

    One that hands it on returns it or waits for the optimizer to be made. Others only look at it, such as a
    check.
    """

    handing_on: list[str]
    looking: set[str]


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Way:
    received: dict[FrameType, str] = {}
    handed: set[str] = set()
    is_made = False

    def follow(frame: FrameType, event: str, result: Any) -> None:
        nonlocal is_made
        if is_made or event not in ("call", "return") or not (name := name_of(frame.f_code)):
            return
        if event == "call" and has_rate(dict(frame.f_locals)):
            received[frame] = name
            if frame.f_code is Sgd.__post_init__.__code__:
                above = [received[caller] for caller in callers(frame) if caller in received]
                handed.update(above)
                is_made = "experiment.preparation.prepare" in above
        elif event == "return" and frame in received and has_rate(result):
            handed.add(received[frame])

    monkeypatch.setattr(command, "_train", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    importlib.import_module("copfl.experiment.run")  # without a look at each import
    sys.setprofile(follow)
    try:
        app(LINE, standalone_mode=False)
    finally:
        sys.setprofile(None)
    assert is_made
    last_first = dict.fromkeys(name for name in reversed(received.values()) if name in handed)
    return Way([*reversed(last_first)], {*received.values()} - handed)


def test_the_page_lists_the_functions_that_hand_the_learning_rate_on(way: Way) -> None:
    assert "`settings.schema.Optimizer`" in SECTION
    assert "--lr" in {field.name: field.metadata["names"] for field in declared(Optimizer)}["lr"]
    last = "core.optim.Sgd.__post_init__"
    assert way.handing_on == [*PLACES, last]
    assert "passes twelve functions" in SECTION
    assert len(PLACES) == 12
    assert len(CHECKS) == 3
    assert {*CHECKS} - {last} <= way.looking


def test_the_page_counts_the_functions_that_are_opened_besides() -> None:
    names = re.findall(r"`(\w+(?:\.\w+)+)`", OPENED)
    assert len(names) == len(set(names)) == 28
    for name in names:
        parts = name.split(".")
        module = next(n for n in (len(parts) - 1, len(parts) - 2) if parts[n - 1].islower())
        assert attrgetter(".".join(parts[module:]))(
            importlib.import_module(f"copfl.{'.'.join(parts[:module])}")
        )


def test_the_page_lists_what_calls_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Reached(Exception):
        pass

    def step(*_: object, **__: object) -> None:
        names = [name_of(frame.f_code) for frame in reversed(callers(sys._getframe()))]
        listed.extend(name for name in names if name in CALLERS)
        raise Reached

    listed: list[str] = []
    monkeypatch.setattr(Sgd, "step", step)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Reached):
        app([*LINE, "--engine", "sequential"], standalone_mode=False)
    assert list(dict.fromkeys(listed)) == CALLERS
    assert len(CALLERS) == 7
