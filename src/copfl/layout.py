"""The names behind the flat vector `w`: the model's parameters first, then its float buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from copfl.errors import UsageError


@dataclass(frozen=True)
class Layout:
    """Names and shapes in the order of the vector; `parameters` entries are trained, the rest are statistics."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trained: int  # how many of the names are parameters
    head: str  # the module that makes the answer out of the features
    norms: tuple[str, ...]  # the modules that normalise

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def parameters(self) -> int:
        """d: how many entries are trained."""
        return sum(self.sizes[: self.trained])

    @property
    def size(self) -> int:
        """D: how many entries the vector has, statistics included."""
        return sum(self.sizes)

    def split(self, part: Tensor, buffers: bool = False) -> dict[str, Tensor]:
        """The tensors by name, cut out of the parameters' (or the buffers') part of the vector, or of rows of vectors.

        One `torch.split` and not many slices: the backward pass of a slice allocates a full-size vector of zeros.
        """
        return self._cut(part, range(self.trained, len(self.names)) if buffers else range(self.trained))

    def split_head(self, part: Tensor) -> dict[str, Tensor]:
        """The head's tensors by name, cut out of its entries alone."""
        return self._cut(part, [i for i, name in enumerate(self.names[: self.trained]) if _inside(name, self.head)])

    def head_of(self, w: Tensor) -> Tensor:
        """The head's entries [h] of w."""
        runs = self._head_runs()
        pieces = zip(torch.split(w, [length for _, length in runs]), runs, strict=True)
        found = [piece for piece, (inside, _) in pieces if inside]
        return found[0] if len(found) == 1 else torch.cat(found) if found else w[:0]

    def with_head(self, w: Tensor, head: Tensor) -> Tensor:
        """w with these entries for its head."""
        runs = self._head_runs()
        new = iter(torch.split(head, [length for inside, length in runs if inside]))
        pieces = zip(torch.split(w, [length for _, length in runs]), runs, strict=True)
        return torch.cat([next(new) if inside else piece for piece, (inside, _) in pieces])

    def _head_runs(self) -> list[tuple[bool, int]]:
        """The vector as runs of (whether it is the head's, length)."""
        inside = [i < self.trained and _inside(name, self.head) for i, name in enumerate(self.names)]
        groups = groupby(zip(inside, self.sizes, strict=True), key=lambda pair: pair[0])
        return [(chosen, sum(size for _, size in group)) for chosen, group in groups]

    def _cut(self, part: Tensor, which: Sequence[int]) -> dict[str, Tensor]:
        sizes, rows = self.sizes, part.shape[:-1]
        pieces = torch.split(part, [sizes[i] for i in which], -1) if which else ()
        return {self.names[i]: piece.view(*rows, *self.shapes[i]) for i, piece in zip(which, pieces, strict=True)}

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        """The flat vector, from the tensors by name."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def where(self, *parts: str) -> Tensor:
        """A bool vector over w, True on these parts: "head", "body", "norms", "buffers", or a module's name."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        for part in parts:
            mask |= self._where(part)
        return mask

    def _where(self, part: str) -> Tensor:
        if part == "body":
            return ~self._where("head") & ~self._where("buffers")
        if part == "buffers":
            chosen = [index >= self.trained for index in range(len(self.names))]
        else:
            modules = {"head": (self.head,), "norms": self.norms}.get(part, (part,))
            chosen = [
                index < self.trained and any(_inside(name, module) for module in modules)
                for index, name in enumerate(self.names)
            ]
            if part not in ("head", "norms") and not any(chosen):
                tops = sorted({name.split(".")[0] for name in self.names})
                raise UsageError(f'no part "{part}" in the model. Known: head, body, norms, buffers, {", ".join(tops)}')
        pieces = [
            torch.full((size,), choice, dtype=torch.bool) for size, choice in zip(self.sizes, chosen, strict=True)
        ]
        return torch.cat(pieces)


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def layout_of(model: nn.Module, head: str | None = None, norms: Iterable[str] = ()) -> Layout:
    """The layout of a model's parameters and float buffers; the head is its last Linear unless it is named."""
    parameters = dict(model.named_parameters())
    buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    if not parameters:
        raise UsageError("the model has no parameters; copfl trains torch modules with at least one")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if head is None:
        head = "head" if "head" in dict(model.named_modules()) else linears[-1] if linears else None
    if head is None or head not in dict(model.named_modules()):
        raise UsageError(
            f'the model has no module "{head}" to be its head; its Linear layers are: {", ".join(linears) or "none"}. '
            'Name the head, such as head="classifier"'
            if head is not None
            else 'the model has no Linear layer to be its head; name one of its modules, such as head="classifier"'
        )
    tensors = {**parameters, **buffers}
    return Layout(
        names=tuple(tensors),
        shapes=tuple(tuple(t.shape) for t in tensors.values()),
        trained=len(parameters),
        head=head,
        norms=tuple(norms),
    )
