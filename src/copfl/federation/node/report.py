"""The report of a node's owner: its model, what it gained, and what left the house. Without the server.

`copfl report` and `copfl site report` call `site_of`; `site` has the record that it makes, `site_page` the page.
"""

import dataclasses
import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from copfl import foreign
from copfl.core import tree
from copfl.core.task import Personal
from copfl.errors import CopflError, DataError, RunError, UsageError, raised_as
from copfl.experiment.bundle.description import Description, read
from copfl.experiment.bundle.places import OF_NODE, of_node
from copfl.experiment.bundle.writing import write_bundle
from copfl.experiment.models.client_models import WEIGHTS, read_weights
from copfl.experiment.rivals import rivals_of_site
from copfl.experiment.run_record import sections_at_site
from copfl.federation.node import audit_log, measured_rounds, remembered_run
from copfl.federation.node.acceptance import invitation_of
from copfl.federation.node.baseline import Tell, TrainedAlone, gain_of, train_alone
from copfl.federation.node.choice import own_losses
from copfl.federation.node.data import NodeData, node_data
from copfl.federation.node.evaluation import scores_of
from copfl.federation.node.known_data import KnownData
from copfl.federation.node.ledger import Spent, spent
from copfl.federation.node.node import Node
from copfl.federation.node.remembered_run import NodeRun
from copfl.federation.node.site import AuditSummary, Measurement, SentKind, SiteGain, SiteReport
from copfl.federation.node.verdict import SiteVerdict, verdict_of
from copfl.federation.policy.file import policy_of
from copfl.federation.protocol.chained_log import AUDIT, Verified, verified
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.settings import TrainingSettings, federation_of, settings_of
from copfl.files import write_bytes
from copfl.rivals import file as rivals_file
from copfl.rivals.records import Rivals
from copfl.stats import Interval

ALONE = "alone"  # the bundle of the model that was trained alone, in the run's folder
GAIN = "gain.json"


def site_of(folder: Path, data: str | None, *, baseline: bool, tell: Tell, rivals: bool = True) -> SiteReport:
    """What the report of a node shows; what was trained alone is kept for the next report.

    Args:
        folder: The node's state-dir, of which the last run is shown, or the folder of a run in it.
        data: Its data, where they are not where they were in training; None: there.
        baseline: Whether to train alone where that has not been done.
        tell: Called after each round of training alone.
        rivals: Whether to train scikit-learn's usual models where that has not been done.
    """
    model = of_node(folder)
    if model is None:
        raise RunError(f"{folder} has no model of a node: no round of a run was evaluated, or bundle=false")
    run = model.parent
    description, rounds, remembered = read(model), measured_rounds.read(run), remembered_run.recall(run)
    gain, why = _kept_gain(run, rounds), ""
    if gain is None and not rounds:
        why = "this node joined after the training, and took part in no round"
    elif gain is None and not baseline:
        why = "the model was not trained alone as well; leave out --no-baseline"
    elif gain is None:
        try:
            gain = _trained_gain(run, description, rounds, remembered, data, tell)
        except CopflError as error:
            why = str(error)
    alone, no_rivals = _kept_rivals(run), ""
    if alone is None and not rivals:
        no_rivals = "scikit-learn's models were not trained here; leave out --no-rivals"
    elif alone is None:
        try:
            alone = _trained_rivals(run, remembered, data)
        except CopflError as error:
            no_rivals = str(error)
    joined = invitation_of(run.parent)
    privacy = spent(run.parent, policy_of(None, run.parent).privacy)
    return SiteReport(
        state=run.parent,
        run=run.name,
        name="" if joined is None else joined.invitation.site,
        model=model,
        description=description,
        metric=remembered.metrics[0],
        rounds=rounds,
        alone=measured_rounds.read(run, measured_rounds.ALONE) if gain is not None else [],
        gain=gain,
        no_gain=why,
        rivals=alone,
        no_rivals=no_rivals,
        log=_audit(run.parent, run.name),
        spent="" if privacy is None else _spent(privacy),
        verdict=_verdict(run, remembered),
        found=sections_at_site(run),
    )


# -- training alone ------------------------------------------------------------------------------------------


def _hash_of_model(run: Path) -> str:
    return hashlib.sha256((run / OF_NODE / WEIGHTS).read_bytes()).hexdigest()


def _key(run: Path, rounds: list[Measurement]) -> dict[str, Any]:
    """What a gain is of: another model, or further rounds, have another."""
    return {"model": _hash_of_model(run), "rounds": [noted.round for noted in rounds]}


def _kept_gain(run: Path, rounds: list[Measurement]) -> SiteGain | None:
    """The gain that an earlier report computed of the same model; None: there is none."""
    if not (run / GAIN).is_file():
        return None
    damaged = f"{run / GAIN} is damaged ({{}}); remove it, and `copfl report` trains alone again"
    with raised_as(RunError, damaged, OSError, *foreign.DAMAGE):
        content = foreign.read_json(foreign.inside(run, run / GAIN))
        if content["of"] != _key(run, rounds):
            return None
        intervals = {name: Interval(*content["gain"][name]) for name in ("interval", "over_constant")}
        return SiteGain(**content["gain"] | intervals)


def _trained_gain(
    run: Path,
    description: Description,
    rounds: list[Measurement],
    remembered: NodeRun,
    data: str | None,
    tell: Tell,
) -> SiteGain:
    """The gain over training alone, which is done now; its model and rounds are kept in the run's folder."""
    settings, samples = _settings_and_data(run, remembered, data)
    alone = train_alone(settings, samples, int(remembered.options["client"]), rounds, tell)
    layout = settings.task.layout
    federated: Personal = read_weights(run / OF_NODE / WEIGHTS, layout).model
    gain = gain_of(samples, tree.each(lambda t: t.to(samples.task.device), federated), alone)
    _write(run, settings, description, samples, alone)
    content = {"of": _key(run, rounds), "gain": gain._asdict()}
    write_bytes(run / GAIN, json.dumps(content, indent=1).encode(), private=True)
    return gain


def _kept_rivals(run: Path) -> Rivals | None:
    """The rivals that an earlier report trained beside the same model; None: there are none."""
    path = run / rivals_file.FILE
    if not path.is_file():
        return None
    damaged = f"{path} is damaged ({{}}); remove it, and `copfl report` trains them again"
    with raised_as(RunError, damaged, OSError, *foreign.DAMAGE):
        content = foreign.read_json(foreign.inside(run, path))
        return rivals_file.from_json(content["rivals"]) if content["of"] == _hash_of_model(run) else None


def _trained_rivals(run: Path, remembered: NodeRun, data: str | None) -> Rivals | None:
    """The rivals, which are trained now and kept in the run's folder; None where such samples have none."""
    settings, samples = _settings_and_data(run, remembered, data)
    model: Personal = read_weights(run / OF_NODE / WEIGHTS, settings.task.layout).model
    network, seed = settings.run.model.name, settings.run.run.seed
    seen = [samples.train, *([] if samples.validation is None else [samples.validation])]
    rivals = rivals_of_site(samples.task, seen, samples.test, model, network, seed, samples.unit)
    if rivals is not None:
        content = {"of": _hash_of_model(run), "rivals": rivals_file.as_json(rivals)}
        write_json(run / rivals_file.FILE, content)
    return rivals


def _settings_and_data(run: Path, remembered: NodeRun, data: str | None) -> tuple[TrainingSettings, NodeData]:
    """What the node trained with; DataError if its samples are others now."""
    options = {**remembered.options, "state-dir": str(run.parent)}
    if data is not None:
        options["data"] = data
    node = Node(NodeConfig.parse(options), policy_of(None, run.parent))
    source = node.config.data
    if not Path(source).expanduser().exists() and ":" not in source:
        raise UsageError(f"the node's data are no longer at {source}; name them with --data")
    settings = settings_of(remembered.run_config)
    torch.set_num_threads(node.config.threads)
    samples = node_data(settings, node)
    if KnownData(node.memory).name_of(samples.samples) != remembered.samples:
        raise DataError("the node's samples are not those that it trained on; name those with --data")
    return settings, samples


def _write(
    run: Path, settings: TrainingSettings, description: Description, data: NodeData, alone: TrainedAlone
) -> None:
    """The bundle of the model that was trained alone, and the metrics of its rounds."""
    (run / measured_rounds.ALONE).unlink(missing_ok=True)
    for round, measured in alone.rounds:
        measured_rounds.enter(run, round, measured, measured_rounds.ALONE)
    origin = dataclasses.replace(
        description.origin,
        title="training alone at this site",
        clients=1,
        round=alone.round,
        select=settings.run.run.select,
    )
    scores = tuple(scores_of(settings.task.metrics, alone.scores, data.test, data.validation))
    facts = dataclasses.replace(description, origin=origin, scores=scores)
    model = tree.each(lambda t: t.cpu(), alone.model)
    write_bundle(run / ALONE, facts, settings.task.layout, model)
    (run / ALONE).chmod(0o700)


def _verdict(run: Path, remembered: NodeRun) -> SiteVerdict | None:
    """What the site's own held-out rows say, where the federation chose among methods by them; None elsewhere."""
    taken = federation_of(remembered.run_config).session.taken
    own = own_losses(run.parent) if taken else None
    if own is None or own.samples != remembered.samples or taken not in own.losses or not own.has_rows:
        return None
    return verdict_of(own, taken)


# -- what left -----------------------------------------------------------------------------------------------


def _spent(privacy: Spent) -> str:
    if privacy.epsilon != math.inf:
        return str(privacy)
    count = f"{privacy.releases:,} releases in {privacy.runs:,} runs"
    return f"{count}, some without noise, so no epsilon bounds what they reveal"


def _audit(state: Path, run: str) -> AuditSummary | None:
    """The audit log of the node, by what left in this run; None where there is no log."""
    if not (state / AUDIT).exists():
        return None
    with raised_as(RunError, f"{state / AUDIT} cannot be used ({{}})", *foreign.DAMAGE):
        return _summary(verified(foreign.inside(state, state / AUDIT)), run)


def _summary(log: Verified, run: str) -> AuditSummary:
    answers = [line for line in log.lines if line.get("event") == audit_log.SENT]
    ours = [line for line in answers if line.get("run") == run]
    messages, sizes = Counter[str](), Counter[str]()
    for line in ours:
        kind = " and ".join(map(str, line.get("left", ())))
        messages[kind] += 1
        sizes[kind] += int(line.get("bytes", 0))
    epsilons = [float(line["epsilon"]) for line in ours if line.get("epsilon") is not None]
    refused = [
        line for line in log.lines if line.get("event") == audit_log.REFUSED and line.get("run") == run
    ]
    return AuditSummary(
        [SentKind(kind, count, sizes[kind]) for kind, count in sorted(messages.items())],
        len(refused),
        sum(epsilons) if epsilons else None,
        len(answers) - len(ours),
        len(log.lines),
        log.problem,
        log.last_hash,
    )
