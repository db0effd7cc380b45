from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.comparison.jobs.job import Job
from copfl.comparison.results.results import last_evaluations, read_record
from copfl.data.clients.partition import Partition
from copfl.errors import DataError, RunError
from copfl.settings.schema import Run
from copfl.stats import worst_of

nan = np.nan


def run(
    path: Path, rounds: list[dict[str, Any]], tested: tuple[int, ...] = (1, 1, 1), last: int | None = None
) -> Job:
    """The folder of a run with these rounds, each given as its clients and their metrics."""
    path.mkdir()
    lines = [
        {
            "round": k,
            "clients": (clients := line.pop("clients", [0, 1, 2])),
            "left_out": [],
            "federation": {},
            "mean": {},
            "per_client": {"bytes_up": [8] * len(clients), "bytes_down": [6] * len(clients), **line},
        }
        for k, line in enumerate(rounds, 1)
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seconds = [9.0, 1.0, 3.0, 2.0, 2.0][: len(lines)]
    timing = ({"round": number, "seconds": s} for number, s in enumerate(seconds, 1))
    (path / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timing))
    parts = tuple(np.arange(3 * n, 3 * n + 3) for n in range(3))
    test = tuple(part[: 3 * some] for part, some in zip(parts, tested, strict=True))
    Partition(parts, test, "by hand").save(path / "partition.json")
    start = {"partition": "a", "samples": "b", "weights": "c"}
    (path / "environment.json").write_text(json.dumps({"start": start}))
    kinds = ("algorithm", "data", "partition", "model", "run")
    (path / "run.toml").write_text("".join(f"[{kind}]\n" for kind in kinds))
    return Job("toy", Run.of({"run": {"seed": 0, "rounds": len(lines)}}), path, last=last)


def evaluated(*after: float | None, **more: Any) -> dict[str, Any]:
    values = {name: list(after) for name in ("accuracy", "accuracy_before", "accuracy_global")}
    return {**values, **more}


def test_a_value_is_the_mean_of_the_last_evaluations_of_each_client(tmp_path: Path) -> None:
    lines = [evaluated(0, 0, 0), {}, evaluated(0.2, 0.4, 0.6), evaluated(0.4, 0.4, 0.9)]
    found = read_record(run(tmp_path / "run", lines, last=2))
    assert found.clients["accuracy"] == pytest.approx([0.3, 0.4, 0.75])
    assert found.mean("accuracy") == pytest.approx(1.45 / 3)
    assert found.rounds == [1, 3, 4]  # the second had no evaluation
    assert found.curves["accuracy"] == pytest.approx([0, 0.4, 1.7 / 3])
    assert found.mean("accuracy", "best_round") == pytest.approx(1.7 / 3)
    assert found.worst == pytest.approx(0.3)  # a tenth of three clients is one
    assert (found.cost["bytes_up"], found.cost["bytes_down"]) == (8, 6)
    assert found.cost["seconds"] == 2  # the median of 1, 3, 2: the first round warms up


def test_a_client_that_was_away_has_its_own_last_evaluations(tmp_path: Path) -> None:
    lines = [
        evaluated(0.1, 0.2, clients=[0, 1]),
        evaluated(0.3, 0.5, clients=[0, 2]),
        evaluated(0.5, 0.4, clients=[0, 1]),
    ]
    found = read_record(run(tmp_path / "run", lines, last=2))
    assert found.clients["accuracy"] == pytest.approx([0.4, 0.3, 0.5])


def test_a_broken_model_counts_as_nought_and_no_samples_as_nothing(tmp_path: Path) -> None:
    found = read_record(run(tmp_path / "run", [evaluated(1, None, None)], tested=(1, 1, 0), last=1))
    assert np.array_equal(found.clients["accuracy"], [1, 0, nan], equal_nan=True)
    assert found.cost["broken"] == 1
    assert found.mean("accuracy") == 0.5
    with pytest.raises(DataError, match="no client has test samples"):
        read_record(run(tmp_path / "other", [evaluated(1, 1, 1)], tested=(0, 0, 0)))


def test_the_worst_tenth() -> None:
    values = np.arange(20, 0, -1) / 20
    assert worst_of(values) == pytest.approx((0.05 + 0.10) / 2)
    assert worst_of(np.append(values, nan)) == worst_of(values)
    assert worst_of(np.append(values, 1.0)) == pytest.approx(0.3 / 3)  # 2.1 clients are three


def test_a_short_run_counts_the_last_third_of_its_evaluations(tmp_path: Path) -> None:
    """Five rounds from 10 to 50 %: the value is the last one, and not the mean of the whole run."""
    rising = [evaluated(*[0.1 * k] * 3) for k in range(1, 6)]
    found = read_record(run(tmp_path / "five", rising))
    assert found.mean() == pytest.approx(0.5)
    assert (found.last, found.counted) == (1, (5, 5))
    assert read_record(run(tmp_path / "asked", rising, last=5)).mean() == pytest.approx(0.3)


def test_a_client_that_is_seldom_selected_counts_the_last_third_of_its_own_evaluations() -> None:
    values = np.full((15, 2), nan)
    values[:, 0], values[::5, 1] = np.arange(15), [1, 2, 3]
    assert last_evaluations(values).tolist() == [12, 3]


def test_last_evaluations_of_fewer_than_asked() -> None:
    assert np.array_equal(last_evaluations(np.array([[1.0, nan], [2.0, nan]]), 5), [1.5, nan], equal_nan=True)


def test_malicious_clients_are_not_counted(tmp_path: Path) -> None:
    malicious = {"malicious": [0.0, 1.0, 0.0]}
    lines = [evaluated(0.2, 0.0, 0.4, **malicious), evaluated(0.4, 1.0, 0.6, **malicious)]
    found = read_record(run(tmp_path / "run", lines, last=1))
    assert found.clients["accuracy"] == pytest.approx([0.4, nan, 0.6], nan_ok=True)
    assert found.mean("accuracy") == pytest.approx(0.5)
    assert found.curves["accuracy"] == pytest.approx([0.3, 0.5])


def test_a_model_that_was_not_tried_has_no_value(tmp_path: Path) -> None:
    found = read_record(run(tmp_path / "run", [{"accuracy": [0.5, None, 0.7]}] * 2, last=2))
    assert found.clients["accuracy"] == pytest.approx([0.5, 0.0, 0.7])  # tried, and without a finite answer
    assert np.isnan(found.clients["accuracy_before"]).all()
    assert np.isnan(found.mean("accuracy_global"))
    assert found.cost["broken"] == 2


@pytest.mark.parametrize("wrong", [17123988.0, 1.5, -0.1])
def test_an_accuracy_that_is_no_fraction_is_an_error(tmp_path: Path, wrong: float) -> None:
    message = r"accuracy_before is between .* must be a fraction.*remove .*run it again"
    job = run(tmp_path / "run", [evaluated(0, 0, 0, accuracy_before=[0.1, wrong, 0.3])])
    with pytest.raises(RunError, match=message):
        read_record(job)
