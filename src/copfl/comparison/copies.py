"""How the processes that train runs start: as copies of one that has imported torch and computed nothing.

To import torch takes seconds. A copy of a process that has computed may hang in torch's threads, and a driver of GPUs
that was initialised before a copy is of no use in it; so what is copied does neither.
"""

from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext

MODULES = ["copfl.comparison.copied"]  # with torch and all that a run needs
KERNELS = [f"copfl.kernels.triton.{name}" for name in ("grouped", "norms", "patches", "random", "vectors")]


def process_context(device: str) -> BaseContext:
    """How processes start: as copies where the system has them, else each imports torch by itself.

    Args:
        device: Where they train, as the setting names it.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(MODULES + (KERNELS if device != "cpu" else []))
    return context


def import_early(device: str) -> None:
    """Starts the process that is copied, so that it imports torch while this one does.

    Args:
        device: Where runs train, as the setting names it.
    """
    if process_context(device).get_start_method() == "forkserver":
        from multiprocessing import forkserver  # not on Windows

        forkserver.ensure_running()
