"""Kernels that Triton does not have on disk are compiled together before the first round, not one by one in it."""

# mypy: ignore-errors
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor
from triton import JITFunction

try:
    from triton import knobs
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
except ImportError:  # before version 3.4
    AsyncCompileMode = None

R = TypeVar("R")

_compiling = None  # within `_compile_together`: how, and what was seen
_missing = []  # within `first_call`: kernels that were not on disk


class _NotOnDisk(BaseException):
    """Leaves a program; not an Exception, which the program might take for one of its own."""


def launch(kernel: JITFunction, grid: tuple[int, ...], *arguments, **options) -> None:
    """kernel[grid](...); within `_compile_together` the kernel is compiled and not called."""
    if _compiling is None:
        kernel[grid](*arguments, **options)
        if _missing:
            raise _NotOnDisk
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


def first_call(program: Callable[[], R]) -> R:
    """The result of a program whose kernels this process may not have.

    Usually Triton has them on disk. At the first that it has not, the program is left; the kernels are then compiled
    together, and it begins again.
    """
    if AsyncCompileMode is None:
        return program()
    before = knobs.compilation.listener

    def note(*, src, cache_hit: bool, **others) -> None:
        if not cache_hit:
            _missing.append(src)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **others)

    knobs.compilation.listener = note
    try:
        return program()
    except _NotOnDisk:
        pass
    finally:
        knobs.compilation.listener = before
        _missing.clear()
    _compile_together(program)
    return program()


def _compile_together(program: Callable[[], object]) -> None:
    """Compiles the kernels of a program in parallel; it runs without them, and its results are not valid."""
    global _compiling
    threads = ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
    with threads, AsyncCompileMode(SimpleNamespace(submit=partial(threads.submit, _loaded))) as mode:
        _compiling = mode, set()
        try:
            program()
        finally:
            _compiling = None
