from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "studies" / "defaults"


def test_the_tables_of_the_page_are_those_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    study = importlib.import_module("analyse_targets")
    page = (FOLDER / "targets.md").read_text("utf-8")
    for table in (study.choice(), study.confirmation("default"), study.confirmation(study.REJECTED)):
        assert table in page
