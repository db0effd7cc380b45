"""docs/architecture.md lists the functions that an entry of a comparison visits; here one is followed to its row."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import copfl
from copfl.comparison.compare import compare
from tests.comparison.small import base, clouds

SOURCE = Path(copfl.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## The way of a row of a comparison")[2].partition("\n## ")[0]
PLACES = re.findall(r"^\d+\. `([\w.]+)`", SECTION, re.MULTILINE)
RATE = 0.012345  # tells the entry from all else
END = "comparison.results.remarks.undefined_values"  # the first to read the finished rows


def has_entry(value: Any, depth: int = 0) -> bool:
    """Whether the value is the entry, what is made of it, or has it inside: all of these have its rate."""
    if depth > 6:
        return False
    if isinstance(value, str):
        return f"{RATE}" in value
    if isinstance(value, Mapping):
        return any(has_entry(inner, depth + 1) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(has_entry(inner, depth + 1) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(has_entry(getattr(value, f.name, None), depth + 1) for f in dataclasses.fields(value))
    return isinstance(value, float) and value == RATE


@cache
def name_of(code: CodeType) -> str:
    """Such as "comparison.compare.compare"; "" of other rooms. What a function defines inside is part of it."""
    path = Path(code.co_filename)
    if not path.is_relative_to(SOURCE / "comparison") or code.co_name.startswith("<"):
        return ""
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    return f"{module}.{code.co_qualname.partition('.<locals>')[0]}"


def is_property(name: str) -> bool:
    """Whether a name is of a property: it shows the entry, and nothing comes of it."""
    module, _, attribute = name.rpartition(".")
    if not module.rpartition(".")[2][:1].isupper():
        return False
    module, _, kind = module.rpartition(".")
    return isinstance(vars(getattr(importlib.import_module(f"copfl.{module}"), kind))[attribute], property)


def test_the_page_lists_the_functions_that_hand_an_entry_on(tmp_path: Path) -> None:
    received: dict[FrameType, str] = {}
    order: dict[str, None] = {}
    handed: set[str] = set()
    is_over = False

    def follow(frame: FrameType, event: str, result: Any) -> None:
        nonlocal is_over
        if is_over or event not in ("call", "return") or not (name := name_of(frame.f_code)):
            return
        if name == END:
            is_over = True
        elif event == "call" and has_entry(dict(frame.f_locals)):
            received[frame] = name
            order.setdefault(name)
        elif event == "return" and frame in received and has_entry(result):
            handed.add(received[frame])

    tables = base(clouds(tmp_path / "clouds.npz"), rounds=1)
    sys.setprofile(follow)
    try:
        compare([f"fedavg:lr={RATE}", "local"], seeds=[0], tune={}, out=tmp_path / "out", base_tables=tables)
    finally:
        sys.setprofile(None)
    assert is_over
    first = "comparison.compare.compare"  # it returns when the row is there
    assert [first, *(name for name in order if name in handed and not is_property(name))] == PLACES
    assert len(PLACES) < 40
