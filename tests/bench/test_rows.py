"""Records: what they are made with, and what cannot come from the protocol."""

from __future__ import annotations

import dataclasses
import json
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from copfl.bench import rows as records
from copfl.bench.protocol import BenchMachine, Suite
from copfl.bench.rows import BenchRow
from copfl.errors import RunError, UsageError
from copfl.settings import named_code
from tests.bench.conftest import MINE


def test_a_row_is_the_same_after_a_file(rows: dict[str, BenchRow], tmp_path: Path) -> None:
    records.write(rows["fedavg"], tmp_path / "row.json")
    assert records.read(tmp_path / "row.json") == rows["fedavg"]


def test_stored_rows_of_the_same_suite_count(suite: Suite, rows: dict[str, BenchRow], tmp_path: Path) -> None:
    for name in ("a", "b"):
        records.store([*rows.values()], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert records.stored(suite) == []  # copfl's own are of the real one


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tuning": [], "runs": [{}]}'])
def test_another_file_is_no_record(content: str, tmp_path: Path) -> None:
    path = tmp_path / "row.json"
    path.write_text(content)
    with pytest.raises(RunError, match="is no record of `copfl bench`"):
        records.read(path)


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(UsageError, match='no suite "quik"; did you mean "quick"'):
        records.suite_of("quik")


def test_the_hash_of_the_code_follows_the_source_and_that_of_base_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    base = "from copfl.algorithms import FedAvg\nclass Base(FedAvg):\n    pass\n"
    (tmp_path / "bench_own.py").write_text("from bench_base import Base\nclass Own(Base):\n    pass\n")
    hashes = []
    for more in ("", "# changed\n"):
        (tmp_path / "bench_base.py").write_text(base + more)
        for name in ("bench_own", "bench_base"):
            sys.modules.pop(name, None)
        linecache.clearcache()
        with named_code.scope():
            named_code.name("bench_own")
            hashes.append(records.code_hash("bench_own:Own"))
    assert hashes[0] != hashes[1]
    with named_code.scope():
        named_code.name("copfl.algorithms.fedavg", MINE.partition(":")[0])
        assert records.code_hash("fedavg") == records.code_hash("copfl.algorithms.fedavg:FedAvg")
        assert records.code_hash("fedavg") != records.code_hash(MINE)


def changed(row: BenchRow, part: str, place: int, **values: Any) -> BenchRow:
    content = json.loads(json.dumps(row.as_json))
    content[part][place] |= values
    return records.row_of(content, "a test")


def test_what_cannot_come_from_the_protocol_is_found(suite: Suite, rows: dict[str, BenchRow]) -> None:
    row = rows["fedavg"]
    assert records.fault(row) == ""
    assert "version 0" in records.fault(dataclasses.replace(row, version="0", settings="x"))
    assert "tuning runs" in records.fault(changed(row, "tuning", 0, lr=0.5))
    assert "best on validation" in records.fault(changed(row, "runs", 0, server="yogi"))
    assert "best on validation" in records.fault(changed(row, "runs", 0, seed=9))
    best = row.runs[0].job
    worse = next(
        place
        for place, run in enumerate(row.tuning)
        if run.job.setting == best.setting and (run.job.server, run.job.lr) != (best.server, best.lr)
    )
    assert "best on validation" in records.fault(changed(row, "tuning", worse, accuracy=[1.0] * 6))


def test_the_environment_names_what_differs() -> None:
    now = records.environment(BenchMachine())
    assert records.differing(now, now) == ""
    assert records.differing(now, {**now, "torch": "0.1"}) == f"torch {now['torch']} and 0.1"
