"""What a node may allow of a setting: the words in which a field of the schema says it.

A field names its policy line where it is declared, as in `setting(1, "Rounds.", policy=AtMost("bounds.rounds"))`.
A line such as "bounds.rounds" is a key of the policy of a machine's owner. A node refuses a field that has no
policy line: a new setting is refused until somebody says what may be allowed of it. A node reads the lines in
`copfl.federation.policy.fields`. Without torch.
"""

from collections.abc import Container
from typing import Any, NamedTuple

KEYS = "keys"  # in place of a key of the policy: what a run config may contain at all


class Free(NamedTuple):
    """Every value that the type and the limits of the field allow."""

    line: str = KEYS


class AtMost(NamedTuple):
    """A number between the least that the field allows and a bound."""

    most: str | float  # a key of the policy, or the bound itself
    least: float | None = None  # None: the field's minimum, or 0
    line: str = ""  # which key decides, where it is not `most`


class ProductAtMost(NamedTuple):
    """A shape of at most so many numbers."""

    most: str


class CountAtMost(NamedTuple):
    """A number, or a list of as many names."""

    most: str


class NumbersAtMost(NamedTuple):
    """A list of at most so many numbers."""

    most: str


class OneOf(NamedTuple):
    """A name on a list of the policy."""

    line: str


class ComponentName(NamedTuple):
    """The name of a component on a list of the policy, or a reference to code that the policy has."""

    line: str


class FunctionNames(NamedTuple):
    """Names of functions on a list of the policy or of its code; with commas where the field is a list."""

    line: str


class FileName(NamedTuple):
    """The name of a file that the policy has under this key."""

    key: str


class ModelPart(NamedTuple):
    """What the models and pretrained bases of the policy decide: a model's "name", "weights" or "sha256"."""

    key: str


class AdapterName(NamedTuple):
    """An adapter on a list of the policy, whose name may contain options, such as lora:r=8."""

    line: str = "adapters"


class RunName(NamedTuple):
    """A name that can be the name of a folder, or none."""


class Option(NamedTuple):
    """A word, a number within `bounds.option`, or a list of them, as of every option of a component."""


class ListedOption(NamedTuple):
    """An option that a list of the policy has, or one with the value that changes nothing."""

    line: str


class Refused(NamedTuple):
    """No value is allowed."""

    line: str
    why: str


class Simulated(NamedTuple):
    """Of simulations alone: `federate init` refuses it, and a node has no such key."""

    why: str
    unless: Container[Any]  # values that change nothing


PolicyLine = (
    Free
    | AtMost
    | ProductAtMost
    | CountAtMost
    | NumbersAtMost
    | OneOf
    | ComponentName
    | FunctionNames
    | FileName
    | ModelPart
    | AdapterName
    | RunName
    | Option
    | ListedOption
    | Refused
    | Simulated
)
HASH_OF_CODE = Refused("code", "names code; a machine's owner enters it in the policy")
