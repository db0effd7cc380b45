"""The tutorial of a federation says what its report says: simulated, with the data and the method of the page."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

import copfl
from tests.code_blocks import ROOT

PAGE = (ROOT / "docs" / "tutorials" / "federation.md").read_text("utf-8")


@pytest.mark.filterwarnings("ignore::copfl.errors.CopflWarning")
def test_the_method_of_the_page_is_as_good_as_a_linear_model_of_each_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page tells its reader to expect that. Its test rows are other ones than those of this table of all sites."""
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], {})  # type: ignore[index]
    with open("all.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["site", "age", "sodium", "ward", "outcome"])
        writer.writeheader()
        for site in ("north", "south", "west"):
            rows = csv.DictReader(Path(f"{site}.csv").read_text().splitlines())
            writer.writerows({**row, "site": site} for row in rows)
    line = re.search(r"--contract contract.toml --algorithm (\w+) --clients 3 --rounds (\d+)\n", PAGE)
    assert line is not None
    how: dict[str, Any] = {"target": "outcome", "client": "site", "data_options": {"missing": "fill"}}
    result = copfl.run(line[1], "all.csv", rounds=int(line[2]), **how)
    assert result.rivals is not None
    gains = result.rivals.gain(result.final("accuracy"))
    # Equal models, or an interval over the test rows with 0 in it.
    assert all(not bounds.without_zero for bounds in result.rivals.interval), gains
    assert "not shown to be better" in " ".join(PAGE.split())
