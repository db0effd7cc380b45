"""Policies as files, and what an app needs of one."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.core.batches import participants
from copfl.errors import UsageError
from copfl.files import write_bytes
from copfl.flower import own_code
from copfl.flower.ledger import spent
from copfl.flower.policy import DEFAULTS, NAMES, Base, File, Policy, refusals
from copfl.models import pretrained
from copfl.settings.federation import Federation
from copfl.settings.flat import nested
from copfl.settings.schema import RunSettings
from copfl.settings.toml import Tables, written
from copfl.settings.user_code import is_reference

STRICT = Path(__file__).parent / "template" / "policy.txt"


def allowing(policy: Policy, run_config: Mapping[str, Any], federation: Federation) -> Policy:
    """The policy with the code, the files and the add-ons that a run config of this machine's own user names.

    `federation` is the record of its settings, which has the folders and the hashes.
    """
    tables, run = nested(run_config), federation.run
    model, task = run.model, run.task
    given = tables.get("model", {})
    name = str(given.get("name", "cnn"))
    references = [(component.name, component.code) for title in NAMES if (component := getattr(run, title))]
    references += [(reference, task.code) for reference in (*task.metrics, task.loss or "")]
    code = []
    for reference, folder in [(name, model.code), *references]:
        if is_reference(reference) and not pretrained.is_pretrained(reference):
            if folder is None:
                raise UsageError(
                    f'"{reference}" is of an installed package, and a federation executes no code of one that a '
                    "run config names; put a function of your own around it, into a file of the app"
                )
            code.append(own_code.entered(reference, Path(folder)))
    bases, files = [], []
    if pretrained.is_pretrained(name):
        place = pretrained.base_of(model.name, "none").name if name.startswith("hf:") else None
        bases.append(Base(name, model.sha256 or "", Path(place).resolve() if place else None))
        weights = str(given.get("weights", "default"))
        if weights not in ("default", "none"):
            files.append(File("weights", weights, Path(str(model.weights)).absolute()))
    if tokenizer := given.get("tokenizer"):
        files.append(File("tokenizer", str(tokenizer), Path(str(model.tokenizer)).absolute()))
    if public := federation.samples.public:
        files.append(File("public", public, Path(public).expanduser().absolute()))
    return dataclasses.replace(
        policy,
        addons=tuple(dict.fromkeys((*policy.addons, *tables.get("addons", {})))),
        code=tuple(dict.fromkeys((*policy.code, *code))),
        bases=tuple(dict.fromkeys((*policy.bases, *bases))),
        files=tuple(dict.fromkeys((*policy.files, *files))),
    )


def write_policy(path: Path, policy: Policy) -> Path:
    """Writes what differs from the usual policy, readable by its owner alone."""
    usual, table = dataclasses.asdict(Policy()), dataclasses.asdict(policy)
    table |= {
        title: [_texts(entry) for entry in getattr(policy, title)] for title in ("code", "bases", "files")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    changed = {line: value for line, value in table.items() if value and value != usual[line]}
    write_bytes(path, written(changed).encode(), private=True)
    return path


def _texts(entry: Any) -> dict[str, str]:
    return {name: str(value) for name, value in entry._asdict().items() if value not in (None, "")}


def strict() -> str:
    """The text of a policy that allows little, with a comment on every line."""
    usual = dataclasses.asdict(Policy())
    names = {line: json.dumps(value) for line, value in usual.items() if isinstance(value, tuple)}
    return STRICT.read_text().format(**names)


def write_strict(path: Path) -> None:
    """Writes the strict policy as a new file of its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, strict().encode(), private=True)


def explained(policy: Policy, run_config: Mapping[str, Any], state_dir: Path | None = None) -> list[str]:
    """What a node with this policy does with the requests of an app: a line each, refusals first.

    Args:
        policy: the node's.
        run_config: the app's.
        state_dir: the node's folder, which has what its data have spent.
    """
    refused = refusals(policy, run_config)
    lines = [f"refused     {refusal.why}  [{refusal.line}]" for refusal in refused]
    if refused:
        return lines
    tables = nested(run_config)
    is_secure = tables.get("secure", {}).get("aggregation", False)
    metrics = {"all": "are sent", "none": "stay here  [reports]"}
    metrics["sums"] = "are sent in secure sums" if is_secure else metrics["none"]
    may_return = "is answered" if policy.rollback else "is refused  [rollback]"
    bounds, proposals = policy.bounds, policy.proposals
    algorithm, model = (tables.get(title, {}).get("name") for title in ("algorithm", "model"))
    rounds = tables.get("run", {}).get("rounds", RunSettings.rounds)
    signers = ", ".join(proposals.coordinators) or "--coordinator"
    consent = "its owner approves each  [proposals.by_hand]" if proposals.by_hand else f"signed by {signers}"
    return [
        f"allowed     {algorithm or 'copfl'} with {model or 'cnn'}, {rounds} rounds",
        f"proposals   {'also unsigned  [proposals.unsigned]' if proposals.unsigned else consent}",
        f"metrics     {metrics[policy.reports]}",
        f"rollback    {may_return}",
        f"a request   may take {bounds.seconds:g} s and {bounds.memory:g} GiB  [bounds]",
        *_privacy_lines(policy, tables, state_dir),
    ]


def _privacy_lines(policy: Policy, tables: Tables, state_dir: Path | None) -> list[str]:
    """What the node's data have spent, and what they will have after all rounds of the app."""
    folder, noise = state_dir or Path(os.devnull), float(tables.get("privacy", {}).get("noise", 0.0))
    run = {**DEFAULTS["run"], **tables.get("run", {})}
    selected = participants(run["clients"], run["participation"])
    each = noise if tables.get("secure", {}).get("aggregation") else noise / selected**0.5
    before = spent(folder, policy.privacy)
    after = spent(folder, policy.privacy, *[each] * int(run["rounds"]))
    lines = [f"privacy     {before}"] if before else []
    if noise and after and after.epsilon is not None:
        is_over = policy.privacy.lifetime_epsilon and after.epsilon > policy.privacy.lifetime_epsilon
        refused = f", and {after.limit:g} is the limit: later rounds are refused" if is_over else ""
        lines.append(f"privacy     epsilon {after.epsilon:.3g} after all rounds{refused}  [privacy]")
    return lines
