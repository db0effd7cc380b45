"""The hash that says which runs are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from copfl.data.clients.partition import Partition
from copfl.settings.complete import complete
from copfl.settings.identity import SAME_RUN, essential, identity
from copfl.settings.record import ALL
from copfl.settings.toml import Tables


def identity_of(*layers: Tables) -> str:
    return identity(complete({"algorithm": {"name": "copfl"}}, *layers))


@pytest.mark.parametrize(
    "layer",
    [
        {
            "run": {
                "device": "cuda",
                "engine": "vmap",
                "chunk": 3,
                "workers": 2,
                "store": "disk",
                "threads": 2,
            }
        },
        {"run": {"checkpoint_every": 3, "save_models": False, "eval_models": "final"}},
        {"run": {"precision": "tf32"}},
        {"data": {"dir": "elsewhere"}},
        {"algorithm": {"rate": 0.25}},  # the default, written out
        {"server": {"name": "mean"}},
    ],
)
def test_it_stays_under_settings_that_change_rounding_at_most(layer: Tables) -> None:
    assert identity_of(layer) == identity_of()


@pytest.mark.parametrize(
    "layer",
    [
        {"run": {"rounds": 41}},
        {"run": {"seed": 1}},
        {"run": {"precision": "fp64"}},
        {"algorithm": {"rate": 0.1}},
        {"model": {"width": 9}},
        {"robust": {"name": "median"}},
    ],
)
def test_it_changes_with_what_is_learned(layer: Tables) -> None:
    assert identity_of(layer) != identity_of()


def test_a_partition_file_counts_by_its_content(tmp_path: Path) -> None:
    parts = tuple(np.array([n]) for n in range(3))
    for name in ("a.json", "b.json"):
        Partition(parts, parts, "by hand").save(tmp_path / name)
    Partition(parts[::-1], parts, "by hand").save(tmp_path / "c.json")
    a, b, c = (identity_of({"partition": {"name": str(tmp_path / f"{name}.json")}}) for name in "abc")
    assert a == b != c


def test_it_is_twelve_digits_of_tables_and_what_else_counts() -> None:
    run = complete()
    assert len(identity(run)) == 12
    assert identity(run, 0.2, 5) != identity(run, 0.2, 4)
    neutral = {
        title: {key for key, values in keys.items() if values is ALL} for title, keys in SAME_RUN.items()
    }
    assert neutral["run"] > {"device", "save_models"}
    assert {"dir", "code"} <= neutral["data"]
    assert not any(neutral[title] & table.keys() for title, table in essential(run).items())
