"""Kernels are compiled together before the first round, not one after the other within it."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

try:
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
except ImportError:  # before version 3.4
    AsyncCompileMode = None


def _loaded(compile):
    """The kernel with its launcher, which Triton would make at the first launch, while all wait."""
    kernel = compile()
    kernel._init_handles()
    return kernel


def compile_together(program: Callable[[], object]) -> None:
    """Compiles the kernels of a program in parallel; it runs without them, and its results are not valid."""
    if AsyncCompileMode is None:
        return
    launch, seen = JITFunction.run, set()

    def compiled(kernel, *arguments, grid, warmup, **options) -> None:
        kinds = ((a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in arguments)
        key = kernel, *kinds, *options.items()
        # A random number that was not drawn might become an index; so might what a kernel of others returns.
        if kernel.fn.__name__ == "_uniform" or not kernel.fn.__module__.startswith("copfl."):
            launch(kernel, *arguments, grid=grid, warmup=warmup, **options)
        elif key not in seen:
            seen.add(key)
            token = active_mode.set(mode)  # of this thread; a backward pass has one of its own
            launch(kernel, *arguments, grid=grid, warmup=True, **options)
            active_mode.reset(token)

    threads = ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
    with threads, AsyncCompileMode(SimpleNamespace(submit=partial(threads.submit, _loaded))) as mode:
        JITFunction.run = compiled
        try:
            program()
        finally:
            JITFunction.run = launch
