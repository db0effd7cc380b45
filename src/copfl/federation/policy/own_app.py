"""The policy of somebody who executes an app of their own: what the app names is entered.

`copfl federate init` writes it for the server, `copfl federate up` for all nodes of a trial: they have one owner.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.errors import UsageError
from copfl.federation.policy import own_code
from copfl.federation.policy.fields import NAMED
from copfl.federation.policy.record import AllowedBase, AllowedFile, Policy
from copfl.models import pretrained
from copfl.settings.federation import Federation
from copfl.settings.flat import nested
from copfl.settings.named_code import file_of, is_reference


def allowing(policy: Policy, run_config: Mapping[str, Any], federation: Federation) -> Policy:
    """The policy with the code, files, add-ons and benefit that a run config of its own user names.

    Args:
        policy: What is allowed already.
        run_config: Of an app whose files this machine's owner wrote or named.
        federation: The record of its settings, which has the hashes.
    """
    tables, run = nested(run_config), federation.run
    model, task = run.model, run.task
    model_options = tables.get("model", {})
    name = str(model_options.get("name", "cnn"))
    references = [component.name for title in NAMED if (component := getattr(run, title))]
    code = []
    for reference in (name, *references, *task.metrics, task.loss or ""):
        if is_reference(reference) and not pretrained.is_pretrained(reference):
            folder = _folder_of(reference.partition(":")[0])
            if folder is None:
                raise UsageError(
                    f'"{reference}" is of an installed package, and a federation executes no code of one '
                    "that a run config names; put a function of your own around it, into a file of the app"
                )
            code.append(own_code.entered(reference, folder))
    bases, files = [], []
    if pretrained.is_pretrained(name):
        local_folder = pretrained.base_of(model.name, "none").name if name.startswith("hf:") else None
        bases.append(
            AllowedBase(name, model.sha256 or "", Path(local_folder).resolve() if local_folder else None)
        )
        weights = str(model_options.get("weights", "default"))
        if weights not in ("default", "none"):
            files.append(AllowedFile("weights", weights, Path(str(model.weights)).absolute()))
    if tokenizer := model_options.get("tokenizer"):
        files.append(AllowedFile("tokenizer", str(tokenizer), Path(str(model.tokenizer)).absolute()))
    if public := federation.samples.public:
        files.append(AllowedFile("public", public, Path(public).expanduser().absolute()))
    return dataclasses.replace(
        policy,
        addons=tuple(dict.fromkeys((*policy.addons, *tables.get("addons", {})))),
        benefit=run.run.benefit or policy.benefit,
        code=tuple(dict.fromkeys((*policy.code, *code))),
        bases=tuple(dict.fromkeys((*policy.bases, *bases))),
        files=tuple(dict.fromkeys((*policy.files, *files))),
    )


def _folder_of(module: str) -> Path | None:
    """The folder in which a module is found by its name; None for an installed package."""
    file = file_of(module)
    if file is None or own_code.INSTALLED & {*file.resolve().parts}:
        return None
    return file.resolve().parents[module.count(".") + (file.name == "__init__.py")]
