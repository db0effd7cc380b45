"""What a record of settings is: fields with type, default, limits and help, and their check.

The records of `schema` and `federation` are made of it, and the options of commands are derived from it.
"""

import dataclasses
import re
import typing
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Self

from copfl.settings.checking import converted
from copfl.settings.policy_lines import HASH_OF_CODE, Option, PolicyLine

DIGEST_LENGTH = (
    12  # hexadecimal digits behind the @ of a value that a program passed, such as FedMine@3fa9c1d20b7e
)
_DIGEST = re.compile(rf"@[0-9a-f]{{{DIGEST_LENGTH}}}$")


def without_digest(name: str) -> str:
    """The name of a value that a program passed, without its hash: such as "FedMine"."""
    return _DIGEST.sub("", name)


class _Everything:
    def __contains__(self, value: object) -> bool:
        return True


ALL: Container[Any] = _Everything()  # every value of a setting


def setting(
    default: Any,
    help: str,
    names: str = "",
    *,
    panel: str = "",
    ours: bool = False,
    shown: str = "",
    not_in: str = "",
    same_run: Container[Any] = (),
    comparable: Container[Any] = ALL,
    policy: PolicyLine | None = None,
    **limits: Any,
) -> Any:
    """A field of a record: all that is known of a setting, and the only place that knows it.

    Args:
        default: The value where none is given.
        help: One sentence about it.
        names: Its names on the command line, such as "--rounds -r"; empty: only --set sets it.
        panel: The group in the help of a command.
        ours: Whether it is no argument of the component that the record describes.
        shown: The default as the help shows it, where it depends on other settings.
        not_in: Commands that have no option for it, such as "compare sweep": they set it, have one of their own, or
            do not take it.
        same_run: Values that do not count in what a run is: runs that differ in nothing else are the same one.
        comparable: Values that runs which are compared may have; an error names the first.
        policy: What a node may allow of it; None: it is no setting of a federation, and a node refuses it.
        limits: In the words of JSON Schema: minimum, maximum, exclusiveMinimum, exclusiveMaximum, enum.
    """
    about = {"help": help, "panel": panel, "names": names, "ours": ours, "shown": shown, "not_in": not_in}
    about |= {"same_run": same_run, "comparable": comparable, "policy": policy, "limits": limits}
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Component:
    """A choice by name with its options, or a value that a program passed.

    `of_options` is what a node may allow of the options, which the schema does not declare: the line of each,
    or one line of all.
    """

    of_options: ClassVar[PolicyLine | Mapping[str, PolicyLine]] = Option()

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = setting(
        None,
        "SHA-256 of the module of a name such as mymodule:MyNet, when it was trained.",
        ours=True,
        same_run=ALL,  # it is compared where the module is imported
        policy=HASH_OF_CODE,
    )
    value: Any = field(default=None, compare=False, repr=False)
    description: str = ""  # of the value

    def __bool__(self) -> bool:
        """Whether anything is chosen."""
        return self != _nothing_chosen(type(self))  # type: ignore[arg-type]  # a class has a hash

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the component."""
        fields = {name: getattr(self, name) for name in argument_names(type(self))}
        return {name: value for name, value in fields.items() if value is not None} | dict(self.options)

    def with_arguments(self, arguments: Mapping[str, Any]) -> Self:
        """The record with these keyword arguments of the component, and no others."""
        names = argument_names(type(self))
        fields = {name: arguments.get(name) for name in names}
        options = {name: value for name, value in arguments.items() if name not in names}
        return dataclasses.replace(self, **fields, options=options)  # type: ignore[arg-type]

    @property
    def title(self) -> str:
        """The name, or the value in words."""
        return without_digest(self.name or self.description)


def declared(record: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a record that are settings."""
    return tuple(f for f in dataclasses.fields(record) if "help" in f.metadata)


def argument_names(record: type[Component]) -> tuple[str, ...]:
    """The declared settings that are keyword arguments of the component that a record describes."""
    return tuple(f.name for f in declared(record) if not f.metadata["ours"] and f.name != "name")


def declared_types(record: type[Any]) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """The type and the limits of each setting of a record."""
    if record not in _TYPES:
        hints = typing.get_type_hints(record)
        _TYPES[record] = {f.name: (hints[f.name], f.metadata["limits"]) for f in declared(record)}
    return _TYPES[record]


_TYPES: dict[type[Any], dict[str, tuple[Any, Mapping[str, Any]]]] = {}


def checked_fields(record: Any, title: str) -> None:
    """Checks and converts the values of a record in place, while it is made.

    Args:
        record: A dataclass, in its `__post_init__`.
        title: Of its table, for the error.
    """
    for name, about in declared_types(type(record)).items():
        object.__setattr__(record, name, converted(f"{title}.{name}", getattr(record, name), *about))


@cache
def _nothing_chosen(kind: type[Component]) -> Component:
    return kind()
