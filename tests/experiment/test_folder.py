"""The folder a run leaves: held by one, never half there, and refused when it is not what it was."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import copfl
from copfl import files as checkpoint
from copfl.errors import CopflError, RunError
from copfl.experiment import folder as run_folder
from tests.commands import files, found

TINY: dict[str, Any] = {
    "model": "mlp",
    "clients": 2,
    "rounds": 3,
    "model_options": {"width": 4},
    "checkpoint_every": 2,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    copfl.run("copfl", **TINY, out=path)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def test_what_a_run_leaves(run: Path) -> None:
    bundles = [
        f"models/{folder}/{file}"
        for folder in ("client-0000", "client-0001", "global")
        for file in ("README.md", "bundle.json", "weights.safetensors")
    ]
    others = ["partition.json", "probabilities.json", "rounds.jsonl", "run.toml", "timing.jsonl"]
    assert sorted(files(run)) == ["checkpoint/state.safetensors", "environment.json", *bundles, *others]
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    assert [line["round"] for line in timing] == [1, 2, 3]
    assert "seconds" not in (run / "rounds.jsonl").read_text()
    environment = json.loads((run / "environment.json").read_text())
    assert {
        "copfl",
        "python",
        "torch",
        "numpy",
        "system",
        "command",
        "device",
        "threads",
    } <= environment.keys()


def test_the_models_are_what_each_client_predicts_with(tmp_path: Path) -> None:
    result = copfl.run("copfl", **TINY, out=tmp_path / "run")
    for n in range(2):
        w = result.client_model(n)
        assert isinstance(w, torch.Tensor)
        saved = load_file(tmp_path / "run" / "models" / f"client-{n:04d}" / "weights.safetensors")
        assert torch.equal(
            torch.cat([saved[name].flatten() for name in result.experiment.task.layout.names]), w
        )


def test_the_experts_of_a_mixture_are_saved_sequential(tmp_path: Path) -> None:
    copfl.run("apfl", **TINY, out=tmp_path / "run")
    saved = load_file(tmp_path / "run" / "models" / "client-0000" / "weights.safetensors")
    assert saved["share"].sum() == pytest.approx(1)
    assert {name.split("/")[0] for name in saved} == {"0", "1", "share"}


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with run_folder.claimed(tmp_path / "run", new=True) as folder:
        for new in (True, False):
            with (
                pytest.raises(
                    RunError, match=r"another process is working in .*; wait for it, or name another"
                ),
                run_folder.claimed(folder.path, new=new),
            ):
                pass
    assert not (tmp_path / "run").exists()


def test_a_lock_that_was_removed_under_us_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def opened(path: Any, *given: Any) -> int:
        handle = original(path, *given)
        if str(path).endswith("/.lock"):
            os.unlink(path)  # as the process that held it does when it ends
        return handle

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_bytes(checkpoint._machine())
    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(RunError, match="another process"), run_folder.claimed(tmp_path / "run", new=True):
        pass


def test_new_folders_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20300101-000000")
    paths = [run_folder.fresh(tmp_path / "runs", "copfl on my data: a/b") for _ in range(3)]
    assert [p.name for p in paths] == [
        "20300101-000000-copfl-on-my-data-a-b",
        "20300101-000000-copfl-on-my-data-a-b-2",
        "20300101-000000-copfl-on-my-data-a-b-3",
    ]
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write into .*; name another folder with out="):
        run_folder.fresh(tmp_path / "file", "copfl")


def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(RunError, match=r"not empty \(it contains thesis\.tex\); name a new folder with out="):
        copfl.run("copfl", **TINY, out=tmp_path)
    assert files(tmp_path) == {"thesis.tex": b"ten years of work"}
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write into .*file: Not a directory"):
        copfl.run("copfl", **TINY, out=tmp_path / "file")


def test_a_run_is_not_written_over(run: Path) -> None:
    before = files(run)
    with pytest.raises(
        RunError, match=f"already contains a run; use `copfl.resume\\('{run}'\\)`, or name another"
    ):
        copfl.run("copfl", **TINY, out=run)
    assert files(run) == before


def test_the_runs_that_are_named_are_also_those_without_a_name(tmp_path: Path) -> None:
    """`copfl run` without --out writes into runs/, so that is where a user's runs are."""
    for name in ("runs/first", "second"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.toml").touch()
    with pytest.raises(RunError, match=r"Known runs: runs/first, second$"):
        copfl.resume(tmp_path / "gone")


def test_what_is_no_run_cannot_go_on(run: Path) -> None:
    with pytest.raises(
        RunError, match=r"there is no folder .*gone; a run folder was expected, .* Known runs: run"
    ):
        copfl.resume(run.parent / "gone")
    (run.parent / "empty").mkdir()
    with pytest.raises(RunError, match=r"is not a run folder: it has no run\.toml.* Known runs: run"):
        copfl.resume(run.parent / "empty")
    assert not files(run.parent / "empty")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunError, match=r"cannot write into .*: Permission denied; name another folder"):
            copfl.run("copfl", **TINY, out=tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_the_system_makes_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        RunError, match=r"cannot write into .*: Read-only file system; name another folder with out="
    ):
        copfl.run("copfl", **TINY, out=tmp_path / "run")


def test_a_clock_that_runs_backwards_changes_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do files of the past and of the future."""
    backwards = itertools.count(int(time.time()), -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(backwards)))
    other = tmp_path / "other"
    copfl.run("copfl", **{**TINY, "rounds": 2}, out=other)
    for number, path in enumerate(sorted(other.rglob("*"))):
        os.utime(path, (1e8, 1e8) if number % 2 else (4e9, 4e9))
    copfl.resume(other, rounds=3)
    assert found(other) == found(run)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [cut, flip, lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"\xff" * 100)]
)
@pytest.mark.parametrize(
    "name", ["checkpoint/state.safetensors", "run.toml", "partition.json", "rounds.jsonl"]
)
def test_damage_is_found_and_named(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(run / name)
    damaged = files(run)
    with pytest.raises(CopflError) as error:
        copfl.resume(run, rounds=5)
    assert str(run) in str(error.value)
    assert files(run) == damaged


def test_a_changed_run_file_is_another_run(run: Path) -> None:
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(re.sub(r"lr = .*", "lr = 0.5", text))
    with pytest.raises(RunError, match=r"the settings of .* are not those of its checkpoint.*copfl.run\("):
        copfl.resume(run, rounds=5)
    (run / "run.toml").write_text(text.replace("checkpoint_every = 2", "checkpoint_every = 1"))
    assert len(copfl.resume(run).records) == 3
    (run / "run.toml").write_text(text.replace("clients = 2", "clients = 3"))
    with pytest.raises(CopflError, match="clients=3 is not the number of clients of the partition, 2"):
        copfl.resume(run)


def test_changed_data_is_another_run(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    copfl.run("fedavg", tmp_path / "mine.npz", **TINY, out=tmp_path / "run")
    np.savez(tmp_path / "mine.npz", x=x + 1, y=y)
    with pytest.raises(
        RunError, match=r"the samples of .* are not those of its checkpoint: .* data were changed"
    ):
        copfl.resume(tmp_path / "run", rounds=5)


def test_lost_rounds_are_not_made_up(run: Path) -> None:
    lines = (run / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (run / "rounds.jsonl").write_bytes(b"".join(lines[:2]))
    with pytest.raises(RunError, match="has 2 rounds, but the checkpoint is of round 3"):
        copfl.resume(run)
    (run / "rounds.jsonl").unlink()
    with pytest.raises(RunError, match=r"cannot read .*rounds.jsonl: No such file"):
        copfl.resume(run)


def test_a_run_without_timing_goes_on(run: Path) -> None:
    (run / "timing.jsonl").unlink()
    assert len(copfl.resume(run).records) == 3


def test_a_damaged_model_is_reported_and_half_of_one_is_removed(run: Path) -> None:
    before, folder = files(run), run / "models" / "client-0001"
    (folder / ".weights.safetensors.part").write_bytes(b"half")
    copfl.resume(run)
    assert files(run) == before
    cut(folder / "weights.safetensors")
    with pytest.raises(RunError, match=r"is damaged or of another model .* start the run again"):
        copfl.resume(run)


def test_a_checkpoint_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    copfl.run("copfl", **{**TINY, "model_options": {"width": 5}}, out=tmp_path / "other")
    other = tmp_path / "other" / "checkpoint" / "state.safetensors"
    checkpoint.write_bytes(run / "checkpoint" / "state.safetensors", other.read_bytes())
    with pytest.raises(RunError, match=r"is not a checkpoint of this run: in server, its w is .* expected"):
        copfl.resume(run)
