"""Personalised federated learning: do your sites gain from training together, and what model does each get?

import copfl
result = copfl.run("copfl", "digits")
print(result.accuracy[-1].mean())
"""

from sys import modules
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from copfl.algorithms import ALGORITHMS
    from copfl.choosing.run import run
    from copfl.comparison.choosing.choose import choose
    from copfl.comparison.compare import compare, sweep
    from copfl.comparison.results.tables import Comparison
    from copfl.experiment.bundle.bundle import Bundle
    from copfl.experiment.loading import load
    from copfl.experiment.result import Result
    from copfl.experiment.run import resume
    from copfl.settings.complete import complete
    from copfl.settings.schema import Run
    from copfl.testing import check_algorithm

# The public API. Its modules load on first use, so that `copfl --help` does not import torch.
_MODULES = {
    "ALGORITHMS": "copfl.algorithms",
    "Bundle": "copfl.experiment.bundle.bundle",
    "Comparison": "copfl.comparison.results.tables",
    "Result": "copfl.experiment.result",
    "Run": "copfl.settings.schema",
    "check_algorithm": "copfl.testing",
    "choose": "copfl.comparison.choosing.choose",
    "compare": "copfl.comparison.compare",
    "complete": "copfl.settings.complete",
    "load": "copfl.experiment.loading",
    "resume": "copfl.experiment.run",
    "run": "copfl.choosing.run",
    "sweep": "copfl.comparison.compare",
}

__all__ = [
    "ALGORITHMS",
    "Bundle",
    "Comparison",
    "Result",
    "Run",
    "__version__",
    "check_algorithm",
    "choose",
    "compare",
    "complete",
    "load",
    "resume",
    "run",
    "sweep",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)
    # With name and obj Python suggests the nearest public name.
    raise AttributeError(f"module 'copfl' has no attribute {name!r}", name=name, obj=modules[__name__])


def __dir__() -> list[str]:
    return sorted(__all__)
