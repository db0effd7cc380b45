"""Rows to the bit: FedAvg under another name, a run that was stopped, and a record that is run again."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from copfl.bench import bench as running
from copfl.bench import protocol
from copfl.bench import rows as records
from copfl.bench.protocol import BenchJob, BenchMachine, MeasuredRun, Suite
from copfl.bench.rows import BenchRow, row_hash
from copfl.bench.settings import QUICK
from copfl.errors import RunError, UsageError
from copfl.settings import named_code
from tests.bench.conftest import MINE
from tests.commands import called
from tests.slow import slow

ALIAS = "copfl.algorithms.fedavg:FedAvg"
REAL = Suite("quick", QUICK)


def refused(job: BenchJob, machine: BenchMachine) -> MeasuredRun:
    raise AssertionError(f"{job.title} is run again")


@pytest.mark.job
def test_fedavg_under_another_name_has_the_same_row_to_the_bit(rows: dict[str, BenchRow]) -> None:
    assert row_hash(rows[MINE]) == row_hash(rows["fedavg"])
    assert row_hash(rows["local"]) != row_hash(rows["fedavg"])


def same_as_stored(alias: list[MeasuredRun], again: list[MeasuredRun]) -> None:
    """FedAvg's runs under another name are the stored ones on the machine of the stored row, else those of now."""
    expected = {run.job: run for run in again}
    for row in records.stored(REAL):
        if row.algorithm == "fedavg" and row.environment == records.environment(BenchMachine()):
            expected = {run.job: run for run in (*row.tuning, *row.runs)}
    for run in alias:
        before = expected[run.job._replace(algorithm="fedavg")]
        assert (run.accuracy, run.hash, run.start) == (before.accuracy, before.hash, before.start)


@pytest.mark.job
def test_fedavg_under_another_name_has_runs_of_the_stored_row() -> None:
    job = BenchJob("fedavg", "tumours", "fedexp", 1e-2, protocol.TUNING_SEED, True)
    with named_code.scope():
        named_code.name("copfl.algorithms.fedavg")
        alias, again = (
            protocol.measured(job._replace(algorithm=name), BenchMachine()) for name in (ALIAS, "fedavg")
        )
    same_as_stored([alias], [again])


def test_stored_rows_come_from_the_protocol() -> None:
    stored = [row for suite in protocol.SUITES.values() for row in records.stored(suite)]
    assert {row.algorithm: records.fault(row) for row in stored if records.fault(row)} == {}


@slow
def test_fedavg_under_another_name_has_the_stored_row(tmp_path: Path) -> None:
    alias, again = running.bench([ALIAS, "fedavg"], REAL, tmp_path, jobs=2)
    same_as_stored([*alias.tuning, *alias.runs], [*again.tuning, *again.runs])


def test_runs_that_are_there_are_used_again(
    suite: Suite, rows: dict[str, BenchRow], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "measured", refused)
    lines: list[str] = []
    (again,) = running.bench(["fedavg"], suite, folder, log=lines.append)
    assert again == rows["fedavg"]
    assert "6 of 6 runs on validation samples are there already" in lines


def test_a_bench_that_was_killed_goes_on(
    suite: Suite, rows: dict[str, BenchRow], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line is cut off: only that run is made again."""
    made = []

    def counted(job: BenchJob, machine: BenchMachine) -> MeasuredRun:
        made.append(job)
        return next(run for run in rows[job.algorithm].runs if run.job == job)

    content = (folder / running.RUNS).read_bytes()
    (tmp_path / running.RUNS).write_bytes(content[:-20])
    monkeypatch.setattr(protocol, "measured", counted)
    (again,) = running.bench([MINE], suite, tmp_path, log=lambda line: None)
    assert again == rows[MINE]
    assert len(made) == 1


def test_an_error_in_a_process_can_be_read_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool would break, as if the process had been killed for lack of memory."""

    def exiting(job: BenchJob, machine: BenchMachine) -> MeasuredRun:
        raise SystemExit("bye")

    monkeypatch.setattr(protocol, "measured", exiting)
    with pytest.raises(RuntimeError, match="SystemExit: bye"):
        running._measured_in_worker(
            BenchJob("fedavg", "iid", "none", 0.1, 0, tuning=False), BenchMachine(), ()
        )


def test_runs_of_other_code_do_not_count(
    suite: Suite, rows: dict[str, BenchRow], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(folder / running.RUNS, tmp_path)
    monkeypatch.setattr(records, "code_hash", lambda algorithm: "other")
    monkeypatch.setattr(protocol, "measured", refused)
    lines: list[str] = []
    with pytest.raises(AssertionError, match="is run again"):
        running.bench(["local"], suite, tmp_path, log=lines.append)
    assert any("were made with other code" in line for line in lines)


def test_a_record_that_is_run_again_is_equal_to_the_bit(suite: Suite, rows: dict[str, BenchRow]) -> None:
    with pytest.raises(UsageError, match=r"is tests\.bench\.mine:FedMine, .* add --code tests\.bench\.mine "):
        running.check(rows[MINE], BenchMachine(), runs=2, log=lambda line: None)
    checked = running.check(
        rows[MINE], BenchMachine(), runs=2, code="tests.bench.mine", log=lambda line: None
    )
    assert checked.text == "2 of 2 runs are equal to the bit"


def test_a_record_with_another_number_is_found(
    suite: Suite, rows: dict[str, BenchRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = rows["local"]
    right = {run.job: run for run in (*row.tuning, *row.runs)}
    monkeypatch.setattr(protocol, "measured", lambda job, machine: right[job])
    better = dataclasses.replace(
        row, runs=[run._replace(accuracy=[1.0] * len(run.accuracy)) for run in row.runs]
    )
    checked = running.check(better, BenchMachine(), runs=0, log=lambda line: None)
    assert len(checked.differ) == len(better.runs)
    assert "it is not a record of this code" in checked.text
    elsewhere = dataclasses.replace(better, environment={**row.environment, "torch": "0.1"})
    checked = running.check(elsewhere, BenchMachine(), runs=0, log=lambda line: None)
    assert "this machine differs from the record's: torch 0.1 and" in checked.text


def test_a_record_of_other_code_or_of_another_protocol_is_not_run(
    suite: Suite, rows: dict[str, BenchRow]
) -> None:
    with pytest.raises(RunError, match=r"here has the hash .*, and the record was made with x"):
        running.check(dataclasses.replace(rows["fedavg"], code="x"), BenchMachine(), runs=1)
    with pytest.raises(RunError, match="cannot be checked: its runs on test samples"):
        running.check(dataclasses.replace(rows["fedavg"], runs=[]), BenchMachine(), runs=1)


@pytest.mark.job
def test_the_command_shows_the_row_and_checks_its_record(
    suite: Suite, rows: dict[str, BenchRow], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = called(capsys, "bench", MINE, "--out", folder, "--jobs", 1)
    assert done.code == 0, done.err
    assert "10 runs; " in done.err
    assert f"{MINE}: place 1 of 1 by mean regret; suite quick, version 1" in done.out
    record = folder / "tests.bench.mine-FedMine.json"
    assert json.loads(called(capsys, "bench", MINE, "-o", folder, "-j", 1, "--json").out) == json.loads(
        record.read_text()
    )
    assert "--code tests.bench.mine" in called(capsys, "bench", "--check", record, "-j", 1).err
    checked = called(capsys, "bench", "--check", record, "--runs", 1, "-j", 1, "--code", "tests.bench.mine")
    assert checked.out == f"{record}: 1 of 1 runs are equal to the bit\n"
    for words in ((), (MINE, "--check", record), (MINE, "--runs", 1)):
        assert called(capsys, "bench", *words).code == 2
