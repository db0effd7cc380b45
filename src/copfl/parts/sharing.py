"""What of w stays home and what is shared, where a fixed part of the model is kept by the client.

Pieces are cut and joined, not masked: what stays home is not in the shared vector at all, and no shape depends on a
tensor's value.
"""

from __future__ import annotations

from itertools import accumulate, groupby

from torch import Tensor

from copfl.core.layout import Runs, cut, put_together, runs
from copfl.core.task import Task


def _runs(task: Task, personal: tuple[str, ...]) -> Runs:
    return runs(task.layout, (*personal, "buffers") if task.buffers == "local" else personal)


def part(task: Task, personal: tuple[str, ...], w: Tensor, local: bool) -> Tensor:
    """The entries of w that stay home, or those that are shared."""
    return cut(w, _runs(task, personal), local)


def apart(task: Task, personal: tuple[str, ...], w: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of w that stay home, and those that are shared; what `joined` puts together."""
    return part(task, personal, w, local=True), part(task, personal, w, local=False)


def joined(task: Task, personal: tuple[str, ...], own: Tensor, shared: Tensor) -> Tensor:
    """w, from the entries that stay home and those that are shared."""
    return put_together(_runs(task, personal), own, shared)


def only(task: Task, part: str) -> Tensor | None:
    """The parameters that may move when one part of the model is trained alone; None, which means all, for "all"."""
    return None if part == "all" else task.where(part)[: task.d]


def layers(task: Task, personal: tuple[str, ...]) -> list[tuple[int, int, bool]]:
    """Where each shared layer begins and ends in the shared vector, and whether it is trained: a module is a layer."""
    layout, local = task.layout, task.local(*personal).cpu()
    ends = list(accumulate(layout.sizes))
    shared = [place for place, end in enumerate(ends) if not local[end - 1]]
    start, spans = 0, []
    for (_, trained), members in groupby(
        shared, lambda p: (layout.names[p].rpartition(".")[0], p < layout.trained)
    ):
        stop = start + sum(layout.sizes[place] for place in members)
        spans.append((start, stop, trained))
        start = stop
    return spans
