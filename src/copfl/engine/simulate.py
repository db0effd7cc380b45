"""THE round loop."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from copfl.core import tree
from copfl.core.algorithm import EVAL_MODELS, AnyAlgorithm, EvalModels, Metrics
from copfl.core.batches import choose, participants, plan
from copfl.core.random import MODEL, hashed
from copfl.core.task import Task
from copfl.data.federation import Federation
from copfl.engine.cuda_graph import no_room
from copfl.engine.mapping import Chunk, Done, Mapping, together
from copfl.engine.store import DiskStore, MemoryStore, Store
from copfl.errors import RunError, UsageError, unknown


@dataclass
class State:
    """Everything a simulation is between two rounds."""

    server: Any
    clients: Store
    held: torch.Tensor  # [N], the mark of the mask that the server holds from each client; nan: none
    round: int = 0


@dataclass(frozen=True)
class Round:
    """What one round shows: figures of the federation, and of each client that took part."""

    number: int  # from 0
    ids: np.ndarray[Any, np.dtype[np.int64]]
    federation: dict[str, float]
    clients: dict[str, np.ndarray[Any, np.dtype[np.float64]]]  # a value per id


Ids = np.ndarray[Any, np.dtype[np.int64]]


class Setting(NamedTuple):
    """What every round of a simulation has in common."""

    algorithm: AnyAlgorithm
    task: Task
    federation: Federation
    mapping: Mapping
    seed: int
    batch: int


class Executor(Protocol):
    """Who trains the clients: this process, several (workers.py), or one for several simulations (in_step.py)."""

    def turns(self, state: State, parts: Sequence[Ids], look: EvalModels) -> Iterator[Done]:
        """What the turns of each part leave, in the order of the parts."""


def begin(algorithm: AnyAlgorithm, task: Task, clients: int, disk: Path | None = None) -> State:
    """The state before the first round, with the clients in memory, or on `disk` in this file."""
    held = torch.full((clients,), torch.nan, dtype=torch.float64)
    store: Store = (
        MemoryStore(algorithm, task, clients) if disk is None else DiskStore(algorithm, task, clients, disk)
    )
    return State(algorithm.server_init(task, clients), store, held)


def simulate(
    algorithm: AnyAlgorithm,
    task: Task,
    federation: Federation,
    mapping: Mapping,
    state: State,
    *,
    rounds: int,
    seed: int = 0,
    batch: int = 32,
    participation: float = 1.0,
    eval_every: int = 1,
    eval_models: str = "all",
    executor: Executor | None = None,
) -> Iterator[Round]:
    """Each round as it ends; `state` is then what the next round starts from.

    Everything random is a function of the seed, the round and the client, so the loop can stop and go on anywhere.
    """
    if not 0 < participation <= 1:
        raise UsageError(
            f"participation={participation} must be above 0 and at most 1: it is a share of the clients"
        )
    for name, value, least in (("batch", batch, 1), ("eval_every", eval_every, 1), ("seed", seed, 0)):
        if value < least:
            raise UsageError(f"{name}={value} must be at least {least}")
    if eval_models not in EVAL_MODELS:
        raise unknown("eval_models", eval_models, EVAL_MODELS)
    tried = EVAL_MODELS[eval_models]
    count = participants(federation.clients, participation)
    executor = executor or InProcess(Setting(algorithm, task, federation, mapping, seed, batch))
    while state.round < rounds:
        due = (state.round + 1) % eval_every == 0 or state.round + 1 == rounds
        look = tried if due else ()
        ids = choose(seed, state.round, federation.clients, count)
        parts = np.split(ids, range(mapping.chunk, len(ids), mapping.chunk))
        metrics: list[Metrics] = []
        # 1. Everybody who takes part gets its message, trains, and adds to the total in the order of the ids.
        total = tree.summed(_totals(executor.turns(state, parts, look), metrics))
        # 2. The server sees the total and nothing else.
        with torch.no_grad():
            state.server, whole = algorithm.server_update(task, state.server, total)
        state.round += 1
        # 3. The figures come to the host once a round.
        per_client = {name: value.cpu().numpy() for name, value in tree.concatenate(metrics).items()}
        _leave_out_masks(state, ids, per_client)
        per_client["weight"] = _shares(per_client["weight"], per_client["healthy"])
        yield Round(state.round - 1, ids, {name: float(value) for name, value in whole.items()}, per_client)


def _totals(turns: Iterator[Done], metrics: list[Metrics]) -> Iterator[Any]:
    """What each part adds to the total; its figures are noted."""
    for done in turns:
        metrics.append(done.metrics)
        yield done.total


def _leave_out_masks(
    state: State, ids: Ids, metrics: dict[str, np.ndarray[Any, np.dtype[np.float64]]]
) -> None:
    """Takes the masks that the server holds already off the bytes, as the wire does, and notes which it holds now."""
    if "mask_fingerprint" not in metrics:
        return
    fingerprints, sizes = metrics.pop("mask_fingerprint"), metrics.pop("mask_bytes")
    held = state.held.numpy()
    metrics["bytes_up"] = metrics["bytes_up"] - np.where(held[ids] == fingerprints, sizes, 0)
    held[ids] = np.where(metrics["healthy"] > 0, fingerprints, held[ids])


def _shares(
    weight: np.ndarray[Any, np.dtype[np.float64]], healthy: np.ndarray[Any, np.dtype[np.float64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Each client's share in the round's mean."""
    counted = np.where(healthy > 0, weight, 0.0)
    return counted / counted.sum() if counted.sum() > 0 else counted


class InProcess:
    """The crew of one process. Where a GPU has no room for a part, half as many clients go together from then on."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.most = setting.mapping.chunk

    def turns(self, state: State, parts: Sequence[Ids], look: EvalModels) -> Iterator[Done]:
        """What the turns of each part leave, or of smaller ones, in the order of the ids."""
        left = np.concatenate(parts)
        while len(left):
            part = left[: self.most]
            done = self._tried(state, part, look)
            if done is None:
                self.most = math.ceil(len(part) / 2)
                told = f"the GPU has no room for {len(part)} clients at once; from here on {self.most} go together"
                warnings.warn(told, RuntimeWarning, stacklevel=1)
                continue
            left = left[len(part) :]
            yield done

    def _tried(self, state: State, part: Ids, look: EvalModels) -> Done | None:
        """None: there is no room, and nothing has changed."""
        try:
            return together_of(self.setting, state.server, state.clients, state.round, part, look)
        except RuntimeError as error:
            if not no_room(error):
                raise
            if len(part) == 1:
                why = str(error).partition(".")[0]
                raise RunError(
                    f"the GPU has no room for the training of a single client ({why}); use --device cpu, a smaller "
                    "model, or --set run.batch=N, or wait until others have left the GPU"
                ) from error
        # Only here, for what was under way is held as long as the error is.
        self.setting.mapping.forget()
        gc.collect()
        torch.cuda.empty_cache()
        return None


def together_of(
    setting: Setting, server: Any, clients: Store, round: int, part: Ids, look: EvalModels
) -> Done:
    """The turns of some clients, their totals already added up; their records go back to the store."""
    chunk = chunk_of(setting, server, clients, round, part)
    if setting.task.device.type == "cpu":
        # What a model draws itself, as dropout does, must not depend on which process trains whom and in what order.
        with torch.random.fork_rng([]):
            torch.manual_seed(int(hashed(setting.seed, MODEL, round, int(part[0]))))
            done = together(setting.algorithm, setting.task, setting.mapping, chunk, look)
    else:
        done = together(setting.algorithm, setting.task, setting.mapping, chunk, look)
    clients.put(chunk.ids, done.client)
    return done._replace(client=None)


def chunk_of(setting: Setting, server: Any, clients: Store, round: int, part: Ids) -> Chunk:
    """What the turns of some clients need."""
    algorithm, task, federation, _, seed, batch = setting
    ids = torch.from_numpy(part).to(task.device)
    order = plan(
        seed, round, part, federation.train.sizes[part],
        batch=batch, epochs=algorithm.total_epochs, augment=federation.dataset.augment, device=task.device,
    )  # fmt: skip
    return Chunk(
        server, ids, clients.rows(ids), federation.train.rows(part), federation.test.rows(part), order
    )
