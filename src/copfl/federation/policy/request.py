"""The one check of a run config against a policy, and what this machine executes of a config that passes.

A node (`node.acceptance`), the SuperLink and the ServerApp call it before anything else reads the config. It opens,
imports and makes nothing. Three steps:

    refusals       what the policy does not allow: each setting for itself (`fields`), then what settings mean together
    admitted       the config that is executed: the owner's paths in place of names; PolicyError if anything is refused
    check_tables   once the settings are made: the defaults that the config left out
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from copfl.errors import CopflError
from copfl.federation.policy.checks import MOST_KEYS, MOST_LIST, MOST_TEXT, entries_of
from copfl.federation.policy.fields import NAMED, refusals_of
from copfl.federation.policy.names import COMPONENTS, USUAL_LOSS
from copfl.federation.policy.record import SMALLEST_SUM, AllowedBase, AllowedCode, Policy, PrivacyRules
from copfl.federation.policy.refusal import OPTION, PolicyError, Refusal, shown
from copfl.measures.metrics import USUAL_METRIC
from copfl.settings.federation import RUN_KEYS, TITLES, Network, SampleDescription
from copfl.settings.flat import flattened, nested
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
USUAL_DECAY = 5e-4  # of the optimizers, the largest
MOST_FORGOTTEN = 0.1  # of the weights before a step, by the decay


def refusals(policy: Policy, run_config: Mapping[str, Any]) -> tuple[Refusal, ...]:
    """What the run config asks for and the policy does not allow. It opens, imports and makes nothing.

    Args:
        policy: The policy of this machine's owner.
        run_config: Flat or as tables, as another machine sent it.
    """
    if malformed := tuple(_malformed(run_config)):
        return malformed
    try:
        tables = nested(run_config)
    except CopflError as error:
        return (Refusal(KEYS, "".join(c if c.isprintable() else "?" for c in str(error)[:300])),)
    if unknown_titles := [title for title in tables if title not in TITLES]:
        return (Refusal(KEYS, f"{unknown_titles[0]} is no table of a run config"),)
    # The defaults of keys that are left out; the defaults of components are checked by `check_tables`.
    completed = {title: {**DEFAULTS.get(title, {}), **tables.get(title, {})} for title in TITLES}
    completed["run"] = {
        key: value
        for key, value in completed["run"].items()
        if key in RUN_KEYS or key in tables.get("run", {})
    }
    if completed["privacy"]:
        completed["privacy"].setdefault("clip", DEFAULT_CLIP)
    kind, task = str(completed["samples"]["kind"]), completed["task"]
    metrics = entries_of(task.get("metrics", ()))
    if not any(str(text).replace(",", "").strip() for text in metrics):  # as in `settings.task.task_record`
        task["metrics"] = USUAL_METRIC.get(kind, "")
    task.setdefault("loss", USUAL_LOSS.get(kind, ""))
    return (*_value_refusals(policy, completed), *_component_refusals(policy, completed))


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


# -- what settings mean together -----------------------------------------------------------------------------


def _value_refusals(policy: Policy, tables: Tables) -> Iterator[Refusal]:
    """What is refused of the tables that have no component."""
    for title in (title for title in TITLES if title not in COMPONENTS):
        yield from refusals_of(policy, title, tables[title])
    if tables["session"].get("rollback") is True and not policy.rollback:
        yield Refusal("rollback", "session.rollback=true is not allowed")
    is_secure = tables["secure"].get("aggregation", False) is True
    if tables["session"].get("agree") is True:
        yield from _statistics_refusals(policy, is_secure)
    if policy.secure_aggregation.required and not is_secure:
        yield Refusal("secure_aggregation.required", "secure.aggregation must be true")
    clients, fraction = tables["run"]["clients"], tables["run"]["participation"]
    is_counted = _are_numbers(clients, fraction) and 0 <= fraction <= 1
    # As `core.batches.participants`, which needs torch: of a part of a client, a whole one takes part.
    selected = max(1, math.ceil(clients * fraction - 1e-9)) if is_counted else 0
    if is_secure and selected < (cohort := policy.secure_aggregation.cohort):
        yield Refusal("secure_aggregation.cohort", f"a round must select at least {cohort} clients")
    if is_secure and policy.secure_aggregation.even_batches and tables["run"].get("even_batches") is not True:
        yield Refusal("secure_aggregation.even_batches", "run.even_batches must be true")
    if is_secure and not policy.secure_aggregation.parts:
        yield from _parts_refusals(tables)
    yield from _few_rows_refusals(policy.least_rows, tables)
    if tables["run"].get("benefit") is True:
        yield from _benefit_refusals(policy, is_secure, selected)
    # A table without noise gets the wrapper's default; the node does not count on it.
    yield from _noise_refusals(policy.privacy, tables["privacy"].get("noise", 0.0), is_secure, selected)


def _noise_refusals(privacy: PrivacyRules, noise: Any, is_secure: bool, selected: int) -> Iterator[Refusal]:
    """What is refused of the noise on the uploads of a round of so many clients."""
    # The noise of a sum is divided among the clients of a round, however many there really are.
    shared = 1.0 if is_secure else max(selected, 1) ** 0.5
    if privacy.noise and not (_are_numbers(noise) and noise >= privacy.noise * shared):
        least = f"privacy.noise must be at least {privacy.noise * shared:g}"
        each = (
            ""
            if is_secure
            else f": {privacy.noise:g} for each of {selected:g} uploads, which the server receives"
        )
        yield Refusal("privacy.noise", least + each)
    if privacy.lifetime_epsilon and not (_are_numbers(noise) and noise > 0):
        yield Refusal(
            "privacy.lifetime_epsilon", "privacy must be above 0: uploads without noise have no epsilon"
        )


def _parts_refusals(tables: Tables) -> Iterator[Refusal]:
    """What is refused of settings by which a round's sum is of some of a node's rows alone.

    Other nodes may send all of theirs, the same in two rounds with the same model: then both sums differ by rows of
    this node, down to one.
    """
    for path, value, whole in (
        ("run.steps", tables["run"].get("steps", 0), 0),
        ("algorithm.rows", tables["algorithm"].get("rows", 1), 1),
    ):
        if value != whole:
            why = f"{path}={shown(value)} is of some of a node's rows in each sum; leave it out"
            yield Refusal("secure_aggregation.parts", why)


def _few_rows_refusals(least: int, tables: Tables) -> Iterator[Refusal]:
    """What is refused of settings by which something of fewer rows leaves a node, however many rows it has."""
    if least <= 1:
        return
    run, algorithm = tables["run"], tables["algorithm"]
    steps, batch = run.get("steps", 0), run["batch"]
    if _are_numbers(steps, batch) and 0 < steps * batch < least:
        why = f"run.steps={steps} of run.batch={batch} is an update of at most {steps * batch} rows"
        yield Refusal("least_rows", f"{why}, and {least} are the least; raise one of them")
    elif _are_numbers(batch) and batch < least:
        why = f"run.batch={batch} has steps of so many rows, of which an update may keep the last alone"
        yield Refusal("least_rows", f"{why}, and {least} are the least; raise it")
    rate, decay = (
        tables["optimizer"].get(name, usual) for name, usual in (("lr", 0), ("weight_decay", USUAL_DECAY))
    )
    if _are_numbers(rate, decay) and rate * decay > MOST_FORGOTTEN:
        why = f"optimizer.lr={shown(rate)} times optimizer.weight_decay={shown(decay)} is the part of the weights that"
        yield Refusal(
            "least_rows",
            f"{why} a step forgets, so that an update is of its last rows; {MOST_FORGOTTEN:g} is the most",
        )
    if (part := algorithm.get("rows", 1)) != 1:
        why = f"algorithm.rows={shown(part)} may be of fewer than {least} rows, which depends on the node's data"
        yield Refusal("least_rows", f"{why}; leave it out")
    group = algorithm.get("group", 1)
    if algorithm["name"] == "trees" and not (_are_numbers(group) and group >= least):
        why = f"algorithm.group={shown(group)} lets bins of that many rows leave, and {least} are the least"
        yield Refusal("least_rows", f"{why}; set algorithm.group={least}")


def _benefit_refusals(policy: Policy, is_secure: bool, selected: int) -> Iterator[Refusal]:
    """What is refused of the comparison of two halves of the clients."""
    if is_secure or not policy.benefit:
        why = "is not possible with secure.aggregation=true" if is_secure else "is not allowed"
        yield Refusal("benefit", f"run.benefit=true {why}; leave it out")
    least = max(policy.secure_aggregation.cohort, SMALLEST_SUM)
    if selected // 2 < least:
        yield Refusal(
            "secure_aggregation.cohort",
            f"run.benefit=true shows all members the means of halves of {selected // 2} clients, and {least} "
            f"are the least: a round must select at least {2 * least} clients",
        )


def _statistics_refusals(policy: Policy, is_secure: bool) -> Iterator[Refusal]:
    """What is refused of sums for encoders."""
    remedy, allowed = "give the means and categories in the contract", policy.statistics.allowed
    if allowed == "none" or (allowed == "sums" and not is_secure):
        how = "only in secure sums" if allowed == "sums" else "never"
        yield Refusal("statistics.allowed", f"statistics leave this node {how}; {remedy}")
    for line in ("noise", "lifetime_epsilon"):
        if getattr(policy.privacy, line):
            yield Refusal(f"privacy.{line}", f"sums for encoders have no noise; {remedy}")


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)


def require_cohort(policy: Policy, members: int) -> None:
    """PolicyError if a sum is of fewer clients than the owner wants.

    Args:
        policy: The policy of this machine's owner.
        members: How many clients would be in the sum.
    """
    least = policy.secure_aggregation.cohort
    if members < least:
        why = f"a sum of {members} clients, and {least} are the least"
        raise PolicyError((Refusal("secure_aggregation.cohort", why),), "request")


# -- the components, and the base of the model ---------------------------------------------------------------


def _component_refusals(policy: Policy, tables: Tables) -> Iterator[Refusal]:
    """What is refused of the components and their options."""
    model = {"name": "cnn", **tables["model"]}
    base = _base_of(policy, model["name"], model)
    yield from refusals_of(policy, "model", {"name": model.pop("name")}, base)
    if base is not None and not base.sha256 and model.get("weights") != "none":
        name = shown(tables["model"]["name"])
        yield Refusal("bases", f"model.name={name} is allowed with model.weights=none alone")
    for title in COMPONENTS:
        yield from refusals_of(policy, title, model if title == "model" else tables[title], base)


def _base_of(policy: Policy, model: Any, options: Mapping[str, Any]) -> AllowedBase | None:
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


# -- what this machine executes ------------------------------------------------------------------------------


class Admitted(NamedTuple):
    """A run config that the policy allows, with this machine's paths, and the code that it needs."""

    run_config: dict[str, Any]
    code: tuple[AllowedCode, ...]


def admitted(policy: Policy, run_config: Mapping[str, Any]) -> Admitted:
    """The run config with the owner's paths in place of names; PolicyError if anything of it is refused.

    Args:
        policy: The policy of this machine's owner.
        run_config: Flat or as tables, as another machine sent it, without the proposal.
    """
    if refused := refusals(policy, run_config):
        raise PolicyError(refused)
    tables = nested(run_config)
    model, task = tables.setdefault("model", {}), tables.get("task", {})
    name = model.get("name", "cnn")
    if base := _base_of(policy, name, model):
        if base.name.startswith("hf:"):
            model["name"] = f"hf:{base.path}"
        if model.get("weights") != "none":
            model["sha256"] = base.sha256
    paths = {(file.key, file.name): str(file.path) for file in policy.files}
    if public := tables.get("samples", {}).get("public"):
        tables["samples"]["public"] = paths["public", public]
    for key in ("tokenizer", "weights"):
        if (key, model.get(key)) in paths:
            model[key] = paths[key, model[key]]
    in_task = {word.strip() for text in entries_of(task.get("metrics", ())) for word in text.split(",")}
    in_task |= {task.get("loss")}
    needed = []
    for code in policy.code:
        titles = [title for title in NAMED if tables.get(title, {}).get("name") == code.reference]
        titles += ["model"] if code.reference == name else []
        titles += ["task"] if code.reference in in_task else []
        needed += [code] if titles else []
        for title in titles:
            tables[title]["code"] = str(code.folder)
    return Admitted(flattened(tables), tuple(needed))


def check_tables(policy: Policy, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """PolicyError if a default of an algorithm, an optimizer or a model is not allowed.

    Args:
        policy: The policy of this machine's owner.
        tables: The settings, with every default.
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
