from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from copfl.comparison.jobs import runner
from copfl.comparison.jobs.forecast import Forecast
from copfl.comparison.jobs.job import Job, LeanFolder, environment_of, finished, locked_folder, placed
from copfl.comparison.jobs.processes import Pool, in_processes
from copfl.comparison.jobs.runner import all_done, run_in_worker
from copfl.comparison.jobs.starts import Starts
from copfl.comparison.jobs.submission import TimeIsUp
from copfl.comparison.rows.entries import entry_of
from copfl.comparison.rows.entry_settings import job_of, row_settings
from copfl.errors import RunError, UsageError
from copfl.experiment.folder import claimed
from copfl.experiment.preparation import prepare
from copfl.experiment.training import execute
from copfl.settings.identity import essential
from copfl.telling import OF_ONE_RUN, heard
from tests.comparison.small import base, clouds
from tests.slow import slow


def job(tmp_path: Path, text: str = "copfl", seed: int = 0, **run: Any) -> Job:
    data = tmp_path / "clouds.npz"
    if not data.exists():
        clouds(data)
    entry = entry_of(text)
    return job_of(
        tmp_path / "runs", entry.label, row_settings(entry, base(data, **run), keeps_state=True).layers, seed
    )


def carry_out(one: Job) -> None:
    all_done([one], Pool(1))


def rounds(one: Job) -> bytes:
    return (one.path / "rounds.jsonl").read_bytes()


def test_a_folder_is_called_after_its_run_and_found_by_what_it_is_of(tmp_path: Path) -> None:
    one = job(tmp_path, "copfl:score=none", 3)
    assert one.path.parent == tmp_path / "runs"
    assert one.path.name.startswith("copfl-score=none-seed3-")
    assert job(tmp_path, "copfl:score=none", 3) == one
    others = [job(tmp_path, "copfl", 3), job(tmp_path, one.label.replace(" ", ":"), 4)]
    others.append(job(tmp_path, "copfl:score=none", 3, batch=4))
    assert len({one.path, *(other.path for other in others)}) == 4
    carry_out(job(tmp_path, "copfl:score=both", 3))  # the default, under another label
    assert job(tmp_path, "copfl", 3).path.name.startswith("copfl-score=both-seed3-")


def test_where_the_data_lie_and_how_often_is_saved_do_not_matter(tmp_path: Path) -> None:
    one = job(tmp_path)
    assert job(tmp_path, checkpoint_every=3).path == one.path
    tables = {
        **base(tmp_path / "clouds.npz"),
        "data": {"name": str(tmp_path / "clouds.npz"), "dir": "elsewhere"},
    }
    assert (
        job_of(
            tmp_path / "runs", "copfl", row_settings(entry_of("copfl"), tables, keeps_state=True).layers, 0
        ).path
        == one.path
    )


def test_a_finished_run_keeps_what_is_read_and_is_left_as_it_is(tmp_path: Path) -> None:
    one = job(tmp_path)
    assert not finished(one)
    carry_out(one)
    assert finished(one)
    left = {path.name: path.stat().st_mtime_ns for path in one.path.iterdir()}
    assert left.keys() == {"run.toml", "partition.json", "rounds.jsonl", "timing.jsonl", "environment.json"}
    carry_out(one)
    assert {path.name: path.stat().st_mtime_ns for path in one.path.iterdir()} == left


def test_a_run_that_no_client_improved_is_finished(tmp_path: Path) -> None:
    """Such as one whose folder somebody put there: `job_of` makes none, as rows have equal rounds."""
    run = job(tmp_path, "fedavg", rounds=30, select="best").run
    early = dataclasses.replace(run, run=dataclasses.replace(run.run, patience=1))
    one = placed(Job("early", early), tmp_path / "runs")
    carry_out(one)
    assert 1 < len(rounds(one).splitlines()) < 30
    assert finished(one)
    before = rounds(one)
    carry_out(one)
    assert rounds(one) == before
    *whole, _ = before.splitlines(keepends=True)
    (one.path / "rounds.jsonl").write_bytes(b"".join(whole))  # some client improved in the round before
    assert not finished(one)


class Stop(Exception):
    pass


@pytest.mark.parametrize("pause", [0.0, 3600.0])
def test_an_unfinished_run_goes_on_to_the_same_bytes(tmp_path: Path, pause: float) -> None:
    whole = job(tmp_path, rounds=6, checkpoint_every=2)
    carry_out(whole)
    expected = rounds(whole)
    shutil.rmtree(whole.path)

    def stop(round: Any, seconds: float) -> None:
        if round.number == 4:
            raise Stop

    folder = LeanFolder(
        whole.path, start={"partition": "", "samples": "", "weights": ""}, rounds=6, pause=pause
    )
    with claimed(whole.path, new=True), pytest.raises(Stop):
        execute(prepare(whole.run), folder, stop)
    assert (whole.path / "checkpoint").exists() == (pause == 0)
    assert not finished(whole)
    carry_out(whole)
    assert rounds(whole) == expected
    assert not (whole.path / "checkpoint").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rounds.jsonl", "{\n" * 3, "line 1 of .*rounds.jsonl is damaged"),
        ("partition.json", "{", "partition.json is not a valid partition"),
        ("run.toml", "[", "is not valid TOML"),
        ("environment.json", "{}", "does not contain what the run began with"),
    ],
)
def test_a_damaged_run_is_reported_with_what_to_do(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    one = job(tmp_path)
    carry_out(one)
    (one.path / name).write_text(content)
    with pytest.raises(RunError, match=message) as error:
        finished(one)
    assert str(error.value).startswith("copfl, seed 0: ")
    assert f"Delete {one.path} to have that run made again" in str(error.value)


def test_a_run_file_that_was_changed_is_reported(tmp_path: Path) -> None:
    one = job(tmp_path)
    carry_out(one)
    path = one.path / "run.toml"
    path.write_text(path.read_text().replace("batch = 20", "batch = 21"))
    with pytest.raises(RunError, match="was changed in run"):
        finished(one)


def test_all_algorithms_of_a_seed_begin_with_the_same(tmp_path: Path) -> None:
    def check() -> None:
        starts = Starts("delete the older run")
        for one in jobs:
            starts.check(one.title, essential(one.run), 0.0, environment_of(one)["start"])

    jobs = [job(tmp_path, text) for text in ("copfl", "fedavg", "local")]
    all_done(jobs, Pool(1))
    check()
    starts = [environment_of(one)["start"] for one in jobs]
    assert starts[0] == starts[1] == starts[2]
    assert len(set(starts[0].values())) == 3
    other = job(tmp_path, "copfl", 1)
    carry_out(other)
    assert environment_of(other)["start"]["weights"] != starts[0]["weights"]
    for what in ("partition", "samples", "weights"):
        path = jobs[1].path / "environment.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "start": {**content["start"], what: "another"}}))
        with pytest.raises(
            RunError, match=r"fedavg, seed 0 and copfl, seed 0 began with .* delete the older run"
        ):
            check()
        path.write_text(json.dumps(content))


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(experiment: Any, *given: Any) -> Any:
        if experiment.run.algorithm.name == "fedavg":
            raise UsageError("it does not work")
        return execute(experiment, *given)

    monkeypatch.setattr(runner, "execute", broken)
    jobs, said = [job(tmp_path, text) for text in ("fedavg", "local")], list[str]()
    failed = r"1 of 2 runs failed, the others are there\. fedavg, seed 0: it does not work"
    with heard(said.append), pytest.raises(RunError, match=failed):
        all_done(jobs, Pool(1))
    assert finished(jobs[1])
    assert "failed" in said[0]
    assert "local, seed 0: done" in said[1]


@slow
def test_a_killed_process_does_not_stop_the_others_and_its_job_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = clouds(tmp_path / "clouds.npz")
    (tmp_path / "fragile.py").write_text(f"""
import os, signal
from multiprocessing import parent_process
from pathlib import Path
import numpy as np

def once():
    killed = Path({str(tmp_path / "killed")!r})
    if killed.exists():
        return load()
    return always(killed.touch)

def always(before=lambda: None):
    if parent_process() is not None:  # the command itself also looks at the data
        before()
        os.kill(os.getpid(), signal.SIGKILL)
    return load()

def load():
    file = np.load({str(data)!r})
    return (file["x"], file["y"]), (file["x_test"], file["y_test"])
""")

    def fragile(name: str) -> Job:
        tables = {**base(data), "data": {"name": f"fragile:{name}"}}
        return job_of(
            tmp_path / "runs", name, row_settings(entry_of("local"), tables, keeps_state=True).layers, 0
        )

    jobs = [fragile("once"), job(tmp_path, "local")]
    done = in_processes(jobs, Pool(2), run_in_worker)
    assert [(ended.job.label, ended.error) for ended in done].count(("once", None)) == 1
    assert all(finished(one) for one in jobs)
    killed, other = in_processes([fragile("always"), job(tmp_path, "fedavg")], Pool(1), run_in_worker)
    assert "its process was killed, perhaps for lack of memory" in str(killed.error)
    assert other.error is None  # a job that kills its process does not stop the others


def test_a_failure_of_several_runs_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise UsageError("it does not work")

    monkeypatch.setattr(runner, "execute", broken)
    said = list[str]()
    with heard(said.append), pytest.raises(RunError) as error:
        all_done([job(tmp_path, text) for text in ("fedavg", "local")], Pool(1))
    assert str(error.value) == (
        "2 of 2 runs failed, the others are there. fedavg, seed 0; local, seed 0: it does not work"
    )
    assert said[0] == "[1/2 runs] fedavg, seed 0: failed: it does not work"


def with_rounds(one: Job, count: int) -> Job:
    """The job, whose folder has so many rounds."""
    one.path.mkdir(parents=True, exist_ok=True)
    (one.path / "rounds.jsonl").write_bytes(b"{}\n" * count)
    return one


def test_a_forecast_has_the_runs_that_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: two runs of ten rounds, one with four of them, and thirty rounds later; two seconds a round."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    new, begun = job(tmp_path, rounds=10), with_rounds(job(tmp_path, "local", rounds=10), 4)
    forecast = Forecast(later=50.0)
    forecast.plan([new, begun])
    assert forecast.text() == ""
    assert (forecast.later, sum(forecast.due.values())) == (30.0, 16)
    now[0] += 16
    with_rounds(new, 5)
    with_rounds(begun, 7)
    assert forecast.left() == 2.0 * (5 + 3 + 30)  # eight rounds in 16 seconds
    now[0] += 4
    forecast.ended(new)
    assert forecast.left() == pytest.approx(20 / 13 * (3 + 30))
    longer = new._replace(run=new.run.replaced({"run": {"rounds": 20}}))
    with_rounds(longer, 10)
    forecast.plan([longer])  # a further stage of the same run
    assert forecast.later == 20.0
    assert forecast.left() == pytest.approx(20 / 13 * (10 + 3 + 20))
    forecast.end = now[0] + 7
    assert forecast.text() == "about 0:07 left"


def test_a_long_run_in_this_process_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("copfl.telling.FIRST", 0)
    monkeypatch.setattr("copfl.telling.INTERVAL", 0)
    said = list[str]()
    with heard(said.append, but_of=OF_ONE_RUN):
        all_done([job(tmp_path, "local", rounds=3)], Pool(1), forecast=Forecast(later=6.0))
    assert [text.split(",")[1].strip() for text in said] == [
        "seed 0: round 1/3", "seed 0: round 2/3", "seed 0: done",
    ]  # fmt: skip
    assert all(text.endswith(" left") for text in said)


def test_at_the_end_of_the_time_runs_in_processes_are_stopped(tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, rounds=10**6) for name in ("local", "fedavg")]
    pool = Pool(2)
    pool.started().submit(int).result()  # torch is imported, whatever the machine's load
    begin = time.monotonic()
    with pytest.raises(TimeIsUp):
        all_done(jobs, pool, end=begin + 2)
    assert time.monotonic() - begin < 20
    for one in jobs:
        with locked_folder(one.path):  # no process has it any more
            assert not finished(one)


def test_at_the_end_of_the_time_a_run_in_this_process_is_stopped(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeIsUp):
        all_done([job(tmp_path, rounds=10**6)], Pool(1), end=begin + 2)
    assert time.monotonic() - begin < 10


def test_the_processes_of_a_pool_run_the_next_jobs_too(tmp_path: Path) -> None:
    """A stage of a race would otherwise wait for torch to be imported again."""
    with Pool(2) as pool:
        all_done([job(tmp_path, "local"), job(tmp_path, "fedavg")], pool)
        assert pool.workers is not None
        first = set(pool.workers._processes or {})
        all_done([job(tmp_path, "local", 1), job(tmp_path, "fedavg", 1)], pool)
        assert set(pool.workers._processes or {}) <= first
    assert pool.workers is None
