from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from copfl.settings.complete import complete

FOLDER = Path(__file__).parents[3] / "studies" / "defaults"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_the_tables_of_the_page_are_those_of_the_records(module: Any) -> None:
    page = (FOLDER / "extremes.md").read_text("utf-8")
    for table in module("analyse_extremes").tables().values():
        assert table in page


@pytest.mark.parametrize(
    "federation", ["iris-5x10", "values-signs-2x60", "labels-200-rounds-8x30", "20-classes-6x250"]
)
def test_the_records_are_of_the_rule(federation: str, module: Any, tmp_path: Path) -> None:
    lines = gzip.decompress((FOLDER / "extremes.jsonl.gz").read_bytes()).decode().splitlines()
    records = [record for record in map(json.loads, lines) if record["federation"] == federation]
    record = next(record for record in records if record["candidate"] == "default")
    tables = module("extremes").write(federation, record["seed"], tmp_path, tmp_path)
    assert complete(tables).method_text == record["method"]
    assert len(record["personal"]) == complete(tables).run.clients
