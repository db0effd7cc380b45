"""The rounds of a row where nobody names them: those that a run by itself finds, once for all seeds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.comparison.results import tables
from copfl.comparison.rows import rounds
from copfl.errors import CopflError
from copfl.settings.schema import Run
from tests.comparison.small import base, clouds, numbers


def open_base(data: Path, **run: Any) -> dict[str, Any]:
    """Settings that name no number of rounds."""
    settings = base(data, **run)
    del settings["run"]["rounds"]
    return settings


def test_a_row_trains_for_as_many_rounds_as_a_run_finds(tmp_path: Path) -> None:
    data = clouds(tmp_path / "clouds.npz")
    few = base(data, rounds=6, find_rounds="first")
    how: dict[str, Any] = {"seeds": [0, 1], "base_tables": few, "tune": {}}
    found = copfl.compare(["fedavg:lr=0.3", "local:lr=0.3"], out=tmp_path / "a", **how)
    for row in found.rows:
        name, own = row.entry.name, {**few, "optimizer": {"name": "adam", "lr": 0.3}}
        alone = copfl.run(name, base_tables=own).experiment.settings
        assert alone.find_rounds == "done"
        assert {run.length for run in row.outcomes} == {alone.rounds}, name
    lengths = ", ".join(f"{row.label} {row.outcomes[0].length}" for row in found.rows)
    assert f"held out, with seed 0: {lengths}." in str(found).replace("\n", " ")
    clouds(data, test_seed=7)  # other test samples
    others = copfl.compare(["fedavg:lr=0.3", "local:lr=0.3"], out=tmp_path / "b", **how)
    assert [row.outcomes[0].length for row in others.rows] == [row.outcomes[0].length for row in found.rows]
    clouds(data)
    beside = copfl.compare(["fedavg:lr=0.3", "local:lr=0.3"], out=tmp_path / "c", jobs=2, **how)
    assert numbers(beside) == numbers(found)


@pytest.mark.job
def test_they_are_looked_for_once_and_where_nobody_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, looked = clouds(tmp_path / "clouds.npz"), list[tuple[str, int, float]]()

    def found(run: Run) -> Run:
        looked.append((run.algorithm.name, run.run.seed, run.optimizer.lr or 0.0))
        settings = dataclasses.replace(run.run, rounds=1 + len(looked), find_rounds="done", temperature=1.5)
        return dataclasses.replace(run, run=settings)

    monkeypatch.setattr(rounds, "with_found_rounds", found)
    said: list[str] = []
    how: dict[str, Any] = {"seeds": [3, 4], "out": tmp_path / "out", "log": said.append}
    rates: dict[str, Any] = {"tune": {"lr": [0.1, 0.2]}}
    first = copfl.compare(["fedavg", "local"], base_tables=open_base(data), **rates, **how)
    expected = [(name, 3, rate) for name in ("fedavg", "local") for rate in (0.1, 0.2)]
    assert looked == expected
    assert said[:2] == ["fedavg lr=0.1: 2 rounds", "fedavg lr=0.2: 3 rounds"]
    assert {run.length for run in first.rows[0].outcomes} <= {2, 3}
    assert {run.length for run in first.rows[1].outcomes} <= {4, 5}
    assert ", 2 to 5 rounds," in first.title or "rounds, seeds 3, 4" in first.title
    again = copfl.compare(["fedavg", "local"], base_tables=open_base(data), **rates, **how)
    assert looked == expected
    assert numbers(again) == numbers(first)
    copfl.compare(["fedavg"], base_tables=base(data), tune={}, **how)
    copfl.compare(["fedavg"], base_tables=open_base(data, rounds=2, find_rounds="off"), tune={}, **how)
    assert looked == expected  # somebody named them
    file = next((tmp_path / "out" / "rounds").iterdir())
    file.write_text("{}")
    with pytest.raises(CopflError, match=f"{file.name} is damaged .*; delete it, and the number of rounds"):
        copfl.compare(["fedavg", "local"], base_tables=open_base(data), **rates, **how)


def test_rows_that_train_too_long_are_named(tmp_path: Path) -> None:
    data = clouds(tmp_path / "clouds.npz")
    how: dict[str, Any] = {"seeds": [0], "base_tables": base(data, rounds=5), "tune": {}}
    found = copfl.compare(["fedavg"], out=tmp_path / "out", **how)
    (record,) = found.rows[0].outcomes
    record.curves["accuracy"][:] = [0.8, 0.84, 0.83, 0.8, 0.78]
    assert tables.past_their_best(found) == []  # not where the loss does not rise
    record.curves["test_loss"][:] = [0.6, 0.4, 0.41, 0.6, 0.7]
    (text,) = tables.past_their_best(found)
    assert text.startswith(
        "Past their best: fedavg (accuracy 84.0 % in rounds 2 to 2, 78.0 % in the last ones)."
    )
    record.curves["accuracy"][4] = 0.835
    assert tables.past_their_best(found) == []
    assert np.isfinite(record.curves["test_loss"]).all()
