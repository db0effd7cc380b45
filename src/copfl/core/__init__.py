"""The public API for authors of algorithms: records, data, optimizers and local training in one import.

The base class of algorithms that average is `copfl.parts.averaging.Averaging`.
"""

from __future__ import annotations

from copfl.core import tree
from copfl.core.algorithm import Algorithm, AnyAlgorithm, ClientOutput, Metrics, received
from copfl.core.batches import training_split, validation_split
from copfl.core.optim import Adam, Optimizer, Scaled, Sgd, State, begin, faster, kept
from copfl.core.task import Batch, Data, Epoch, Experts, Objective, Personal, Plan, Task, task_of
from copfl.core.train import Trained, descend, fresh, has_valid, mean_loss, pull, train
from copfl.core.tree import Gathered, Masked
from copfl.errors import UsageError, above, at_least, fraction_of, one_of

__all__ = [
    "Adam",
    "Algorithm",
    "AnyAlgorithm",
    "Batch",
    "ClientOutput",
    "Data",
    "Epoch",
    "Experts",
    "Gathered",
    "Masked",
    "Metrics",
    "Objective",
    "Optimizer",
    "Personal",
    "Plan",
    "Scaled",
    "Sgd",
    "State",
    "Task",
    "Trained",
    "UsageError",
    "above",
    "at_least",
    "begin",
    "descend",
    "faster",
    "fraction_of",
    "fresh",
    "has_valid",
    "kept",
    "mean_loss",
    "one_of",
    "pull",
    "received",
    "task_of",
    "train",
    "training_split",
    "tree",
    "validation_split",
]
