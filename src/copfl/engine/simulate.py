"""The round loop.

`experiment.training` runs it to its end; searches for a number of rounds stop it early.
"""

import gc
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, Metrics, next_plan, rows_for, traits
from copfl.core.batches import choose, participants
from copfl.core.evaluation import (
    EVAL_MODELS,
    MODEL,
    EvalModels,
    Measured,
    is_evaluated,
    measured,
    on_host,
    without_model,
)
from copfl.core.halves import DIFFERENCE, HALF
from copfl.core.selection import BestRounds, has_ended
from copfl.core.task import Data, Personal, Task
from copfl.data.clients.federation import FederatedData
from copfl.engine.cuda_graph import out_of_memory
from copfl.engine.halves import ClientHalves, loss_differences
from copfl.engine.mapping import Chunk, ChunkResult, Group, Kept, Mapping, run_chunk
from copfl.engine.rounds import Ids, ModelKeeper, Round, State, Store, Values
from copfl.engine.sizes import groups_of
from copfl.engine.store import DiskStore, MemoryStore
from copfl.errors import RunError, at_least, fraction_of, one_of, warn


class Simulation(NamedTuple):
    """The constants of a simulation: the same in every round."""

    algorithm: AnyAlgorithm
    task: Task
    federation: FederatedData
    mapping: Mapping
    seed: int = 0
    batch: int = 32
    halves: ClientHalves | None = None  # whose models are compared; None: no halves


class Executor(Protocol):
    """Runs local updates: in this process, in several (workers.py, ranks.py), or batched with other seeds."""

    def local_updates(self, state: State, chunks: Sequence[Ids], models: EvalModels) -> Iterator[ChunkResult]:
        """The result of each part's local updates, in the order of the parts; the store has their records.

        Args:
            state: After the round before; the executor reads it, and its store gets the new records.
            chunks: The participants, in the order of their numbers.
            models: Which models are evaluated.
        """


def begin(algorithm: AnyAlgorithm, task: Task, clients: int, disk: Path | None = None) -> State:
    """The state before the first round.

    Args:
        algorithm: The algorithm, in its wrappers.
        task: What every client learns.
        clients: How many there are.
        disk: The file in which the clients' records are; None: they are in memory.
    """
    no_masks = torch.full((clients,), torch.nan, dtype=torch.float64)
    store: Store = (
        MemoryStore(algorithm, task, clients) if disk is None else DiskStore(algorithm, task, clients, disk)
    )
    return State(algorithm.server_init(task, clients), store, no_masks)


def simulate(
    simulation: Simulation,
    state: State,
    *,
    rounds: int,
    participation: float = 1.0,
    eval_every: int = 1,
    eval_models: str = "all",
    population: Ids | None = None,
    executor: Executor | None = None,
    models: ModelKeeper | None = None,
    models_of_all: bool = False,
    best: BestRounds | None = None,
    patience: int = 0,
) -> Generator[Round, None, None]:
    """Each round as it ends; `state` is then the start of the next round.

    Everything random is a function of the seed, the round and the client, so the loop can stop and resume
    anywhere.

    Args:
        simulation: What is the same in every round.
        state: Where the rounds begin, see `begin`; it is changed.
        rounds: The number of rounds in all, with those that `state` has behind it.
        participation: Fraction of the population in each round.
        eval_every: Rounds between evaluations.
        eval_models: Which models are evaluated, of EVAL_MODELS.
        population: The clients from which each round's are chosen; None: all.
        executor: Runs the local updates; None: in this process.
        models: Gets each client's model of its last evaluation, which no record has: algorithms may evaluate
            one that is neither uploaded nor stored.
        models_of_all: `models` gets those of all evaluations, for a caller that may end before the last one.
        best: Each client's best evaluation so far, which is kept up to date; `models` gets the model of that
            one instead.
        patience: With `best`, the rounds end after so many evaluations without a better one; 0: never.
    """
    algorithm, task, federation, mapping, seed, batch, halves = simulation
    fraction_of("the clients", participation=participation)
    at_least(1, batch=batch, eval_every=eval_every)
    at_least(0, seed=seed)
    one_of(EVAL_MODELS, eval_models=eval_models)
    population = np.arange(federation.clients) if population is None else population
    count = participants(len(population), participation)

    def clients_of(round: int) -> Ids:
        return population[choose(seed, round, len(population), count)]

    evaluated = (n for n in reversed(range(state.round, rounds)) if is_evaluated(n, rounds, eval_every))
    last = {} if models is None or best is not None else _last_rounds(evaluated, population, clients_of)
    executor = executor or InProcess(simulation)
    while not has_ended(state.round, rounds, best, patience):
        ids = clients_of(state.round)
        asked: EvalModels = EVAL_MODELS[eval_models] if is_evaluated(state.round, rounds, eval_every) else ()
        evaluated_now = ids.tolist() if asked else []
        possible = last.get(state.round, []) if best is None and not models_of_all else evaluated_now
        candidates = {n for n in possible if models is not None and models.wanted(n)}
        chunks = np.split(ids, range(mapping.chunk, len(ids), mapping.chunk))
        metrics: list[Metrics] = []
        sums = tree.Sum[Any]()
        begin = 0
        # 1. Each participant gets its message, trains, and adds to the total, in the order of the ids.
        for result in executor.local_updates(state, chunks, (*asked, MODEL) if candidates else asked):
            chunk_ids = ids[begin : begin + len(result.metrics["healthy"])]
            begin += len(chunk_ids)
            values, after = without_model(result.metrics)
            if on_host(task):
                tested, *validated = (
                    [split.targets(int(n)) for n in chunk_ids] for split in federation.splits[1:]
                )
                values = measured(task, values, tested, *validated)
            if models is not None and after is not None:
                _keep(models, after, chunk_ids, candidates, state.round + 1, values, best)
            metrics.append(values)
            if result.total is not None:
                sums.add((result.total, result.half))
        total, half = sums.total
        # 2. The server gets the total and nothing else.
        with torch.no_grad():
            before = state.server
            state.server, whole = algorithm.server_update(task, before, total)
        state.round += 1
        # 3. The metrics are copied to the host once a round.
        per_client = {name: value.cpu().numpy() for name, value in tree.concatenate(metrics).items()}
        _leave_out_masks(state, ids, per_client)
        per_client["weight"] = _normalised(per_client["weight"], per_client["healthy"])
        if halves is not None:
            sides = np.where(np.isin(ids, halves.first(seed, state.round - 1)), 1.0, -1.0)
            per_client[HALF] = np.where(per_client["weight"] > 0, sides, 0.0)
            how = algorithm, task, mapping, federation
            per_client[DIFFERENCE] = loss_differences(*how, before, (total, half), state.clients, chunks)
        if best is not None:
            best.add(state.round, ids, per_client)
        yield Round(state.round - 1, ids, {name: float(value) for name, value in whole.items()}, per_client)


def _last_rounds(
    rounds: Iterator[int], population: Ids, clients_of: Callable[[int], Ids]
) -> dict[int, list[int]]:
    """The clients last evaluated in a round, by round; `rounds` are those that evaluate, the last first."""
    last: dict[int, list[int]] = {}
    left = set(population.tolist())
    for round in rounds:
        if not left:
            break
        last[round] = [n for n in clients_of(round).tolist() if n in left]
        left.difference_update(last[round])
    return last


def _keep(
    models: ModelKeeper,
    after: Measured,
    ids: Ids,
    candidates: set[int],
    round: int,
    metrics: Metrics,
    best: BestRounds | None,
) -> None:
    """Gives the models of the `candidates` in this part to `models`.

    With `best`, those that are the best so far; else all but those that diverged: a huge model may be finite,
    and its predictions not.
    """
    if best is None:
        is_kept = ((metrics["healthy"] > 0) & after.finite).tolist()
    else:
        is_kept = best.replaced(ids, {k: v.cpu().numpy() for k, v in metrics.items()}).tolist()
    for row, n in enumerate(ids.tolist()):
        if n not in candidates:
            continue
        model: Personal = tree.each(lambda t, row=row: t[row].cpu(), after.model)
        if is_kept[row] and tree.finite(model):
            models.put(n, model, round)
        elif best is None:
            models.drop(n)


def _leave_out_masks(state: State, ids: Ids, metrics: dict[str, Values]) -> None:
    """Subtracts the bytes of masks that the server knows, as the wire does; updates the known masks."""
    if "mask_fingerprint" not in metrics:
        return
    fingerprints, sizes = metrics.pop("mask_fingerprint"), metrics.pop("mask_bytes")
    known = state.known_masks.numpy()
    metrics["bytes_up"] = metrics["bytes_up"] - np.where(known[ids] == fingerprints, sizes, 0)
    known[ids] = np.where(metrics["healthy"] > 0, fingerprints, known[ids])


def _normalised(weight: Values, healthy: Values) -> Values:
    """Each client's fraction of the round's mean."""
    counted = np.where(healthy > 0, weight, 0.0)
    return counted / counted.sum() if counted.sum() > 0 else counted


class InProcess:
    """The executor of one process. When a GPU runs out of memory, it halves its chunks from then on."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.chunk = simulation.mapping.chunk
        self.known = KnownOfSamples()

    def local_updates(self, state: State, chunks: Sequence[Ids], models: EvalModels) -> Iterator[ChunkResult]:
        """The result of each part's local updates, or of smaller parts, in the order of the ids."""
        self.known = KnownOfSamples(self.known)
        left = np.concatenate(chunks)
        while len(left):
            chunk_ids = left[: self.chunk]
            result = self._try(state, chunk_ids, models)
            if result is None:
                self.chunk = math.ceil(len(chunk_ids) / 2)
                batched = len(chunk_ids)
                message = (
                    f"the GPU is out of memory with {batched} clients batched; from now on {self.chunk} are"
                )
                warn(message)
                continue
            left = left[len(chunk_ids) :]
            yield result

    def _try(self, state: State, ids: Ids, models: EvalModels) -> ChunkResult | None:
        """None: the GPU is out of memory, and nothing has changed."""
        try:
            return train_part(
                self.simulation, state.server, state.clients, state.round, ids, models, self.known
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if len(ids) == 1:
                why = str(error).partition(".")[0]
                raise RunError(
                    f"the GPU is out of memory in the training of a single client ({why}); use --device cpu, "
                    "a smaller model, or --set run.batch=N, or wait until other programs have left the GPU"
                ) from error
        # Outside of the handler: the error refers to the tensors of the failed program.
        self.simulation.mapping.release()
        gc.collect()
        torch.cuda.empty_cache()
        return None


class KnownOfSamples:
    """What is known of some clients, by their numbers: of the round before, and of this one."""

    def __init__(self, before: "KnownOfSamples | None" = None) -> None:
        self.before: dict[bytes, Any] = {} if before is None else before.now  # of their samples
        self.totals_before: dict[bytes, Any] = {} if before is None else before.totals
        self.now: dict[bytes, Any] = {}
        self.totals: dict[bytes, Any] = {}


def train_part(
    simulation: Simulation,
    server: Any,
    clients: Store,
    round: int,
    ids: Ids,
    models: EvalModels,
    known: KnownOfSamples | None = None,
) -> ChunkResult:
    """The local updates of some clients; the result has no records, as the store has taken them.

    Args:
        simulation: What is the same in every round.
        server: Its record.
        clients: The records of all clients.
        round: Its number, from 0.
        ids: The clients, sorted.
        models: Which models are evaluated.
        known: Of their samples; this round is added. None: nothing is kept.
    """
    algorithm, task, mapping = simulation.algorithm, simulation.task, simulation.mapping
    chunk = chunk_input(simulation, server, clients, round, ids)
    kept: list[Kept] = []
    if known is not None and task.device.type == "cpu" and simulation.halves is None:
        keys = [(chunk.ids if g.rows is None else chunk.ids[g.rows]).numpy().tobytes() for g in chunk.groups]
        groups = [
            _with_known(algorithm, task, server, group, key, known)
            for group, key in zip(chunk.groups, keys, strict=True)
        ]
        chunk = chunk._replace(groups=tuple(groups))
        if groups[0].data.known is not None and getattr(algorithm, "adds_up_rows", False):
            kept = [Kept(known.totals_before.get(key)) for key in keys]
    result = run_chunk(algorithm, task, mapping, chunk, models, kept)
    if known is not None and kept:
        known.totals |= {key: one.now for key, one in zip(keys, kept, strict=True)}
    clients.put(chunk.ids, result.client)
    return result._replace(client=None)


def _with_known(
    algorithm: AnyAlgorithm, task: Task, server: Any, group: Group, key: bytes, known: KnownOfSamples
) -> Group:
    """The group whose data have what is known of them for this round."""
    values = rows_for(algorithm, task, server, group.data, known.before.get(key))
    if values is None:
        return group
    known.now[key] = values
    return group._replace(data=group.data._replace(known=values))


class Widths(NamedTuple):
    """The sizes of clients that train in one batch with other simulations' clients."""

    smallest: int
    largest: int
    test: int  # the largest
    validation: int = 1


def chunk_input(
    simulation: Simulation,
    server: Any,
    clients: Store,
    round: int,
    numbers: Ids,
    widths: Widths | None = None,
) -> Chunk:
    """The input of some clients' local updates.

    Args:
        simulation: What is the same in every round.
        server: Its record.
        clients: The records of all clients.
        round: Its number, from 0.
        numbers: The clients, sorted.
        widths: To which all clients are padded, in one group; None: in groups of similar size.
    """
    federation, device = simulation.federation, simulation.task.device
    sizes, batch = federation.train.sizes[numbers], simulation.batch
    ids = torch.from_numpy(numbers).to(device)
    records = clients.rows(ids)
    is_one_group = (
        widths is not None or traits(simulation.algorithm).local_steps
    )  # where all make as many steps
    rows = [np.arange(len(numbers))] if is_one_group else groups_of(sizes, batch, simulation.mapping.name)
    members = [numbers[row] for row in rows]
    train = federation.train.groups(members, 1 if widths is None else widths.largest)
    # Predictions of all groups are one tensor, so that the groups have test rows of one width.
    test_width, validation_width = (1, 1) if widths is None else (widths.test, widths.validation)
    test = federation.test.groups(members, max(test_width, int(federation.test.sizes[numbers].max())))
    validation: Sequence[Data | None] = [None] * len(rows)
    if (held_out := federation.validation) is not None:
        validation = held_out.groups(members, max(validation_width, int(held_out.sizes[numbers].max())))

    def group(n: int) -> Group:
        index = None if len(rows) == 1 else torch.from_numpy(rows[n]).to(device)
        batches = next_plan(
            simulation.algorithm,
            simulation.task,
            records if index is None else tree.rows(records, index),
            round,
            members[n],
            sizes[rows[n]],
            seed=simulation.seed,
            batch=batch,
            augment=federation.dataset.augment,
            limits=None if widths is None else (widths.smallest, widths.largest),
        )
        return Group(index, train[n], test[n], batches, validation[n])

    first_half = None
    if simulation.halves is not None:
        first_half = torch.isin(ids, ids.new_tensor(simulation.halves.first(simulation.seed, round)))
    return Chunk(server, ids, records, tuple(map(group, range(len(rows)))), first_half)
