"""Personalised federated learning that knows who contributes what.

import copfl
result = copfl.run("copfl", "digits")
print(result.accuracy[-1].mean())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from copfl.algorithms import ALGORITHMS
    from copfl.contract import check_algorithm
    from copfl.experiment import Result, run

# The names a user wants first. They load on first use, so that `copfl --help` need not wait for torch.
_HOMES = {
    "ALGORITHMS": "copfl.algorithms",
    "Result": "copfl.experiment",
    "check_algorithm": "copfl.contract",
    "run": "copfl.experiment",
}

__all__ = ["ALGORITHMS", "Result", "__version__", "check_algorithm", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'copfl' has no attribute {name!r}")
