"""Values as people write them, checked against types, limits and signatures; one kind of error.

Records, components and layers use it, so a mistake reads the same wherever it is made.
"""

import dataclasses
import difflib
import inspect
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from copfl.errors import UsageError

LARGEST = 1e30  # of a number that is set by name: ten times as much must still fit into float32
TYPES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    type(None): "left out",
}


class Limit(typing.NamedTuple):
    """A kind of limit of a number."""

    words: str
    allows: Callable[[Any, Any], bool]  # the number, beside its limit


LIMITS = {  # in the words of JSON Schema
    "minimum": Limit("at least", operator.ge),
    "exclusiveMinimum": Limit("above", operator.gt),
    "maximum": Limit("at most", operator.le),
    "exclusiveMaximum": Limit("below", operator.lt),
}


# What other libraries call a setting or an option.
OTHER_NAMES = {
    "data": "dataset",
    "gpu": "device",
    "label": "target",
    "learning_rate": "lr",
    "num_clients": "clients",
    "bs": "batch_size",
    "fraction": "participation",
    "global_epoch": "rounds",
    "global_rounds": "rounds",
    "join_ratio": "participation",
    "local_epoch": "epochs",
    "local_epochs": "epochs",
    "local_learning_rate": "lr",
    "n_clients": "clients",
    "n_rounds": "rounds",
    "num_epochs": "epochs",
    "num_rounds": "rounds",
    "output": "out",
    "output_dir": "out",
    "random_state": "seed",
    "step_size": "lr",
}


class SettingError(UsageError):
    """A setting that is not allowed.

    Args:
        path: The key, such as "run.rounds".
        value: What it was set to; None: a key alone.
        allowed: What it may be, as a sentence.
    """

    def __init__(self, path: str, value: Any, allowed: str) -> None:
        text = repr(value)
        short = text if len(text) <= 60 else f"{text[:57]}..."
        super().__init__(f"{path if value is None else f'{path}={short}'} {allowed}")
        self.path, self.value, self.allowed = path, value, allowed

    def __reduce__(self) -> tuple[Any, ...]:
        return SettingError, (self.path, self.value, self.allowed)


def unknown_key(path: str, value: Any, known: Iterable[str], elsewhere: Iterable[str] = ()) -> SettingError:
    """The error for a key that does not exist; `elsewhere` has the paths of keys in other tables.

    Args:
        path: Of the key.
        value: That it was set to.
        known: The keys that there are.
        elsewhere: The paths of keys in other tables.
    """
    names, key = sorted(known), path.rpartition(".")[2]
    same = [other for other in elsewhere if other != path and other.rpartition(".")[2] == key]
    meant = OTHER_NAMES.get(_plain(key))
    near = same or [name for name in names if _plain(name) == meant]
    near = near or difflib.get_close_matches(key, names, n=1)
    return _unlisted(path, value, "is no setting", names, near)


def _plain(name: str) -> str:
    """The name of a setting or an option, such as "batch_size" of --batch-size."""
    return name.lstrip("-").replace("-", "_")


def unknown_name(path: str, name: str, known: Iterable[str]) -> SettingError:
    """The error for a name that does not exist.

    Args:
        path: Of the setting.
        name: As it was written.
        known: The names that there are.
    """
    names = sorted(known)
    same = [other for other in names if _letters(other) == _letters(name)]
    return _unlisted(path, name, "is unknown", names, same or difflib.get_close_matches(name, names, n=1))


def _letters(name: str) -> str:
    """What remains of a name in another spelling: "FedAvg-FT" is "fedavg_ft"."""
    return "".join(filter(str.isalnum, name)).casefold()


def _unlisted(path: str, value: Any, what: str, known: Sequence[str], near: Sequence[str]) -> SettingError:
    """The error for what is not among the known names; first the nearest one, as the others may be many."""
    listed = ", ".join(known) or "none"
    rest = f'did you mean "{near[0]}"? Allowed are {listed}' if near else f"allowed are {listed}"
    return SettingError(path, value, f"{what}; {rest}")


def converted(path: str, value: Any, hint: Any, limits: Mapping[str, Any] | None = None) -> Any:
    """The value as the hint's type: a plain one, a tuple of one, or a choice of those, within its limits.

    Args:
        path: Of the setting, for the error.
        value: As it was set.
        hint: The type of its field or parameter.
        limits: By their names in LIMITS.
    """
    limits = limits or {}
    for option in _alternatives(hint):
        if option not in TYPES:
            if typing.get_origin(option) is not tuple:
                return value  # the component checks other types
            inner = typing.get_args(option)[0]
            items = value if isinstance(value, list | tuple) else (value,)
            return tuple(converted(path, item, inner, limits) for item in items)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not abs(value) <= LARGEST:
                raise SettingError(path, value, f"must be a finite number of at most {LARGEST:g}")
            value = float(value)
        if type(value) is option:
            if not limits or value is None:
                return value
            if (choices := limits.get("enum")) and value not in choices:
                raise unknown_name(path, str(value), choices)
            if choices or all(LIMITS[name].allows(value, limit) for name, limit in limits.items()):
                return value
            break
    raise SettingError(path, value, f"must be {described(hint, limits)}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a choice of types, in order; a type alone."""
    if isinstance(hint, types.UnionType):
        return hint.__args__
    if isinstance(hint, type):  # most hints; to ask typing takes longer than all the rest of a check
        return (hint,)
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Union else (hint,)


def described(hint: Any, limits: Mapping[str, Any]) -> str:
    """What a value may be, such as "a whole number of at least 1 and at most 1,024".

    Args:
        hint: The type.
        limits: By their names in LIMITS.
    """
    if choices := limits.get("enum"):
        return ", ".join(choices[:-1]) + f" or {choices[-1]}"
    texts = [
        TYPES.get(option) or f"a list of {TYPES.get(typing.get_args(option)[0], 'values')[2:]}s"
        for option in _alternatives(hint)
    ]
    bounds = " and ".join(f"{kind.words} {limits[name]:,}" for name, kind in LIMITS.items() if name in limits)
    return " or ".join(texts) + (f", {bounds}" if bounds else "")


# Signatures


class Parameter(typing.NamedTuple):
    """A keyword of a factory."""

    default: Any  # inspect.Parameter.empty where there is none
    hint: Any


def parameters_of(factory: Callable[..., Any], skip: Iterable[str] = ()) -> dict[str, Parameter]:
    """The keywords of a function or class; a dataclass has the keywords of its parts, too.

    A part is a field whose default is a dataclass, such as `growth: Pwpm` of CO-PFL. `optimizer` is none: it
    is a kind of its own.

    Args:
        factory: The function or class.
        skip: Parameters that are left out.
    """
    try:
        every = _parameters_of(factory)
    except TypeError:  # an object without a hash
        every = _parameters_of.__wrapped__(factory)
    return {name: parameter for name, parameter in every.items() if name not in skip}


@lru_cache(maxsize=256)  # a reproduction checks a thousand records against the same few signatures
def _parameters_of(factory: Callable[..., Any]) -> Mapping[str, Parameter]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    # The fields of a dataclass may be annotated in the modules of its bases, which __init__ does not know.
    plain_class = inspect.isclass(factory) and not dataclasses.is_dataclass(factory)
    try:
        hints = typing.get_type_hints(factory.__init__ if plain_class else factory)
    except (NameError, TypeError):  # the annotations of a user's code may name what does not exist
        hints = {}
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of a class in C
        return {}
    result = {
        p.name: Parameter(p.default, hints.get(p.name, Any)) for p in parameters if p.kind not in variadic
    }
    for name, nested in parts_of(factory).items():
        del result[name]
        hinted = parameters_of(type(nested))
        result |= {
            option: Parameter(value, hinted[option].hint) for option, value in options_of(nested).items()
        }
    for name, default in _defaults(factory).items():
        if name in result:
            result[name] = Parameter(default, result[name].hint)
    return result


def takes_any(factory: Callable[..., Any]) -> bool:
    """Whether a function takes keywords that it does not name, or whose names Python cannot find out."""
    try:
        kinds = [p.kind for p in inspect.signature(factory).parameters.values()]
    except (TypeError, ValueError):
        return True
    return inspect.Parameter.VAR_KEYWORD in kinds


def _defaults(factory: Any) -> dict[str, Any]:
    """The defaults of a dataclass's fields."""
    fields = (
        dataclasses.fields(factory) if inspect.isclass(factory) and dataclasses.is_dataclass(factory) else ()
    )
    missing = dataclasses.MISSING
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not missing}
    return made | {f.name: f.default for f in fields if f.default is not missing}


def parts_of(factory: Any) -> dict[str, Any]:
    """The defaults of a dataclass that are dataclasses themselves; `optimizer` is a kind of its own."""
    return {
        name: default
        for name, default in _defaults(factory).items()
        if dataclasses.is_dataclass(default) and not inspect.isclass(default) and name != "optimizer"
    }


def checked(
    kind: str,
    factory: Callable[..., Any],
    options: Mapping[str, Any],
    skip: Iterable[str] = (),
    elsewhere: Iterable[str] = (),
) -> dict[str, Any]:
    """The keywords with the types of the factory's parameters; SettingError names one that does not fit.

    Args:
        kind: Such as "partition", for the error.
        factory: The function or class.
        options: Its keywords as they were set.
        skip: Parameters that are no settings.
        elsewhere: The paths of keys in other tables, for the error.
    """
    parameters = parameters_of(factory, skip)
    result = dict(options)
    for name, value in options.items():
        if name in parameters:
            result[name] = converted(f"{kind}.{name}", value, parameters[name].hint)
        elif not takes_any(factory):
            raise unknown_key(f"{kind}.{name}", value, parameters, elsewhere)
    return result


def with_options(value: Any, options: Mapping[str, Any]) -> Any:
    """The same dataclass with the options that are its own or its parts'.

    Args:
        value: A dataclass.
        options: By the name of its field.
    """
    changed = {f.name: options[f.name] for f in dataclasses.fields(value) if f.init and f.name in options}
    nested = {name: with_options(getattr(value, name), options) for name in parts_of(type(value))}
    return dataclasses.replace(value, **changed, **nested)


def options_of(value: Any) -> dict[str, Any]:
    """The options of a dataclass, its own and its parts'."""
    result: dict[str, Any] = {}
    nested = parts_of(type(value))
    for field in dataclasses.fields(value):
        if field.name in nested:
            result |= options_of(getattr(value, field.name))
        elif field.init and field.name != "optimizer":
            result[field.name] = getattr(value, field.name)
    return result
