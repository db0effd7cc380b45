"""A federation's settings as values, from Flower's run config: the same on the server and on every node.

`settings_of` makes them for a training, `statistics.terms_of` for the sums before it. Both sides compare the layout:
a hash of the form of what is sent.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from copfl import wire
from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import AnyAlgorithm, blank_samples, example_output
from copfl.core.task import Task
from copfl.data.contract.contract import Contract
from copfl.data.reading import npz_arrays
from copfl.data.samples import Shape
from copfl.errors import DataError, UsageError, raised_as
from copfl.experiment.analysis.halves import check_benefit, check_evidence
from copfl.experiment.models.network import build_model
from copfl.experiment.tasks import learned_task
from copfl.federation.policy.model_size import require_size
from copfl.federation.policy.record import RequestBounds
from copfl.federation.protocol import choice, secure_total
from copfl.federation.protocol.halves import check_halves
from copfl.federation.protocol.noise import SecretNoise
from copfl.federation.protocol.secure_sum import Rules
from copfl.settings.checking import unknown_key
from copfl.settings.components import build
from copfl.settings.facts import check_model
from copfl.settings.federation import OWN, RUN_TABLES, TITLES, Federation, check_run_keys, own_record
from copfl.settings.flat import nested
from copfl.settings.schema import Run
from copfl.settings.toml import Tables
from copfl.settings.validation import validate
from copfl.wrappers.even_batches import with_even_batches
from copfl.wrappers.local_steps import with_local_steps
from copfl.wrappers.privacy import check_sums

TEXT: Shape = {"input_ids": (2,), "attention_mask": (2,)}  # of a sentence; its length is the node's own


@dataclass(frozen=True, eq=False)
class Terms:
    """What the machines of a federation must agree on to add something up."""

    federation: Federation
    layout: str  # hash of the form of what is sent, which both sides compare

    @property
    def run(self) -> Run:
        """The algorithm, its optimizer, the model, the robust rule and the task, with every default."""
        return self.federation.run

    @property
    def rules(self) -> Rules:
        """The rules of secure aggregation."""
        return rules_of(self.federation)

    @property
    def noised(self) -> SecretNoise | None:
        """The algorithm, if it adds noise to what is sent."""
        return None


@dataclass(frozen=True, eq=False)
class TrainingSettings(Terms):
    """A federation's settings as values; the layout is of the model, its base and the public samples."""

    algorithm: AnyAlgorithm
    task: Task
    shape: Shape

    @property
    def noised(self) -> SecretNoise | None:
        return self.algorithm if isinstance(self.algorithm, SecretNoise) else None


def rules_of(federation: Federation) -> Rules:
    """The rules of secure aggregation."""
    secure = federation.secure
    return Rules(federation.selected, secure.threshold, secure.range, secure.bits, secure.neighbours)


def federation_of(run_config: Mapping[str, Any]) -> Federation:
    """The record that a run config describes, with every default; SettingError names an invalid key."""
    tables: Tables = {title: {} for title in TITLES} | nested(run_config)
    for title, table in tables.items():
        if title not in TITLES:
            raise unknown_key(title, table, TITLES)
    own_records = {title: own_record(title, tables[title]) for title in OWN}
    check_run_keys(tables["run"])
    algorithm = {"name": "copfl", **tables["algorithm"]}
    if own_records["secure"].aggregation:
        algorithm = {**secure_total.summable(ALGORITHMS.get(str(algorithm["name"]))), **algorithm}
    suggested = {"algorithm": algorithm, "model": {"name": "cnn", **tables["model"]}}
    run = validate({title: tables[title] for title in RUN_TABLES} | suggested)
    federation = Federation(run=run, **own_records)
    if federation.choice.names:
        federation = choice.applied(federation)
    if federation.secure.aggregation:
        rules_of(federation)  # its numbers are checked
    return federation


def contract_of(text: str) -> Contract:
    """The data contract in a run config; UsageError if it is none, which says nothing about a node's data."""
    with raised_as(UsageError, "samples.contract cannot be used: {}", DataError):
        return Contract.read(text)


def settings_of(run_config: Mapping[str, Any], bounds: RequestBounds | None = None) -> TrainingSettings:
    """The settings that a run config describes; UsageError names the key that is invalid.

    Args:
        run_config: Settings of a federation, flat or as tables.
        bounds: What the machine's owner allows a model of copfl's; None: any model.
    """
    federation = federation_of(run_config)
    if (text := federation.samples.contract) and not (contract := contract_of(text)).is_frozen:
        names = ", ".join(column.name for column in contract.open[:5])
        raise UsageError(
            f"the data contract is not frozen: {names} have no mean or categories yet; agree on them with "
            "`copfl federate agree FOLDER`, or give them in the contract"
        )
    return prepared(federation, bounds)


def prepared(federation: Federation, bounds: RequestBounds | None = None) -> TrainingSettings:
    """The values that a federation describes; UsageError for what cannot run.

    Args:
        federation: The record of the settings.
        bounds: What the machine's owner allows a model of copfl's; None: any model.
    """
    run, samples = federation.run, federation.samples
    algorithm = build("algorithm", run.algorithm, optimizer=run.optimizer)
    check_model(run, algorithm)
    algorithm = with_local_steps(with_even_batches(algorithm, run.run.even_batches), run.run.steps)
    for kind in ("server", "addons", "robust"):
        if component := getattr(run, kind):
            algorithm = build(kind, component, algorithm=algorithm)
    if federation.session.choose:
        algorithm = choice.InFolds.of_federation(federation)
    shape = () if samples.text else samples.shape
    public = _public(samples.public, shape) if samples.public else None
    if bounds is not None:
        arrays = TEXT if samples.text else shape
        count = 2  # of `blank_samples`
        require_size(bounds, run.model, run.adapter, arrays, samples.outputs, samples.kind, count)
    model = build_model(run.model, run.adapter, shape, samples.outputs, run.run.seed, samples.kind)
    task = learned_task(run, model, samples.kind, samples.outputs, samples.channels, samples.scale)
    task = task.without_constants(blank_samples(task, TEXT if samples.text else shape))
    task = dataclasses.replace(task, public=public)
    layout = wire.layout_hash(task.layout) + ("" if public is None else "-" + wire.fingerprint(public))
    layout += "-" + base[:16] if (base := run.model.sha256) else ""
    settings = TrainingSettings(federation, layout, algorithm, task, TEXT if samples.text else shape)
    if run.privacy:
        settings = _private(settings)
    check_evidence(run)
    if run.run.benefit:
        check_halves(federation)
        blank = blank_samples(task, settings.shape)
        example = example_output(settings.algorithm, task, blank, federation.augment, federation.clients)
        check_benefit(run, settings.algorithm, task, example, federation.clients)
    if federation.secure.aggregation:
        impossible = f'secure.aggregation is not possible with "{run.algorithm.name}": {{}}'
        with raised_as(UsageError, impossible, UsageError):
            clients, augment = federation.clients, federation.augment
            secure_total.check(settings.algorithm, task, settings.shape, clients, augment)
    return settings


def _private(settings: TrainingSettings) -> TrainingSettings:
    """The settings with clipped and noised uploads; UsageError if no epsilon would hold."""
    federation, task, algorithm = settings.federation, settings.task, settings.algorithm
    blank = blank_samples(task, settings.shape)
    check_sums(algorithm, task, example_output(algorithm, task, blank, federation.augment, 2).upload)
    private = SecretNoise(
        algorithm,
        clients=federation.clients,
        taking_part=federation.selected,
        **federation.run.privacy.arguments,
    )
    with torch.no_grad():  # it refuses algorithms that send more than weights
        example_output(private, task, blank, federation.augment, federation.clients)
    return dataclasses.replace(settings, algorithm=private)


def _public(path: str, shape: tuple[int, ...]) -> Tensor:
    arrays = npz_arrays(Path(path).expanduser())
    if "x" not in arrays or tuple(arrays["x"].shape[1:]) != shape:
        raise DataError(f"samples.public={path} must hold an array x of samples {list(shape)}")
    return torch.from_numpy(arrays["x"])
