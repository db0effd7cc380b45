"""What of w stays home and what is shared, where a fixed part of the model is kept by the client.

Pieces are cut and joined, not masked: what stays home is not in the shared vector at all, and no shape depends on a
tensor's value.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor

from copfl.layout import Layout
from copfl.task import Task


@lru_cache(maxsize=64)
def runs(layout: Layout, parts: tuple[str, ...]) -> tuple[tuple[int, bool], ...]:
    """The vector as runs of (length, whether it is in these parts)."""
    inside = layout.where(*parts)
    _, lengths = torch.unique_consecutive(inside, return_counts=True)
    ends = accumulate(lengths.tolist())
    return tuple((length, bool(inside[end - 1])) for length, end in zip(lengths.tolist(), ends, strict=True))


def _runs(task: Task, keeps: tuple[str, ...]) -> tuple[tuple[int, bool], ...]:
    return runs(task.layout, (*keeps, "buffers") if task.buffers == "local" else keeps)


def part(task: Task, keeps: tuple[str, ...], w: Tensor, home: bool) -> Tensor:
    """The entries of w that stay home, or those that are shared."""
    return _cut(w, _runs(task, keeps), home)


def apart(task: Task, keeps: tuple[str, ...], w: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of w that stay home, and those that are shared; what `joined` puts together."""
    return part(task, keeps, w, home=True), part(task, keeps, w, home=False)


def joined(task: Task, keeps: tuple[str, ...], own: Tensor, shared: Tensor) -> Tensor:
    """w, from the entries that stay home and those that are shared."""
    layout = _runs(task, keeps)
    mine = iter(torch.split(own, [length for length, stays in layout if stays]))
    theirs = iter(torch.split(shared, [length for length, stays in layout if not stays]))
    return torch.cat([next(mine) if stays else next(theirs) for _, stays in layout])


def entries(task: Task, w: Tensor, *parts: str) -> Tensor:
    """The entries of w in these parts of the model, wherever they live."""
    return _cut(w, runs(task.layout, parts), True)


def _cut(w: Tensor, layout: tuple[tuple[int, bool], ...], inside: bool) -> Tensor:
    pieces = torch.split(w, [length for length, _ in layout])
    wanted = [piece for piece, (_, chosen) in zip(pieces, layout, strict=True) if chosen == inside]
    return wanted[0] if len(wanted) == 1 else torch.cat(wanted) if wanted else w.new_zeros(0)


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
