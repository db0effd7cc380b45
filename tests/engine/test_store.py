from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import copfl as copfl_package
from copfl.algorithms import ALGORITHMS, COPFL, FedAvg
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, trained_alone
from copfl.core.optim import Adam
from copfl.engine.mapping import vmap
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.engine.store import DiskStore, MemoryStore
from copfl.errors import RunError
from copfl.testing import small_federation
from copfl.testing.federations import other_federation
from tests.commands import found
from tests.slow import slow
from tests.toys import slopes


def store(clients: int = 4) -> MemoryStore:
    return MemoryStore(COPFL(), slopes(1.0, 2.0), clients)


def test_everybody_begins_as_a_client_that_never_took_part() -> None:
    first = COPFL().client_init(slopes(1.0, 2.0))
    rows = store().rows(torch.arange(4))
    for (path, expected), (other, value) in zip(tree.named(first), tree.named(rows), strict=True):
        assert path == other
        assert all(torch.equal(value[n], expected) for n in range(4))


def test_rows_of_some_are_theirs_and_come_back_to_them() -> None:
    it = store()
    some = it.rows(torch.tensor([1, 3]))
    it.put(torch.tensor([1, 3]), some._replace(w=torch.tensor([[10.0, 10.0], [30.0, 30.0]]).double()))
    assert it.rows(torch.arange(4)).w[:, 0].tolist() == [1, 10, 1, 30]
    assert it.rows(torch.tensor([3])).w.tolist() == [[30, 30]]


def test_everybody_at_once_and_then_some() -> None:
    it = store(2)
    everybody = it.rows(torch.arange(2))
    it.put(torch.arange(2), everybody._replace(w=torch.tensor([[5.0, 5.0], [6.0, 6.0]]).double()))
    it.put(torch.tensor([1]), it.rows(torch.tensor([1]))._replace(w=torch.tensor([[7.0, 7.0]]).double()))
    assert it.rows(torch.arange(2)).w[:, 0].tolist() == [5, 7]


def test_the_first_weights_of_the_task_are_not_written_into() -> None:
    task = slopes(1.0, 2.0)
    it = MemoryStore(COPFL(), task, 3)
    it.put(torch.tensor([0]), tree.each(torch.zeros_like, it.rows(torch.tensor([0]))))
    assert task.initial.tolist() == [1, 2]
    assert it.rows(torch.tensor([2])).w.tolist() == [[1, 2]]


SIZES = (5, 9, 3, 12, 4, 6, 7)
HOW: dict[str, Any] = {"participation": 0.6}


def same(a: object, b: object) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.job
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(COPFL(), marks=slow), COPFL(optimizer=Adam(keep=True)), FedAvg()],
    ids=repr,
)
def test_on_disk_is_in_memory_bit_for_bit(algorithm: AnyAlgorithm, tmp_path: Path) -> None:
    task, federation = small_federation("batch", SIZES)
    memory, disk = (begin(algorithm, task, len(SIZES), path) for path in (None, tmp_path / "states"))
    for state in (memory, disk):
        rounds = simulate(Simulation(algorithm, task, federation, vmap(2), 3, 4), state, rounds=4, **HOW)
        for number, _ in enumerate(rounds):
            if number == 1:
                state.clients.saved()
                state.clients.settled()
    assert same(disk.server, memory.server)
    everybody = torch.arange(len(SIZES))
    assert same(disk.clients.rows(everybody), memory.clients.rows(everybody))


def test_the_disk_holds_the_last_checkpoint_whatever_is_written_after_it(tmp_path: Path) -> None:
    task = slopes(1.0, 2.0)
    it = DiskStore(COPFL(), task, 3, tmp_path / "states")
    ids = torch.tensor([0, 2])

    def put(number: float) -> None:
        it.put(ids, tree.each(lambda t: torch.full_like(t, number), it.rows(ids)))

    put(1)
    put(2)
    saved = tree.each(torch.clone, it.saved())
    it.settled()
    for number in (3, 4, 5):
        put(number)
    assert it.rows(torch.arange(3)).w[:, 0].tolist() == [5, 1, 5]
    again = DiskStore(COPFL(), task, 3, tmp_path / "states")
    again.restore(saved)
    assert again.rows(torch.arange(3)).w[:, 0].tolist() == [2, 1, 2]


def test_masks_take_a_bit_an_entry_and_who_never_took_part_takes_nothing(tmp_path: Path) -> None:
    task, _ = small_federation("none", (4, 4))
    it = DiskStore(COPFL(), task, 1000, tmp_path / "states")
    record = COPFL().client_init(task)
    masks = sum(t.numel() for t in tree.leaves(record) if t.dtype == torch.bool)
    whole = sum(t.numel() * t.element_size() for t in tree.leaves(record))
    assert it.size == whole - masks + sum(
        -(-t.numel() // 8) for t in tree.leaves(record) if t.dtype == torch.bool
    )
    it.put(torch.tensor([999]), tree.repeat(record, 1))
    assert (tmp_path / "states").stat().st_blocks * 512 < 4 * it.length


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    it = DiskStore(COPFL(), slopes(1.0), 2, tmp_path / "file" / "states")
    with pytest.raises(RunError, match=r"cannot store the clients' records in .*states"):
        it.put(torch.tensor([0]), tree.repeat(COPFL().client_init(slopes(1.0)), 1))


@pytest.mark.job
def test_a_run_on_disk_that_was_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    how: dict[str, Any] = {"rounds": 6, "clients": 6, "participation": 0.5, "checkpoint_every": 2}
    how |= {"store": "disk", "model": "mlp", "model_options": {"width": 4}}
    program = (
        "import os, copfl\n"
        f"how = {how!r}\n"
        f"copfl.run(out={str(tmp_path / 'killed')!r}, on_round=lambda r, s: r.number == 4 and os.kill(os.getpid(), 9),"
        " **how)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == -9
    copfl_package.run(out=tmp_path / "whole", **how)
    copfl_package.resume(tmp_path / "killed")
    assert found(tmp_path / "killed") == found(tmp_path / "whole")
    # In memory it is the same again.
    copfl_package.run(out=tmp_path / "memory", **{**how, "store": "memory"})
    assert found(tmp_path / "memory") == found(tmp_path / "whole")


def test_rows_that_an_update_hands_on_unchanged_can_be_put_back_where_processes_share_them() -> None:
    """As the starts of a method's training alone are: with several workers that ended a run after its rounds."""
    it = store()
    it.share()
    everybody = torch.arange(4)
    before = tree.each(torch.clone, it.rows(everybody))
    it.put(everybody, it.rows(everybody))
    for (_, old), (_, new) in zip(tree.named(before), tree.named(it.rows(everybody)), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("name", ["levels", "trees"])
def test_training_alone_with_shared_records_is_as_with_its_own(name: str) -> None:
    algorithm = trained_alone(ALGORITHMS[name]())
    assert algorithm is not None
    task, federation = other_federation("regression", "linear" if name == "levels" else "trees")
    found = []
    for is_shared in (False, True):
        state = begin(algorithm, task, federation.clients)
        if is_shared:
            state.clients.share()
        rounds = simulate(Simulation(algorithm, task, federation, vmap(64)), state, rounds=2)
        found.append([round.clients["test_loss"].tolist() for round in rounds])
    assert found[0] == found[1]
