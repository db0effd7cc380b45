"""The structure of the flat vector `w`: the model's parameters first, then its float buffers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from copfl.errors import UsageError, how_to_set
from copfl.kernels.fused import joined


class Pieces(NamedTuple):
    """Tensors that lie one after another in a vector."""

    shapes: dict[str, tuple[int, ...]]  # by name
    sizes: list[int]

    def of(self, part: Tensor) -> dict[str, Tensor]:
        """The tensors by name, from the vector or rows of vectors."""
        if not self.sizes:
            return {}
        rows, pieces = part.shape[:-1], torch.split(part, self.sizes, -1)
        named = zip(self.shapes.items(), pieces, strict=True)
        return {name: piece.view((*rows, *shape)) for (name, shape), piece in named}


@dataclass(frozen=True)
class Layout:
    """Names and shapes in the order of the vector; the first `trained` of them are parameters."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trained: int  # the number of names that are parameters
    head: str  # the module that computes the logits from the features
    norms: tuple[str, ...]  # the modules that normalise

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def parameters(self) -> int:
        """d: the number of trained entries."""
        return sum(self.sizes[: self.trained])

    @property
    def size(self) -> int:
        """D: the number of entries of the vector, statistics included."""
        return sum(self.sizes)

    def without(self, names: Collection[str]) -> Layout:
        """The layout of a vector that lacks these buffers."""
        kept = [(n, s) for n, s in zip(self.names, self.shapes, strict=True) if n not in names]
        return replace(self, names=tuple(n for n, _ in kept), shapes=tuple(s for _, s in kept))

    @property
    def head_shape(self) -> tuple[int, ...]:
        """The shape of the head's matrix; () where the head is no trained layer with one."""
        return dict(zip(self.names, self.shapes, strict=True)).get(f"{self.head}.weight", ())

    def split(self, part: Tensor, buffers: bool = False) -> dict[str, Tensor]:
        """The tensors by name, from the parameters (or buffers) of the vector, or of rows of vectors.

        One `torch.split` and not many slices: the backward pass of a slice allocates a full-size vector of
        zeros.
        """
        return self._buffers.of(part) if buffers else self._parameters.of(part)

    def split_head(self, part: Tensor) -> dict[str, Tensor]:
        """The head's tensors by name, from the head's entries alone."""
        return self._head.of(part)

    def entries(self, w: Tensor, *parts: str) -> Tensor:
        """The entries of w in these parts of the model."""
        return cut(w, runs(self, parts), True)

    def with_entries(self, w: Tensor, part: str, values: Tensor) -> Tensor:
        """w with these values in one part of the model: the inverse of `entries`."""
        spans = runs(self, (part,))
        return put_together(spans, values, cut(w, spans, False))

    @cached_property
    def _parameters(self) -> Pieces:
        return self._pieces(self.names[: self.trained])

    @cached_property
    def _buffers(self) -> Pieces:
        return self._pieces(self.names[self.trained :])

    @cached_property
    def _head(self) -> Pieces:
        return self._pieces(self._names_in("head"))

    def _pieces(self, names: Sequence[str]) -> Pieces:
        all_shapes = dict(zip(self.names, self.shapes, strict=True))
        shapes = {name: all_shapes[name] for name in names}
        return Pieces(shapes, [math.prod(shape) for shape in shapes.values()])

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        """The flat vector, from the tensors by name."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def where(self, *parts: str) -> Tensor:
        """A bool vector, True on these parts of w.

        A part is "head", "body", "norms", "buffers", the name of a module or a parameter, or a pattern of
        such names, as "*.lora_B".
        """
        chosen = {name for part in parts for name in self._names_in(part)}
        sizes = zip(self.names, self.sizes, strict=True)
        return torch.cat([torch.full((size,), name in chosen) for name, size in sizes])

    def _names_in(self, part: str) -> Sequence[str]:
        trained = self.names[: self.trained]
        if part == "buffers":
            return self.names[self.trained :]
        if part == "body":
            return [name for name in trained if not inside(name, self.head)]
        modules = {"head": (self.head,), "norms": self.norms}.get(part, (part,))
        names = [name for name in trained if any(inside(name, module) for module in modules)]
        if not names and part not in ("head", "norms"):
            tops = sorted({name.split(".")[0] for name in self.names})
            raise UsageError(
                f'no part "{part}" in the trained part of the model. Known: head, body, norms, buffers, '
                f'{", ".join(tops)}, and patterns of parameters\' names such as "*.bias"'
            )
        return names


# A vector as runs of (length, whether they are in some parts), so that no shape depends on a value.

Runs = tuple[tuple[int, bool], ...]


@lru_cache(maxsize=64)
def runs(layout: Layout, parts: tuple[str, ...]) -> Runs:
    """The vector as runs of (length, whether they are in these parts)."""
    inside = layout.where(*parts)
    _, lengths = torch.unique_consecutive(inside, return_counts=True)
    ends = accumulate(lengths.tolist())
    return tuple((length, bool(inside[end - 1])) for length, end in zip(lengths.tolist(), ends, strict=True))


def cut(w: Tensor, runs: Runs, inside: bool) -> Tensor:
    """The entries of w in the runs that are inside, or in those that are not."""
    pieces = torch.split(w, [length for length, _ in runs])
    wanted = [piece for piece, (_, chosen) in zip(pieces, runs, strict=True) if chosen == inside]
    return wanted[0] if len(wanted) == 1 else torch.cat(wanted) if wanted else w.new_zeros(0)


def put_together(runs: Runs, inside: Tensor, outside: Tensor) -> Tensor:
    """The vector, from its entries inside and outside: the inverse of `cut`."""
    pieces = {
        chosen: iter(torch.split(part, [length for length, c in runs if c == chosen]))
        for chosen, part in ((True, inside), (False, outside))
    }
    return joined(*(next(pieces[chosen]) for _, chosen in runs))


def inside(name: str, module: str) -> bool:
    """Whether the parameter `name` is the module or pattern `module`, or within it."""
    if any(sign in module for sign in "*?["):
        return fnmatchcase(name, module) or fnmatchcase(name, module + ".*")
    return name == module or name.startswith(module + ".")


def layout_of(
    model: nn.Module,
    head: str | None = None,
    norms: Iterable[str] = (),
    statistics: Collection[str] | None = None,
) -> Layout:
    """The layout of the parameters that require a gradient, and of the float buffers.

    Of a model with frozen parameters, only those buffers count whose module has a parameter that is trained.

    Args:
        model: With all tensors.
        head: The name of the module that computes the logits; None: see `_head`.
        norms: The names of the modules that normalise.
        statistics: The names of the buffers that training changes; None: any may be.
    """
    _check_registered(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    if not parameters:
        raise UsageError(
            "the model has no parameter to train; copfl trains the parameters of a torch module that have "
            "requires_grad=True, and there must be at least one"
        )
    if statistics is not None:
        buffers = {name: b for name, b in buffers.items() if name in statistics}
    if any(not p.requires_grad for p in model.parameters()):
        trained = {name.rpartition(".")[0] for name in parameters}
        buffers = {name: b for name, b in buffers.items() if name.rpartition(".")[0] in trained}
    head = _head(model, head, parameters)
    tensors = {**parameters, **buffers}
    return Layout(
        names=tuple(tensors),
        shapes=tuple(tuple(t.shape) for t in tensors.values()),
        trained=len(parameters),
        head=head,
        norms=tuple(norms),
    )


def _head(model: nn.Module, head: str | None, parameters: Iterable[str]) -> str:
    """The module of this name; else "head", or the last Linear that is trained and not in an adapter."""
    modules = dict(model.named_modules())
    linears = [name for name, m in modules.items() if isinstance(m, nn.Linear) and ".lora_" not in name]
    if head is None and "head" not in modules and not linears:
        raise UsageError(
            "the model has no Linear layer to be its head; name one of its modules, such as "
            f"{how_to_set('model.head', 'classifier')}"
        )
    if head is None:
        trained = {name.rpartition(".")[0] for name in parameters}
        head = "head" if "head" in modules else ([n for n in linears if n in trained] or linears)[-1]
    if head not in modules:
        raise UsageError(
            f'the model has no module "{head}" to be its head; its Linear layers are: '
            f"{', '.join(linears) or 'none'}. Name the head, such as {how_to_set('model.head', 'classifier')}"
        )
    return head


def _check_registered(model: nn.Module) -> None:
    """UsageError for parameters in a plain list, tuple or dict, which torch would neither move nor train."""
    registered = {id(p) for p in model.parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            parts = value.values() if isinstance(value, dict) else value
            for part in parts if isinstance(value, list | tuple | dict) and name[0] != "_" else ():
                own = list(part.parameters()) if isinstance(part, nn.Module) else [part]
                if any(isinstance(p, nn.Parameter) and id(p) not in registered for p in own):
                    kind, place = type(part).__name__, f"{path}.{name}" if path else name
                    raise UsageError(
                        f'the model keeps a {kind} in "{place}", a plain {type(value).__name__}: torch does '
                        "not see its parameters, so they would not be trained; use nn.ModuleList, "
                        "nn.ModuleDict or nn.ParameterList there"
                    )
