"""The one check of a run config against a policy."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from copfl.errors import CopflError
from copfl.federation.policy.checks import MOST_KEYS, MOST_LIST, MOST_TEXT, parts_of
from copfl.federation.policy.components import component_refusals
from copfl.federation.policy.names import USUAL_LOSS, USUAL_METRIC
from copfl.federation.policy.record import Policy
from copfl.federation.policy.refusal import OPTION, PolicyError, Refusal, shown
from copfl.federation.policy.values import value_refusals
from copfl.settings.federation import RUN_KEYS, TITLES, Network, SampleDescription
from copfl.settings.flat import nested
from copfl.settings.policy_lines import KEYS
from copfl.settings.record import declared
from copfl.settings.schema import RunSettings
from copfl.settings.toml import Tables

# What a run config means that leaves keys out, of the tables whose values the policy bounds.
DEFAULTS: dict[str, dict[str, Any]] = {
    title: {f.name: f.default for f in declared(record)}
    for title, record in (("run", RunSettings), ("network", Network), ("samples", SampleDescription))
} | {"algorithm": {"name": "copfl"}}
DEFAULT_CLIP = 1.0  # of noised uploads


def refusals(policy: Policy, run_config: Mapping[str, Any]) -> tuple[Refusal, ...]:
    """What the run config asks for and the policy does not allow. It opens, imports and makes nothing."""
    if malformed := tuple(_malformed(run_config)):
        return malformed
    try:
        tables = nested(run_config)
    except CopflError as error:
        return (Refusal(KEYS, "".join(c if c.isprintable() else "?" for c in str(error)[:300])),)
    if unknown_titles := [title for title in tables if title not in TITLES]:
        return (Refusal(KEYS, f"{unknown_titles[0]} is no table of a run config"),)
    completed = _completed(tables)
    return (*value_refusals(policy, completed), *component_refusals(policy, completed))


def _completed(tables: Tables) -> Tables:
    """The tables with the defaults of keys that are left out. Those of components are in `check_tables`."""
    completed = {title: {**DEFAULTS.get(title, {}), **tables.get(title, {})} for title in TITLES}
    completed["run"] = {
        key: value
        for key, value in completed["run"].items()
        if key in RUN_KEYS or key in tables.get("run", {})
    }
    if completed["privacy"]:
        completed["privacy"].setdefault("clip", DEFAULT_CLIP)
    kind, task = str(completed["samples"]["kind"]), completed["task"]
    metrics = parts_of(task.get("metrics", ()))
    if not any(str(text).replace(",", "").strip() for text in metrics):  # as in `settings.task.task_record`
        task["metrics"] = USUAL_METRIC.get(kind, "")
    task.setdefault("loss", USUAL_LOSS.get(kind, ""))
    return completed


def _malformed(run_config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Keys and values that no run config of Flower has, before anything reads them."""
    if not isinstance(run_config, Mapping) or len(run_config) > MOST_KEYS:
        yield Refusal(KEYS, f"a run config is a table of at most {MOST_KEYS} keys")
        return
    for key, value in run_config.items():
        if not isinstance(key, str) or not re.fullmatch(r"[a-z][a-z0-9_.-]{0,79}", key):
            yield Refusal(KEYS, f"{shown(key)} is no key of a run config")
        elif isinstance(value, Mapping):
            if key not in TITLES or len(value) > MOST_KEYS:
                yield Refusal(KEYS, f"{key} is no table of a run config")
            for name, option in value.items():
                if not isinstance(name, str) or not OPTION.fullmatch(name):
                    yield Refusal(KEYS, f"{shown(name)} is no option of {key}")
                elif not _is_plain(option):
                    yield Refusal(KEYS, f"{key}.{name} is too large, or no number, word or list of them")
        elif not _is_plain(value):
            yield Refusal(KEYS, f"{key} is too large, or no number, word or list of them")


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or a list of them, of a size that can be read."""
    if isinstance(value, list | tuple):
        return len(value) <= MOST_LIST and all(
            not isinstance(v, list | tuple) and _is_plain(v) for v in value
        )
    if isinstance(value, str):
        return len(value) <= MOST_TEXT
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < 2**63)


def require_cohort(policy: Policy, members: int) -> None:
    """PolicyError if a sum is of fewer clients than the owner wants."""
    least = policy.secure_aggregation.cohort
    if members < least:
        why = f"a sum of {members} clients, and {least} are the least"
        raise PolicyError((Refusal("secure_aggregation.cohort", why),), "request")
