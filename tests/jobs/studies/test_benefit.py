from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.audit import replay
from copfl.tables import as_markdown
from tests.slow import slow

FOLDER = Path(__file__).parents[3] / "studies" / "benefit"


@pytest.fixture
def subsets(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("subsets")
    for name, value in {"CLIENTS": 4, "ROUNDS": 2, "EVAL_EVERY": 1}.items():
        monkeypatch.setattr(module.study, name, value)
    return module


def test_the_federation_of_a_set_is_the_run_without_the_others(subsets: Any) -> None:
    job = subsets.study.Job("fedper, 4 classes", "reversed updates", 10, 0)
    made, _ = subsets.study.experiment(job, "cpu")
    losses = subsets.losses_of_sets(made)
    for missing, number in (([], 0b1111), ([2], 0b1011), ([0, 3], 0b0110)):
        run = replay.without(made, missing)
        for name, table in losses.items():
            np.testing.assert_allclose(table[number], run.metric(name)[-1], rtol=1e-5)


def test_values_to_the_others_of_an_additive_game(subsets: Any) -> None:
    worth = np.random.default_rng(0).normal(size=(4, 4))  # [client, judge]
    sets = [[client for client in range(4) if number >> client & 1] for number in range(16)]
    losses = np.stack([-worth[members].sum(0) for members in sets])
    expected = [np.delete(worth[client], client).mean() for client in range(4)]
    for values in subsets.to_the_others(losses).values():
        np.testing.assert_allclose(values, expected, rtol=1e-3)


def tables_of(module: Any, whole: bool) -> str:
    """The tables of the page from the stored records; not `whole`: those that need no estimate again."""
    tables = (
        module.study_tables(*module.runs_of(module.lines_of(FOLDER / "records.jsonl.gz"))) if whole else []
    )
    tables += [module.subset_table(module.lines_of(FOLDER / "subsets.jsonl.gz"))]
    tables += [module.coverage_table(module.lines_of(FOLDER / "coverage.jsonl.gz"))]
    tables += module.weight_tables(module.lines_of(FOLDER / "weights.jsonl.gz"))
    return "\n\n".join(as_markdown(table).strip() for table in tables)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=slow)])
def test_the_tables_of_the_page_are_those_of_the_records(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    page = (FOLDER / "README.md").read_text()
    assert tables_of(importlib.import_module("analyse"), whole) in page
