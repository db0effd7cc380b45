"""The runs of a row: the same clients for all, choices on validation samples, every number counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.bench import protocol
from copfl.bench.protocol import (
    SEEDS,
    SUITES,
    BenchJob,
    BenchMachine,
    MeasuredRun,
    Suite,
    final_jobs,
    measured,
)
from copfl.bench.rows import BenchRow
from copfl.bench.settings import QUICK, SETTINGS, TABLE, BenchSetting, arrays
from copfl.errors import DataError, UsageError
from tests.bench.conftest import MINE


def run(server: str, lr: float, *accuracy: float | None, setting: str = "a") -> MeasuredRun:
    return MeasuredRun(BenchJob("x", setting, server, lr, 0, True), [*accuracy], 0.0, 0.0, "", "")


def test_the_best_on_validation_samples_is_taken_of_equals_the_first() -> None:
    tuning = [run("mean", 0.1, 0.5, None), run("mean", 0.2, 0.4, 0.8), run("fedexp", 0.1, 0.6, 0.6)]
    tuning += [run("mean", 0.3, 0.1, setting="b")]
    chosen = final_jobs(tuning)
    assert chosen == [
        BenchJob("x", setting, "mean", lr, seed, False)
        for setting, lr in (("a", 0.2), ("b", 0.3))
        for seed in SEEDS
    ]


def test_all_algorithms_begin_with_the_same_clients_samples_and_weights(rows: dict[str, BenchRow]) -> None:
    starts = [
        {(run.job.setting, run.job.seed, run.job.tuning, run.start) for run in (*row.tuning, *row.runs)}
        for row in rows.values()
    ]
    assert starts[0] == starts[1] == starts[2]
    assert len(starts[0]) == 2 * (1 + 2)  # two settings: a seed for the choice and two others


def test_no_test_sample_takes_part_in_the_choice(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other labels of the test samples, a run on validation samples is the same to the bit, another is not."""
    jobs = [BenchJob("fedavg", "pairs", "mean", 1e-2, 0, tuning) for tuning in (True, False)]
    before = [measured(job, BenchMachine()) for job in jobs]

    def other(name: str, files: Path | None) -> dict[str, Any]:
        data = arrays(name, files)
        return {**data, "x_test": 255 - data["x_test"]}

    monkeypatch.setattr(protocol, "arrays", other)
    after = [measured(job, BenchMachine()) for job in jobs]
    assert after[0].hash == before[0].hash
    assert after[0].accuracy == before[0].accuracy
    assert after[1].hash != before[1].hash


def test_an_output_that_is_not_finite_counts_as_zero(suite: Suite) -> None:
    broken = measured(BenchJob("fedavg", "hospitals", "mean", 1e30, 1, False), BenchMachine())
    assert broken.accuracy == [0.0] * 6
    assert broken.value == 0.0


def test_a_client_that_was_absent_is_no_zero(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of six clients in a round, every second one evaluated: those that no round evaluated are in the end."""
    settings = {"rounds": 4, "batch": 8, "participation": 1 / 3, "eval_every": 2, "save_models": False}
    setting = BenchSetting("tumours", ("by_group", {}), 0, 4, TABLE, {"run": settings})
    monkeypatch.setitem(SETTINGS, "hospitals", setting)
    found = measured(BenchJob("fedavg", "hospitals", "mean", 1e-2, 1, False), BenchMachine())
    assert min(value for value in found.accuracy if value is not None) > 0.2
    assert None not in found.accuracy
    broken = measured(BenchJob("fedavg", "hospitals", "mean", 1e30, 1, False), BenchMachine())
    assert 0.0 in broken.accuracy  # of those whose training diverged


def test_steps_that_an_algorithm_refuses_are_left_out(rows: dict[str, BenchRow]) -> None:
    assert {run.job.server for run in rows["local"].tuning} == {"mean"}
    assert rows["local"].refused.keys() == {"momentum", "fedexp"}
    assert {run.job.server for run in rows[MINE].tuning} == set(protocol.SERVERS)


def test_what_the_protocol_decides_cannot_be_set(suite: Suite) -> None:
    for text in ("fedavg:lr=0.1", "fedavg:run.rounds=3", "fedavg:server.name=adam"):
        with pytest.raises(UsageError, match="part of the protocol"):
            protocol.tuning_jobs(text, suite, BenchMachine())
    jobs, _ = protocol.tuning_jobs("fedprox:mu=0.1", suite, BenchMachine())
    assert jobs[0].algorithm == "fedprox:mu=0.1"


def test_an_algorithm_that_cannot_train_is_refused_before_any_run(suite: Suite) -> None:
    with pytest.raises(UsageError, match=r"ffa_lora cannot train in the setting hospitals: .*lora"):
        protocol.tuning_jobs("ffa_lora", suite, BenchMachine())


def test_the_full_suite_says_which_files_it_needs(tmp_path: Path) -> None:
    job = BenchJob("fedavg", "cifar-2", "mean", 1e-3, 0, True)
    for files in (None, tmp_path):
        with pytest.raises(DataError, match=r'"cifar" .* are missing: .*prepare\.py'):
            protocol.experiment_of(job, BenchMachine(files=files))


def test_files_are_read_in_place_of_embedded_data(tmp_path: Path) -> None:
    np.savez(tmp_path / "tumours.npz", x=np.zeros((4, 2), np.float16), y=np.arange(4))
    assert arrays("tumours", tmp_path)["x"].dtype == np.float32
    assert len(arrays("tumours", None)["y"]) == 569


def test_the_hash_of_a_suite_changes_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Suite("quick", QUICK)
    before = quick.hash
    assert quick._replace(version="2").hash != before
    monkeypatch.setitem(SETTINGS, QUICK[0], dataclasses.replace(SETTINGS[QUICK[0]], rounds=1))
    assert quick.hash != before


def test_the_full_suite_has_the_settings_of_the_quick_one() -> None:
    assert set(SUITES["full"].settings) >= set(QUICK)
    assert all(SETTINGS[name].data in protocol_data() for name in QUICK)


def protocol_data() -> set[str]:
    """The data that the wheel has."""
    from copfl.bench.settings import EMBEDDED

    return set(EMBEDDED)
