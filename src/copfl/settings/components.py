"""What a name stands for: an algorithm, an optimizer, a model, ... of copfl, of an installed package or of the user."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any

from copfl.algorithms import ALGORITHMS as OURS
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.optim import Adam, DefaultNumber, Optimizer, Sgd
from copfl.data.schemes import SCHEMES
from copfl.errors import UsageError, raised_as
from copfl.models import MODELS, SOURCES
from copfl.models.adapters import ADAPTERS
from copfl.parts.mamo import Mamo
from copfl.parts.server_steps import SERVER_STEPS
from copfl.settings import checking, schema, user_code
from copfl.settings.checking import (
    SettingError,
    converted,
    parameters_of,
    takes_any,
    unknown_key,
    unknown_name,
)
from copfl.wrappers.addons import with_addons
from copfl.wrappers.attacks import ATTACKS, attacked
from copfl.wrappers.privacy import Private
from copfl.wrappers.robust import ROBUST_RULES
from copfl.wrappers.server_optimizer import with_server_optimizer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "mamo": Mamo, "sgd": Sgd}
# Parameters that are no settings: a run has these values.
CONTEXT = {
    "algorithm": ("optimizer",),
    "partition": ("dataset", "clients", "seed"),
    "model": ("shape", "classes"),
    "adapter": ("model",),
    "addons": ("algorithm",),
    "robust": ("algorithm",),
    "privacy": ("algorithm", "clients", "taking_part", "seed"),
    "attack": ("algorithm", "attack", "clients", "seed"),
}
PLAIN = (bool, int, float, str)  # what a file of settings has
WRAPPERS = ("server", "addons", "robust", "privacy", "attack")  # around the algorithm, from the inside out


@lru_cache(maxsize=1)
def algorithms() -> Mapping[str, Callable[..., AnyAlgorithm]]:
    """The algorithms by name: copfl's, and those that installed packages add as entry points `copfl.algorithms`."""
    found: dict[str, Callable[..., AnyAlgorithm]] = {}
    for entry in metadata.entry_points(group="copfl.algorithms"):
        unusable = (
            f'the algorithm "{entry.name}" of {entry.value} cannot be imported: {{}}; uninstall that package'
        )
        with raised_as(UsageError, unusable, ImportError, AttributeError):
            found[entry.name] = entry.load()
    return {**found, **OURS}


FACTORIES: dict[str, Callable[[], Mapping[str, Callable[..., Any]]]] = {
    "algorithm": algorithms,
    "optimizer": lambda: OPTIMIZERS,
    "partition": lambda: SCHEMES,
    "model": lambda: MODELS,
    "adapter": lambda: ADAPTERS,
    "server": lambda: SERVER_STEPS,
    "addons": lambda: {"": with_addons},
    "robust": lambda: ROBUST_RULES,
    "privacy": lambda: {"": Private},
    "attack": lambda: dict.fromkeys(ATTACKS, attacked),
}


def factory_of(title: str, name: str, code: str | None = None) -> Callable[..., Any]:
    """The class or function with this name, also "module:attribute"; SettingError if there is none.

    Args:
        title: The kind, such as "algorithm".
        name: Its name.
        code: The folder of the module.
    """
    known = FACTORIES[title]()
    if name in known:
        return known[name]
    if user_code.is_reference(name):
        found = user_code.attribute(title, name, code)
        if not callable(found) and title != "model":
            raise SettingError(
                f"{title}.name", name, f"is {type(found).__name__}; it must be a class or function"
            )
        return found  # type: ignore[no-any-return]
    more = [*SOURCES, "mymodule:MyNet"] if title == "model" else ["mymodule:MyName"]
    if not name:
        raise SettingError(f"{title}.name", name, f"is missing; allowed are {', '.join([*known, *more])}")
    raise unknown_name(f"{title}.name", name, [*known, *more])


def context_of(title: str, factory: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a factory that are no settings."""
    if title == "model":
        return (*CONTEXT[title], *user_code.given_by_copfl(factory))
    return CONTEXT.get(title, ())


def component(kind: str, table: Mapping[str, Any], fill: bool = True) -> Any:
    """The record of a table: its component is found by the name, every setting is checked.

    Args:
        kind: Such as "optimizer".
        table: What is set. A declared setting has the type and the limits of the schema, another one the type of the
            component's parameter.
        fill: Whether what is not set gets the component's default.
    """
    record = schema.record_of(kind, table)  # the declared settings are checked
    factory = factory_of(kind, record.name, record.code)
    parameters = parameters_of(factory, context_of(kind, factory))
    defaults = {key: p.default for key, p in parameters.items() if fill and _is_plain(p.default)}
    arguments = {key: float(d) if isinstance(d, DefaultNumber) else d for key, d in defaults.items()}
    for key, value in record.arguments.items():
        if key not in parameters and not takes_any(factory):
            raise unknown_key(f"{kind}.{key}", value, parameters, schema.paths())
        is_option = key in parameters and key in record.options
        arguments[key] = converted(f"{kind}.{key}", value, parameters[key].hint) if is_option else value
    if user_code.is_reference(record.name):
        record = dataclasses.replace(record, code=user_code.folder_of(record.name))
    return record.with_arguments(arguments)


def _is_plain(value: Any) -> bool:
    return all(isinstance(v, (*PLAIN, type(None))) for v in (value if isinstance(value, tuple) else (value,)))


def build(title: str, record: schema.Component, **context: Any) -> Any:
    """The value that a component describes.

    Args:
        title: The kind, such as "partition".
        record: The choice and its options.
        context: What the run has, see CONTEXT; a factory gets those that it has parameters for.
    """
    if record.value is not None:
        return record.value
    factory = factory_of(title, record.name, record.code)
    known = parameters_of(factory)
    given = {name: value for name, value in context.items() if name in known or takes_any(factory)}
    arguments = record.arguments
    try:
        if not user_code.is_reference(record.name):
            return checking.built(factory, arguments, **given)
        with user_code.calling(title, record.name, "making it"):
            return checking.built(factory, arguments, **given)
    except UsageError as error:
        raise _located(title, arguments, error) from error


def wrapped(title: str, record: schema.Component, algorithm: AnyAlgorithm, **context: Any) -> AnyAlgorithm:
    """The algorithm in a wrapper of this kind; a server optimizer is a rule that is put around it.

    Args:
        title: One of WRAPPERS.
        record: The choice and its options.
        algorithm: What is wrapped.
        context: What the run has, see CONTEXT.
    """
    made = build(title, record, algorithm=algorithm, **context)
    return with_server_optimizer(algorithm, made) if title == "server" else made  # type: ignore[no-any-return]


def _located(title: str, arguments: Mapping[str, Any], error: UsageError) -> UsageError:
    """The error of a component about one of its options ("rate=2 must ..."), with the path of that option."""
    match = re.fullmatch(r"(?:\w+\.)?(\w+)=\S+ (.*)", str(error), re.DOTALL)
    if isinstance(error, SettingError) or match is None or match[1] not in arguments:
        return error
    return SettingError(f"{title}.{match[1]}", arguments[match[1]], match[2])


def algorithm_of(run: schema.Run) -> AnyAlgorithm:
    """The algorithm of a complete run, without wrappers."""
    context = {"optimizer": build("optimizer", run.optimizer)} if run.optimizer else {}  # a value has its own
    return build("algorithm", run.algorithm, **context)  # type: ignore[no-any-return]


def usual_optimizer(algorithm: str, code: str | None = None) -> Any:
    """The optimizer of an algorithm where none is given; None if it has none."""
    parameter = parameters_of(factory_of("algorithm", algorithm, code)).get("optimizer")
    if parameter is None:
        return None
    return Sgd() if parameter.default is inspect.Parameter.empty else parameter.default


def name_of(title: str, value: Any) -> str:
    """The name under which `factory_of` finds the class of this value; empty if there is none."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return ""
    for name, factory in FACTORIES[title]().items():
        if factory is kind:
            return name
    reference = f"{kind.__module__}:{kind.__qualname__}"
    return reference if kind.__module__ != "__main__" and "<" not in reference else ""
