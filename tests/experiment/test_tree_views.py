"""What trees say: importance, dependence and the first tree, of a federation whose law is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import copfl
from copfl.errors import RunError
from copfl.experiment import tree_views
from copfl.report import page, run_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The value is 10 above an age of 50, 5 for one colour, and independent of the rest."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("trees")
    lines = ["site,age,colour,noise,y"]
    for n in range(240):
        age, colour = rng.uniform(20, 80), rng.choice(["red", "green", "blue"])
        y = 10 * (age > 50) + 5 * (colour == "red") + rng.normal(scale=0.1)
        lines.append(f"s{n % 3},{age:.2f},{colour},{rng.normal():.3f},{y:.3f}")
    (path / "table.csv").write_text("\n".join(lines) + "\n")
    copfl.run(
        "trees", str(path / "table.csv"), data_options={"target": "y", "client": "site"},
        model_options={"trees": 30, "depth": 2}, model="trees", rivals=False, out=path / "run",
    )  # fmt: skip
    return path / "run"


def test_the_columns_that_count_come_first(folder: Path) -> None:
    views = tree_views.read(folder)
    assert views is not None
    assert [one.column for one in views.importance] == ["age", "colour", "noise"]
    gains = [one.gain for one in views.importance]
    assert sum(gains) == pytest.approx(1)
    assert gains[0] > 0.6
    grown = [one.permuted for one in views.importance]
    assert grown[0] > grown[1] > 10 * abs(grown[2])


def test_the_answer_depends_on_a_column_as_the_law_does(folder: Path) -> None:
    views = tree_views.read(folder)
    assert views is not None
    age, colour = views.dependence[:2]
    answers = dict(zip(map(float, age.values), age.answers[0][1], strict=True))
    old, young = (np.mean([a for v, a in answers.items() if (v > 50) == is_old]) for is_old in (True, False))
    assert 6 < old - young < 10  # 30 trees of a rate of 0.05 take three quarters of it
    by_colour = dict(zip(colour.values, colour.answers[0][1], strict=True))
    assert 2 < by_colour["red"] - by_colour["blue"] < 5


def test_the_first_tree_asks_for_the_age_first(folder: Path) -> None:
    views = tree_views.read(folder)
    assert views is not None
    root = views.first[0]
    assert root.text.startswith("age ≤ ")
    assert float(root.text.split()[-1]) == pytest.approx(50, abs=2)
    assert root.parent == -1
    assert len(views.first) == 7


def test_the_report_shows_them(folder: Path) -> None:
    document = page.document_of(run_data.read_all([folder]))
    (section,) = [one for one in document.sections if one.name == "trees"]
    names = [chart.name for chart in section.charts]
    assert names[:2] == ["tree-gain", "tree-shuffled"]
    assert names[-1] == "first-tree"


def test_a_damaged_file_is_reported(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / tree_views.FILE).read_text())
    content["first"][0]["parent"] = 3
    (tmp_path / tree_views.FILE).write_text(json.dumps(content))
    with pytest.raises(RunError, match="comes before its parent"):
        tree_views.read(tmp_path)


def test_other_algorithms_have_none(tmp_path: Path) -> None:
    copfl.run("fedavg", "wine", clients=2, rounds=1, rivals=False, out=tmp_path / "run")
    assert tree_views.read(tmp_path / "run") is None
