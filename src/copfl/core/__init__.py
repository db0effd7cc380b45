"""The public API for authors of algorithms: records, data, optimizers and local training in one import.

The base class of algorithms that average is `copfl.parts.averaging.Averaging`.
"""

from __future__ import annotations

from copfl.core import tree
from copfl.core.algorithm import Algorithm, AnyAlgorithm, ClientOutput, Metrics
from copfl.core.batches import training_split, validation_split
from copfl.core.optim import Adam, Optimizer, Sgd, State, begin, kept
from copfl.core.task import Batch, Data, Epoch, Experts, Objective, Personal, Plan, Task, task_of
from copfl.core.train import Trained, descend, fresh, pull, train
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
    "Sgd",
    "State",
    "Task",
    "Trained",
    "UsageError",
    "above",
    "at_least",
    "begin",
    "descend",
    "fraction_of",
    "fresh",
    "kept",
    "one_of",
    "pull",
    "task_of",
    "train",
    "training_split",
    "tree",
    "validation_split",
]
