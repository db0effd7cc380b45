"""The options of `copfl federate init` are settings that a federation can have."""

from __future__ import annotations

import re

import pytest

from copfl.cli.options import settings
from copfl.settings.policy_lines import Simulated
from copfl.settings.record import declared
from copfl.settings.schema import KINDS
from tests import code_blocks
from tests.commands import called


def test_init_has_no_option_that_a_federation_refuses_in_any_case() -> None:
    offered = {(option.kind, option.key) for option in settings("init")}
    simulated = {
        (kind, field.name)
        for kind, record in KINDS.items()
        for field in declared(record)
        if isinstance(field.metadata["policy"], Simulated)
    }
    assert ("run", "patience") in simulated
    assert not offered & simulated


@pytest.mark.parametrize("role", ["federate", "site"])
def test_the_help_of_a_role_has_whole_sentences_in_the_order_of_the_page(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = called(capsys, role, "--help").out
    assert "..." not in shown.partition("COMMAND")[2].partition("\n")[2]
    first = shown.partition("In this order:\n")[2].partition("\n\n")[0]
    names = re.findall(r"^  (\w+)", first, re.MULTILINE)
    page = (code_blocks.ROOT / "docs" / "deploy.md").read_text("utf-8")
    row = re.search(rf"^\| [^|]+ \| `copfl {role}` (?P<order>[^;|]+);", page, re.MULTILINE)
    assert row is not None
    assert names == re.findall(r"`(\w+)`", row["order"])
