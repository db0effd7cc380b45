"""What is refused of the components that a run config names, and of their options."""

from collections.abc import Iterator, Mapping
from typing import Any

from copfl.federation.policy.fields import refusals_of
from copfl.federation.policy.names import COMPONENTS
from copfl.federation.policy.record import AllowedBase, Policy
from copfl.federation.policy.refusal import PolicyError, Refusal, shown
from copfl.settings.toml import Tables


def component_refusals(policy: Policy, tables: Tables) -> Iterator[Refusal]:
    """What is refused of the components and their options."""
    model = {"name": "cnn", **tables["model"]}
    base = base_of(policy, model["name"], model)
    yield from refusals_of(policy, "model", {"name": model.pop("name")}, base)
    if base is not None and not base.sha256 and model.get("weights") != "none":
        name = shown(tables["model"]["name"])
        yield Refusal("bases", f"model.name={name} is allowed with model.weights=none alone")
    for title in COMPONENTS:
        yield from refusals_of(policy, title, model if title == "model" else tables[title], base)


def base_of(policy: Policy, model: Any, options: Mapping[str, Any]) -> AllowedBase | None:
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
    refused: list[Refusal] = []
    for title in (title for title in COMPONENTS if title != "addons"):  # their defaults add nothing
        # Others are checked where a run config has them.
        table = {
            key: value
            for key, value in tables.get(title, {}).items()
            if type(value) in (int, float) or (title, key) == ("optimizer", "name")
        }
        refused += refusals_of(policy, title, table)
    if refused:
        raise PolicyError(tuple(refused))
