"""Effects on the process, in one place: the environment, torch's threads and precision, the path of modules, garbage.

They last as long as a command or a call of the API, and are then as before; only `importing` is for good, in processes
of our own. Importing copfl changes nothing.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

ENVIRONMENT = {
    # On ARM, torch's oneDNN would leave a file /tmp/perf-PID.map for the profiler perf in every process.
    "ONEDNN_JIT_PROFILE": "0",
    # Its allocator there returns freed memory after 10 ms, and fresh pages take a quarter of a large step.
    "MIMALLOC_PURGE_DELAY": "10000",  # ms
    # As torch sets it when it opens a GPU, which may be open before.
    "CUDA_MODULE_LOADING": "LAZY",
}


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Inside, the variables of ENVIRONMENT that are not set are; torch reads some of them when it loads."""
    added = [name for name in ENVIRONMENT if name not in os.environ]
    os.environ.update({name: ENVIRONMENT[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For imports of a process of our own: what they make stays, and is not searched for garbage, now or later.

    Of torch's 200,000 objects, every search takes a tenth of a second.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """What a run sets in the process is as before when it ends.

    These are torch's settings, sys.path, the environment, and the modules of code that may be imported.
    """
    import torch

    from copfl.settings import named_code

    path, threads = list(sys.path), torch.get_num_threads()
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        with environment(), named_code.scope():
            yield
    finally:
        sys.path[:] = path
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
