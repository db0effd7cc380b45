from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import copfl
from copfl.errors import RunError, UsageError
from copfl.experiment import reading
from copfl.report import document, page


def test_a_run_is_read_from_its_files(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    lines = [json.loads(line) for line in (runs["copfl"] / "rounds.jsonl").read_text().splitlines()]
    assert (run.label, run.algorithm, run.clients, run.rounds, run.planned) == (
        "copfl",
        "copfl",
        4,
        [1, 2, 3, 4, 5],
        5,
    )
    assert run.metric("accuracy").shape == (5, 4)
    assert run.final("accuracy").tolist() == lines[-1]["per_client"]["accuracy"]
    assert run.federation_metric("shared") == [line["federation"]["shared"] for line in lines]
    assert len(run.seconds) == 5
    assert run.label_counts is not None
    assert run.label_counts.sum(1).tolist() == run.sizes[0]


def test_the_masks_by_layer_are_those_of_the_checkpoint(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    assert run.masks is not None
    mask = load_file(runs["copfl"] / "checkpoint" / "state.safetensors")["clients:mask"]
    assert run.masks.round == 5
    assert sum(run.masks.sizes) == mask.shape[1] == run.environment["parameters"]
    whole = (run.masks.fraction * run.masks.sizes).sum(1) / mask.shape[1]
    assert np.allclose(whole, run.final("personal_fraction"), atol=1e-6)
    first = mask[:, : run.masks.sizes[0]]  # a layer's weight and bias are adjacent
    assert np.allclose(run.masks.fraction[:, 0], first.double().mean(1))
    assert run.masks.shared_by_all[0] == pytest.approx(float((~first.any(0)).double().mean()))
    assert not torch.equal(first[0], first[1])


def test_the_masks_of_a_run_with_add_ons_are_found(tmp_path: Path) -> None:
    """An add-on that adds to the client's record has the algorithm's own one inside."""
    copfl.run(
        "copfl",
        clients=3,
        rounds=2,
        model="mlp",
        model_options={"width": 8},
        addons={"ema": 0.9},
        out=tmp_path / "run",
    )
    (run,) = reading.read_all([tmp_path / "run"])
    assert run.masks is not None
    whole = (run.masks.fraction * run.masks.sizes).sum(1) / sum(run.masks.sizes)
    assert np.allclose(whole, run.final("personal_fraction"), atol=1e-6)
    assert not any("no checkpoint" in note for note in page.document_of([run]).notes)


@pytest.mark.job
def test_an_algorithm_without_masks_has_none(runs: dict[str, Path]) -> None:
    assert reading.read_all([runs["fedavg"]])[0].masks is None


def test_runs_of_one_algorithm_are_told_apart_by_their_folders(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["copfl"], tmp_path / "again")
    labels = [run.label for run in reading.read_all([runs["copfl"], tmp_path / "again", runs["local"]])]
    assert labels == ["copfl, mamo 0.003 (copfl)", "copfl, mamo 0.003 (again)", "local, adam 0.003"]


def test_a_run_that_goes_on_can_be_read(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["copfl"], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    lines = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    (tmp_path / "run" / "rounds.jsonl").write_bytes(
        lines[: lines.index(b"\n") + 20]
    )  # the second line is not all there
    (run,) = reading.read_all([tmp_path / "run"])
    assert run.rounds == [1]
    assert len(run.seconds) == 1
    assert run.masks is None


def test_what_is_wrong_is_said(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        reading.read_all([tmp_path])
    with pytest.raises(UsageError, match="named twice"):
        reading.read_all([runs["copfl"], runs["copfl"]])
    shutil.copytree(runs["copfl"], tmp_path / "run")
    (tmp_path / "run" / "environment.json").write_text("{")
    with pytest.raises(RunError, match=r"cannot read .*environment"):
        reading.read_all([tmp_path / "run"])
    found = json.loads((runs["copfl"] / "environment.json").read_text())
    odds: list[dict[str, object]] = [
        {"parameters": 10**4000},
        {"layers": {"head.weight": 10**4000}},
        {"parameters": -1},
        {"metrics": [{"name": "accuracy", "higher_is__better": True}]},
        {"metrics": []},
    ]
    for odd in odds:
        (tmp_path / "run" / "environment.json").write_text(json.dumps(found | odd))
        with pytest.raises(RunError, match=r"cannot read .*environment"):
            reading.read_all([tmp_path / "run"])
    (tmp_path / "run" / "environment.json").write_text(json.dumps(found | {"layers": {"head.weight": 2**60}}))
    with pytest.raises(RunError, match="has other layers than environment"):
        reading.read_all([tmp_path / "run"])
    shutil.copy(runs["copfl"] / "environment.json", tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "state.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RunError, match="is damaged"):
        reading.read_all([tmp_path / "run"])


@pytest.mark.parametrize("rounds", ["[1]", "nan", "inf", '"many"', "0", "-3"])
def test_a_run_file_that_names_no_number_of_rounds(
    runs: dict[str, Path], tmp_path: Path, rounds: str
) -> None:
    shutil.copytree(runs["copfl"], tmp_path / "run")
    path = tmp_path / "run" / "run.toml"
    path.write_text(re.sub(r"(?m)^rounds = .*$", f"rounds = {rounds}", path.read_text()))
    with pytest.raises(RunError, match="no valid number of rounds"):
        reading.read_all([tmp_path / "run"])


def test_odd_words_in_a_folder_are_shown_as_they_are(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["copfl"], tmp_path / "run")
    path = tmp_path / "run" / "environment.json"
    found = json.loads(path.read_text())
    path.write_text(
        json.dumps(found | {"command": "copfl run 'half", "classes": ["9" * 5000] * len(found["classes"])})
    )
    assert "copfl run &#39;half" in document.render(page.document_of(reading.read_all([tmp_path / "run"])))


def test_a_round_without_seconds_is_damage(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["copfl"], tmp_path / "run")
    (tmp_path / "run" / "timing.jsonl").write_text('{"round": 1, "seconds": null}\n')
    with pytest.raises(RunError, match="it has no seconds"):
        reading.read_all([tmp_path / "run"])
