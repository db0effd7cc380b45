"""What of w stays home and what is shared, where a fixed part of the model is kept by the client.

Pieces are cut and joined, not masked: what stays home is not in the shared vector at all, and no shape depends on a
tensor's value.
"""

from __future__ import annotations

from itertools import accumulate, groupby

from torch import Tensor

from copfl.core.layout import Runs, cut, put_together, runs
from copfl.core.task import Task


def _runs(task: Task, keeps: tuple[str, ...]) -> Runs:
    return runs(task.layout, (*keeps, "buffers") if task.buffers == "local" else keeps)


def part(task: Task, keeps: tuple[str, ...], w: Tensor, home: bool) -> Tensor:
    """The entries of w that stay home, or those that are shared."""
    return cut(w, _runs(task, keeps), home)


def apart(task: Task, keeps: tuple[str, ...], w: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of w that stay home, and those that are shared; what `joined` puts together."""
    return part(task, keeps, w, home=True), part(task, keeps, w, home=False)


def joined(task: Task, keeps: tuple[str, ...], own: Tensor, shared: Tensor) -> Tensor:
    """w, from the entries that stay home and those that are shared."""
    return put_together(_runs(task, keeps), own, shared)


def only(task: Task, part: str) -> Tensor | None:
    """The parameters that may move when one part of the model is trained alone; None, which means all, for "all"."""
    return None if part == "all" else task.where(part)[: task.d]


def layers(task: Task, keeps: tuple[str, ...]) -> list[tuple[int, int, bool]]:
    """Where each shared layer begins and ends in the shared vector, and whether it is trained: a module is a layer."""
    layout, home = task.layout, task.home(*keeps).cpu()
    ends = list(accumulate(layout.sizes))
    shared = [place for place, end in enumerate(ends) if not home[end - 1]]  # a tensor stays home whole or not at all
    start, spans = 0, []
    for (_, trained), members in groupby(shared, lambda p: (layout.names[p].rpartition(".")[0], p < layout.trained)):
        stop = start + sum(layout.sizes[place] for place in members)
        spans.append((start, stop, trained))
        start = stop
    return spans
