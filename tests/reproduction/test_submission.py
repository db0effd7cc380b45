"""Records that others submit."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from copfl.comparison.jobs import Job
from copfl.comparison.results import Record, record_of
from copfl.comparison.runner import all_done
from copfl.reproduction import records, submission
from copfl.settings.complete import complete
from tests.commands import called

COMMITTED = Path(__file__).resolve().parents[2] / "results" / "reproduction"
TABLES: dict[str, dict[str, Any]] = {
    "algorithm": {"name": "local"},
    "data": {"name": "digits"},
    "model": {"name": "mlp", "width": 8},
    "run": {"clients": 3, "rounds": 2, "eval_models": "all"},
}


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """A file with one record, and that record."""
    folder = tmp_path_factory.mktemp("mine")
    job = Job("mine", complete(TABLES), folder / "run")
    all_done([job], 1, lambda line: None)
    record = record_of(job)
    records.write(folder / "mine.jsonl.gz", {"one": record})
    return folder / "mine.jsonl.gz", record


def test_a_good_file_gives_its_row_and_can_be_run_again(
    submitted: tuple[Path, Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, record = submitted
    words = ("--results", tmp_path / "none", "--runs", tmp_path / "runs", "--device", "cpu")
    answer = called(capsys, "reproduce", path, "--check", "--repeat", *words)
    assert answer.code == 0, answer.err
    assert f"| digits, 3 clients, local, sgd | 2 | 1 | {100 * record.mean():.1f} |" in answer.out
    assert "a client differs by 0.00 points at most" in answer.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r._replace(rounds=[1]), "it ends with round 1 of 2"),
        (lambda r: r._replace(clients={"accuracy": [1.0, 1.0, 1.0]}), "is not that of its curve"),
        (lambda r: r._replace(clients={"accuracy": [7.0, 1.0, 1.0]}), "not between 0 and 1"),
        (lambda r: r._replace(clients={"accuracy": [1.0]}), "it has 1 clients, its settings 3"),
        (lambda r: r._replace(start={"partition": "", "samples": "", "weights": ""}), "fingerprints"),
    ],
)
def test_what_speaks_against_a_record(
    submitted: tuple[Path, Record], tmp_path: Path, change: Callable[[Record], Record], said: str
) -> None:
    records.write(tmp_path / "bad.jsonl.gz", {"one": change(submitted[1])})
    (checked,) = submission.check(tmp_path / "bad.jsonl.gz", records.opened(tmp_path / "none"))
    assert any(said in problem for problem in checked.problems), checked.problems


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n"))
    for name, said in ((path, "is no record of this version"), (tmp_path / "none", "is no file of records")):
        answer = called(capsys, "reproduce", name, "--check", "--results", tmp_path)
        assert (answer.code, said in answer.err) == (2, True), answer.err


def test_our_own_records_pass() -> None:
    store = records.opened(COMMITTED)
    checked = submission.check(COMMITTED / "table-samples.jsonl.gz", store)
    assert [one.problems for one in checked if one.problems] == []
    assert all(one.here is not None for one in checked)
