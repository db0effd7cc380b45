"""How the local update is mapped over clients: the one thing in which the engines differ.

`simulate` trains each chunk of clients with it; everything else is the same for all engines.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, ClientOutput, Metrics
from copfl.core.algorithm import total_of as total_of_rows
from copfl.core.evaluation import EvalModels, evaluate
from copfl.core.payload import mask_bytes, mask_fingerprint, nbytes
from copfl.core.task import Data, Personal, Plan, Task
from copfl.engine.cuda_graph import Recorder, out_of_memory, side_by_side
from copfl.errors import CopflError, UsageError, how_to_set
from copfl.kernels.fused import LONG, compiles, either_rows, mostly_rows

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")

LIBRARIES = Path(torch.__file__).parent, Path(__file__).parents[1]  # of torch and of copfl
WRITE = "it writes the values of many clients into one tensor; write torch.stack, torch.cat or torch.where"
READ = "it reads a tensor's value, as .item(), float(), .numpy() and .tolist() do; compute with the tensor"
RULES = {  # of user code that vmap maps, by what torch says where it is broken
    "control flow": "it is a Python branch on a tensor; write torch.where",
    ".item()": READ,
    "data pointer": READ,
    "dynamic "
    "shape": "the shape of its result depends on a tensor's values; write torch.where in place of a mask",
    "is not possible because there exists a Tensor": WRITE,
    "doesn't match the broadcast shape": WRITE,
}


class ClientInput(NamedTuple):
    """The input of one client's local update."""

    id: Tensor
    client: Any
    down: Any
    data: Data
    test: Data
    plan: Plan
    validation: Data | None = None  # samples that it does not train on


class ClientResult(NamedTuple):
    """The result of one client's local update."""

    client: Any
    upload: Any
    metrics: Metrics


class Submission(NamedTuple):
    """One client's upload at the server, with its record afterwards, which stays with the client."""

    id: Tensor
    upload: Any
    client: Any


class Group(NamedTuple):
    """Clients that take each step together: their samples and batches, padded to the largest of them."""

    rows: Tensor | None  # [n], which clients of the chunk they are; None: all of them
    data: Data
    test: Data
    plan: Plan
    validation: Data | None = None


class Chunk(NamedTuple):
    """The input of some clients' local updates: rows, and the server that they have in common."""

    server: Any
    ids: Tensor
    clients: Any
    groups: tuple[Group, ...]  # see engine.sizes
    first_half: Tensor | None = None  # [N] bool, see engine.halves; None: no halves are averaged


class ChunkResult(NamedTuple):
    """The result of some clients' local updates."""

    client: Any
    total: Any  # the sum of their summands; None: another part's total has it
    metrics: Metrics
    half: Any = None  # the sum over the first half alone


@dataclass
class Kept:
    """What `core.algorithm.total_of` keeps of a group from round to round."""

    before: Any = None
    now: Any = None


def call_directly(f: Callable[[A], B], inputs: A, variant: object) -> B:
    """f of the inputs; an engine that records calls does not call directly.

    Args:
        f: What is computed.
        inputs: Of it.
        variant: What distinguishes this call from others of the same function; here it does not count.
    """
    return f(inputs)


class Mapping(NamedTuple):
    """The number of clients in one program, how it maps a function over rows, and how it is called."""

    name: str
    chunk: int
    over: Callable[[Callable[[Any], Any], Any], Any]
    call: Callable[[Callable[[Any], Any], Any, object], Any] = call_directly

    def release(self) -> None:
        """Frees the memory of recorded programs."""
        if isinstance(self.call, Recorder):
            self.call.release()


def sequential() -> Mapping:
    """Client after client: plain PyTorch, the reference, and suited to a debugger."""
    return Mapping("sequential", 1, single)


def vmap(chunk: int = 64) -> Mapping:
    """Up to `chunk` clients batched in one program, by vmap."""
    return Mapping("vmap", chunk, batched)


def cuda_graph(chunk: int = 64) -> Mapping:
    """`vmap`, with the program recorded in the first rounds as a CUDA graph and replayed in the others."""
    return Mapping("cuda_graph", chunk, batched, Recorder(_lasting))


def renewed(mapping: Mapping) -> Mapping:
    """The same engine without recorded programs, for another algorithm."""
    return cuda_graph(mapping.chunk) if isinstance(mapping.call, Recorder) else mapping


def _lasting(result: ChunkResult | Sequence[ChunkResult]) -> Any:
    """The parts that are needed after the next chunk; the store copies the clients' records before that."""
    if isinstance(result, ChunkResult):
        return result.total, result.metrics, result.half
    return tuple(map(_lasting, result))


def single(f: Callable[[A], B], rows: A) -> B:
    """f of the only row.

    Args:
        f: Of one client's values.
        rows: One row.
    """
    return tree.each(lambda t: t.unsqueeze(0), f(tree.row(rows, 0)))


class NotBatchable(UsageError):
    """A line of a user's code that vmap cannot map over clients."""


def batched(f: Callable[[A], B], rows: A) -> B:
    """f over all rows at once, by vmap; NotBatchable names the line of a user's code that vmap cannot map.

    Args:
        f: Of one client's values.
        rows: A row per client.
    """
    try:
        return tree.vectorised(f, rows)
    except Exception as error:
        line, message = _line_of_user(error), " ".join(str(error).split())
        if not line or isinstance(error, CopflError) or out_of_memory(error):
            raise
        if "called random operation" in message:  # client after client it runs, but never twice the same
            raise NotBatchable(
                f"{line} draws random numbers of its own; only those of the plan can be repeated"
            ) from error
        if not _runs_alone(f, rows):
            raise
        rule = next((rule for said, rule in RULES.items() if said in message), f"torch says: {message[:200]}")
        remedy = f"or use {how_to_set('run.engine', 'sequential', '--engine')}, one client after the other"
        raise NotBatchable(f"{line} cannot be computed for many clients at once: {rule}; {remedy}") from error


def _line_of_user(error: Exception) -> str:
    """The innermost line of the traceback that is neither copfl's nor torch's; empty if there is none."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = (f"{frame.filename}:{frame.lineno}" for frame in frames if not _is_ours(frame.filename))
    return next(lines, "")


def _is_ours(file: str) -> bool:
    return file.startswith("<") or any(folder in Path(file).parents for folder in LIBRARIES)


def _runs_alone(f: Callable[[A], B], rows: A) -> bool:
    """Whether f has a result for the first row."""
    try:
        f(tree.row(rows, 0))
    except Exception:
        return False
    return True


def run_chunk(
    algorithm: AnyAlgorithm,
    task: Task,
    mapping: Mapping,
    chunk: Chunk,
    models: EvalModels,
    kept: Sequence[Kept] = (),
) -> ChunkResult:
    """These clients' local updates and the sum of their summands.

    A client whose upload or record is not finite is left out of the round: it adds nothing and keeps its old
    record. The record is checked too, because a client that shares little can diverge without a trace in its
    upload.

    Args:
        algorithm: What the clients train with.
        task: What they learn.
        mapping: How a function is mapped over clients.
        chunk: The clients, with what they need.
        models: Which models are evaluated.
        kept: Of each group whose clients `core.algorithm.total_of` adds up.
    """

    def run(chunk: Chunk) -> ChunkResult:
        def update(client: ClientInput) -> ClientResult:
            return local_update(algorithm, task, client, models)

        inputs = inputs_of(algorithm, chunk)
        results = side_by_side([partial(mapping.over, update, rows) for rows in inputs])
        if kept:
            return added_up(algorithm, task, chunk, results, kept)
        updated = with_healthy_records(in_order(chunk, results), chunk.clients)
        return total_of(algorithm, task, mapping, chunk, updated)

    with torch.no_grad():
        result: ChunkResult = mapping.call(run, chunk, models)
        return result


def added_up(
    algorithm: AnyAlgorithm, task: Task, chunk: Chunk, results: Sequence[ClientResult], kept: Sequence[Kept]
) -> ChunkResult:
    """The results of clients that are added up together, see `core.algorithm.total_of`.

    Args:
        algorithm: What the clients train with.
        task: What they learn.
        chunk: The clients.
        results: Of the updates of each group.
        kept: Of each group.
    """
    totals = tree.Sum[Any]()
    for group, result, one in zip(chunk.groups, results, kept, strict=True):
        how = algorithm, task, chunk.server, group.data, result.upload, result.metrics["healthy"] > 0
        total, one.now = total_of_rows(*how, one.before)
        totals.add(total)
    updated = in_order(chunk, [result._replace(upload=()) for result in results])
    updated = with_healthy_records(updated, chunk.clients)
    return ChunkResult(updated.client, totals.total, updated.metrics)


def inputs_of(algorithm: AnyAlgorithm, chunk: Chunk) -> list[ClientInput]:
    """The input of each client's local update, with its message from the server; rows of each group.

    Args:
        algorithm: What the clients train with.
        chunk: The clients, with what they need.
    """
    down = algorithm.downlink(chunk.server, chunk.ids)

    def of_group(group: Group) -> ClientInput:
        common = chunk.ids, chunk.clients, down
        ids, clients, message = common if group.rows is None else tree.rows(common, group.rows)
        return ClientInput(ids, clients, message, group.data, group.test, group.plan, group.validation)

    return list(map(of_group, chunk.groups))


def in_order(chunk: Chunk, results: Sequence[ClientResult]) -> ClientResult:
    """The results of the groups as rows in the order of the chunk's clients.

    Args:
        chunk: The clients.
        results: Of each of its groups.
    """
    rows_of_groups = [group.rows for group in chunk.groups if group.rows is not None]
    if not rows_of_groups:
        return results[0]

    def ordered(*of_groups: Tensor) -> Tensor:
        whole = of_groups[0].new_empty((len(chunk.ids), *of_groups[0].shape[1:]))
        for rows, values in zip(rows_of_groups, of_groups, strict=True):
            whole.index_copy_(0, rows, values)
        return whole

    return tree.each(ordered, *results)


def with_healthy_records(updated: ClientResult, before: Any) -> ClientResult:
    """The results, in which a client whose update is not finite has its record from before.

    Args:
        updated: The results.
        before: The records before the update.
    """
    healthy = updated.metrics["healthy"] > 0
    return updated._replace(client=healthy_records(healthy, updated.client, before))


def total_of(
    algorithm: AnyAlgorithm, task: Task, mapping: Mapping, chunk: Chunk, updated: ClientResult
) -> ChunkResult:
    """The sum of the clients' summands, at their server.

    Args:
        algorithm: What the clients train with.
        task: What they learn.
        mapping: How a function is mapped over clients.
        chunk: The clients.
        updated: The results of their updates.
    """
    rows = Submission(chunk.ids, updated.upload, updated.client)
    summands = mapping.over(lambda row: algorithm.summand(task, chunk.server, row.id, row.upload), rows)
    healthy = updated.metrics["healthy"] > 0
    half = None if chunk.first_half is None else healthy_total(healthy & chunk.first_half, summands)
    return ChunkResult(updated.client, healthy_total(healthy, summands), updated.metrics, half)


def local_update(
    algorithm: AnyAlgorithm, task: Task, inputs: ClientInput, models: EvalModels
) -> ClientResult:
    """One client's local update, with an evaluation of these models; "healthy": its result is finite.

    Args:
        algorithm: What the client trains with.
        task: What it learns.
        inputs: Its record, its message and its samples.
        models: Which models are evaluated.
    """
    output = algorithm.client_update(task, inputs.client, inputs.down, inputs.data, inputs.plan)
    if not isinstance(output, ClientOutput):
        raise UsageError(
            f"client_update of {type(algorithm).__name__} returned a {type(output).__name__}; it must return a "
            "ClientOutput(client, upload, trained, metrics), of copfl.core"
        )
    zero = torch.zeros((), dtype=torch.float64, device=inputs.id.device)
    metrics = {name: metric.to(torch.float64) for name, metric in output.metrics.items()}
    metrics["healthy"] = tree.finite((output.client, output.upload), inputs.id.device).to(torch.float64)
    raw, sent = mask_bytes(output.upload, inputs.client, output.client)
    up, down = (nbytes(one, of=task.initial.dtype) for one in (output.upload, inputs.down))
    metrics.setdefault("bytes_up", zero + up - raw + sent)  # split learning counts its own
    metrics.setdefault("bytes_down", zero + down)
    if raw:  # the round loop subtracts them where the server knows the mask already
        metrics["mask_bytes"] = zero + sent
        metrics["mask_fingerprint"] = zero + mask_fingerprint(output.upload)
    if models:
        records = inputs.client, inputs.down, output.client
        samples = inputs.test, models, inputs.validation
        trained: Personal | None = output.trained
        if trained is None:
            trained = algorithm.personal_model(task, output.client, inputs.down)
        metrics |= evaluate(algorithm, task, *records, trained, *samples)
    return ClientResult(output.client, output.upload, metrics)


def healthy_total(healthy: Tensor, summands: T) -> T:
    """The sum of the healthy clients' summands, rows [N, ...]; Gathered parts have zeros for the others.

    Args:
        healthy: Which clients' results are finite, [N] bool.
        summands: A row per client.
    """
    if not healthy.is_cuda:
        return tree.total(summands if healthy.all() else tree.each(partial(_or_zero, healthy), summands))

    def total(rows: Tensor, gathered: bool) -> Tensor:
        if gathered:
            return _or_zero(healthy, rows).flatten(0, 1)
        if rows.dim() == 2 and rows.shape[1] > LONG and compiles(rows):
            from copfl.kernels.triton import vectors

            return vectors.sum_rows(healthy, rows)
        return _or_zero(healthy, rows).sum(0)

    totals = map(total, tree.leaves(summands), tree.gathered(summands))
    return tree.rebuild(summands, list(totals))


def _or_zero(healthy: Tensor, rows: Tensor) -> Tensor:
    return either_rows(healthy, rows, torch.zeros_like(rows))


def healthy_records(healthy: Tensor, new: T, old: T) -> T:
    """The new records of the healthy clients and the old ones of the others, rows [N, ...].

    Args:
        healthy: Which clients' results are finite, [N] bool.
        new: The records after the update, a row per client.
        old: The records before it.
    """
    if not healthy.is_cuda:
        if bool(healthy.all()):
            return tree.each(torch.Tensor.contiguous, new)  # a value that all share gets a row for each
        return tree.each(lambda n, o: either_rows(healthy, n, o), new, old)
    read_only = {t.untyped_storage().data_ptr() for t in tree.leaves(old)}

    def choose(n: Tensor, o: Tensor) -> Tensor:
        storage = n.untyped_storage().data_ptr()
        writable = storage not in read_only
        read_only.add(storage)
        return mostly_rows(healthy, n, o) if writable else either_rows(healthy, n, o)

    return tree.each(choose, new, old)
