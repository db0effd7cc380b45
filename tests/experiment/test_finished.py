"""What a finished run gives beside its bundles: the model before local training, and every model everywhere."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.core.task import Personal
from copfl.errors import RunError, UsageError
from copfl.experiment import reading
from copfl.experiment.finished import cross_site
from copfl.experiment.models.client_models import RECEIVED
from copfl.report import page
from tests.commands import called, files
from tests.experiment.bundle.test_bundle import samples_of

SMALL: dict[str, Any] = {
    "clients": 4,
    "rounds": 2,
    "model": "mlp",
    "model_options": {"width": 8},
    "engine": "sequential",
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> copfl.Result:
    return copfl.run("fedavg_ft", **SMALL, out=tmp_path_factory.mktemp("finished") / "run")


def vector(model: Personal) -> list[float]:
    assert not isinstance(model, tuple)
    return model.tolist()


def test_the_model_before_local_training_is_that_of_the_result(result: copfl.Result) -> None:
    assert result.folder is not None
    before = files(result.folder)
    bundle = copfl.load(result.folder, 2, before_training=True)
    assert vector(bundle.model) == vector(result.client_model(2, before_training=True))
    assert vector(bundle.model) != vector(copfl.load(result.folder, 2).model)
    origin = bundle.description.origin
    assert (origin.stage, origin.round, origin.client) == (RECEIVED, 2, 2)
    assert bundle.description.scores == ()  # no evaluation has measured it
    assert files(result.folder) == before


def test_the_model_before_local_training_on_the_command_line(
    result: copfl.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, _ = samples_of(result, 1)
    np.savez(tmp_path / "x.npz", x=x[:5])
    words: list[Any] = [result.folder, "--client", 1, "--before-training"]
    answer = called(capsys, "predict", *words, "--data", tmp_path / "x.npz", "--json")
    expected = copfl.load(result.folder or "", 1, before_training=True).predict(x[:5])
    assert json.loads(answer.out)["prediction"] == expected.tolist()
    called(capsys, "export", *words, "--out", tmp_path / "sent")
    sent = copfl.load(tmp_path / "sent")
    assert sent.predict(x[:5]).tolist() == expected.tolist()
    assert "before local training, round 2 of 2" in (tmp_path / "sent" / "README.md").read_text("utf-8")
    without = called(capsys, "predict", result.folder, "--before-training", "--data", tmp_path / "x.npz")
    assert (without.code, "name it with --client" in without.err) == (2, True)
    with pytest.raises(RunError, match="is no run folder"):
        copfl.load(tmp_path / "sent", 1, before_training=True)
    with pytest.raises(UsageError, match="the global model is not trained by a client"):
        copfl.load(result.folder or "", "global", before_training=True)


def test_every_model_on_every_clients_samples(result: copfl.Result) -> None:
    assert result.folder is not None
    found = cross_site(result.folder, samples=1000)
    names = [*range(4), "global"]
    expected = [
        [bundle.score(bundle.outputs(x), y) for x, y in (samples_of(result, n) for n in range(4))]
        for bundle in (copfl.load(result.folder, name) for name in names)
    ]
    assert found.values == pytest.approx(np.array(expected))
    assert found.own == pytest.approx(result.final("accuracy"))
    assert found.of_others[0] == pytest.approx(np.mean(expected[0][1:]))
    assert cross_site(result.folder, samples=7).samples == [7] * 4  # evenly chosen


def test_the_matrix_is_in_the_report_and_in_files(
    result: copfl.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert result.folder is not None
    answer = called(capsys, "evaluate", result.folder, "--all", "--out", tmp_path / "matrix.csv")
    assert "global model" in answer.out
    assert "on other clients' samples" in answer.out
    content = json.loads(called(capsys, "evaluate", result.folder, "--all", "--json").out)
    rows = list(csv.reader((tmp_path / "matrix.csv").read_text("utf-8").splitlines()))
    assert [row[0] for row in rows[1:]] == content["models"]
    assert [float(value) for value in rows[1][1:]] == pytest.approx(content["values"][0], rel=1e-5)
    run = reading.read(result.folder, "run")
    assert run.analysis is not None
    assert run.analysis.cross.values.tolist() == content["values"][:-1]
    assert run.known_gains is None  # nothing was trained alone
    charts = [chart.name for section in page.sections([run]) for chart in section.charts]
    assert "cross" in charts
    both = called(capsys, "evaluate", result.folder, "--all", "--data", "x.npz")
    assert (both.code, "name only the run" in both.err) == (2, True)
    nothing = called(capsys, "evaluate", result.folder, "--client", 0)
    assert (nothing.code, "--all" in nothing.err) == (2, True)


def test_a_folder_without_bundles_names_the_command_that_makes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copfl.run("fedavg", **{**SMALL, "rounds": 1}, save_models=False, out=tmp_path / "run")
    with pytest.raises(RunError, match=r"'save_models': True}.*` makes them"):
        copfl.load(tmp_path / "run", 0)
    words = [
        "run",
        "-c",
        tmp_path / "run" / "run.toml",
        "--set",
        "run.save_models=true",
        "--out",
        tmp_path / "again",
    ]
    assert called(capsys, *words, "--quiet").code == 0
    assert copfl.load(tmp_path / "again", 0).description.scores


OWN_NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, classes))
"""


def test_a_bundle_with_code_of_ones_own_says_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    code = tmp_path / "code"
    code.mkdir()
    (code / "ownnet_of_a_bundle.py").write_text(OWN_NET, encoding="utf-8")
    monkeypatch.chdir(code)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "ownnet_of_a_bundle:Net"
    copfl.run("fedavg", clients=2, rounds=1, model=name, engine="sequential", out=tmp_path / "run")
    x = np.zeros((2, 1, 8, 8), np.uint8)
    monkeypatch.chdir(tmp_path)
    trained = copfl.load(tmp_path / "run", 0, code="ownnet_of_a_bundle")  # imported already
    expected = trained.predict_proba(x)
    trained.save(tmp_path / "sent")
    assert str(tmp_path) not in (tmp_path / "sent" / "bundle.json").read_text("utf-8")
    assert f"**Needs:** {name}" in (tmp_path / "sent" / "README.md").read_text("utf-8")
    del sys.modules["ownnet_of_a_bundle"]
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(code)])
    with pytest.raises(UsageError, match=r"add --code ownnet_of_a_bundle .* here there is no file of it"):
        copfl.load(tmp_path / "sent")
    with pytest.raises(UsageError, match="there is no module ownnet_of_a_bundle"):
        copfl.load(tmp_path / "sent", code="ownnet_of_a_bundle")
    monkeypatch.syspath_prepend(code)
    with pytest.raises(UsageError, match=r"here: .*ownnet_of_a_bundle\.py, sha256 \w{64} \(the same\)"):
        copfl.load(tmp_path / "sent")
    assert "ownnet_of_a_bundle" not in sys.modules
    found = copfl.load(tmp_path / "sent", code="ownnet_of_a_bundle")
    assert found.predict_proba(x).tolist() == expected.tolist()
    del sys.modules["ownnet_of_a_bundle"]
