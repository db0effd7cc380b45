"""Elementwise functions in one pass over memory: a kernel on a GPU with Triton, plain PyTorch elsewhere.

An optimizer's step reads and writes every parameter; as a dozen PyTorch operations it moves five times the
bytes that it needs. `elementwise(f, ...)` is f(...), inside vmap and outside, only faster.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from copfl.kernels.private_torch import in_vmap, mapped

COMPILE = True  # False: no kernels of our own, to measure their gain
LONG = 2**16  # entries from which a vector is worth a kernel of its own
ALIGN = 32  # entries: rows that start at multiples of this let matrix products read in the widest units

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


def aligned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Empty rows of this shape [N, d], aligned for a GPU."""
    rows, length = shape
    padded = -(-length // ALIGN) * ALIGN
    return torch.empty(rows, padded, dtype=dtype, device=device)[:, :length]


def compiles(tensor: Tensor) -> bool:
    """Whether functions of this tensor are one kernel."""
    return COMPILE and tensor.is_cuda and can_compile()


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Plain PyTorch within it, for a comparison that is not worth the seconds of compiling kernels."""
    global COMPILE
    before, COMPILE = COMPILE, False
    try:
        yield
    finally:
        COMPILE = before


@cache
def can_compile() -> bool:
    """Whether Triton can make GPU kernels here."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (7, 0)


def as_rows(clients: int, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a vmap rule, with the clients in the first axis of every tensor."""

    def rows_of(a: Any, dim: int | None) -> Any:
        if not isinstance(a, Tensor):
            return a
        return a.expand(clients, *a.shape) if dim is None else a.movedim(dim, 0)

    return list(map(rows_of, arguments, in_dims))


def over_rows(function: F) -> F:
    """A function of rows [N, ...] as a function of one client's tensors; vmap calls it once for all."""

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            rows = function(*(a[None] if isinstance(a, Tensor) else a for a in arguments))
            return tuple(t[0] for t in rows) if isinstance(rows, tuple) else rows[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
            rows = function(*as_rows(info.batch_size, in_dims, arguments))
            return rows, (0,) * len(rows) if isinstance(rows, tuple) else 0

    by_torch: Any = Rows.apply

    @wraps(function)
    def apply(*arguments: Any) -> Any:
        if any(isinstance(a, Tensor) and a.is_cuda for a in arguments):
            return by_torch(*arguments)  # on a GPU it is recorded once, so its time does not matter
        rows = in_vmap(arguments, rows_of)
        return by_torch(*arguments) if rows is NotImplemented else rows

    def rows_of(clients: int, in_dims: list[int | None], arguments: list[Any]) -> Any:
        return function(*as_rows(clients, in_dims, arguments)) if clients else apply(*arguments)

    return apply  # type: ignore[return-value]


@over_rows
def sums_by_place(place: Tensor, numbers: Tensor, room: int) -> Tensor:
    """[room]: the sums of the numbers of each place.

    Args:
        place: [m] int64, below the room.
        numbers: [m].
        room: Of the sums.
    """
    if numbers.device.type != "cpu" or numbers.dtype != torch.float64:
        return numbers.new_zeros(len(numbers), room).scatter_add(1, place, numbers)
    # numpy adds in the same order, and several times as fast.
    rows = zip(place.numpy(), numbers.numpy(), strict=True)
    return torch.from_numpy(np.stack([np.bincount(*row, minlength=room) for row in rows]))


@over_rows
def joined(*parts: Tensor) -> Tensor:
    """The vectors one after the other; on a GPU aligned for matrix products."""
    if len(parts) > 8 or mapped() or not compiles(parts[0]):  # a launch per part, and not inside another vmap
        return torch.cat(parts, 1)
    from copfl.kernels.triton import vectors

    lengths = [part.shape[1] for part in parts]
    whole = aligned((len(parts[0]), sum(lengths)), parts[0].dtype, parts[0].device)
    none = torch.zeros(len(whole), dtype=torch.bool, device=whole.device)
    for place, part, length in zip(torch.split(whole, lengths, 1), parts, lengths, strict=True):
        if length:
            vectors.put_back(none, place, part)
    return whole


def elementwise(function: Function, *arguments: Any) -> tuple[Tensor, ...]:
    """function(*arguments), elementwise in its tensors; scalars broadcast, every result is a vector."""
    results: tuple[Tensor, ...] = _of_rows(function, *arguments) if mapped() else function(*arguments)
    return results


@over_rows
def _of_rows(function: Function, *arguments: Any) -> tuple[Tensor, ...]:
    longest = max((a for a in arguments if isinstance(a, Tensor)), key=Tensor.dim)

    def beside(a: Any) -> Any:
        ones = [1] * (longest.dim() - a.dim()) if isinstance(a, Tensor) else []
        return a.reshape(len(a), *ones, *a.shape[1:]) if ones else a

    given, results = list(map(beside, arguments)), None
    if compiles(longest) and longest.dim() == 2 and longest.shape[1] > 1 and not mapped():
        from copfl.kernels.triton import pointwise

        results = pointwise.results_of(function, given)
    return function(*given) if results is None else results


def either(mask: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """The entries of `own` where the mask is True, of `other` elsewhere: m o own + (1 - m) o other."""
    return elementwise(_either, mask, own, other)[0]


def _either(mask: Tensor, own: Tensor, other: Tensor) -> tuple[Tensor]:
    return (torch.where(mask, own, other),)


def mostly_rows(keep: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The rows of `new` [N, ...] where `keep` [N] is True, of `old` elsewhere; `new` may be overwritten.

    The rare case must not cost a pass over all rows: on a CPU the values are checked first, on a GPU a kernel
    does.
    """
    outside = not mapped()  # inside another vmap no value can be read
    if outside and not keep.is_cuda and bool(keep.all()):
        return new
    in_place = new.dim() == 2 and new.stride(1) == 1 and new.stride(0) >= new.shape[1] > LONG
    if outside and in_place and compiles(new):
        from copfl.kernels.triton import vectors

        return vectors.put_back(keep, new, old)
    return either_rows(keep, new, old)


def either_rows(keep: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The rows of `new` [N, ...] where `keep` [N] is True, of `old` elsewhere."""
    return torch.where(keep.view(-1, *[1] * (new.dim() - 1)), new, old)


# The new vector where `keep` [] is True, as it nearly always is, else the old one.
mostly: Callable[[Tensor, Tensor, Tensor], Tensor] = over_rows(mostly_rows)
