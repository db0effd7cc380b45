"""Records of tensors (NamedTuples, tuples, dicts) as one value: map, stack, pick rows, add.

Every record of an algorithm is such a tree. A tree of rows has one more axis in front: the clients.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import UnionType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


class Masked(NamedTuple):
    """A vector with personal entries, which are not sent: only the shared entries and the mask are."""

    values: Tensor  # [D], zero where personal
    personal: Tensor  # [D] bool, True = stays at the client


class Gathered(NamedTuple):
    """A part of a total that is concatenated instead of added, for a server that needs every client's value.

    Each summand has one row; the total has a row per client, in no particular order.
    """

    rows: Any  # [clients, ...] each


def each(change: Callable[..., Any], first: T, *others: T) -> T:
    """The tree with every tensor replaced by `change(tensor, *tensors at the same path in the others)`."""
    if first is None:
        return first
    if isinstance(first, Tensor):
        return change(first, *others)  # type: ignore[no-any-return]
    if isinstance(first, dict):
        items = {key: each(change, v, *(o[key] for o in others)) for key, v in first.items()}  # type: ignore
        return items  # type: ignore[return-value]
    if isinstance(first, tuple):
        parts = tuple(each(change, *column) for column in zip(first, *others, strict=True))
        return type(first)(*parts) if hasattr(first, "_fields") else parts  # type: ignore[return-value]
    raise TypeError(f"a record has tensors, tuples and dicts, not {type(first).__name__}")


def named(tree: object, prefix: str = "", leaf: type | UnionType = Tensor) -> Iterator[tuple[str, Any]]:
    """Every tensor with its path, such as ("client.moments.u", tensor), in the order of the fields."""
    if tree is None:
        return
    if isinstance(tree, leaf):
        yield prefix, tree
        return
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, tuple):
        items = list(zip(getattr(tree, "_fields", map(str, range(len(tree)))), tree, strict=True))
    else:
        raise TypeError(f"a record has tensors, tuples and dicts, not {type(tree).__name__}")
    for key, value in items:
        yield from named(value, f"{prefix}.{key}" if prefix else str(key), leaf)


def leaves(tree: object) -> list[Tensor]:
    """The tensors of the tree, in the order of the fields."""
    return [tensor for _, tensor in named(tree)]


def rebuild(like: T, tensors: Sequence[Tensor]) -> T:
    """The tree `like` with its tensors replaced, in order: the inverse of `leaves`."""
    rest = iter(tensors)
    return each(lambda _: next(rest), like)


def stack(trees: Sequence[T]) -> T:
    """One tree of rows, from a tree per client."""
    return each(lambda *tensors: torch.stack(tensors), *trees)


def concatenate(trees: Sequence[T]) -> T:
    """One tree of rows, from several trees of rows."""
    return trees[0] if len(trees) == 1 else each(lambda *tensors: torch.cat(tensors), *trees)


def split(tree: T, sizes: Sequence[int]) -> list[T]:
    """Several trees of rows, from one, as views."""
    if len(sizes) == 1:
        return [tree]
    pieces = [torch.split(t, list(sizes)) for t in leaves(tree)]
    return [rebuild(tree, [parts[n] for parts in pieces]) for n in range(len(sizes))]


def row(tree: T, n: int) -> T:
    """One client's tree out of a tree of rows."""
    return each(lambda t: t[n], tree)


def rows(tree: T, ids: Tensor) -> T:
    """A tree of rows with these clients alone, copied."""
    return each(lambda t: t.index_select(0, ids.to(t.device)), tree)


def put_rows(tree: T, ids: Tensor, values: T) -> None:
    """Writes the values into these clients' rows, in place."""

    def put(t: Tensor, v: Tensor) -> None:
        # A part of a record that an update hands on unchanged is still the memory that it would be written to.
        is_own = v.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        t.index_copy_(0, ids.to(t.device), v.clone() if is_own else v.to(t.device))

    each(put, tree, values)


def repeat(tree: T, clients: int) -> T:
    """A tree of rows in which every client has the same tree; the rows share memory and are read-only."""
    return each(lambda t: t.unsqueeze(0).expand(clients, *t.shape), tree)


def placed(tree: T, id: Tensor, clients: int) -> T:
    """A table with this tree in the row of client `id` and zeros elsewhere, for the sum of such tables."""

    def place(t: Tensor) -> Tensor:
        here = torch.arange(clients, device=t.device) == id
        return torch.where(here.view(-1, *[1] * t.dim()), t, torch.zeros_like(t))

    return each(place, tree)


def vectorised(f: Callable[[A], B], rows: A) -> B:
    """f over all rows at once. vmap accepts neither records nor None, so it gets plain lists of tensors."""
    shape: list[B] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        shape[:] = [f(rebuild(rows, tensors))]
        return tuple(leaves(shape[0]))

    results = torch.func.vmap(flat, randomness="error")(*leaves(rows))
    return rebuild(shape[0], results)


def add(a: T, b: T) -> T:
    """The sum of two trees, tensor by tensor; Gathered parts are concatenated."""
    pairs = zip(leaves(a), leaves(b), gathered(a), strict=True)
    return rebuild(a, [torch.cat([x, y]) if is_gathered else x + y for x, y, is_gathered in pairs])


class Sum(Generic[T]):
    """The sum of one tree or more in double precision, one after the other."""

    def __init__(self) -> None:
        self._sum: T | None = None
        self._dtypes: list[torch.dtype] = []

    def add(self, part: T) -> None:
        """Adds a tree."""
        if self._sum is None:
            self._sum, self._dtypes = part, [t.dtype for t in leaves(part)]
        else:
            self._sum = add(wide(self._sum), wide(part))

    @property
    def total(self) -> T:
        """The sum, in the dtypes of the first tree."""
        if self._sum is None:
            raise ValueError("there is no tree to add up")
        return narrow(self._sum, self._dtypes)


def summed(trees: Iterable[T]) -> T:
    """The sum of one tree or more in double precision, in the dtypes of the first."""
    result = Sum[T]()
    for part in trees:
        result.add(part)
    return result.total


def wide(tree: T) -> T:
    """The tree in double precision, in which the order of a sum hardly matters; Gathered parts stay."""
    pairs = zip(leaves(tree), gathered(tree), strict=True)
    return rebuild(
        tree, [t if is_gathered or not t.is_floating_point() else t.double() for t, is_gathered in pairs]
    )


def narrow(tree: T, dtypes: Sequence[torch.dtype]) -> T:
    """The tree with its tensors in these dtypes, in the order of the fields."""
    return rebuild(tree, [t.to(dtype) for t, dtype in zip(leaves(tree), dtypes, strict=True)])


def total(tree: T) -> T:
    """The sum of a tree of rows over the clients; Gathered parts are concatenated."""
    pairs = zip(leaves(tree), gathered(tree), strict=True)
    return rebuild(tree, [t.flatten(0, 1) if is_gathered else _sum(t) for t, is_gathered in pairs])


def _sum(rows: Tensor) -> Tensor:
    return rows[0] if len(rows) == 1 and rows.is_floating_point() else rows.sum(0)


def gathered(tree: object, inside: bool = False) -> list[bool]:
    """Whether each tensor of the tree, in the order of the fields, is in a Gathered part."""
    if isinstance(tree, Tensor):
        return [inside]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple) else ()
    inside = inside or isinstance(tree, Gathered)
    return [flag for part in parts for flag in gathered(part, inside)]


def finite(tree: object, device: torch.device | None = None) -> Tensor:
    """Whether every number of the tree is finite, from one sum per tensor: one pass over memory.

    Args:
        tree: Its tensors are on one device.
        device: Of the answer where the tree has no tensor of numbers.
    """
    checks = [torch.isfinite(t.sum()) for t in leaves(tree) if t.is_floating_point()]
    return torch.stack(checks or [torch.ones((), dtype=torch.bool, device=device)]).all()
