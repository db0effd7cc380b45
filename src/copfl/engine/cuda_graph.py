"""A program recorded once as a CUDA graph and replayed: one launch instead of thousands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from copfl.core import tree

G = TypeVar("G")
R = TypeVar("R")

WARMUP = 2  # rounds as written before recording: compilers and libraries settle


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    given: list[Tensor]  # where the graph reads
    result: Any  # where it writes


def no_room(error: BaseException) -> bool:
    """Whether it says that a GPU has no memory left, which torch and the libraries below it each say in their way."""
    told = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    )


def nothing(result: Any) -> Any:
    """No part of it."""
    return ()


class Recorder:
    """Calls a function as written at first, then replays it; one recording per shape of what is given.

    The function must be the same one whenever the variant is the same, and must not look at a value on the host. What
    it returns is valid until the next call, but for what `lasting` takes out of it, which is copied.
    """

    def __init__(self, lasting: Callable[[Any], Any] = nothing) -> None:
        self.lasting = lasting
        self.forget()
        self.stream: Any = None

    def forget(self) -> None:
        """Gives back what was recorded, with its memory."""
        self.recordings: dict[object, Recording] = {}
        self.calls: dict[object, int] = {}
        self.sources: dict[object, list[Tensor]] = {}
        self.pool: Any = None

    def __call__(self, f: Callable[[G], R], given: G, variant: object) -> R:
        tensors = tree.leaves(given)
        if not tensors[0].is_cuda:
            return f(given)
        key = (variant, tuple((t.shape, t.dtype) for t in tensors))
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] <= WARMUP:
            return self._warm(f, given)
        if key not in self.recordings:
            self.recordings[key] = self._record(f, given)
            self.sources[key] = []
        return self._replayed(key, tensors)  # type: ignore[no-any-return]

    def _replayed(self, key: object, tensors: list[Tensor]) -> Any:
        recording, before = self.recordings[key], self.sources[key]
        # Where there is no room for the copies it must show now: the replay writes over what the caller may still have.
        lasting = tree.leaves(self.lasting(recording.result))
        copies = {id(t): torch.empty_like(t) for t in lasting}
        for place, (to, source) in enumerate(zip(recording.given, tensors, strict=True)):
            # Data that did not change since the last call is the same tensor; records are written in place.
            if not (place < len(before) and before[place] is source and source.dtype in (torch.uint8,)):
                to.copy_(source, non_blocking=True)
        self.sources[key] = tensors
        recording.graph.replay()
        for t in lasting:
            copies[id(t)].copy_(t)
        return tree.each(lambda t: copies.get(id(t), t), recording.result)

    def _warm(self, f: Callable[[G], R], given: G) -> R:
        """Runs as written, on a stream of its own, as recording will; on one alone, for each keeps what it frees."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = f(given)
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.empty_cache()  # until it is recorded others may want the memory, such as another process
        return result

    def _record(self, f: Callable[[G], R], given: G) -> Recording:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a recording keeps its memory to itself, so what the warm-up used goes back first
        fixed = tree.each(lambda t: t.contiguous().clone(), given)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                result = f(fixed)
        except BaseException as error:
            # torch leaves its own stream in place then. Whatever this thread did next would be done beside what other
            # threads do, and they would read numbers that are not there yet.
            torch.cuda.set_stream(before)
            if no_room(error):
                raise torch.cuda.OutOfMemoryError(str(error)) from error
            raise
        self.pool = graph.pool()
        return Recording(graph, tree.leaves(fixed), result)
