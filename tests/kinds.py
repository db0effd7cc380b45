"""The algorithms that stand for all of them in the quick suite; with COPFL_SLOW=1 each stands for itself.

What one algorithm could break alone, the contract, a run on machines and a message, CI tests with every algorithm,
those that are no kind in its jobs: tests/test_testing.py, tests/federation/server/test_rounds.py, tests/test_wire.py.
Matrices of all algorithms times something else test that something, which sees no more of an algorithm than its kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.slow import slow

# A mean, masks, models mixed by weights and by their outputs, heads in phases, a model beside the shared one, control
# variates, clusters, stored features, public samples, adapters, and the two that train no network.
KINDS = (
    *("fedavg", "copfl", "apfl", "fedpoe", "fedrep", "ditto", "scaffold", "ifca", "knn_per", "ktpfl"),
    *("flex_lora", "levels", "trees"),
)


def quick(
    names: Iterable[str], kinds: Collection[str] = KINDS, others: pytest.MarkDecorator = slow
) -> list[Any]:
    """The parameters of a test of these algorithms, of which the quick suite runs the kinds.

    Args:
        names: Of all algorithms of the test.
        kinds: Those that always run.
        others: The mark of those that do not: `pytest.mark.job` if CI shall run them.
    """
    return [pytest.param(name, marks=[] if name in kinds else others) for name in names]
