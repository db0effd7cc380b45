from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from copfl.algorithms import COPFL
from copfl.algorithms.fedavg import FedAvg
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, ClientOutput
from copfl.core.task import Personal, Task, task_of
from copfl.data.clients.federation import FederatedData
from copfl.engine.mapping import ChunkResult, vmap
from copfl.engine.rounds import Round, State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.engine.workers import LARGE, Workers, _buffer, _pickled, _unpickled
from copfl.errors import RunError, UsageError
from copfl.testing import small_federation
from tests.slow import slow

SIZES = (5, 9, 3, 12, 4, 6, 7)


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def torch_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from a process that has imported it; those of the command below are spawned, as a user's."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["copfl.engine.workers", __name__])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forking)


class Kept(dict[int, Any]):
    """The model of each client's last evaluation, and its round."""

    def wanted(self, client: int) -> bool:
        return True

    def put(self, client: int, model: Personal, round: int) -> None:
        self[client] = tree.each(torch.clone, model), round

    def drop(self, client: int) -> None:
        del self[client]


def trained(
    algorithm: AnyAlgorithm, task: Task, federation: FederatedData, workers: int, disk: Path | None = None
) -> tuple[State, list[Round], Kept]:
    """The state after three rounds, what they showed, and the models; without workers, in this process."""
    state, engine, models = begin(algorithm, task, federation.clients, disk), vmap(2), Kept()
    simulation = Simulation(algorithm, task, federation, engine, 3, 4)
    how: dict[str, Any] = {"rounds": 3, "participation": 0.8, "models": models}
    if not workers:
        return state, list(simulate(simulation, state, **how)), models
    with Workers(simulation, state, workers) as executor:
        return state, list(simulate(simulation, state, executor=executor, **how)), models


class Dropping(nn.Module):
    """A model that draws, and so wide that its totals go through shared memory."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        inputs = math.prod(shape)
        width = LARGE // 4 // inputs + 1
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.Dropout(0.5))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result


@pytest.mark.job
@pytest.mark.parametrize(("where", "draws"), [("memory", True), ("disk", False)])
def test_the_number_of_workers_changes_nothing(where: str, draws: bool, tmp_path: Path) -> None:
    task, federation = small_federation("batch", SIZES)
    if draws:
        torch.manual_seed(0)
        task = task_of(Dropping(federation.shape, task.classes), task.classes)
        task = task.probed(tree.row(federation.train.rows([0]), 0))
        assert task.random
    algorithm: AnyAlgorithm = FedAvg() if draws else COPFL()  # its masks of so many entries take long
    everybody = torch.arange(len(SIZES))
    states, shown, models = zip(
        *(
            trained(algorithm, task, federation, n, tmp_path / str(n) if where == "disk" else None)
            for n in (0, 2 if where == "memory" else 1)  # each imports torch, which takes seconds
        ),
        strict=True,
    )
    records = [tree.leaves((state.server, state.clients.rows(everybody))) for state in states]
    assert all(torch.equal(a, b) for a, b in zip(*records, strict=True))
    for mine, theirs in zip(*shown, strict=True):
        assert all((mine.clients[k] == v).all() for k, v in theirs.clients.items())
    assert models[0].keys() == models[1].keys()
    assert len(models[0]) > 4
    for client, (model, round) in models[0].items():
        assert models[1][client][1] == round
        assert all(map(torch.equal, tree.leaves(model), tree.leaves(models[1][client][0])))


def test_large_tensors_go_over_the_tray_as_long_as_there_is_room() -> None:
    numbers = torch.randn(LARGE // 4)
    result = ChunkResult(
        client=None,
        total=(numbers, numbers.double(), numbers > 0, torch.arange(8)[::2], torch.ones(3).expand(LARGE, 3)),
        metrics={"loss": torch.tensor(0.5), "short": torch.ones(2, dtype=torch.bfloat16)},
    )
    buffer = _buffer(4 * LARGE)
    message = _pickled(result, buffer)
    assert 12 * LARGE < len(message) < 13 * LARGE  # what does not fit goes through the pipe
    found = _unpickled(message, buffer)
    buffer.zero_()  # what was unpacked has memory of its own
    assert isinstance(found, ChunkResult)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(result), strict=True))
    assert str(_unpickled(_pickled(RunError("message"), buffer), buffer)) == "message"


@dataclass(frozen=True)
class Failing(FedAvg):
    """An algorithm with a fault."""

    exit: bool = False

    def client_update(self, *given: Any) -> ClientOutput:
        if self.exit:
            os._exit(7)
        raise ValueError("a fault of its own")


def test_a_fault_in_a_worker_is_raised_here() -> None:
    with pytest.raises(ValueError, match="a fault of its own"):
        trained(Failing(), *small_federation("none", SIZES), 1)


def test_a_worker_that_ends_is_noticed() -> None:
    with pytest.raises(RunError, match="exit code 7"):
        trained(Failing(exit=True), *small_federation("none", SIZES), 1)


def test_what_cannot_be_sent_is_refused() -> None:
    task, federation = small_federation("none", SIZES)

    @dataclass(frozen=True)
    class Inside(FedAvg):
        pass

    with pytest.raises(UsageError, match="cannot be sent to worker processes"):
        trained(Inside(), task, federation, 1)


@pytest.mark.job
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=slow)])
def test_nothing_is_left_running_when_the_run_is_stopped(how: signal.Signals, tmp_path: Path) -> None:
    words = ["run", "--workers", "2", "--rounds", "100000", "--model", "mlp", "--out", str(tmp_path / "run")]
    run = subprocess.Popen(
        [sys.executable, "-m", "copfl", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    rounds = tmp_path / "run" / "rounds.jsonl"
    try:
        until(lambda: rounds.exists() and rounds.stat().st_size > 0, 240)
        assert len(members(run.pid)) >= 3
        if how is signal.SIGINT:
            os.killpg(run.pid, how)  # as a terminal does
        else:
            run.kill()
        run.wait(60)
        until(lambda: not members(run.pid), 60)
    finally:
        for process in members(run.pid):
            os.kill(process, signal.SIGKILL)


def members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def until(ready: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.1)
