from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from copfl.algorithms import COPFL, FedAvg
from copfl.core.algorithm import AnyAlgorithm
from copfl.engine import autotune
from copfl.engine.autotune import Workload
from copfl.engine.mapping import Chunk, sequential, vmap
from copfl.testing import small_federation


def load_of(algorithm: AnyAlgorithm, sizes: tuple[int, ...], rounds: int = 1, norm: str = "none") -> Workload:
    task, federation = small_federation(norm, sizes)
    return Workload(algorithm, task, federation, batch=4, participants=len(sizes), rounds=rounds)


SECONDS = autotune.seconds  # before tests/conftest.py replaces it


@pytest.fixture(autouse=True)
def really_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "seconds", SECONDS)


ENGINES = [vmap(2), sequential(), vmap(1)]


@pytest.mark.parametrize(
    ("seconds", "local_updates", "chosen"),
    [
        ((1.0, 0.1, 0.05), 10, 0),  # too short to measure
        ((1.0, 0.5, 0.2), 1000, 2),
        ((1.0, 0.5, 0.6), 1000, 1),
        ((1.0, 0.9, 0.85), 1000, 0),  # noise does not decide
    ],
)
def test_the_first_engine_unless_another_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], local_updates: int, chosen: int
) -> None:
    of = dict(zip(ENGINES, seconds, strict=True))
    monkeypatch.setattr(autotune, "seconds", lambda load, engine, **_: of[engine])
    load = load_of(FedAvg(), (4, 4), rounds=local_updates // 2)
    assert autotune.choose(load, ENGINES) == ENGINES[chosen]


def test_a_measurement_takes_some_time() -> None:
    load = load_of(FedAvg(), (5, 9, 3), norm="batch")
    for engine in ENGINES:
        assert 0 < autotune.seconds(load, engine) < 60


@pytest.mark.parametrize(("enough", "measured"), [(0.0, 3), (60.0, 1)])
def test_a_measurement_that_decides_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, enough: float, measured: int
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(autotune, "run_chunk", lambda *given, **named: calls.append(given))
    autotune.seconds(load_of(FedAvg(), (4, 4)), ENGINES[0], enough=enough)
    assert len(calls) == measured


def test_few_samples_decide_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sizes = [0.0], []

    def run_chunk(algorithm: object, task: object, engine: object, chunk: Chunk, models: object) -> None:
        sizes.append(tuple(chunk.groups[0].data.y.shape))
        clock[0] += 0.1 * chunk.groups[0].data.y.numel()

    monkeypatch.setattr(autotune, "run_chunk", run_chunk)
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    load = load_of(FedAvg(), (64, 64, 64))._replace(batch=16)
    assert autotune.seconds(load, vmap(3)) == pytest.approx(6.4)  # 64 samples of 0.1 seconds
    assert sizes == [(2, 4), (2, 4)]  # clients, samples


def test_a_trial_of_few_samples_trains_the_clients_on_them_alone() -> None:
    load = load_of(FedAvg(), (20, 3))._replace(batch=10)
    chunk, factor = autotune._trial(load, clients=2, samples=8)
    assert (chunk.groups[0].data.size.tolist(), [len(epoch) for epoch in chunk.groups[0].plan]) == (
        [8, 3],
        [1],
    )
    assert factor == pytest.approx(2 * 10 / 8 / 2)  # two steps of ten samples, and two clients were trained


@pytest.mark.parametrize(("processes", "chosen"), [(1, 0), (2, 1), (4, 1)])
def test_an_engine_that_uses_all_processors_is_preferred(
    monkeypatch: pytest.MonkeyPatch, processes: int, chosen: int
) -> None:
    of = dict(zip(ENGINES, (1.0, 1.1, 1.2), strict=True))
    monkeypatch.setattr(autotune, "seconds", lambda load, engine, **_: of[engine])
    load = load_of(FedAvg(), (4, 4), rounds=500)._replace(processes=processes)
    assert autotune.choose(load, ENGINES) == ENGINES[chosen]  # of two clients, vmap(2) is one part


def test_the_chunks_of_a_round_are_equal() -> None:
    task, _ = small_federation("none", (4,))
    for participants in (1, 10, 64, 100, 1000):
        chunk = autotune.clients_per_batch(task, participants)
        parts = -(-participants // chunk)
        assert 1 <= chunk <= autotune.MAX_CLIENTS["cpu"]
        assert parts * chunk - participants < parts  # no chunk is smaller by more than a few


def test_ten_clients_of_a_large_model_are_one_batch_on_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(140e9), int(150e9)))
    layout = SimpleNamespace(size=128_807_306)  # vgg11, of which ten clients took 59 GB
    task: Any = SimpleNamespace(device=torch.device("cuda"), layout=layout)
    assert autotune.clients_per_batch(task, 10) >= 10
    assert autotune.clients_per_batch(task, 30) == 10  # three equal ones


@pytest.mark.parametrize(
    ("seconds", "rounds", "chunk", "states", "expected"),
    [
        (1.0, 100, 1, 2, 4),
        (1.0, 100, 2, 2, 2),  # four clients are two parts
        (1.0, 100, 4, 2, 1),  # all of them are one
        (0.01, 100, 1, 2, 1),  # too short
        (1.0, 100, 1, 10**15, 1),  # more than can be shared
        (1.0, 100, 1, 0, 4),  # on disk
    ],
)
def test_processes_in_a_long_run(
    monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int, chunk: int, states: int, expected: int
) -> None:
    monkeypatch.setattr(autotune, "processors", lambda: 4)
    monkeypatch.setattr(autotune, "SHARED", autotune.SHARED if autotune.SHARED.is_dir() else Path.cwd())
    load = load_of(COPFL(), (4, 4, 4, 4), rounds=rounds)
    total = seconds * load.local_updates
    assert autotune.processes(load, vmap(chunk), states, total) == expected


def test_one_process_for_what_cannot_be_sent_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(FedAvg):
        """Nobody else can import this one."""

    monkeypatch.setattr(autotune, "processors", lambda: 2)
    for algorithm, expected in ((FedAvg(), 2), (Mine(), 1)):
        assert autotune.processes(load_of(algorithm, (4, 4)), sequential(), states=2, total=1e3) == expected
