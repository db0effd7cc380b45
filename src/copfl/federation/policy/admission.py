"""A run config that the policy allows, as this machine executes it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from copfl.federation.policy.checks import parts_of
from copfl.federation.policy.components import base_of
from copfl.federation.policy.fields import NAMED
from copfl.federation.policy.record import AllowedCode, Policy
from copfl.federation.policy.refusal import PolicyError
from copfl.federation.policy.request import refusals
from copfl.settings.flat import flattened, nested


class Admitted(NamedTuple):
    """A run config that the policy allows, with this machine's paths, and the code that it needs."""

    run_config: dict[str, Any]
    code: tuple[AllowedCode, ...]


def admitted(policy: Policy, run_config: Mapping[str, Any]) -> Admitted:
    """The run config with the owner's paths in place of names; PolicyError if anything of it is refused."""
    if refused := refusals(policy, run_config):
        raise PolicyError(refused)
    tables = nested(run_config)
    model, task = tables.setdefault("model", {}), tables.get("task", {})
    name = model.get("name", "cnn")
    if base := base_of(policy, name, model):
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
    in_task = {word.strip() for text in parts_of(task.get("metrics", ())) for word in text.split(",")}
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
