"""How the processes that train runs start: as copies of one that has imported torch and computed nothing.

To import torch takes seconds. A copy of a process that has computed may hang in torch's threads, and a driver of GPUs
that was initialised before a copy is of no use in it; so what is copied does neither.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext

MODULES = ["copfl.comparison.jobs.copied"]  # with torch and all that a run needs
KERNELS = [f"copfl.kernels.triton.{name}" for name in ("grouped", "norms", "patches", "random", "vectors")]
SAFE_PATH = "PYTHONSAFEPATH"  # set: the current folder is not searched for modules
# Of a terminal, for all its processes: Ctrl-C, and that it is closed. This process ends the others then.
SIGNALS = {signal.SIGINT, signal.SIGHUP} if os.name == "posix" else set[signal.Signals]()


def process_context(device: str) -> BaseContext:
    """How processes start: as copies where the system has them, else each imports torch by itself.

    The process that is copied starts here, once, and imports torch while this one goes on.

    Args:
        device: Where they train, as the setting names it.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    from multiprocessing import forkserver  # not on Windows

    context = get_context("forkserver")
    context.set_forkserver_preload(MODULES + (KERNELS if device != "cpu" else []))
    try:
        with _undisturbed():
            forkserver.ensure_running()
    except OSError:  # its socket cannot be in the folder of temporary files, whose path may be too long
        return get_context("spawn")
    return context


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A process that starts inside imports no module of the current folder, and gets none of SIGNALS.

    A file random.py of the user would take the place of Python's.
    """
    from multiprocessing import resource_tracker

    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # where that starts, it unblocks Ctrl-C
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # last: a Ctrl-C that waits is raised here
