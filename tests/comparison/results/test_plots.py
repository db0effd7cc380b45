from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from copfl import charts
from copfl.comparison.results import plots
from copfl.comparison.results.tables import Comparison, ComparisonRow
from copfl.comparison.rows.entries import Entry
from tests.comparison.results.test_tables import comparison, record

pytest.importorskip("matplotlib", reason="matplotlib is an extra")


@pytest.mark.job
def test_curves_and_clients_are_pictures_and_the_same_every_time(tmp_path: Path) -> None:
    paths = plots.write(comparison(), tmp_path)
    assert [path.name for path in paths] == ["curves.png", "curves.svg", "clients.png", "clients.svg"]
    first = [path.read_bytes() for path in paths]
    assert first[0].startswith(b"\x89PNG")
    assert ElementTree.fromstring(first[1]).tag.endswith("svg")
    assert [path.read_bytes() for path in plots.write(comparison(), tmp_path)] == first


def dots(axes: Any) -> list[float]:
    return sorted(float(x) for line in axes.lines if line.get_marker() == "o" for x in line.get_xdata())


def test_the_clients_picture_has_a_dot_for_each_and_their_gains() -> None:
    left, right = charts.draw([plots.clients(comparison())]).axes
    assert dots(left) == pytest.approx([40, 50, 50, 60, 60, 70, 80, 80])
    assert dots(right) == pytest.approx([-10, -10, -10, 0, 0, 0, 0, 0])
    assert [label.get_text() for label in left.get_yticklabels()] == ["copfl", "local"]


def test_the_curve_is_the_mean_over_seeds() -> None:
    (axes,) = charts.draw([[plots.curves(comparison())]]).axes
    assert np.asarray(axes.lines[0].get_ydata()) == pytest.approx([10, 65])
    assert len(axes.collections) == 2  # a band per row


@pytest.mark.job
def test_a_map_of_a_sweep(tmp_path: Path) -> None:
    rows = [ComparisonRow(Entry("copfl", f"cell {i}", {}), [record(0.1 * i)]) for i in range(6)]
    grid = {("copfl", "rate"): [0.05, 0.5], ("copfl", "budget"): [0.1, 0.2, 0.3]}
    found = Comparison("toys", rows, [0], 5, over=grid)
    assert "map.png" in {path.name for path in plots.write(found, tmp_path)}
    axes = charts.draw([[plots.heat_map(found)]]).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.0", "10.0", "20.0", "30.0", "40.0", "50.0"]


def test_without_matplotlib_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)
    assert plots.write(comparison(), tmp_path) == []
    assert "copfl[plots]" in charts.MISSING
