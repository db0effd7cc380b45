from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from copfl.settings.presets import content

FOLDER = Path(__file__).parents[3] / "studies" / "defaults"


def test_the_published_form_does_not_follow_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study changed CO-PFL's defaults, and its own runs must stay what they were."""
    monkeypatch.syspath_prepend(FOLDER)
    forms = importlib.import_module("named").FORMS
    published = {key: value for key, value in content("paper")["algorithm"].items() if key != "name"}
    assert forms["paper"] == published
    assert all({"head", "budget", "training"} <= set(options) for options in forms.values())


def test_the_page_has_the_records_of_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module("analyse_named")
    text = script.PAGE.read_text("utf-8")
    assert script.page(text) == text, "run python studies/defaults/analyse_named.py"
