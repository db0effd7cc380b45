"""Run folders of version 0.1, whose settings, metrics and records had other names."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from copfl import run
from copfl.algorithms import ALGORITHMS, FedAvg
from copfl.errors import RunError, UsageError
from copfl.experiment import migration, records
from copfl.experiment.components import resolve
from copfl.experiment.config import Tables, read_file
from copfl.experiment.folder import RunFolder
from copfl.experiment.run import execute, prepare, resume

OLD = Path(__file__).parent / "version-0.1"  # stopped after two of four rounds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def whole_run(tmp_path: Path) -> list[dict[str, Any]]:
    """The rounds of a run that was not stopped, under today's names."""
    shutil.copy(OLD / "rounds-of-the-whole-run.jsonl", tmp_path / "rounds.jsonl")
    return records.read(tmp_path / "rounds.jsonl")


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [r["clients"] for r in found] == [r["clients"] for r in expected]
    for one, other in zip(found, expected, strict=True):
        for part in ("federation", "mean", "per_client"):
            assert one[part].keys() == other[part].keys()
            for name, values in one[part].items():
                # Another processor rounds differently.
                np.testing.assert_allclose(values, other[part][name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_an_old_folder_is_resumed_to_the_same_metrics(folder: Path, tmp_path: Path) -> None:
    result = resume(folder, rounds=4)
    assert_same(result.records, whole_run(tmp_path))
    assert records.read(folder / "rounds.jsonl") == result.records
    text = (folder / "rounds.jsonl").read_text() + (folder / "run.toml").read_text()
    assert "personal_fraction" in text
    assert not [old for old in ("personal_share", "look_every", "levers", "all_at_once") if old in text]
    assert len(resume(folder, rounds=5).records) == 5


def test_an_old_run_file_runs_anew_to_the_same_metrics(tmp_path: Path) -> None:
    experiment = prepare([read_file(OLD / "run.toml"), {"run": {"rounds": 4}}])
    assert_same(execute(experiment, None).records, whole_run(tmp_path))


def test_stopped_right_after_the_checkpoint_was_migrated_it_still_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write_tables", stopped)
        with pytest.raises(KeyboardInterrupt):
            resume(folder, rounds=4)
    assert_same(resume(folder, rounds=4).records, whole_run(tmp_path))


def test_an_old_folder_whose_settings_were_changed_is_refused(folder: Path) -> None:
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace("rate = 0.25", "rate = 0.2"))
    with pytest.raises(RunError, match=r"the settings of .* are not those of its checkpoint"):
        resume(folder, rounds=4)


def test_a_folder_that_is_older_than_an_option_is_resumed_with_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Older(FedAvg):
        weights: ClassVar[str] = "samples"  # type: ignore[misc]

    with monkeypatch.context() as patched:
        patched.setitem(ALGORITHMS, "fedavg", Older)
        run("fedavg", rounds=2, checkpoint_every=1, out=tmp_path / "run")
    assert "weights" not in (tmp_path / "run" / "run.toml").read_text()
    resumed = resume(tmp_path / "run", rounds=3)
    assert resumed.records == run("fedavg", rounds=3).records
    assert 'weights = "samples"' in (tmp_path / "run" / "run.toml").read_text()


@pytest.mark.parametrize("line", (OLD / "tables.jsonl").read_text().splitlines())
def test_every_table_that_could_be_written_is_still_understood(line: str) -> None:
    resolve([migration.migrated(json.loads(line))], {})


def test_names_values_and_tables_are_renamed() -> None:
    tables: Tables = {
        "algorithm": {"name": "copfl", "among": "anew", "without": "letter"},
        "levers": {"schedule": "cosine", "over": 5},
        "guard": {"name": "clip"},
        "run": {"look_at": "own", "engine": "captured"},
    }
    assert migration.migrated(tables) == {
        "algorithm": {"name": "copfl", "candidates": "reselect", "leave_one_out": "paper"},
        "addons": {"lr_schedule": "cosine", "lr_rounds": 5},
        "robust": {"name": "clip"},
        "run": {"eval_models": "personal", "engine": "cuda_graph"},
    }


def test_a_removed_option_is_dropped_unless_it_had_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(migration.REMOVED, ("copfl", "gone"), 0)
    assert migration.migrated({"copfl": {"gone": 0, "rate": 0.1}}) == {"copfl": {"rate": 0.1}}
    with pytest.raises(UsageError, match=r"copfl\.gone=1 was removed"):
        migration.migrated({"copfl": {"gone": 1}})


def test_a_renamed_field_of_a_record_is_read_under_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(migration.RECORDS, "old", "new")
    assert migration.renamed_tensor("inner.old.u", ["inner.new.u"]) == "inner.new.u"
    assert migration.renamed_tensor("server.server.w", ["server.w"]) == "server.w"
    assert migration.renamed_tensor("server.hostile", ["server.w"]) is None
