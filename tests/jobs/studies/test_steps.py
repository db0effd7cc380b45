"""The table of the rule on both sides of 20 rounds is that of its records."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "studies" / "defaults"


def test_the_page_has_the_table_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import steps  # type: ignore[import-not-found]

    page = (FOLDER / "README.md").read_text("utf-8")
    assert "\n  ".join(steps.table().splitlines()) in page
