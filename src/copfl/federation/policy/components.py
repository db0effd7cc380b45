"""What is refused of the components that a run config names, and of their options."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from copfl.federation.policy.checks import MOST_LIST, one_of, parts_of, whole
from copfl.federation.policy.names import ADDONS, COMPONENTS, NAMES, SOURCES
from copfl.federation.policy.record import Base, Policy
from copfl.federation.policy.refusal import KEYS, OPTION, PolicyError, Refusal, plain_option, shown
from copfl.settings.toml import Tables

ADAPTER = re.compile(r"[a-z_]+(:[a-z_]+=[A-Za-z0-9_.*+-]{1,200}(,[a-z_]+=[A-Za-z0-9_.*+-]{1,200})*)?")
WORD = re.compile(r"[A-Za-z0-9_.*?+, -]{0,200}")  # no path, no address, no module:attribute, no variable


def component_refusals(policy: Policy, tables: Tables) -> Iterator[Refusal]:
    """What is refused of the components and their options."""
    model = tables["model"].get("name", "cnn")
    base = base_of(policy, model, tables["model"])
    codes = tuple(code.reference for code in policy.code)
    if model not in (*policy.models, *codes) and base is None:
        source, colon, _ = str(model).partition(":")
        line = "bases" if colon and source in SOURCES else "code" if colon else "models"
        allowed = {"bases": [b.name for b in policy.bases], "code": codes, "models": policy.models}[line]
        yield Refusal(line, f"model.name={shown(model)} {one_of(*allowed)(None)}")
    if base is not None and not base.sha256 and tables["model"].get("weights") != "none":
        yield Refusal("bases", f"model.name={shown(model)} is allowed with model.weights=none alone")
    for title in COMPONENTS:
        for option, value in tables[title].items():
            if (title, option) == ("model", "name"):
                continue
            line, wrong = _option(policy, title, option, value, base)
            if wrong:
                yield Refusal(line, f"{title}.{plain_option(option)}={shown(value)} {wrong}")


def _option(policy: Policy, title: str, option: Any, value: Any, base: Base | None) -> tuple[str, str]:
    """The policy's line for one option of a table, and what is wrong with it; "" if nothing is."""
    most = policy.bounds
    if not isinstance(option, str) or not OPTION.fullmatch(option):
        return KEYS, "is no option"
    if option == "code":
        return "code", "names a folder; a machine's owner enters it in the policy"
    if title == "addons" and option not in policy.addons:
        is_off = type(value) is type(ADDONS.get(option)) and value == ADDONS[option]
        return "addons", "" if is_off else one_of(*policy.addons)(None)
    if option == "name" and title in NAMES:
        if title == "adapter" and value not in [code.reference for code in policy.code]:
            return "adapters", _adapter(policy, value)
        line = NAMES[title]
        is_reference = isinstance(value, str) and ":" in value
        allowed = [code.reference for code in policy.code] if is_reference else getattr(policy, line)
        return "code" if is_reference else line, one_of(*allowed)(value)
    if option in ("name", "value"):
        return KEYS, "is no option"
    if title == "task" and option in ("loss", "metrics"):
        names = parts_of(value)
        if not all(isinstance(text, str) for text in names) or (option == "loss" and type(value) is not str):
            return KEYS, "must be names"
        words = [
            word.strip() for text in names for word in (text.split(",") if option == "metrics" else [text])
        ]
        allowed = policy.losses if option == "loss" else policy.metrics
        known = {*allowed, *(code.reference for code in policy.code)}
        wrong = [word for word in filter(None, words) if word not in known]
        line = "code" if any(":" in word for word in wrong) else "losses" if option == "loss" else "metrics"
        return line, one_of(*sorted(known))(None) if wrong else ""
    if title == "model" and option == "sha256":
        is_right = base is not None and value == base.sha256
        return "bases", "" if is_right else "is the hash of no base that the policy has"
    if title == "model" and option == "weights":
        if base is None:
            return "bases", "is of a base that the policy does not have"
        return "files", one_of("none", *(["default"] if base.sha256 else []), *policy.file_names("weights"))(
            value
        )
    if title == "model" and option == "tokenizer":
        return "files", one_of(*policy.file_names("tokenizer"))(value)
    if option.endswith("epochs"):
        return "bounds.epochs", whole(0, most.epochs)(value)
    if option.endswith("layers"):
        return "bounds.layers", whole(0, most.layers)(value)
    if option.endswith("steps"):
        return "bounds.steps", whole(0, most.steps)(value)
    values = parts_of(value)
    if len(values) > MOST_LIST:
        return KEYS, f"must have at most {MOST_LIST} entries"
    for part in values:
        if type(part) in (int, float) and not abs(part) <= most.option:
            return "bounds.option", f"must be at most {most.option:g}"
        if isinstance(part, str) and not WORD.fullmatch(part):
            return KEYS, "must be a word: letters, digits and _.*?+,- alone"
        if not isinstance(part, bool | int | float | str):
            return KEYS, "must be a number, a word or a list of them"
    return KEYS, ""


def _adapter(policy: Policy, value: Any) -> str:
    if value == "":
        return ""
    if not isinstance(value, str) or not ADAPTER.fullmatch(value):
        return "must be such as lora:r=8,alpha=16,targets=query+value"
    name, _, words = value.partition(":")
    if name not in policy.adapters:
        return one_of(*policy.adapters)(name)
    for word in filter(None, words.split(",")):
        option, _, text = word.partition("=")
        if option != "targets" and not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", text):
            return f"has {option}, which must be a number below a million"
    return ""


def base_of(policy: Policy, model: Any, options: Mapping[str, Any]) -> Base | None:
    """The base that the model's name or the hash in its options means, of the same library; None if none."""
    source = str(model).partition(":")[0]
    of_source = [base for base in policy.bases if base.name.partition(":")[0] == source and ":" in str(model)]
    by_name = [base for base in of_source if base.name == model]
    digest = options.get("sha256")
    if digest is None:
        return by_name[0] if by_name else None
    same = [base for base in (*by_name, *of_source) if base.sha256 == digest]
    # Of torchvision and timm the name is the architecture too.
    return next((base for base in same if source == "hf" or base.name == model), None)


def check_tables(policy: Policy, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """PolicyError if a default of an algorithm, an optimizer or a model is not allowed.

    Args:
        policy: that of this machine's owner.
        tables: those of the settings, which have every default.
    """
    refused = []
    for title in (title for title in COMPONENTS if title != "addons"):  # their defaults add nothing
        for option, value in tables.get(title, {}).items():
            is_number = type(value) in (int, float)  # others are checked where a run config has them
            if is_number or (title, option) == ("optimizer", "name"):
                line, wrong = _option(policy, title, option, value, None)
                refused += (
                    [Refusal(line, f"{title}.{plain_option(option)}={shown(value)} {wrong}")] if wrong else []
                )
    if refused:
        raise PolicyError(tuple(refused))
