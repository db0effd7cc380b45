"""Elementwise functions in one pass over memory: compiled where a GPU and a compiler are there, plain elsewhere.

An optimizer's step reads and writes every parameter; written as a dozen PyTorch operations it moves five times the
bytes it needs. `elementwise(f, ...)` is f(...), inside vmap and outside, only quicker.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

COMPILE = True  # False: always as written, for measuring what compiling brings


Function = Callable[..., Any]


@lru_cache(maxsize=512)
def _compiled(function: Function, kind: object) -> Function:
    """One compiled copy per kind of arguments: the compiler gives up on a function that it meets with too many kinds.

    It makes another program for every shape, every stride and every number, and after eight of them none at all.
    """
    code = function.__code__.replace(
        co_name=function.__name__ + "_"
    )  # the compiler tells functions apart by their code
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    return torch.compile(copy, dynamic=False)


@cache
def _into(function: Function) -> Function:
    """The function with its results written into given tensors, which the compiler does in the same pass."""

    def into(outs: tuple[Tensor, ...], *arguments: Any) -> None:
        for out, result in zip(outs, function(*arguments), strict=True):
            out.copy_(result)

    return into


LONG = 2**16  # entries from which a vector is worth a kernel of its own
ALIGN = 32  # numbers; rows that begin at such multiples let matrix products read in the widest pieces


def aligned_like(results: tuple[Tensor, ...], rows: int, length: int) -> tuple[Tensor, ...]:
    """Empty rows of this length for each result, which begin where a GPU reads best."""
    padded = -(-length // ALIGN) * ALIGN
    return tuple(torch.empty(rows, padded, dtype=r.dtype, device=r.device)[:, :length] for r in results)


def quick(function: Function, tensor: Tensor) -> Function:
    """The function, compiled for this tensor's shape where a GPU and a compiler are there."""
    return _compiled(function, _kind([tensor])) if compiles(tensor) else function


def compiles(tensor: Tensor) -> bool:
    """Whether functions of this tensor are compiled."""
    return COMPILE and tensor.is_cuda and can_compile()


@lru_cache(maxsize=1)
def can_compile() -> bool:
    """Whether torch.compile can make GPU kernels here."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (7, 0)


def mapped() -> bool:
    """Whether this is called from within vmap or another of torch.func's transforms."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_front(info: Any, dim: int | None, tensor: Tensor) -> Tensor:
    """The tensor with the client axis in front, where vmap had put it anywhere or nowhere."""
    return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


BLOCK = 2**15  # numbers; the intermediate results of a block stay in a core's cache
F = TypeVar("F", bound=Function)
MANY_STEPS: set[Function] = set()


def of_many_steps(function: F) -> F:
    """Marks a function of half a dozen operations or more: block by block, those are worth one more copy."""
    MANY_STEPS.add(function)
    return function


def _in_blocks(function: Function, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """function(*arguments), of long vectors on a CPU block by block: one pass over memory instead of a dozen."""
    vectors = [a for a in arguments if isinstance(a, Tensor) and a.dim() == 1]
    length = max((len(v) for v in vectors), default=0)
    if (
        function not in MANY_STEPS
        or length <= 2 * BLOCK
        or vectors[0].device.type != "cpu"
        or any(len(v) != length for v in vectors)
    ):
        whole: tuple[Tensor, ...] = function(*arguments)
        return whole
    results: tuple[Tensor, ...] = ()
    for start in range(0, length, BLOCK):
        part = slice(start, start + BLOCK)
        found = function(*(a[part] if isinstance(a, Tensor) and a.dim() == 1 else a for a in arguments))
        if start == 0:
            results = tuple(torch.empty(length, dtype=f.dtype) for f in found)
        for result, piece in zip(results, found, strict=True):
            result[part] = piece
    return results


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(function: Function, *arguments: Any) -> tuple[Tensor, ...]:
        return _in_blocks(function, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: Function, *arguments: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        dims = [d for a, d in zip(arguments, in_dims[1:], strict=True) if isinstance(a, Tensor)]
        rank = max(t.dim() - (d is not None) for t, d in zip(tensors, dims, strict=True))

        def aligned(argument: Any, dim: int | None) -> Any:
            if not isinstance(argument, Tensor) or dim is None:
                return argument
            rows = argument.movedim(dim, 0)
            return rows.reshape(rows.shape[0], *[1] * (rank + 1 - rows.dim()), *rows.shape[1:])

        given = [aligned(a, d) for a, d in zip(arguments, in_dims[1:], strict=True)]
        like = next(g for g in given if isinstance(g, Tensor) and g.dim() == rank + 1)
        if not compiles(like) or like.dim() != 2:
            results = function(*given)
        else:
            # One entry of each tells the dtypes; a vector that clients have in common has no client axis.
            first = [g[..., :1] if isinstance(g, Tensor) and g.dim() else g for g in given]
            results = aligned_like(function(*first), *like.shape)
            _compiled(_into(function), _kind(given))(results, *given)
        return results, tuple(0 for _ in results)


def _kind(arguments: Sequence[Any]) -> tuple[object, ...]:
    return tuple((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments)


def elementwise(function: Function, *arguments: Any) -> tuple[Tensor, ...]:
    """function(*arguments), which must be elementwise in its tensors; scalars broadcast, every result is a vector."""
    return _apply(function, *arguments)


_apply: Callable[..., tuple[Tensor, ...]] = _Elementwise.apply


def either(mask: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Own values where the mask is, the other's elsewhere: m o own + (1 - m) o other."""
    return elementwise(_either, mask, own, other)[0]


def _either(mask: Tensor, own: Tensor, other: Tensor) -> tuple[Tensor]:
    return (torch.where(mask, own, other),)


def mostly_rows(keep: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The rows of `new` [N, ...] where `keep` [N] holds, those of `old` elsewhere; `new` itself may be written to.

    What is rarely needed must not cost a pass over all rows: on a CPU one looks first, on a GPU a kernel does.
    """
    look = not mapped()  # within another vmap nothing can be looked at
    if look and not keep.is_cuda and bool(keep.all()):
        return new
    if (
        look
        and new.dim() == 2
        and new.stride(1) == 1
        and new.stride(0) >= new.shape[1] > LONG
        and compiles(new)
    ):
        from copfl.kernels.triton import vectors

        return vectors.put_back(keep, new, old)
    return either_rows(keep, new, old)


def either_rows(keep: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The rows of `new` [N, ...] where `keep` [N] holds, those of `old` elsewhere."""
    return torch.where(keep.view(-1, *[1] * (new.dim() - 1)), new, old)


class _Mostly(torch.autograd.Function):
    @staticmethod
    def forward(keep: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return mostly_rows(keep[None], new[None], old[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], keep: Tensor, new: Tensor, old: Tensor
    ) -> tuple[Tensor, int]:
        return mostly_rows(
            *(in_front(info, dim, t) for dim, t in zip(in_dims, (keep, new, old), strict=True))
        ), 0


def mostly(keep: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new vector where `keep` [] holds, as it nearly always does, else the old one; see `mostly_rows`."""
    return _choose(keep, new, old)


_choose: Callable[[Tensor, Tensor, Tensor], Tensor] = _Mostly.apply
