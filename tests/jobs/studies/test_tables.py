"""The study of tables: its federations, and its page."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from copfl.errors import UsageError
from studies.tables.__main__ import PAGE, RECORDS
from studies.tables.federations import FEDERATIONS, natural, rows_for_testing
from studies.tables.page import INTRODUCTION, page_of

ANYWHERE = [name for name, federation in FEDERATIONS.items() if not federation.needs_folder]


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_federation_that_needs_no_files_has_sites_with_rows_on_both_sides(name: str) -> None:
    data = natural(None, federation=name)
    assert data.kind == FEDERATIONS[name].kind
    assert 3 <= len(data.groups) <= 161
    for split in (data.train, data.test):
        assert split.group is not None
        assert len(np.unique(split.group)) == len(data.groups)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="data-dir"):
        natural(tmp_path, federation="pupils")


def test_each_site_keeps_a_row_to_train_on() -> None:
    sites = np.repeat([0, 1, 2], [1, 2, 10])
    is_test = rows_for_testing(sites, 0)
    assert np.bincount(sites, is_test).tolist() == [0, 1, 3]


def test_the_page_has_means_and_differences_to_the_best(tmp_path: Path) -> None:
    models = {"constant": [0.7, 0.5], "linear": [0.4, 0.6], "forest": [0.5, None], "levels": [0.4, 0.4]}
    lines = []
    for split in range(2):
        values = {name: {"log_loss": losses} for name, losses in models.items()}
        run = {"federation": "heart", "split": split, "method": "levels", "trained": "levels", "seconds": 1.0}
        lines.append({**run, "values": values})
        worth = {"calibration_error": 0.05, "sites": 2, "above": 1, "shown_above": 0}
        default = {"default": {"log_loss": [0.3, 0.5]}}
        lines.append({**run, "method": "default", "values": default, "probabilities": worth})
    run = {"federation": "heart", "split": 2, "method": "levels", "trained": "levels", "seconds": 1.0}
    lines.append(
        {**run, "values": {"levels": {"log_loss": [9.0, 9.0]}}}
    )  # a split that the default does not have
    lines.append({**run, "split": 1, "method": "choose", "values": {"choose": {"log_loss": [0.9, 0.7]}}})
    for split, own in enumerate([[0.3, 0.5], [0.5, 0.5]]):
        arms = {"trees, own": {"log_loss": own}, "trees, shared": {"log_loss": [0.4, 0.5]}}
        lines.append({**run, "split": split, "method": "trees, own", "values": arms, "kept": [2, 0]})
        lines.append(
            {**run, "split": split, "method": "trees, alone", "values": {"trees, alone": {"log_loss": [0.6]}}}
        )
    file = tmp_path / "records.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    page = page_of(file)
    assert page.startswith(INTRODUCTION.read_text("utf-8").strip())
    assert "| heart | 2 | 0.600 | 0.500 | 0.500 | 0.400 | 0.400 |" in page
    assert "| heart | 2 | levels 2 | -33.3 " in page
    assert "| heart | 2 | 5.0 | 2 of 4 | 0 |" in page
    assert "| heart | log loss | levels | 0.800 | 0.400 |" in page
    assert "| heart | 2 | 0.600 | 0.450 | 0.450 | +0.0 [" in page
    assert "| 2 of 4 | 1, 1 |" in page


def test_the_page_is_that_of_the_records() -> None:
    assert PAGE.read_text("utf-8") == page_of(RECORDS)
