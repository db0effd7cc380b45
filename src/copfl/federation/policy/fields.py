"""Each setting of a run config against the policy, by the line that its field of the schema declares.

`request` calls `refusals_of` for each table. What a node may allow of a setting stands once, with the setting: its
field in `settings/` declares a line (`settings.policy_lines`), and `_judged` has a case for each kind of line. A key
without a line is refused.
"""

import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_origin

from copfl.federation.policy.checks import (
    MOST_LIST,
    classes,
    entries_of,
    flag,
    number,
    numbers,
    one_of,
    run_name,
    shape,
    text,
    whole,
)
from copfl.federation.policy.names import ADDONS, COMPONENTS, SOURCES
from copfl.federation.policy.record import AllowedBase, Policy
from copfl.federation.policy.refusal import OPTION, Refusal, plain_option, shown
from copfl.settings.federation import RECORDS
from copfl.settings.policy_lines import (
    KEYS,
    AdapterName,
    AtMost,
    ComponentName,
    CountAtMost,
    FileName,
    Free,
    FunctionNames,
    ListedOption,
    ModelPart,
    NumbersAtMost,
    OneOf,
    Option,
    PolicyLine,
    ProductAtMost,
    Refused,
    RunName,
    Simulated,
)
from copfl.settings.record import declared, declared_types

ADAPTER = re.compile(r"[a-z_]+(:[a-z_]+=[A-Za-z0-9_.*+-]{1,200}(,[a-z_]+=[A-Za-z0-9_.*+-]{1,200})*)?")
WORD = re.compile(r"[A-Za-z0-9_.*?+, -]{0,200}")  # no path, no address, no module:attribute, no variable
# How the options of components end that `bounds` has a line for. Each word is a row of parameters.
COUNTED = {
    "epochs": "epochs",
    "layers": "layers",
    "steps": "steps",
    "words": "parameters",
    "pairs": "parameters",
}


class Judged(NamedTuple):
    """A value beside the policy."""

    line: str  # of the policy, which decided
    wrong: str  # what is wrong with the value; "" if nothing is


class DeclaredSetting(NamedTuple):
    """A key of a table, and what the schema says of it."""

    line: PolicyLine | None
    hint: Any = float  # of an option that the schema does not declare
    limits: Mapping[str, Any] = {}
    default: Any = None

    @property
    def least(self) -> float:
        """The smallest number that the schema allows."""
        return self.limits.get("minimum", self.limits.get("exclusiveMinimum", 0))  # type: ignore[no-any-return]

    def wrong_by_type(self, value: Any) -> str:
        """What the type and the limits of the schema do not allow."""
        if choices := self.limits.get("enum"):
            return one_of(value, *choices)
        checks = {bool: flag, str: text, tuple[float, ...]: numbers}
        if self.hint in checks:
            return checks[self.hint](value)
        return self.wrong_outside(value, self.least, self.limits["maximum"])

    def wrong_outside(self, value: Any, least: float, most: float) -> str:
        """What is wrong with a number of the setting's type.

        Args:
            value: Another machine's.
            least: The smallest that is allowed.
            most: The largest.
        """
        is_whole = int in (self.hint, *get_args(self.hint))
        return whole(value, int(least), most) if is_whole else number(value, least, most)


def refusals_of(
    policy: Policy, title: str, table: Mapping[Any, Any], base: AllowedBase | None = None
) -> Iterator[Refusal]:
    """What the policy refuses of the settings of one table, each for itself.

    Args:
        policy: The policy of this machine's owner.
        title: The table's.
        table: Values by key, as another machine sent them.
        base: The pretrained base of the model, if the policy has it.
    """
    for key, value in table.items():
        line, wrong = _judged(policy, declared_setting(title, key), key, value, base)
        if line == KEYS and wrong == NO_SETTING:
            wrong = "is no option" if title in COMPONENTS else "is no key of a run config"
        if wrong:
            yield Refusal(line, f"{title}.{plain_option(key)}={shown(value)} {wrong}")


def declared_setting(title: str, key: Any) -> DeclaredSetting:
    """What the schema says of a key; the options of components, which it does not declare, have one line.

    Args:
        title: The title of the table.
        key: In the table; another machine's.
    """
    record = RECORDS[title]
    for field in declared(record):
        if field.name == key:
            return DeclaredSetting(field.metadata["policy"], *declared_types(record)[key], field.default)
    of_options = getattr(record, "of_options", None)
    line = of_options.get(key) if isinstance(of_options, Mapping) else of_options
    return DeclaredSetting(line if isinstance(key, str) and OPTION.fullmatch(key) else None)


NO_SETTING = "is no setting"
# Tables whose name chooses a component of copfl or of the policy's code.
NAMED = tuple(
    title
    for title in RECORDS
    if isinstance(declared_setting(title, "name").line, ComponentName | AdapterName)
)


def _judged(
    policy: Policy, setting: DeclaredSetting, key: str, value: Any, base: AllowedBase | None
) -> Judged:
    """The value of a key beside the policy's line for it."""
    match setting.line:
        case None | Simulated():
            return Judged(KEYS, NO_SETTING)
        case Refused(line, why):
            return Judged(line, why)
        case Free(line):
            return Judged(line, setting.wrong_by_type(value))
        case AtMost(most, least, line):
            wrong = setting.wrong_outside(
                value, setting.least if least is None else least, _bound(policy, most)
            )
            return Judged(line or (most if isinstance(most, str) else KEYS), wrong)
        case ProductAtMost(most):
            return Judged(most, shape(value, _bound(policy, most)))
        case CountAtMost(most):
            return Judged(most, classes(value, _bound(policy, most)))
        case NumbersAtMost(most):
            return Judged(most, numbers(value, _bound(policy, most)))
        case OneOf(line):
            return Judged(line, one_of(value, *getattr(policy, line)))
        case ComponentName(line):
            if isinstance(value, str) and ":" in value:  # a reference to code that the policy may have
                return Judged("code", one_of(value, *(code.reference for code in policy.code)))
            return Judged(line, one_of(value, *getattr(policy, line)))
        case AdapterName(line):
            is_code = value in [code.reference for code in policy.code]
            return Judged(line, "" if is_code else _adapter(policy, value))
        case FunctionNames(line):
            return _functions(policy, line, value, is_list=get_origin(setting.hint) is tuple)
        case FileName(file_key):
            unset = [""] if setting.default == "" else []
            return Judged("files", one_of(value, *unset, *policy.file_names(file_key)))
        case ModelPart(part):
            return _model_part(policy, part, value, base)
        case RunName():
            return Judged(KEYS, run_name(value))
        case ListedOption(line):
            is_off = type(value) is type(ADDONS.get(key)) and value == ADDONS[key]
            if key not in getattr(policy, line):
                return Judged(line, "" if is_off else one_of(None, *getattr(policy, line)))
            return _option(policy, key, value)
        case Option():
            return _option(policy, key, value)


def _bound(policy: Policy, most: str | float) -> Any:
    """A bound that is written in the schema, or the policy's, by its line."""
    return attrgetter(most)(policy) if isinstance(most, str) else most


def _adapter(policy: Policy, value: Any) -> str:
    """What is wrong with the name of an adapter, which may contain options."""
    if value == "":
        return ""
    if not isinstance(value, str) or not ADAPTER.fullmatch(value):
        return "must be such as lora:r=8,alpha=16,targets=query+value"
    name, _, words = value.partition(":")
    if name not in policy.adapters:
        return one_of(name, *policy.adapters)
    for word in filter(None, words.split(",")):
        option, _, number_text = word.partition("=")
        if option != "targets" and not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", number_text):
            return f"has {option}, which must be a number below a million"
    return ""


def _functions(policy: Policy, line: str, value: Any, is_list: bool) -> Judged:
    """Names of losses or metrics: each on the policy's list, or a reference to code that the policy has."""
    texts = entries_of(value)
    if not all(isinstance(entry, str) for entry in texts) or not (is_list or isinstance(value, str)):
        return Judged(KEYS, "must be names")
    words = [word.strip() for entry in texts for word in (entry.split(",") if is_list else [entry])]
    allowed = {*getattr(policy, line), *(code.reference for code in policy.code)}
    unlisted = [word for word in filter(None, words) if word not in allowed]
    wrong = one_of(None, *sorted(allowed)) if unlisted else ""
    return Judged("code" if any(":" in word for word in unlisted) else line, wrong)


def _model_part(policy: Policy, part: str, value: Any, base: AllowedBase | None) -> Judged:
    """The name, the hash or the weights of a model, whose base is the one that name and hash mean."""
    if part == "sha256":
        is_right = base is not None and value == base.sha256
        return Judged("bases", "" if is_right else "is the hash of no base that the policy has")
    if part == "name":
        codes = [code.reference for code in policy.code]
        source, colon, _ = str(value).partition(":")
        line = "bases" if colon and source in SOURCES else "code" if colon else "models"
        listed = {"bases": [entry.name for entry in policy.bases], "code": codes, "models": policy.models}
        is_known = value in (*policy.models, *codes) or base is not None
        return Judged(line, "" if is_known else one_of(None, *listed[line]))
    if base is None:
        return Judged("bases", "is of a base that the policy does not have")
    allowed = ["none", *(["default"] if base.sha256 else []), *policy.file_names("weights")]
    return Judged("files", one_of(value, *allowed))


def _option(policy: Policy, key: str, value: Any) -> Judged:
    """A word, a number within bounds, or a list of them."""
    if key in ("name", "value"):
        return Judged(KEYS, NO_SETTING)
    for ending, line in COUNTED.items():
        if key.endswith(ending):
            return Judged(f"bounds.{line}", whole(value, 0, getattr(policy.bounds, line)))
    entries, most = entries_of(value), policy.bounds.option
    if len(entries) > MOST_LIST:
        return Judged(KEYS, f"must have at most {MOST_LIST} entries")
    for entry in entries:
        if type(entry) in (int, float) and not abs(entry) <= most:
            return Judged("bounds.option", f"must be at most {most:g}")
        if isinstance(entry, str) and not WORD.fullmatch(entry):
            return Judged(KEYS, "must be a word: letters, digits and _.*?+,- alone")
        if not isinstance(entry, bool | int | float | str):
            return Judged(KEYS, "must be a number, a word or a list of them")
    return Judged(KEYS, "")
