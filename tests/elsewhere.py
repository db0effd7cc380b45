"""A device that this machine does not have, for tests of what must be moved to it: torch's "meta", but with values.

A tensor there has its values in the host's memory and says that it is on the device. What torch refuses for a GPU is
an error here too: an operation on tensors of both places, and `numpy` of one that is elsewhere. From the third round on
the local updates are as in a recorded CUDA graph, where nothing is copied between the places. So a `.to(device)` that
is missing, and one that a recording cannot have, fail on a machine without a GPU.

    with elsewhere():
        copfl.run("fedavg", data, device="meta")
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_flatten, tree_map_only

from copfl.core import front, tree
from copfl.engine import mapping
from copfl.engine.cuda_graph import WARMUP
from copfl.experiment import preparation

HERE, THERE = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default)
# The rows that are looked up may be in the host's memory.
INDEXED = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
)


class Elsewhere(Tensor):
    """A tensor on the device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=THERE,
            requires_grad=False,
        )
        made.held = held.detach()
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.tolist:  # torch has it for no class of others
            return args[0].cpu().tolist()
        if func in (Tensor.untyped_storage, Tensor.data_ptr):  # to tell whether two are the same memory
            return func(args[0].held)
        if func is Tensor.new_tensor:  # of an unknown class of tensors, torch would make it without values
            return Elsewhere(func(args[0].held, *args[1:], **(kwargs or {})))
        with torch._C.DisableTorchFunctionSubclass():  # or torch would make each result one of this class
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes what is asked for on the device, as `torch.zeros(3, device="meta")`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        is_there = kwargs.get("device") is not None and torch.device(kwargs["device"]) == THERE
        if is_there or any(isinstance(t, Elsewhere) for t in flat):
            return _computed(func, args, kwargs)
        return func(*args, **kwargs)


def _computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on the values, as the device would compute or refuse it."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    there = [isinstance(t, Elsewhere) for t in tensors]
    asked = kwargs.get("device")
    is_allowed = all(there) or func in COPIES or (func in INDEXED and there[0])
    if not is_allowed and any(t.dim() for t, one in zip(tensors, there, strict=True) if not one):
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found cpu and {THERE}"
        )
    if (
        _Recording.on
        and func in COPIES
        and not (all(there) and (asked is None or torch.device(asked) == THERE))
    ):
        raise RuntimeError(f"{func}: Cannot copy between cpu and {THERE} during CUDA graph capture")
    plain_args, plain = tree_map_only(Elsewhere, lambda t: t.held, (args, kwargs))
    found = func(*plain_args, **({**plain, "device": HERE} if asked is not None else plain))
    if not there[0] if func is aten.copy_.default else asked is not None and torch.device(asked) == HERE:
        return args[0] if func is aten.copy_.default else found
    wrapped = tree_map_only(Tensor, Elsewhere, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)  # type: ignore[no-untyped-call]


class _Recording:
    """Whether what is computed would be recorded as a CUDA graph."""

    on = False

    def __init__(self) -> None:
        self.calls: dict[object, int] = {}

    def __call__(self, f: Callable[[Any], Any], inputs: Any, variant: object) -> Any:
        """f of the inputs, as `copfl.engine.cuda_graph.Recorder` calls it."""
        is_there = isinstance(tree.leaves(inputs)[0], Elsewhere)
        self.calls[variant] = self.calls.get(variant, 0) + 1
        _Recording.on = is_there and self.calls[variant] > WARMUP
        try:
            return f(inputs)
        finally:
            _Recording.on = False


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Inside, runs can be on the device "meta"."""
    run, tensor, asarray = threading.Thread.run, torch.tensor, torch.asarray

    def in_thread(thread: threading.Thread) -> None:
        with _Mode():  # type: ignore[no-untyped-call]
            run(thread)

    def of_values(
        data: Any, *, device: Any = None, **kwargs: Any
    ) -> Tensor:  # torch would make it without them
        is_there = device is not None and torch.device(device) == THERE
        return Elsewhere(tensor(data, **kwargs)) if is_there else tensor(data, device=device, **kwargs)

    def recorded(chunk: int = 64) -> mapping.Mapping:
        return mapping.Mapping("vmap", chunk, mapping.batched, _Recording())

    def of_storage(*args: Any, **kwargs: Any) -> Tensor:  # as safetensors reads a file
        with _disable_current_modes():
            return asarray(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(threading.Thread, "run", in_thread))
        stack.enter_context(mock.patch.object(torch, "tensor", of_values))
        stack.enter_context(mock.patch.object(torch, "asarray", of_storage))
        stack.enter_context(mock.patch.object(mapping, "vmap", recorded))
        stack.enter_context(mock.patch.dict(front.MEMORY, meta=front.MEMORY["cpu"]))
        stack.enter_context(mock.patch.object(preparation, "device_of", torch.device))
        stack.enter_context(_Mode())  # type: ignore[no-untyped-call]
        yield
