"""Recording needs a GPU; what is done around it does not: here torch.cuda is played by records of what was asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from copfl.engine.cuda_graph import Recorder, Recording, out_of_memory
from copfl.engine.mapping import cuda_graph, sequential


class Cuda:
    """The streams of a GPU, as far as a recorder asks for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_the_end: Exception | None) -> None:
        self.stream, self.made, self.freed = "usual", list[Stream](), 0
        for name, value in {
            "current_stream": lambda: self.stream,
            "set_stream": self.set_stream,
            "Stream": lambda: self.made.append(Stream()) or self.made[-1],  # type: ignore[func-returns-value]
            "stream": lambda stream: contextlib.nullcontext(),
            "empty_cache": self.empty,
            "synchronize": lambda: None,
            "CUDAGraph": lambda: None,
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None, raising=False)
        self.at_the_end = at_the_end

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def empty(self) -> None:
        self.freed += 1

    @contextlib.contextmanager
    def graph(self, graph: object, pool: object) -> Iterator[None]:
        """As torch does it: what goes wrong at the end of a recording leaves the recording's stream in place."""
        self.stream = "recording"
        yield
        if self.at_the_end is not None:
            raise self.at_the_end
        self.stream = "usual"


class Stream:
    wait_stream: Any


@pytest.mark.parametrize(
    ("problem", "seen"),
    [
        (RuntimeError("CUDA error: out of memory"), torch.cuda.OutOfMemoryError),
        (RuntimeError("something else"), RuntimeError),
        (KeyError("in the program"), KeyError),
    ],
)
def test_a_recording_that_fails_leaves_the_stream_as_it_was(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, seen: type[Exception]
) -> None:
    """Else this thread goes on beside the others, which read what it has not yet computed."""
    cuda = Cuda(monkeypatch, at_the_end=problem)
    with pytest.raises(seen):
        Recorder()._record(lambda given: given, (torch.zeros(2),))
    assert cuda.stream == "usual"


def test_so_does_a_program_that_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, at_the_end=None)

    def broken(given: Any) -> Any:
        raise ValueError("cannot be")

    with pytest.raises(ValueError, match="cannot be"):
        Recorder()._record(broken, (torch.zeros(2),))
    assert cuda.stream == "usual"


def test_rounds_before_the_recording_share_one_stream_and_give_their_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, recorder = Cuda(monkeypatch, None), Recorder()
    monkeypatch.setattr(cuda, "stream", Stream())
    results = [recorder._warm_up(lambda given: (given[0] + 1,), (torch.zeros(2),)) for _ in range(3)]
    assert [r[0].tolist() for r in results] == [[1.0, 1.0]] * 3
    assert len(cuda.made) == 1
    assert cuda.freed == 3


def test_a_released_program_is_recorded_again() -> None:
    recorder = Recorder()
    recorder.recordings["x"] = object()  # type: ignore[assignment]
    recorder.calls["x"], recorder.sources["x"], recorder.pool = 3, [], object()
    cuda_graph(4)._replace(call=recorder).release()
    assert (recorder.recordings, recorder.calls, recorder.sources, recorder.pool) == ({}, {}, {}, None)
    sequential().release()  # has nothing to release


class Doubling:
    """A recorded program that writes twice what it is given, where it always writes."""

    def __init__(self, given: torch.Tensor, result: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.given, self.result = given, result

    def replay(self) -> None:
        for place in self.result:
            place.copy_(2 * self.given)


def test_what_lasts_is_copied_and_room_for_it_is_found_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, result = torch.zeros(2), (torch.zeros(2), torch.zeros(2))
    recorder = Recorder(lasting=lambda result: result[1:])
    recorder.recordings["x"] = Recording(Doubling(given, result), [given], result)  # type: ignore[arg-type]
    recorder.sources["x"] = []
    first = recorder._replay("x", [torch.ones(2)])
    assert first[0] is result[0]  # valid until the next call
    second = recorder._replay("x", [torch.full((2,), 3.0)])
    assert (first[1].tolist(), second[1].tolist()) == ([2, 2], [6, 6])

    def full(t: torch.Tensor) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        recorder._replay("x", [torch.full((2,), 4.0)])
    assert result[0].tolist() == [6, 6]  # which the caller may hold as its state: it can try again


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_reported_in_several_ways(error: Exception, expected: bool) -> None:
    assert out_of_memory(error) is expected
