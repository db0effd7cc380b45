"""A few small runs that the tests of this room look at and do not change."""

from __future__ import annotations

from pathlib import Path

import pytest

import copfl


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs of the same four clients, by algorithm."""
    home = tmp_path_factory.mktemp("runs")
    for name in ("copfl", "local", "fedavg"):
        copfl.run(
            name,
            clients=4,
            rounds=5,
            checkpoint_every=2,
            model="mlp",
            model_options={"width": 8},
            algorithm_options={"budget": 0.5} if name == "copfl" else {},  # masks that grow
            out=home / name,
        )
    return {name: home / name for name in ("copfl", "local", "fedavg")}
