"""The rivals of a run: the same rows, chosen without test rows, and the same after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.charts import Dots
from copfl.experiment import reading
from copfl.experiment.analysis import against_rivals as of_rivals
from copfl.experiment.analysis.against_rivals import RIVALS
from copfl.experiment.folder import RunFolder
from copfl.experiment.preparation import prepare
from copfl.experiment.rivals import rivals_of
from copfl.measures.metrics import METRICS
from copfl.report import page
from copfl.rivals import file as rivals_file
from copfl.rivals.records import BOOSTED, CONSTANT, FOREST, LINEAR, Rivals, RivalValues
from copfl.settings.complete import complete
from copfl.stats import Interval
from copfl.telling import heard
from tests.commands import called
from tests.models import tiny

QUICK: dict[str, Any] = {"model": "mlp", "model_options": {"width": 4}, "rounds": 2, "batch": 16}


def sites(path: Path, flipped_tests: bool = False) -> Path:
    """A .npz file of three sites: a line separates the classes, at the last one all rows are of one class."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for suffix, count in (("", 120), ("_test", 60)):
        x, group = rng.normal(size=(count, 3)), np.arange(count) % 3
        y = np.where(group == 2, 1, x.sum(1) > 0).astype(np.int64)
        arrays[f"x{suffix}"], arrays[f"group{suffix}"] = x.astype(np.float32), group
        arrays[f"y{suffix}"] = 1 - y if flipped_tests and suffix else y
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> copfl.Result:
    folder = tmp_path_factory.mktemp("rivals")
    data = sites(folder / "sites.npz")
    return copfl.run("fedavg", data, **QUICK, local_baseline=True, out=folder / "run")


def test_every_site_has_rivals_on_its_own_rows(result: copfl.Result) -> None:
    rivals = result.rivals
    assert rivals is not None
    assert list(rivals.values) == [CONSTANT, LINEAR, FOREST, BOOSTED]
    assert rivals.chosen == LINEAR
    assert rivals.by_site == (LINEAR, LINEAR, CONSTANT)  # of one class, the constant answer wins
    assert (rivals.best > 0.85).all()
    assert rivals.best[2] == 1.0
    federation = result.experiment.federation
    expected = [float((federation.test.targets(n) == 1).double().mean()) for n in range(3)]
    majority = [float((federation.train.targets(n) == 1).double().mean()) > 0.5 for n in range(3)]
    assert rivals.constant == pytest.approx(
        [e if m else 1 - e for e, m in zip(expected, majority, strict=True)]
    )
    assert result.analysis is not None
    assert rivals.constant == pytest.approx(result.analysis.constant)
    assert rivals.personal["accuracy"] == pytest.approx(result.final("accuracy"))
    for gain, (low, high) in zip(rivals.gain(rivals.personal["accuracy"]), rivals.interval, strict=True):
        assert low <= gain <= high


def test_the_choice_and_the_answers_do_not_depend_on_test_targets(
    result: copfl.Result, tmp_path: Path
) -> None:
    other = copfl.run("fedavg", sites(tmp_path / "flipped.npz", flipped_tests=True), **QUICK).rivals
    assert other is not None
    assert result.rivals is not None
    assert (other.chosen, other.by_site) == (result.rivals.chosen, result.rivals.by_site)
    for name, values in result.rivals.values.items():
        assert values.validated.tolist() == other.values[name].validated.tolist()
        assert values.tested["accuracy"][:2] == pytest.approx(1 - other.values[name].tested["accuracy"][:2])


def test_the_file_gives_back_the_record(result: copfl.Result) -> None:
    assert result.folder is not None
    assert result.rivals is not None
    read = RIVALS.read(result.folder)
    assert read is not None
    assert rivals_file.as_json(read) == rivals_file.as_json(result.rivals)
    assert read.interval == result.rivals.interval
    saved = result.save(result.folder.parent / "saved")
    assert (saved / RIVALS.file).read_bytes() == (result.folder / RIVALS.file).read_bytes()


def test_a_stopped_run_has_the_same_rivals(
    result: copfl.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RunFolder.append

    def stopped(folder: RunFolder, record: dict[str, Any], seconds: float) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt
        append(folder, record, seconds)

    monkeypatch.setattr(RunFolder, "append", stopped)
    data, out = sites(tmp_path / "sites.npz"), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        copfl.run("fedavg", data, **QUICK, local_baseline=True, checkpoint_every=1, out=out)
    monkeypatch.undo()
    assert not (out / RIVALS.file).exists()
    copfl.resume(out)
    assert result.folder is not None
    assert (out / RIVALS.file).read_bytes() == (result.folder / RIVALS.file).read_bytes()


def test_the_report_has_them(result: copfl.Result) -> None:
    assert result.folder is not None
    runs = reading.read_all([result.folder])
    section = next(s for s in page.sections(runs) if s.name == "rivals")
    (chart,) = section.charts
    assert isinstance(chart, Dots)
    assert [line.name for line in chart.series][1:] == [
        "the constant answer", "a linear model", "a random forest", "boosted trees"
    ]  # fmt: skip
    means, of_sites = section.tables
    assert [row[0] for row in means.rows][-1] == "the personal models"
    assert [row[-1] for row in of_sites.rows] == [LINEAR, LINEAR, CONSTANT]
    assert any("a linear model that each site trains alone" in text for text in page.of_runs(runs))


def test_the_command_prints_them_and_can_leave_them_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = sites(tmp_path / "sites.npz")
    words = [
        "run",
        "-a",
        "fedavg",
        "-d",
        data,
        "-m",
        "mlp",
        "-s",
        "model.width=4",
        "-r",
        2,
        "--no-local-baseline",
    ]
    answer = called(capsys, *words, "--verbose", "--out", tmp_path / "with")
    assert answer.code == 0, answer.err
    head = answer.out.partition("\nDetails\n")[2].splitlines()[3].split()
    assert head[head.index("constant") :] == ["constant", "linear", "global", "personal", "verdict", "weight"]
    text = " ".join(answer.out.split())
    assert "What each site has alone" in text
    assert "linear model that each site trains alone" in text
    assert "og loss" in text
    without = called(capsys, *words, "--no-rivals", "--out", tmp_path / "without")
    assert without.code == 0
    assert "constant" not in without.out.splitlines()[2]
    assert not (tmp_path / "without" / RIVALS.file).exists()
    assert (tmp_path / "without/rounds.jsonl").read_bytes() == (tmp_path / "with/rounds.jsonl").read_bytes()
    as_json = called(capsys, *words, "--json", "--out", tmp_path / "json")
    found = json.loads(as_json.out)["rivals"]
    assert found["chosen"] == LINEAR
    assert len(found["verdicts"]) == 3


def test_how_long_they_take_is_said_before_the_rounds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4000, 20)).astype(np.float32), np.arange(4000) % 2
    np.savez(tmp_path / "large.npz", x=x, y=y, group=np.arange(4000) % 10)
    told: list[str] = []
    layer = {"data": {"name": str(tmp_path / "large.npz")}, "run": {"engine": "sequential"}}
    with heard(told.append):
        prepare(complete(layer))
    assert any(line.startswith("after the rounds, rivals at 10 sites alone, about ") for line in told)
    told.clear()
    with heard(told.append):
        prepare(complete(layer, {"run": {"rivals": False}}))
    assert not any("rivals" in line for line in told)


@pytest.mark.usefixtures("rivals_of_images")
def test_images_from_scratch_have_models_of_their_values() -> None:
    result = copfl.run("fedavg", "digits", **QUICK | {"rounds": 1}, clients=2)
    assert result.rivals is not None
    assert list(result.rivals.values) == ["constant", "linear", "forest"]
    assert result.rivals.inputs == "the same numbers, whatever their places"


def test_values_have_the_rivals_of_values(tmp_path: Path) -> None:
    result = copfl.run("fedavg", "diabetes", **QUICK, clients=3)
    assert result.rivals is not None
    assert [metric.name for metric in result.rivals.metrics] == ["rmse"]
    means = {name: result.rivals.means(name)["rmse"] for name in result.rivals.values}
    assert means[LINEAR] < means[CONSTANT]


def test_texts_from_scratch_have_a_bag_of_words(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "news.jsonl"
    topics = {"sport": "goal team match", "money": "bank price share"}
    rows = [
        {
            "site": f"s{n % 2}",
            "topic": topic,
            "line": " ".join(rng.permutation([*words.split(), "the", "a"])[:4]),
        }
        for n in range(60)
        for topic, words in [list(topics.items())[n // 2 % 2]]
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = {"text": "line", "client": "site", "target": "topic"}
    result = copfl.run("fedavg", path, data_options=options, rounds=1, model_options={"words": 64})
    assert result.rivals is not None
    assert list(result.rivals.values) == [CONSTANT, LINEAR]
    assert result.rivals.inputs == "TF-IDF of the same words"
    assert (result.rivals.values[LINEAR].tested["accuracy"] > 0.9).all()


@pytest.mark.job
def test_a_pretrained_model_has_a_linear_model_of_its_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COPFL_CACHE", str(tmp_path / "cache"))
    how: dict[str, Any] = {"clients": 2, "rounds": 1, "batch": 4, "partition": "iid", "workers": 1}
    found = []
    for cache in ("on", "off"):  # of the front's outputs: the features are the same
        result = copfl.run(
            "fedavg",
            tiny.sentences(),
            model=f"hf:{tiny.base(tmp_path)}",
            model_options={"train": "head"},
            cache_features=cache,
            **how,
        )
        assert result.rivals is not None
        assert list(result.rivals.values) == [CONSTANT, LINEAR]
        assert result.rivals.inputs == "the features of the same pretrained model"
        found.append(result.rivals.values[LINEAR].tested["log_loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def test_without_models_there_is_no_interval(result: copfl.Result) -> None:
    rivals = rivals_of(result.experiment, lambda client: None)
    assert rivals is not None
    assert np.isnan(rivals.personal["accuracy"]).all()
    assert not np.isfinite(rivals.interval).any()


# What is said, by hand


def by_hand(best: list[float], constant: list[float], intervals: list[Interval]) -> Rivals:
    def of(values: list[float]) -> RivalValues:
        return RivalValues(np.array(values), {"accuracy": np.array(values)})

    values = {CONSTANT: of(constant), FOREST: of(best)}
    chosen = (FOREST,) * len(best)
    return Rivals((METRICS["accuracy"],), values, FOREST, chosen, {}, tuple(intervals))


def test_the_verdict_of_a_site_by_hand() -> None:
    bounds = [Interval(0.1, 0.3), Interval(-0.3, -0.1), Interval(-0.1, 0.1), Interval(-0.2, 0.1)]
    rivals = by_hand([0.6, 0.9, 0.7, 0.6], [0.5, 0.5, 0.5, 0.6], bounds)
    personal = np.array([0.8, 0.7, 0.7, 0.55])
    assert of_rivals.verdicts(rivals, personal) == ["better", "worse", "alike", "constant better"]
    unknown = by_hand([0.6], [0.5], [Interval(-np.inf, np.inf)])
    assert of_rivals.verdicts(unknown, np.array([0.7])) == [""]
    assert of_rivals.verdicts(unknown, np.array([np.nan])) == [""]


def test_the_conclusion_by_hand() -> None:
    nowhere = [Interval(-np.inf, np.inf)] * 3
    rivals, names = by_hand([0.8, 0.8, 0.8], [0.7, 0.7, 0.7], nowhere), ["a", "b", "c"]
    worse = of_rivals.conclusion(rivals, np.array([0.71, 0.7, 0.69]), names)
    assert worse.startswith("Stay alone, take a random forest: the personal models are 10.0 points [")
    assert worse.endswith("1 of 3 sites is worse than the constant answer: c.")
    better = of_rivals.conclusion(rivals, np.array([0.91, 0.9, 0.89]), names)
    assert better.startswith("The personal models are 10.0 points [")
    assert "better than a random forest that each site trains alone." in better
    alike = of_rivals.conclusion(rivals, np.array([0.9, 0.8, 0.7]), names)
    assert alike.startswith("No gain over what sites have alone is shown: the personal models are not dis")
    assert of_rivals.conclusion(rivals, np.full(3, np.nan), names) == ""
    one = of_rivals.conclusion(by_hand([0.8], [0.7], nowhere[:1]), np.array([0.9]), ["a"])
    assert (
        one == "The personal models are 10.0 points better than a random forest that each site trains alone."
    )


def test_each_site_has_a_sentence_by_hand() -> None:
    """Better, worse, alike, without an interval, and below the constant answer; a site without a model has none."""
    bounds = [
        Interval(0.017, 0.061),
        Interval(-0.3, -0.1),
        Interval(-0.1, 0.1),
        Interval(-np.inf, np.inf),
        Interval(0, 0),
    ]
    best = [0.6, 0.9, 0.7, 0.6, 0.5]
    rivals = by_hand([*best, 0.5], [0.5, 0.5, 0.75, 0.5, 0.5, 0.5], [*bounds, Interval(0.1, 0.2)])
    personal, names = (
        np.array([0.639, 0.7, 0.7, 0.7, 0.5, np.nan]),
        ["north", "south", "x", "one", "y", "bad"],
    )
    lead, lines = of_rivals.of_sites(rivals, personal, names, [61, 20, 30, 1, 9, 9])
    assert lead == (
        "Site by site, its model against a random forest that it trains alone, with the 95 % interval over its own "
        "test rows:"
    )
    assert lines == [
        "North: better with the others: +3.9 points [+1.7, +6.1] on its 61 test rows",
        "South: worse with the others: -20.0 points [-30.0, -10.0] on its 20 test rows; it should keep a random forest "
        "of its own",
        "X: cannot be told apart: +0.0 points [-10.0, +10.0] on its 30 test rows; the constant answer is 5.0 points "
        "better than its model",
        "One: not judged, as there is no interval: +10.0 points on its 1 test row",
        "Y: cannot be told apart: equally good on each of its 9 test rows",
    ]
    assert of_rivals.of_sites(rivals, np.full(6, np.nan), names, [1] * 6) == ("", [])


def test_many_sites_are_counted_and_those_that_lose_are_named() -> None:
    better, worse, alike, unknown = (0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1), (-np.inf, np.inf)
    bounds = [Interval(*one) for one in (*[better] * 7, *[worse] * 2, *[alike] * 31)]
    rivals, names = by_hand([0.6] * 40, [0.5] * 40, bounds), [f"s{n}" for n in range(40)]
    lead, lines = of_rivals.of_sites(rivals, np.full(40, 0.6), names, [20] * 40)
    assert not lines
    assert lead == (
        "Site by site, its model against a random forest that it trains alone: 7 of 40 better, 2 worse (s7, s8), "
        "31 cannot be told apart. By the 95 % interval over each site's own test rows."
    )
    rivals = by_hand([0.6] * 13, [0.5] * 13, [Interval(*alike)] * 12 + [Interval(*unknown)])
    lead, _ = of_rivals.of_sites(rivals, np.full(13, 0.6), names, [20] * 13)
    assert (
        ": 0 of 13 better, 0 worse, 12 cannot be told apart, 1 not judged, as there is no interval. By"
        in lead
    )
