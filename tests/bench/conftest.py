"""A suite of two small federations, and rows of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from copfl.bench import bench as running
from copfl.bench import protocol
from copfl.bench.protocol import SUITES, Suite
from copfl.bench.rows import BenchRow
from copfl.bench.settings import SETTINGS, TABLE, BenchSetting, skew

MINE = "tests.bench.mine:FedMine"


@contextlib.contextmanager
def small_suite() -> Iterator[Suite]:
    """In place of the quick suite, with the same name: two federations of two rounds, one rate, two seeds."""
    small = {
        "hospitals": BenchSetting("tumours", ("by_group", {}), 0, 2, TABLE),
        "pairs": BenchSetting("digits", skew(2, 4, 4), 3, 2, ("mlp", {"width": 4})),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, setting in small.items():
            patch.setitem(SETTINGS, name, setting)
        patch.setitem(SUITES, "quick", Suite("quick", tuple(small)))
        patch.setattr(protocol, "RATES", (1e-2,))
        patch.setattr(protocol, "SEEDS", (1, 2))
        yield SUITES["quick"]


@pytest.fixture
def suite() -> Iterator[Suite]:
    with small_suite() as suite:
        yield suite


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the rows below."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="session")
def rows(folder: Path) -> dict[str, BenchRow]:
    """Rows of the small suite, by algorithm."""
    with small_suite() as suite:
        made = running.bench(["local", "fedavg", MINE], suite, folder, log=lambda line: None)
    return {row.algorithm: row for row in made}
