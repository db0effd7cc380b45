"""What a node notes of its rounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from copfl.errors import RunError
from copfl.federation.node import measured_rounds
from copfl.federation.node.evaluation import MeasuredModels


def found(value: float) -> MeasuredModels:
    return MeasuredModels({"accuracy": torch.tensor(value)}, {"accuracy_validation": torch.tensor(math.nan)})


def noted(folder: Path) -> list[tuple[int, float]]:
    return [(line.round, line.metrics["accuracy"]) for line in measured_rounds.read(folder)]


def test_a_round_that_is_repeated_replaces_itself_and_later_ones(tmp_path: Path) -> None:
    for round, value in enumerate((0.5, 0.25, 0.75)):
        measured_rounds.enter(tmp_path, round, found(value))
    assert noted(tmp_path) == [(1, 0.5), (2, 0.25), (3, 0.75)]
    measured_rounds.enter(tmp_path, 2, found(1.0))
    assert noted(tmp_path) == [(1, 0.5), (2, 0.25), (3, 1.0)]
    measured_rounds.enter(tmp_path, 1, found(0.0))  # the server lost rounds
    assert noted(tmp_path) == [(1, 0.5), (2, 0.0)]
    assert math.isnan(measured_rounds.read(tmp_path)[0].metrics["accuracy_validation"])
    assert (tmp_path / measured_rounds.FILE).stat().st_mode & 0o077 == 0


def test_a_line_that_a_kill_cut_off_is_written_again(tmp_path: Path) -> None:
    for round in range(2):
        measured_rounds.enter(tmp_path, round, found(0.5))
    path = tmp_path / measured_rounds.FILE
    path.write_bytes(path.read_bytes()[:-5])
    assert noted(tmp_path) == [(1, 0.5)]
    measured_rounds.enter(tmp_path, 1, found(0.25))
    assert noted(tmp_path) == [(1, 0.5), (2, 0.25)]
    path.write_bytes(b"{}\n")
    with pytest.raises(RunError, match="is damaged"):
        measured_rounds.read(tmp_path)
    with pytest.raises(RunError, match="is damaged"):
        measured_rounds.enter(tmp_path, 2, found(0.25))
