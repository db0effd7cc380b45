"""What a run is made of, as values: `prepare` makes it of the settings."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, traits
from copfl.core.task import Task
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.groups import names_of_clients
from copfl.engine.features import TrainedPart
from copfl.engine.mapping import Mapping as Engine
from copfl.experiment.analysis.hints import hints, regrouped
from copfl.settings.identity import settings_digest
from copfl.settings.record import without_digest
from copfl.settings.schema import Run, RunSettings
from copfl.settings.toml import Tables


@dataclass(frozen=True, eq=False, repr=False)
class Experiment:
    """Everything a run is made of, as values."""

    algorithm: AnyAlgorithm
    task: Task
    federation: FederatedData
    engine: Engine
    run: Run  # the same as names and numbers, for run.toml
    training: TrainedPart  # what the rounds train: the task and the samples, or a tail and features

    def __repr__(self) -> str:
        return f"Experiment of {self.title}, {self.partition_text}"

    @property
    def settings(self) -> RunSettings:
        """[run]."""
        return self.run.run

    @property
    def clients(self) -> int:
        return self.federation.clients

    @property
    def server_step(self) -> str:
        """The name of the server's step; empty for the plain mean."""
        server = self.run.server
        is_plain = server.name in ("", "mean") and server.options.get("lr", 1) == 1
        return "" if is_plain else server.name

    @property
    def cuda(self) -> list[torch.device]:
        """The devices beside the CPU whose random state a round may use."""
        return [self.task.device] if self.task.device.type == "cuda" else []

    @property
    def title(self) -> str:
        """Such as "copfl on digits"."""
        name = without_digest(self.run.algorithm.name) or type(self.algorithm).__name__
        return f"{name} on {self.federation.dataset.name}"

    @property
    def partition_text(self) -> str:
        """Such as "10 clients, partition classes (per_client=2)"; of natural clients, by_group."""
        return self.run.partition_text

    @property
    def model_text(self) -> str:
        """Such as "mlp with 5,059 parameters; optimizer mamo, learning rate 0.001"."""
        optimizer = self.run.optimizer
        total = sum(parameter.numel() for parameter in self.task.module.parameters())
        trained = "" if total <= self.task.d else f", {self.task.d:,} of them trained"
        text = f"{self.run.model.title} with {max(total, self.task.d):,} parameters{trained}"
        known = optimizer.name and optimizer.lr is not None
        return f"{text}; optimizer {optimizer.name}, learning rate {optimizer.lr:g}" if known else text

    @cached_property
    def hints(self) -> list[str]:
        """What will probably keep the model from learning; empty where nothing was found."""
        return [*hints(self.task, self.federation.dataset), *regrouped(self.federation)]

    def about(self) -> dict[str, Any]:
        """The content of environment.json beside the versions."""
        layout, data, partition = self.task.layout, self.federation.dataset, self.federation.partition
        attackers = traits(self.algorithm).attackers
        counts = partition.label_counts(data)  # without columns where targets are not classes
        return {
            "device": torch.cuda.get_device_name(self.task.device) if self.cuda else "cpu",
            "threads": torch.get_num_threads(),
            "parameters": self.task.d,
            # If not, a GPU reaches half the speed at most.
            "batched_model": self.training.task.batched is not None,
            **self.training.about(),
            "algorithm": repr(self.algorithm),
            **({"attackers": list(attackers)} if attackers else {}),
            "metrics": [metric.as_json() for metric in self.task.metrics],
            "data": data.note,
            "partition": list(partition.notes),
            # For a reader without data and model: the trained tensors, and each client's samples by class.
            "layers": dict(list(zip(layout.names, layout.sizes, strict=True))[: layout.trained]),
            "classes": list(data.classes),
            "client_names": names_of_clients(data, partition),
            "label_counts": [" ".join(map(str, row)) for row in counts.tolist() if row],
        }

    @property
    def contents(self) -> Tables:
        """The content of the data and of the partition, whatever their names."""
        data = self.federation.dataset
        facts = {"classes": len(data.classes), "mean": data.mean, "std": data.std, "augment": data.augment}
        return {"data": facts, "partition": {"sha256": self.federation.partition.fingerprint}}

    def fingerprints(self) -> dict[str, str]:
        """Hashes that a checkpoint must share with the run that continues from it."""
        samples = hashlib.sha256()
        for split in self.federation.splits:
            for tensor in tree.leaves((split.x, split.y)):
                samples.update(tensor.cpu().numpy().tobytes())
        return {"settings": settings_digest(self.run, self.contents), "samples": samples.hexdigest()[:16]}
