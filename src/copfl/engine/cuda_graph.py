"""A program recorded once as a CUDA graph and replayed: one launch instead of thousands.

`mapping.cuda_graph` is the engine that calls its functions with a `Recorder`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from copfl.core import tree
from copfl.kernels.fused import can_compile

G = TypeVar("G")
R = TypeVar("R")

WARMUP = 2  # eager rounds before recording, in which compilers and libraries initialise


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # where the graph reads
    result: Any  # where it writes


def out_of_memory(error: BaseException) -> bool:
    """Whether a GPU ran out of memory; torch and the libraries below it each report that in their own way."""
    # The last one: cuDNN has no memory for its handle.
    reports = ("out of memory", "ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR")
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(report in str(error) for report in reports)
    )


def side_by_side(calls: Sequence[Callable[[], R]]) -> list[R]:
    """The results of calls that do not depend on each other.

    In a recording each call has a stream of its own. The kernels of a small group leave most of a GPU idle,
    so that the replay computes the groups at the same time.
    """
    if len(calls) == 1 or not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return [call() for call in calls]
    main, results = torch.cuda.current_stream(), []
    streams = [_stream(n, main.device.index) for n in range(len(calls))]
    for call, stream in zip(calls, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(call())
    for stream in streams:
        main.wait_stream(stream)
    return results


@cache
def _stream(n: int, device: int) -> Any:
    """The stream of the n-th call: always the same one, as memory that it freed is for it alone.

    The first call takes longest, so that its kernels go before the others'.
    """
    return torch.cuda.Stream(device, priority=0 if n else -1)  # type: ignore[no-untyped-call,unused-ignore]


class Recorder:
    """Calls a function eagerly at first, then replays it; one recording per shape of the input.

    The function must be the same one whenever the variant is the same, and must not read a value on the host.
    The result is valid until the next call, except for the part that `lasting` selects, which is copied.
    """

    def __init__(self, lasting: Callable[[Any], Any] = lambda result: ()) -> None:
        self.lasting = lasting
        self.release()
        self.stream: Any = None

    def release(self) -> None:
        """Drops all recordings, with their memory."""
        self.recordings: dict[object, Recording] = {}
        self.calls: dict[object, int] = {}
        self.sources: dict[object, list[Tensor]] = {}
        self.pool: Any = None

    def __call__(self, f: Callable[[G], R], inputs: G, variant: object) -> R:
        tensors = tree.leaves(inputs)
        if not tensors[0].is_cuda:
            return f(inputs)
        key = (variant, tuple((t.shape, t.dtype) for t in tensors))
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] <= WARMUP:
            return self._warm_up(f, inputs, first=self.calls[key] == 1)
        if key not in self.recordings:
            self.recordings[key] = self._record(f, inputs)
            self.sources[key] = []
        return self._replay(key, tensors)  # type: ignore[no-any-return]

    def _replay(self, key: object, tensors: list[Tensor]) -> Any:
        recording, before = self.recordings[key], self.sources[key]
        # Allocated first: the replay overwrites the last result, which the caller needs if memory runs out.
        lasting = tree.leaves(self.lasting(recording.result))
        copies = {id(t): torch.empty_like(t) for t in lasting}
        for n, (to, source) in enumerate(zip(recording.inputs, tensors, strict=True)):
            # Samples (uint8) that did not change since the last call are the same tensor; records change in
            # place.
            if not (n < len(before) and before[n] is source and source.dtype == torch.uint8):
                to.copy_(source, non_blocking=True)
        self.sources[key] = tensors
        recording.graph.replay()
        for t in lasting:
            copies[id(t)].copy_(t)
        return tree.each(lambda t: copies.get(id(t), t), recording.result)

    def _warm_up(self, f: Callable[[G], R], inputs: G, first: bool = False) -> R:
        """Calls f eagerly on one side stream, as recording will; each stream caches the memory it frees."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if first and can_compile():
                from copfl.kernels.triton.compiling import first_call

                result = first_call(lambda: f(inputs))
            else:
                result = f(inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.empty_cache()  # another process may need the memory until the recording
        return result

    def _record(self, f: Callable[[G], R], inputs: G) -> Recording:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a recording has a memory pool of its own, so the warm-up's is freed first
        fixed = tree.each(lambda t: t.contiguous().clone(), inputs)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                result = f(fixed)
        except BaseException as error:
            # torch then leaves its own stream current. Later work of this thread would run concurrently with
            # that of other threads, which would read results before they are computed.
            torch.cuda.set_stream(before)
            if out_of_memory(error):
                raise torch.cuda.OutOfMemoryError(str(error)) from error
            raise
        self.pool = graph.pool()
        return Recording(graph, tree.leaves(fixed), result)
