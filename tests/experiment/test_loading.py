"""The circle that `copfl.load` had with the whole room stays cut."""

from __future__ import annotations

import pytest

from tests.test_layers import all_imports


@pytest.mark.job
def test_a_bundle_does_not_reach_the_run_that_made_it() -> None:
    """Also not by an import within a function."""
    reached, waiting = set(), ["experiment.bundle.bundle"]
    while waiting:
        reached.add(module := waiting.pop())
        waiting += all_imports(module) - reached
    assert not reached & {"experiment.run", "experiment.finished", "experiment.loading", "experiment.result"}
