"""Lists in documents that a change of the code may forget: metrics, sections of a page, functions on a way."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from copfl.federation.operations.sections import sections
from copfl.federation.operations.watched import read
from copfl.measures.metrics import METRICS, USUAL_METRIC
from tests.federation.folders import ServerState

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("targets", "kind"),
    [
        ("classes", "classification"),
        ("labels, several per sample", "multilabel"),
        ("numbers", "regression"),
        ("next token", "next_token"),
        ("time until an event", "survival"),
    ],
)
def test_the_table_of_tasks_has_every_metric(targets: str, kind: str) -> None:
    (row,) = re.findall(rf"^\| {targets} \|.*", (DOCS / "tasks.md").read_text("utf-8"), re.MULTILINE)
    default, others = (re.findall(r"`(\w+)`", cell) for cell in row.split("|")[3:5])
    assert default == [USUAL_METRIC[kind]]
    assert {*default, *others} == {metric.name for metric in METRICS.values() if kind in metric.kinds}


def test_the_table_of_the_coordinators_page_has_every_section(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "clinic", rounds=1, benefit=True)
    state.start()
    state.begin_round(1)
    state.end_round(1)
    text = (DOCS / "operations.md").read_text("utf-8").partition("## The coordinator's page")[2]
    rows = re.findall(r"^\| ([^|]+) \|", text.partition("\n## ")[0], re.MULTILINE)
    named = {name for row in rows for name in row.split(", ")}
    # The first is called as its metric.
    assert {"Metric", *(section.short for section in [*sections(read(state.app))][1:])} <= named


def found(name: str) -> Any:
    """What a name such as "settings.facts.Facts.known" means in copfl; None if there is no such thing."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(["copfl", *parts[:count]]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part, None)
        return value
    return None


@pytest.mark.parametrize(
    ("way", "room"),
    [("setting", ""), ("row of a comparison", "comparison."), ("message at a node", "federation.")],
)
def test_every_function_on_a_way_exists(way: str, room: str) -> None:
    text = (DOCS / "architecture.md").read_text("utf-8").partition(f"## The way of a {way}\n")[2]
    names = re.findall(r"`([a-z]\w*(?:\.\w+)+)`", text.partition("\n## ")[0])
    assert len(names) > 15
    assert [name for name in names if found(name) is None and found(room + name) is None] == []


def test_the_number_of_functions_beside_the_way_of_a_setting() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8").partition("What nobody chose joins the number")[2]
    names = re.findall(r"`([a-z]\w*(?:\.\w+)+)`", text.partition("Then the optimizer is made")[0])
    assert f"opens {len({*names})} functions more" in text
