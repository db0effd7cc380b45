"""Every row of the page for security officers names a test that exists."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from copfl.federation.policy.record import Policy

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "who-can-do-what.md").read_text()
NAMED = re.findall(r"`(\w+/\w+\.py)::(\w+)`", PAGE)
# What a node answers is compared with the code in `node/test_what_a_node_answers.py`.
ATTACKS = PAGE.partition("## What a node answers")[0] + PAGE.partition("## Outsider")[2]
ROWS = [
    line for line in ATTACKS.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| it "))
]


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_the_named_tests_exist(file: str) -> None:
    tree = ast.parse((ROOT / "tests" / "federation" / file).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {test for named, test in NAMED if named == file} <= defined


def test_every_row_names_a_test_or_says_that_it_is_possible() -> None:
    attacks = [row for row in ROWS if row.count(" | ") >= 2 and not row.startswith(("| party", "| outsider"))]
    parties = ("| member |", "| curious", "| malicious", "| coordinator |", "| node owner |")
    bare = [row for row in attacks if "::" not in row and not row.startswith(parties)]
    assert all("**possible" in row or "sees it" in row for row in bare), bare
    assert len(NAMED) > 40


def test_the_settings_are_lines_of_a_policy() -> None:
    policy = Policy()
    lines = {field.name for field in dataclasses.fields(policy)}
    for table in ("bounds", "privacy", "secure_aggregation", "statistics"):
        lines |= {f"{table}.{name}" for name in vars(getattr(policy, table))}
    given = set(re.findall(r"`((?:bounds|privacy|secure_aggregation|statistics)\.\w+)`", PAGE))
    assert given
    assert given <= lines
