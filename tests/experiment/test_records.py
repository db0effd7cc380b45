"""A line a round, the same bytes for the same run."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.engine.rounds import Round
from copfl.errors import RunError
from copfl.experiment import records


def a_round(number: int = 0) -> Round:
    metrics = {
        "loss": np.array([0.5, np.nan, 1.5]),
        "accuracy": np.array([np.nan, np.nan, np.nan]),
        "healthy": np.array([1.0, 0.0, 1.0]),
    }
    return Round(number, np.array([0, 2, 5]), {"shared": 0.25, "odd": math.inf}, metrics)


def test_a_record_holds_plain_numbers_and_null_for_what_is_not_finite() -> None:
    record = records.as_record(a_round(3))
    assert record == {
        "round": 4,
        "clients": [0, 2, 5],
        "federation": {"odd": None, "shared": 0.25},
        "mean": {"healthy": pytest.approx(2 / 3), "loss": 1.0},
        "left_out": [2],
        "per_client": {"accuracy": [None] * 3, "healthy": [1.0, 0.0, 1.0], "loss": [0.5, None, 1.5]},
    }
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    for number in range(3):
        records.append(path, records.as_record(a_round(number)))
    assert records.read(path) == [records.as_record(a_round(number)) for number in range(3)]
    assert path.read_bytes().count(b"\n") == 3


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    for number in range(2):
        records.append(path, records.as_record(a_round(number)))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert len(records.read(path)) == 1
    path.write_bytes(b"")
    assert records.read(path) == []


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense\n",
        b'{"round":1}\n{"round":3}\n',
        b'{"round":2}\n',
        b"[]\n",
        b"\n",
        b"3\n",
        b"{}\n",
        b"\xff\n",
        b"null\n",
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(content)
    with pytest.raises(
        RunError, match=r"line [12] of .*rounds\.jsonl is damaged .*; restore the file, or start"
    ):
        records.read(path)
    with pytest.raises(RunError, match=r"cannot read .*gone: No such file or directory"):
        records.read(tmp_path / "gone")


@pytest.mark.parametrize("client", [-1, 2, 10**30])
def test_a_client_that_is_not_there_is_named(client: int) -> None:
    record = {"round": 3, "clients": [0, client], "per_client": {"accuracy": [0.5, 0.5]}}
    with pytest.raises(RunError, match=rf"round 3 names client {client}, but there are 2: its rounds\.jsonl"):
        records.latest([record], "accuracy", 2)


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rounds.jsonl"
    records.append(path, records.as_record(a_round()))
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            RunError, match=r"cannot write .*: No space left on device; free some space, then `copfl.resume\("
        ):
            records.append(path, records.as_record(a_round(1)))
    assert path.read_bytes() == before
    records.append(path, records.as_record(a_round(1)))
    assert len(records.read(path)) == 2


def test_a_figure_as_a_table() -> None:
    lines = [records.as_record(a_round(number)) for number in range(2)]
    table = records.table(lines, "loss", 6)
    assert table.shape == (2, 6)
    assert np.array_equal(table[0], [0.5, np.nan, np.nan, np.nan, np.nan, 1.5], equal_nan=True)
    assert np.isnan(records.table(lines, "nothing", 6)).all()
    assert records.table([], "loss", 6).shape == (0, 6)
