from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from copfl.comparison import executor
from copfl.comparison.entries import entry_of, layers
from copfl.comparison.executor import all_done
from copfl.comparison.jobs import Job, LeanFolder, carry_out, check_common, finished, job_of, start_of
from copfl.errors import RunError, UsageError
from copfl.experiment.folder import claimed
from copfl.experiment.run import execute, prepare
from tests.comparison.small import base, clouds


def job(tmp_path: Path, text: str = "copfl", seed: int = 0, **run: Any) -> Job:
    data = tmp_path / "clouds.npz"
    if not data.exists():
        clouds(data)
    entry = entry_of(text)
    return job_of(tmp_path / "runs", entry.label, layers(entry, base(data, **run)), seed)


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
    assert job_of(tmp_path / "runs", "copfl", layers(entry_of("copfl"), tables), 0).path == one.path


def test_a_finished_run_keeps_what_is_read_and_is_left_as_it_is(tmp_path: Path) -> None:
    one = job(tmp_path)
    assert not finished(one)
    carry_out(one)
    assert finished(one)
    left = {path.name: path.stat().st_mtime_ns for path in one.path.iterdir()}
    assert left.keys() == {"run.toml", "partition.json", "rounds.jsonl", "timing.jsonl", "environment.json"}
    carry_out(one)
    assert {path.name: path.stat().st_mtime_ns for path in one.path.iterdir()} == left


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
        whole.path, start={"partition": "", "samples": "", "first": ""}, rounds=6, pause=pause
    )
    with claimed(whole.path, new=True), pytest.raises(Stop):
        execute(prepare([whole.tables]), folder, stop)
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
        ("environment.json", "{}", "does not say what the run began with"),
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
    path.write_text(path.read_text().replace("batch = 8", "batch = 9"))
    with pytest.raises(RunError, match="was changed in run"):
        finished(one)


def test_all_algorithms_of_a_seed_begin_with_the_same(tmp_path: Path) -> None:
    jobs = [job(tmp_path, text) for text in ("copfl", "fedavg", "local")]
    all_done(jobs, 1, print)
    check_common(jobs)
    starts = [start_of(one) for one in jobs]
    assert starts[0] == starts[1] == starts[2]
    assert len(set(starts[0].values())) == 3
    other = job(tmp_path, "copfl", 1)
    carry_out(other)
    assert start_of(other)["first"] != starts[0]["first"]
    for what in ("partition", "samples", "first"):
        path = jobs[1].path / "environment.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "start": {**content["start"], what: "another"}}))
        with pytest.raises(RunError, match=r"seed 0: the .* so they cannot be compared"):
            check_common(jobs)
        path.write_text(json.dumps(content))


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(one: Job) -> None:
        if one.label == "fedavg":
            raise UsageError("it does not work")
        carry_out(one)

    monkeypatch.setattr(executor, "carry_out", broken)
    jobs, said = [job(tmp_path, text) for text in ("fedavg", "local")], list[str]()
    with pytest.raises(
        RunError, match=r"1 of 2 runs failed, the others are there\. fedavg, seed 0: it does not work"
    ):
        all_done(jobs, 1, said.append)
    assert finished(jobs[1])
    assert "failed" in said[0]
    assert "local, seed 0: done" in said[1]


def test_a_process_that_dies_is_reported(tmp_path: Path) -> None:
    from multiprocessing import Pipe

    class Dead:
        exitcode = -9

        def join(self) -> None:
            pass

    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(
        RunError, match="ended with code -9, perhaps for want of memory; run the same command again"
    ):
        executor._answer(ours, Dead(), job(tmp_path))
    ours.close()
