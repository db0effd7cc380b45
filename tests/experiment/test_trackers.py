from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from copfl.engine.rounds import Round
from copfl.errors import RunError, UsageError
from copfl.experiment import trackers
from tests.commands import TINY, called

SETTINGS: dict[str, dict[str, Any]] = {"algorithm": {"name": "copfl", "rate": 0.25}, "run": {"seed": 3}}


def round_of(number: int) -> Round:
    values = {"accuracy": np.array([0.5, np.nan]), "weight": np.array([0.25, 0.75])}
    return Round(number, np.array([1, 4]), {"shared": 0.5}, values)


def test_every_finite_figure_has_a_name() -> None:
    assert trackers.metrics(round_of(0), 0.1) == {
        "seconds": 0.1, "federation/shared": 0.5, "mean/accuracy": 0.5, "mean/weight": 0.5, "client-0001/accuracy": 0.5,
        "client-0001/weight": 0.25, "client-0004/weight": 0.75,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is no part of copfl")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with trackers.tracking(["tensorboard"], tmp_path, SETTINGS) as on_round:
        for number in range(2):
            on_round(round_of(number), 0.1)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("client-0004/weight")] == [(1, 0.75), (2, 0.75)]


def test_what_mlflow_and_wandb_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for both: neither is installed here, and both want to talk to a server."""
    mlflow, wandb = mock.Mock(), mock.Mock()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with trackers.tracking(["mlflow", "wandb"], tmp_path, SETTINGS) as on_round:
        on_round(round_of(0), 0.1)
    settings = {"algorithm.name": "copfl", "algorithm.rate": "0.25", "run.seed": "3"}
    mlflow.log_params.assert_called_once_with(settings)
    mlflow.log_metrics.assert_called_once_with(trackers.metrics(round_of(0), 0.1), step=1)
    mlflow.end_run.assert_called_once_with()
    wandb.init.assert_called_once_with(
        project="copfl", name=tmp_path.name, dir=str(tmp_path), config=settings
    )
    wandb.init().log.assert_called_once_with(trackers.metrics(round_of(0), 0.1), step=1)
    wandb.init().finish.assert_called_once_with()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own
def test_a_resumed_run_goes_on_where_it_was_tracked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint every second round: the third is played again, and is shown once."""
    pytest.importorskip("tensorboard", reason="tensorboard is no part of copfl")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    every_second = ("--set", "run.checkpoint_every=2")
    answer = called(
        capsys, "run", *TINY, "-r", 3, *every_second, "--track", "tensorboard", "--out", out, "-q"
    )
    assert answer == (0, "", "")
    assert called(capsys, "resume", out, "-r", 5, "-q") == (0, "", "")
    shown = EventAccumulator(str(out / "tensorboard"))
    shown.Reload()
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    events = shown.Scalars("client-0001/accuracy")
    assert [event.step for event in events] == [1, 2, 3, 4, 5]
    expected = [record["per_client"]["accuracy"][1] for record in records]
    assert [event.value for event in events] == pytest.approx(expected)


def test_trackers_with_a_server_find_their_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow, wandb = mock.Mock(), mock.Mock()
    mlflow.start_run().info.run_id, wandb.init().id = "of mlflow", "of wandb"
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with trackers.tracking(["mlflow", "wandb"], tmp_path, SETTINGS) as on_round:
        on_round(round_of(0), 0.1)
    mlflow.reset_mock()
    with trackers.tracking([], tmp_path, SETTINGS) as on_round:
        on_round(round_of(1), 0.1)
    mlflow.start_run.assert_called_once_with(run_id="of mlflow")
    mlflow.log_params.assert_not_called()
    assert wandb.init.call_args.kwargs["id"] == "of wandb"
    assert wandb.init.call_args.kwargs["resume"] == "allow"
    (tmp_path / "track.json").write_text("[")
    with (
        pytest.raises(RunError, match=r"track.json cannot be read"),
        trackers.tracking([], tmp_path, SETTINGS),
    ):
        pass


def test_trackers_are_closed_when_a_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    opened: Any = lambda *_: (lambda *_: None, lambda: closed.append("closed"), "")  # noqa: E731
    monkeypatch.setattr(trackers, "TRACKERS", {"mine": ("json", opened)})
    with contextlib.suppress(RuntimeError), trackers.tracking(["mine"], tmp_path, {}) as on_round:
        on_round(round_of(0), 0.1)
        raise RuntimeError
    assert closed == ["closed"]


def test_what_is_wrong_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = called(capsys, "run", *TINY, "--track", "tensorbord", "--out", tmp_path / "run")
    assert answer.code == 2
    assert 'did you mean "tensorboard"?' in answer.err
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="pip install wandb"), trackers.tracking(["wandb"], tmp_path, {}):
        pass
