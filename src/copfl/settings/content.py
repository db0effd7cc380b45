"""What a program passed, by its content: what has no name in a file of settings is stored as its hash.

A class or function counts with its code, the values that it closes over, and what it uses of the program: functions,
classes, numbers and words. A network counts with its weights, a data set with its samples. What the code calls in other
modules does not count.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor, nn

from copfl.core.algorithm import AnyAlgorithm, traits, with_optimizer
from copfl.core.optim import Optimizer
from copfl.data.samples import Dataset
from copfl.settings.record import DIGEST_LENGTH

SKIPPED = ("__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__annotate_func__")


def digest_of(value: Any) -> str:
    """The hash of a value: the same in every process with the same version of Python."""
    content = hashlib.sha256()
    for piece in _pieces(value, set()):
        content.update(piece)
        content.update(b"\0")
    return content.hexdigest()[:DIGEST_LENGTH]


def named_by_content(name: str, value: Any) -> str:
    """Such as "FedMine@3fa9c1d20b7e".

    Args:
        name: Of its class.
        value: Whose content is hashed.
    """
    return f"{name}@{digest_of(value)}"


def _pieces(value: Any, seen: set[int]) -> Iterator[bytes]:
    if isinstance(value, Dataset):
        yield value.digest.encode()
        return
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        yield f"{value.dtype.str} {value.shape}".encode()
        yield (
            repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes()
        )
        return
    if value is None or isinstance(value, str | bytes | int | float | complex | PurePath):
        yield f"{type(value).__name__} {value!r}".encode()
        return
    if isinstance(value, type):
        yield from _of_class(value, seen)
        return
    if id(value) in seen:  # a value that contains itself
        return
    seen.add(id(value))
    yield type(value).__qualname__.encode()
    if isinstance(value, types.CodeType):
        yield value.co_code
        names = [*value.co_names, *value.co_varnames, *value.co_freevars]
        yield from _of_all([*value.co_consts, *names], seen)
    elif isinstance(value, types.FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        yield from _of_all([value.__code__, value.__defaults__, value.__kwdefaults__, *closed], seen)
        if is_of_program(value):
            yield from _of_all(_used_globals(value), seen)
    elif isinstance(value, types.MethodType):
        yield from _of_all([value.__func__, value.__self__], seen)
    elif isinstance(value, functools.partial):
        yield from _of_all([value.func, value.args, value.keywords], seen)
    elif isinstance(value, property):
        yield from _pieces(value.fget, seen)
    elif isinstance(value, staticmethod | classmethod):
        yield from _pieces(value.__func__, seen)
    elif isinstance(value, nn.Module):
        yield repr(value).encode()
        yield from _of_all([type(value), dict(value.state_dict())], seen)
    elif isinstance(value, Mapping):
        yield from _of_all([key_or_value for item in value.items() for key_or_value in item], seen)
    elif isinstance(value, list | tuple):
        yield from _of_all(value, seen)
    elif isinstance(value, set | frozenset):
        yield from sorted(b"\0".join(_pieces(key_or_value, seen)) for key_or_value in value)
    elif dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        yield from _of_all([type(value), fields], seen)
    elif isinstance(value, types.BuiltinFunctionType | types.ModuleType | np.ufunc):
        yield value.__name__.encode()
    else:
        yield from _of_all([type(value), getattr(value, "__dict__", {})], seen)


def _of_all(values: Any, seen: set[int]) -> Iterator[bytes]:
    for value in values:
        yield from _pieces(value, seen)


def _used_globals(function: types.FunctionType) -> Iterator[Any]:
    """What of the program a function uses by name, also in functions inside it; not what it changes itself."""
    waiting = [function.__code__]
    for code in waiting:  # which grows
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    changed = {i.argval for code in waiting for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    for name in dict.fromkeys(name for code in waiting for name in code.co_names):
        value = function.__globals__.get(name)
        is_code = isinstance(value, type | types.FunctionType) and is_of_program(value)
        if name not in changed and (is_code or isinstance(value, bool | int | float | str | tuple)):
            yield name
            yield value


def _of_class(value: type, seen: set[int]) -> Iterator[bytes]:
    """The name; of a class of the program itself also its attributes and its bases' attributes."""
    yield f"{value.__module__}.{value.__qualname__}".encode()
    if id(value) in seen or not is_of_program(value):
        return
    seen.add(id(value))
    yield from _of_all(value.__bases__, seen)
    for name, attribute in sorted(vars(value).items()):
        if name not in SKIPPED and isinstance(
            attribute,
            types.FunctionType | property | staticmethod | classmethod | str | int | float | tuple,
        ):
            yield name.encode()
            yield from _pieces(attribute, seen)


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that has no value yet
        return False


def is_of_program(value: Any) -> bool:
    """Whether a class or function is of a script, a notebook or a function, where no other process can import it."""
    return value.__module__ == "__main__" or "<" in value.__qualname__


# Classes and values that have no name in a module


_KEPT: dict[str, Callable[..., Any]] = {}  # by name with the hash: those that this program passed


def kept(name: str) -> Callable[..., Any] | None:
    """What this program passed under this name; None: nothing."""
    return _KEPT.get(name)


def keep(factory: type[Any]) -> str:
    """The name of a class that this program passed, by which settings mean it from now on.

    Args:
        factory: The class.
    """
    name = named_by_content(factory.__name__, factory)
    _KEPT[name] = factory
    return name


def keep_algorithm(algorithm: AnyAlgorithm) -> str:
    """The name of an algorithm that is more than a class with plain options; its optimizer can be another one."""
    name, usual = named_by_content(type(algorithm).__name__, algorithm), traits(algorithm).optimizer
    if usual is None:
        _KEPT[name] = lambda: algorithm
        return name

    def made(optimizer: Optimizer = usual) -> AnyAlgorithm:
        return with_optimizer(algorithm, optimizer)  # type: ignore[no-any-return]

    _KEPT[name] = made
    return name
