"""What a name stands for: an algorithm, an optimizer, a model, ... of copfl, a package or the user.

`validate` makes the record of a choice here, and `prepare` the value that the record describes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import AnyAlgorithm, traits
from copfl.core.optim import Adam, DefaultNumber, Optimizer, Sgd, is_chosen, plain_sgd
from copfl.data.clients.schemes import SCHEMES
from copfl.errors import UsageError
from copfl.models import MODELS, SOURCES
from copfl.models.adapters import ADAPTERS
from copfl.parts.mamo import Mamo
from copfl.parts.server_steps import SERVER_STEPS
from copfl.settings import content, named_code, schema, user_code
from copfl.settings.checking import (
    SettingError,
    converted,
    options_of,
    parameters_of,
    parts_of,
    takes_any,
    unknown_key,
    unknown_name,
    with_options,
)
from copfl.settings.record import Component, argument_names, declared_types, without_digest
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


FACTORIES: dict[str, Callable[[], Mapping[str, Callable[..., Any]]]] = {
    "algorithm": lambda: ALGORITHMS,
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


def reference_of(title: str, name: str) -> str:
    """The name as "module:attribute", where it is one or the entry point of an installed package; or else empty.

    Args:
        title: The kind, such as "algorithm".
        name: As it was set.
    """
    name = named_code.plugins().get(name, name) if title == "algorithm" and name not in ALGORITHMS else name
    return name if user_code.is_reference(name) else ""


def factory_of(title: str, name: str, code: str | None = None) -> Callable[..., Any]:
    """The class or function with this name, also "module:attribute"; SettingError if there is none.

    Args:
        title: The kind, such as "algorithm".
        name: Its name.
        code: The module's hash of when it was trained, see `named_code.digests`.
    """
    known = FACTORIES[title]()
    if name in known:
        return known[name]
    if (plain := without_digest(name)) != name:
        if passed := content.kept(name):
            return passed
        raise UsageError(
            f"the {title} is {plain} of a Python program, as its code was with the hash {name.rpartition('@')[2]}; "
            f"pass it again, as it was: {title}={plain}"
        )
    if reference := reference_of(title, name):
        code_of_user = user_code.attribute(title, reference, code)
        if not callable(code_of_user) and title != "model":
            raise SettingError(
                f"{title}.name", name, f"is {type(code_of_user).__name__}; it must be a class or function"
            )
        return code_of_user  # type: ignore[no-any-return]
    user_code.check_no_file(title, name)
    if advice := user_code.in_current_folder(title, name):
        raise SettingError(f"{title}.name", name, advice)
    more = [*SOURCES, "mymodule:MyNet"] if title == "model" else ["mymodule:MyName"]
    if not name:
        raise SettingError(f"{title}.name", name, f"is missing; allowed are {', '.join([*known, *more])}")
    more = [*named_code.plugins(), *more] if title == "algorithm" else more
    raise unknown_name(f"{title}.name", name, [*known, *more])


def context_parameters(title: str, factory: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a factory that are no settings.

    Args:
        title: The kind, such as "model".
        factory: The function or class.
    """
    if title == "model":
        return (*CONTEXT[title], *user_code.given_by_copfl(factory))
    return CONTEXT.get(title, ())


def component(kind: str, table: Mapping[str, Any], fill: bool = True) -> Any:
    """The record of a table: its component is found by the name, every setting is checked.

    Args:
        kind: Such as "optimizer".
        table: What is set. A declared setting has the type and the limits of the schema, another one the type
            of the component's parameter.
        fill: Whether what is not set gets the component's default.
    """
    record = schema.KINDS[kind]
    declared, arguments = declared_types(record), argument_names(record)
    fields = {k: converted(f"{kind}.{k}", v, *declared[k]) for k, v in table.items() if k in declared}
    name = fields.get("name", "")
    factory = factory_of(kind, name, fields.get("code"))
    if reference := reference_of(kind, name):
        fields["code"] = named_code.digests(reference)
    parameters = parameters_of(factory, context_parameters(kind, factory))
    options = {}
    for key, value in table.items():
        if key in declared and key not in arguments:
            continue  # no setting of the component
        if key not in parameters and not takes_any(factory):
            if holder := _undecorated(factory, key):
                advice = (
                    f"is no setting: {holder} declares {key} but is no dataclass: add @dataclass(frozen=True)"
                )
                raise SettingError(f"{kind}.{key}", value, advice)
            raise unknown_key(f"{kind}.{key}", value, parameters, schema.paths())
        if key not in declared:
            hint = parameters[key].hint if key in parameters else Any
            options[key] = converted(f"{kind}.{key}", value, hint)
    if fill:
        plain = {key: p.default for key, p in parameters.items() if _is_plain(p.default)}
        usual = {key: float(d) if isinstance(d, DefaultNumber) else d for key, d in plain.items()}
        fields = {key: usual[key] for key in arguments if key in usual} | fields
        options = {key: d for key, d in usual.items() if key not in arguments} | options
    return record(**fields, options=options)


def _undecorated(factory: Any, name: str) -> str:
    """The class that declares this name as a dataclass would, without being one; empty if there is none."""
    classes = factory.__mro__ if inspect.isclass(factory) else ()
    undecorated = (c for c in classes if "__dataclass_params__" not in vars(c))
    return next((c.__name__ for c in undecorated if name in inspect.get_annotations(c)), "")


def _is_plain(value: Any) -> bool:
    return all(isinstance(v, (*PLAIN, type(None))) for v in (value if isinstance(value, tuple) else (value,)))


def build(title: str, record: Component, optimizer: schema.Optimizer | None = None, **context: Any) -> Any:
    """The value that a component describes; of one of WRAPPERS the algorithm in it.

    Args:
        title: The kind, such as "partition".
        record: The choice and its options.
        optimizer: The optimizer of an algorithm, where it has one.
        context: What the run has, see CONTEXT; a factory gets those that it has parameters for. A step of the server
            is put around `algorithm`.
    """
    if record.value is not None:
        return record.value
    factory = factory_of(title, record.name, record.code)
    known, nested = parameters_of(factory), parts_of(factory)
    if optimizer:
        context["optimizer"] = build("optimizer", optimizer)
    algorithm = context.get("algorithm")
    context = {name: value for name, value in context.items() if name in known or takes_any(factory)}
    arguments = record.arguments
    of_parts = {option for options in nested.values() for option in options_of(options)}
    others = {name: value for name, value in arguments.items() if name not in of_parts}
    own_code = reference_of(title, record.name)
    try:
        with user_code.calling(title, record.name, "making it") if own_code else nullcontext():
            made = {name: with_options(options, arguments) for name, options in nested.items()}
            value = factory(**context, **others, **made)
    except UsageError as error:
        raise _located(title, arguments, error) from error
    return with_server_optimizer(algorithm, value) if title == "server" else value


def _located(title: str, arguments: Mapping[str, Any], error: UsageError) -> UsageError:
    """The error of a component about one of its options ("rate=2 must ..."), with the path of that option."""
    match = re.fullmatch(r"(?:\w+\.)?(\w+)=\S+ (.*)", str(error), re.DOTALL)
    if isinstance(error, SettingError) or match is None or match[1] not in arguments:
        return error
    return SettingError(f"{title}.{match[1]}", arguments[match[1]], match[2])


def usual_optimizer(algorithm: str | AnyAlgorithm, code: str | None = None, *, by_rule: bool = False) -> Any:
    """The optimizer of an algorithm where none is given; None if it has none.

    Args:
        algorithm: Its name, or one of a program.
        code: The hash of its module in training, see `named_code.digests`.
        by_rule: Whether it is Adam where the algorithm's authors chose none, see `Facts.follows_rule`.
    """
    if isinstance(algorithm, str):
        parameter = parameters_of(factory_of("algorithm", algorithm, code)).get("optimizer")
        if parameter is None:
            return None
        usual = plain_sgd() if parameter.default is inspect.Parameter.empty else parameter.default
    else:
        usual = traits(algorithm).optimizer
    return Adam() if by_rule and usual is not None and not is_chosen(usual) else usual


def name_of(title: str, value: Any) -> str:
    """The name under which `factory_of` finds the class of this value; empty if there is none.

    A class that no other process can import has the name that `content.keep` gives it.

    Args:
        title: The kind, such as "optimizer".
        value: Of a program.
    """
    kind = type(value)
    if kind.__module__ == "builtins":
        return ""
    for name, factory in FACTORIES[title]().items():
        if factory is kind:
            return name
    reference = f"{kind.__module__}:{kind.__qualname__}"
    return content.keep(kind) if content.is_of_program(kind) else reference
