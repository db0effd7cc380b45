"""What can be asked of the machine before torch is imported: its processors, and its GPU by the driver alone.

Commands ask before they import torch, and `autotune` afterwards.
"""

import ctypes
import os

DRIVER = "libcuda.so.1"


def processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_gpu(index: int = 0) -> int:
    """Opens the GPU by its driver alone; the driver's error, 0 for none. Other libraries then find it open."""
    driver, context = ctypes.CDLL(DRIVER), ctypes.c_void_p()
    return driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)  # type: ignore[no-any-return]
