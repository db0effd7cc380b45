"""Kernels are compiled together before the first round, not one after the other within it."""

# mypy: ignore-errors
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from triton import JITFunction

try:
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
except ImportError:  # before version 3.4
    AsyncCompileMode = None

_compiling = None  # within `compile_together`: how, and what was seen


def launch(kernel: JITFunction, grid: tuple[int, ...], *arguments, **options) -> None:
    """kernel[grid](...); within `compile_together` the kernel is compiled and not called."""
    if _compiling is None:
        kernel[grid](*arguments, **options)
        return
    mode, seen = _compiling
    kinds = ((a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in arguments)
    key = kernel, *kinds, *options.items()
    if key not in seen:
        seen.add(key)
        token = active_mode.set(mode)  # of this thread; a backward pass has one of its own
        kernel.warmup(*arguments, grid=grid, **options)
        active_mode.reset(token)


def _loaded(make):
    """The kernel with its launcher, which Triton would make at the first launch, while all wait."""
    kernel = make()
    kernel._init_handles()
    return kernel


def compile_together(program: Callable[[], object]) -> None:
    """Compiles the kernels of a program in parallel; it runs without them, and its results are not valid."""
    global _compiling
    if AsyncCompileMode is None:
        return
    threads = ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
    with threads, AsyncCompileMode(SimpleNamespace(submit=partial(threads.submit, _loaded))) as mode:
        _compiling = mode, set()
        try:
            program()
        finally:
            _compiling = None
