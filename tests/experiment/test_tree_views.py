"""What trees say: importance, dependence and the first tree, of a federation whose law is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl import charts
from copfl.charts import Tree
from copfl.errors import RunError
from copfl.experiment import reading, tree_views
from copfl.experiment.tree_views import TREES
from copfl.report import page
from tests.commands import called


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


@pytest.mark.job
def test_the_columns_that_count_come_first(folder: Path) -> None:
    views = TREES.read(folder)
    assert views is not None
    assert [one.column for one in views.importance] == ["age", "colour", "noise"]
    gains = [one.gain for one in views.importance]
    assert sum(gains) == pytest.approx(1)
    assert gains[0] > 0.6
    grown = [one.permuted for one in views.importance]
    assert grown[0] > grown[1] > 10 * abs(grown[2])


def test_the_answer_depends_on_a_column_as_the_law_does(folder: Path) -> None:
    views = TREES.read(folder)
    assert views is not None
    age, colour = views.dependence[:2]
    answers = dict(zip(map(float, age.values), age.answers[0][1], strict=True))
    old, young = (np.mean([a for v, a in answers.items() if (v > 50) == is_old]) for is_old in (True, False))
    assert 6 < old - young < 10  # 30 trees of a rate of 0.05 take three quarters of it
    by_colour = dict(zip(colour.values, colour.answers[0][1], strict=True))
    assert 2 < by_colour["red"] - by_colour["blue"] < 5


def test_the_first_tree_asks_for_the_age_first(folder: Path) -> None:
    views = TREES.read(folder)
    assert views is not None
    root = views.first[0]
    assert root.text.startswith("age ≤ ")
    assert float(root.text.split()[-1]) == pytest.approx(50, abs=2)
    assert root.parent == -1
    assert len(views.first) == 7


def test_the_report_shows_them(folder: Path) -> None:
    document = page.document_of(reading.read_all([folder]))
    (section,) = [one for one in document.sections if one.name == "trees"]
    names = [chart.name for chart in section.charts]
    assert names[:2] == ["tree-gain", "tree-shuffled"]
    assert names[-1] == "first-tree"


@pytest.mark.parametrize(
    ("box", "key", "value", "said"),
    [
        (0, "parent", 3, "comes before its parent"),
        (2, "parent", -1, "has none"),  # a second root
        (2, "level", 10**9, "not on the level"),
        (1, "level", -(10**9), "not on the level"),
        (1, "place", 1e308, "not on the level"),
        (1, "place", float("nan"), "not on the level"),
        (5, "parent", 0, "not on the level"),
    ],
)
def test_a_damaged_file_is_reported(
    box: int, key: str, value: float, said: str, folder: Path, tmp_path: Path
) -> None:
    content = json.loads((folder / TREES.file).read_text())
    content["first"][box][key] = value
    (tmp_path / TREES.file).write_text(json.dumps(content))
    with pytest.raises(RunError, match=said):
        TREES.read(tmp_path)


def test_a_tree_that_no_picture_has_room_for_is_refused(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / TREES.file).read_text())
    root = {"text": "", "parent": -1, "level": 0, "place": 0.5}
    wide = [root, *({**root, "parent": 0, "level": 1} for _ in range(3))]
    deep = [{**root, "parent": level - 1, "level": level} for level in range(tree_views.LEVELS + 2)]
    for boxes, said in ((wide, "more than two answers"), (deep, "not on the level")):
        (tmp_path / TREES.file).write_text(json.dumps({**content, "first": boxes}))
        with pytest.raises(RunError, match=said):
            TREES.read(tmp_path)


def test_a_deep_tree_is_shown_to_a_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of all leaves of a tree with eight levels of questions was wider than matplotlib draws."""
    monkeypatch.setattr(tree_views, "LEVELS", 3)
    x = np.random.default_rng(0).uniform(size=(400, 1)).astype(np.float32)
    options: dict[str, Any] = {"model": "trees", "model_options": {"trees": 1, "depth": 5}, "rivals": False}
    samples = {"x": x, "y": np.round(32 * x[:, 0]), "kind": "regression"}
    copfl.run("trees", samples, clients=2, **options, out=tmp_path / "run")
    views = TREES.read(tmp_path / "run")
    assert views is not None
    assert max(box.level for box in views.first) == tree_views.LEVELS
    cut = {box.level for box in views.first if box.text.endswith(" …")}
    assert cut == {tree_views.LEVELS}


@pytest.mark.job
def test_a_picture_is_no_wider_than_matplotlib_draws() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    leaves = 400
    levels = [0, *[1] * leaves]
    chart = Tree("a", "a", "", [""] * len(levels), [-1, *[0] * leaves], levels, [0.5] * len(levels))
    assert max(charts.draw([[chart]]).get_size_inches()) == charts.MOST_INCHES


@pytest.mark.job
def test_names_are_no_formulas(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two signs of a dollar in the name of a column were a formula of matplotlib, and an error where it is none."""
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    run = shutil.copytree(folder, tmp_path / "run")
    name = r"$\none{$ x_{"
    content = json.loads((run / TREES.file).read_text().replace("colour", json.dumps(name)[1:-1]))
    content["first"][0]["text"] = name
    (run / TREES.file).write_text(json.dumps(content))
    answer = called(capsys, "report", run, "--figures", tmp_path / "pictures")
    assert answer.code == 0, answer.err
    assert "none" in (tmp_path / "pictures" / "first-tree.svg").read_text()


def test_other_algorithms_have_none(tmp_path: Path) -> None:
    copfl.run("fedavg", "wine", clients=2, rounds=1, rivals=False, out=tmp_path / "run")
    assert TREES.read(tmp_path / "run") is None
