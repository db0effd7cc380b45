from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl import charts
from copfl.charts import Dots, Heat, Line, Lines
from copfl.experiment import reading
from copfl.experiment.analysis.gains import Analysis, Cross
from copfl.measures.metrics import ACCURACY, MetricInfo
from copfl.report import comparison_page, document, page, paired, run_charts
from copfl.rivals.records import CONSTANT, LINEAR, Rivals, RivalValues
from copfl.stats import Interval
from tests.commands import called
from tests.report.hostile import NAME, assert_harmless
from tests.slow import SLOW

UNKNOWN = np.full(4, np.nan)  # constant answers


def data_of(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_of_one_run_has_a_figure_and_a_table_for_every_question(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = called(capsys, "report", runs["copfl"], "--out", tmp_path / "report.html")
    assert answer == (0, f"{tmp_path / 'report.html'}\n", "")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    drawn = data_of(html)["figures"]
    assert list(drawn) == [
        "accuracy", "clients", "calibration", "log-loss", "weight", "gradient_score", "prediction_score", "masks",
        "shared", "where", "layers", "data", "bytes", "seconds",
    ]  # fmt: skip
    for name in drawn:
        assert f'id="plot-{name}"' in html
        assert f'id="part-table-{name}"' in html
    assert "copfl run --config run.toml" in html
    assert "[algorithm]\nname = &#34;copfl&#34;" in html  # run.toml, whole
    assert len(re.findall(r"<h1>", html)) == 1


def test_the_page_opens_with_who_gains_and_what_it_cost(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    assert str(page.of_runs([run])[0]).endswith("the run did not train them alone as a baseline.")
    alone = run.final("accuracy") - np.array([0.1, 0.05, 0.0, -0.02])
    measured = dataclasses.replace(
        run, findings={"analysis": Analysis(alone, Cross([0], np.ones((1, 1))), UNKNOWN)}
    )
    first, who, cost = map(str, page.of_runs([measured]))
    assert first.startswith("2 of 4 sites gain over training alone. Mean gain: +3.2 points (95 % interval")
    assert "not" not in first or "no gain is distinguishable" in first
    least, most = min(run.sizes[1]), max(run.sizes[1])
    samples = f"{least} test samples" if least == most else f"{least} to {most} test samples"
    assert who == (
        "Largest gains over training alone: site 0 +10.0, site 1 +5.0. No gain: site 3 -2.0, site 2 +0.0. "
        f"A single site's gain has no interval here and may be chance: it is measured on {samples}, where one more "
        f"or less is {100 / least:.1f} points."
    )
    assert re.fullmatch(r"Cost: 5 rounds in \d+:\d\d, .* up and .* down per site and round.", cost)
    constant = np.array([0.94, *[np.nan] * 3])
    skewed = dataclasses.replace(
        run, findings={"analysis": Analysis(alone, Cross([0], np.ones((1, 1))), constant)}
    )
    assert (
        "No useful gain is shown: always answering a site's most frequent class, or mean value, in training gives "
        "accuracy 94.0 %; the personal models compared with it: -"
    ) in str(page.of_runs([skewed])[0])
    html = document.render(page.document_of([measured]))
    # The verdict and its chart first; all else is folded.
    places = [
        html.index(part) for part in ('id="plot-verdict"', '<details id="details">', 'id="part-conclusion"')
    ]
    assert places == sorted(places)
    assert '<h2 id="title-verdict">No gain shown.</h2>' in html
    assert "site 0: no interval, +10.0 points." in html  # for a screen reader
    assert 'id="details"' not in document.render(page.document_of([run]))
    assert len(html) < 300_000  # the limit is 2 MB


def test_the_verdict_of_each_client_stands_before_the_mean_gain(runs: dict[str, Path]) -> None:
    """In a list, with its interval; the largest gains, which have none, are not named then."""
    (run,) = reading.read_all([runs["copfl"]])
    values = {CONSTANT: np.full(4, 0.1), LINEAR: run.final("accuracy") - 0.1}
    bounds = (Interval(0.05, 0.15), Interval(-0.1, 0.3), Interval(0.05, 0.15), Interval(-0.1, 0.3))
    rivals = Rivals(
        (ACCURACY,),
        {name: RivalValues(of, {"accuracy": of}) for name, of in values.items()},
        LINEAR,
        (LINEAR,) * 4,
        interval=bounds,
    )
    analysis = Analysis(values[LINEAR], Cross([0], np.ones((1, 1))), UNKNOWN)
    judged = dataclasses.replace(run, findings={"rivals": rivals, "analysis": analysis})
    against, lead, verdicts, gain, cost = page.of_runs([judged])
    assert str(against).startswith("The personal models are 10.0 points [")
    assert str(lead).startswith("Site by site, its model against a linear model that it trains alone")
    assert isinstance(verdicts, tuple)
    rows = run.sizes[1]
    assert verdicts[0] == (
        f"Site 0: better with the others: +10.0 points [+5.0, +15.0] on its {rows[0]} test rows"
    )
    assert len(verdicts) == 4
    assert str(gain).startswith("4 of 4 sites gain over training alone.")
    assert str(cost).startswith("Cost: ")
    html = document.render(page.document_of([judged]))
    assert f"<ul><li>{verdicts[0]}</li><li>" in html
    assert "Largest gains" not in html


def test_damaged_numbers_are_gaps_and_do_not_end_the_report(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    tables = {**run.tables, "optimizer": {"name": ["adam"], "lr": 1e-3}}
    last = run.records[-1]
    largest = {**last, "per_client": {**last["per_client"], "accuracy": [1.7976931348623157e308] * 4}}
    damaged = dataclasses.replace(run, tables=tables, records=[*run.records[:-1], largest])
    with np.errstate(over="ignore", invalid="ignore"):
        assert "<html" in document.render(page.document_of([damaged]))


def test_the_classes_have_a_table(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    per_class = [(3, 4), *[(0, 0)] * 9]
    cross = Cross([0], np.ones((1, 1)), per_class=per_class)
    run = dataclasses.replace(run, findings={"analysis": Analysis(np.zeros(4), cross, UNKNOWN)})
    (table,) = next(s for s in page.sections([run]) if s.name == "data").tables
    assert table.head == ["class", "sites that have it", "training samples", "accuracy"]
    assert run.label_counts is not None
    counts = run.label_counts[:, 0]
    assert table.rows[0] == ["0", f"{(counts > 0).sum()} of 4", str(counts.sum()), "75.0 % of 4"]
    assert table.rows[1][-1] == "-"


def test_the_weights_are_coloured_around_the_equal_share(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    drawn = data_of(document.render(page.document_of([run])))["figures"]
    assert drawn["weight"]["centre"] == 0.25
    assert drawn["weight"]["centre_title"] == "mark: the equal weight 1/4 = 0.250"
    assert drawn["gradient_score"]["centre"] is None


def test_the_curve_is_the_mean_of_the_records(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    curve = page.sections([run])[0].charts[0]
    assert isinstance(curve, Lines)
    assert curve.lines[0].y == pytest.approx([100 * r["mean"]["accuracy"] for r in run.records])
    assert curve.lines[0].low == pytest.approx(100 * np.quantile(run.metric("accuracy"), 0.1, axis=1))
    worst = run.metric("accuracy")[-1].argmin()
    assert curve.lines[0].remarks[-1].startswith(f"lowest: site {worst}, ")


def test_a_paired_difference_without_a_value_is_not_called_indistinguishable() -> None:
    pair = paired.Paired("other", np.array([0.1, np.inf]), ACCURACY)
    assert pair.verdict == "not computed: 1 of 2 values of clients are infinite"
    assert pair.bounds == "-"
    assert math.isnan(pair.mean)


def test_several_runs_are_paired_client_by_client(runs: dict[str, Path]) -> None:
    found = reading.read_all([runs["copfl"], runs["local"], runs["fedavg"]])
    gain = 100 * (found[1].final("accuracy") - found[0].final("accuracy"))
    pairs = paired.paired(found)
    assert [pair.label for pair in pairs] == ["local, adam 0.003", "fedavg, adam 0.003"]
    assert 100 * pairs[0].difference == pytest.approx(gain)
    table = page._pairs(found[0], pairs)
    label, mean, bounds, verdict, *counts = table.rows[0]
    assert (label, mean) == ("local, adam 0.003", f"{gain.mean():+.1f}")
    assert counts == [str((gain > 0).sum()), str((gain == 0).sum()), str((gain < 0).sum())]
    low, high = map(float, bounds.split(" to "))
    assert low <= gain.mean() <= high
    assert verdict == ("not distinguishable" if low <= 0 <= high else "higher" if low > 0 else "lower")
    assert f"local, adam 0.003: {verdict}, {mean} points ({bounds})." in page.of_runs(found)[0]
    names = list(data_of(document.render(page.document_of(found)))["figures"])
    assert {"differences", "clients-1-copfl", "clients-3-fedavg"} <= set(names)
    chart = next(c for c in page.sections(found)[0].charts if c.name == "clients-1-copfl")
    assert isinstance(chart, Dots)
    assert chart.series[-1].name == "local training only"
    assert chart.series[-1].y == pytest.approx(100 * found[1].final("accuracy"))


def test_runs_of_other_clients_are_not_paired(runs: dict[str, Path]) -> None:
    found = reading.read_all([runs["copfl"], runs["local"]])
    other = dataclasses.replace(found[1].partition, train=found[1].partition.train[::-1])
    found[1] = dataclasses.replace(found[1], partition=other)
    assert paired.paired(found) == []
    assert "there are no paired differences" in document.render(page.document_of(found))


def test_a_run_without_rounds_has_a_page(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["copfl"], tmp_path / "run")
    for name in ("rounds.jsonl", "timing.jsonl"):
        (tmp_path / "run" / name).write_bytes(b"")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    html = document.render(page.document_of(reading.read_all([tmp_path / "run"])))
    assert "no round has ended yet" in html
    assert list(data_of(html)["figures"]) == ["data"]


def test_what_a_user_called_things_cannot_break_out(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    bad = '</script><script>alert("x")</script><!--'
    run = dataclasses.replace(
        run, label=bad, environment={**run.environment, "classes": [bad] * 10, "command": bad}
    )
    html = document.render(page.document_of([run]))
    assert "<script>alert" not in html
    assert data_of(html)["figures"]["data"]["columns"][0] == bad


def test_names_do_not_become_markup(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    known = {**run.environment, "classes": [NAME] * 10, "command": NAME, "dataset": NAME, "warnings": [NAME]}
    page_of_run = assert_harmless(
        document.render(page.document_of([dataclasses.replace(run, label=NAME, environment=known)]))
    )
    assert NAME[:5] in page_of_run.text


def test_the_page_allows_itself_no_network(runs: dict[str, Path]) -> None:
    html = document.render(page.document_of(reading.read_all([runs["copfl"]])))
    assert "default-src 'none'" in html
    assert "connect-src 'none'" in html
    assert "unsafe" not in html
    inline = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", html, re.DOTALL)
    assert len(inline) == 3
    for text in inline:  # and no other text is executed
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in html
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="(?!data:)', html)


def test_a_long_table_shows_some_rounds_and_says_so() -> None:
    line = Line("mean", [float(n) for n in range(500)])
    table = document.table_of(Lines("a", "A", "", list(range(1, 501)), "y", [line]))
    assert len(table.rows) == document.TABLE_ROWS
    assert (table.rows[0][0], table.rows[-1][0]) == ("1", "500")
    assert table.notes == ["60 of 500 rounds; rounds.jsonl contains all."]


def test_what_was_not_measured_is_a_dash() -> None:
    heat = Heat("h", "H", "", ["site 0"], ["1", "2"], [[None, 0.25]], "weight", "round", digits=2)
    table = document.table_of(heat)
    assert (table.head, table.rows) == (["site", "round 1", "round 2"], [["site 0", "-", "0.25"]])
    assert charts.figure(heat)["values"] == [[None, 0.25]]


@pytest.mark.job
def test_every_chart_is_a_picture_for_papers(
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With COPFL_SLOW=1 all are drawn, otherwise those named below and the first of each other kind."""
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    pictures, kinds = charts.pictures, set[type]()

    def some(panels: list[list[charts.Chart]], title: str = "") -> dict[str, bytes]:
        chart = panels[0][0]
        is_drawn = SLOW or chart.name in ("accuracy", "clients", "where") or type(chart) not in kinds
        kinds.add(type(chart))
        return pictures(panels) if is_drawn else {"png": b"", "svg": b""}

    monkeypatch.setattr(charts, "pictures", some)
    words = ("report", runs["copfl"], "--out", tmp_path / "r.html", "--figures", tmp_path / "a")
    assert called(capsys, *words).code == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {f"{name}.{kind}" for name in ("accuracy", "clients", "where") for kind in ("png", "svg")} <= set(
        first
    )
    # The same bytes each time: comparison/test_plots.py.
    assert b"site 3" in first["clients.svg"]
    assert len(kinds) > 2


def test_a_comparison_has_a_page_that_says_what_is_distinguishable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(label: str, accuracy: list[float], gain: tuple[float, float, float] | None) -> dict[str, Any]:
        names = ("accuracy", "bytes_up", "bytes_down", "seconds")
        over = {}
        if gain is not None:
            verdict = "lower" if gain[2] < 0 else "not distinguishable"
            over["accuracy"] = {
                "mean": gain[0],
                "over_seeds": gain[1:],
                "over_both": gain[1:],
                "verdict": verdict,
            }
        return {
            "label": label,
            "mean": dict.fromkeys(names, 0.5),
            "spread": dict.fromkeys(names, 0.1),
            "per_seed": {"accuracy": accuracy},
            "curves": [{"round": [1, 2], "accuracy": [own / 2, own]} for own in accuracy],
            "differences": over,
            "gained": 0.02,
            "rises": True,
            "rounds": 2,
            "bytes": 1500.0,
        }

    rows = [row("copfl", [0.9, 0.8], None), row("fedavg", [0.5, 0.6], (-0.3, -0.5, -0.1))]
    rows.append(row("local", [0.9, 0.7], (-0.05, -0.4, 0.3)))
    content = {
        "title": "digits",
        "averaged": "the last evaluation",
        "common_value": 0.5,
        "seeds": [0, 1],
        "reference": "copfl",
        "over": {},
        "partition": ["2 sites, partition iid"],
        "notes": [],
        "rows": rows,
    }
    path = tmp_path / "table.json"
    path.write_text(json.dumps({**content, "share_that_gains": {"copfl": [1.0, 0.5]}}))
    assert called(capsys, "report", tmp_path) == (0, f"{tmp_path / 'report.html'}\n", "")
    html = (tmp_path / "report.html").read_text()
    assert "Lower: fedavg -30.0 [-50.0, -10.0]. Not distinguishable: local -5.0 [-40.0, +30.0]." in html
    assert "better than under local training: copfl 75 %." in html
    assert "Sites: 2 sites, partition iid." in html
    drawn = data_of(html)["figures"]
    assert list(drawn) == ["curves", "seeds", "differences"]
    assert drawn["differences"]["series"][0]["low"] == [-50, -40]
    assert drawn["curves"]["lines"][0]["y"] == [42.5, 85]
    answer = called(capsys, "report", tmp_path, tmp_path)
    assert (answer.code, "name it alone" in answer.err) == (2, True)
    path.write_text('{"rows": 3}')
    answer = called(capsys, "report", tmp_path)
    assert answer.code == 2
    assert "`copfl compare` or `copfl sweep` writes it again" in answer.err


def test_a_comparison_says_first_which_methods_gain_over_what_sites_have_alone() -> None:
    def gain(mean: float, low: float | None, high: float | None, verdict: str) -> dict[str, Any]:
        return {"mean": mean, "over_both": [low, high], "verdict": verdict}

    gains = {
        "fedper": gain(0.1, 0.05, 0.15, "higher"),
        "fedavg": gain(-0.02, -0.1, 0.06, "not distinguishable"),
    }
    content: dict[str, Any] = {
        "rows": [],
        "reference": "fedavg",
        "rivals": {"chosen": LINEAR, "differences": {**gains, "local": gain(0.0, -0.1, 0.1, "")}},
    }
    section = comparison_page._answer(content, ACCURACY)
    assert section is not None
    assert section.title == "Training together gains with 1 of 2 methods: fedper."
    (chart,) = section.charts
    assert isinstance(chart, charts.GainChart)
    assert [(row.label, row.words, row.mark) for row in chart.rows] == [
        ("fedper", "better together", "▲"),
        ("fedavg", "no clear difference", "="),
    ]
    assert chart.rows[0][1:4] == pytest.approx((10, 5, 15))
    # A metric that is better when low: the difference falls, the gain is positive.
    rmse = MetricInfo("rmse", higher_is_better=False, fraction=False)
    lower = gain(-0.1, -0.15, -0.05, "lower")
    rows = [{"label": "fedper", "differences": {"rmse": lower}}, {"label": "local", "differences": {}}]
    section = comparison_page._answer({"rows": rows, "reference": "local"}, rmse)
    assert section is not None
    (chart,) = section.charts
    assert isinstance(chart, charts.GainChart)
    assert chart.rows[0][1:4] == pytest.approx((0.1, 0.05, 0.15))
    assert chart.rows[0].words == "better together"
    one_seed = gain(0.1, None, None, "not computed")
    rows[0]["differences"] = {"rmse": one_seed}
    section = comparison_page._answer({"rows": rows, "reference": "local"}, rmse)
    assert section is not None
    assert section.title == "None of 1 methods shows a gain."
    assert comparison_page._answer({"rows": rows, "reference": "fedavg"}, rmse) is None


def test_a_model_has_one_mark_in_every_chart() -> None:
    styles = charts.MODEL_STYLES
    assert len(set(styles.values())) == len(styles) <= len(charts.SYMBOLS)
    assert [charts.SYMBOLS[styles[name]] for name in ("", "alone", "_global")] == ["o", "s", "x"]


def test_marks_at_one_place_are_moved_apart() -> None:
    values = [np.array([0.5, 0.0]), np.array([0.5, 1.0]), np.array([np.nan, 0.5])]
    moved = [charts._apart(values, place) for place in range(3)]
    assert moved[0].tolist() == pytest.approx([-0.1, 0])
    assert moved[1].tolist() == pytest.approx([0.1, 0])
    assert moved[2].tolist() == [0, 0]


def test_help_waits_for_no_large_library() -> None:
    heavy = ("torch", "jinja2", "matplotlib")
    code = f"import sys, copfl.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def styles(chart: Dots | Lines) -> dict[str, tuple[int, int | None]]:
    """By name, the colour and the symbol of each series of dots; curves have no symbols."""
    if isinstance(chart, Lines):
        return {line.name: (line.colour, line.colour) for line in chart.lines}
    return {line.name: (line.colour, line.symbol) for line in chart.series}


def test_a_model_has_one_colour_and_symbol_in_all_charts(runs: dict[str, Path]) -> None:
    copfl_run, local = reading.read_all([runs["copfl"], runs["local"]])
    cross = Cross([0], np.ones((1, 1)))
    measured = dataclasses.replace(
        copfl_run, findings={"analysis": Analysis(local.final("accuracy"), cross, UNKNOWN)}
    )
    (clients,) = run_charts.clients(measured, [measured, local])
    (gain,) = run_charts.gain(measured)
    curves = run_charts.accuracy([measured])[0]
    assert isinstance(clients, Dots)
    assert isinstance(gain, Dots)
    assert isinstance(curves, Lines)
    by_client, by_gain, by_round = styles(clients), styles(gain), styles(curves)
    assert by_client["global model"] == by_gain["global model"] == by_round["global model"]
    assert by_client["after training"] == by_gain["personal model, after training"]
    assert by_client["after training"] == by_round["after training"]
    assert len(set(by_client.values())) == 4
    drawn = data_of(document.render(page.document_of([measured])))["figures"]
    assert [line["symbol"] for line in drawn["gain"]["series"]] == [0, 2]


def test_a_curve_has_its_colour_where_another_model_was_not_evaluated(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["fedavg"]])
    records = [
        {**record, "per_client": {k: v for k, v in record["per_client"].items() if k != "accuracy_before"}}
        for record in run.records
    ]
    curves = run_charts.accuracy([dataclasses.replace(run, records=records)])[0]
    assert isinstance(curves, Lines)
    assert styles(curves) == {"after training": (0, 0), "global model": (2, 2)}


def test_the_share_of_personal_parameters_is_not_called_as_an_accuracy(runs: dict[str, Path]) -> None:
    found = page.document_of(reading.read_all([runs["copfl"]]))
    names = [name for name, *_ in found.tiles]
    assert "personal parameters" in names
    assert "personal" not in names


def test_of_one_client_there_is_no_interval(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["copfl"]])
    alone = np.full(4, np.nan)
    alone[1] = run.final("accuracy")[1] + 0.022
    measured = dataclasses.replace(
        run, findings={"analysis": Analysis(alone, Cross([0], np.ones((1, 1))), UNKNOWN)}
    )
    first = str(page.of_runs([measured])[0])
    assert "Mean gain: -2.2 points (95 % interval over sites: no interval, as there is one site)" in first
    assert "no gain is distinguishable" in first


def test_clients_have_their_names_in_the_page_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, names = np.random.default_rng(0), ["north", "south", "west"]
    arrays: dict[str, Any] = {}
    for part in ("", "_test"):
        arrays |= {f"x{part}": rng.normal(size=(30, 4)).astype(np.float32), f"y{part}": np.arange(30) % 2}
        arrays[f"group{part}"] = np.repeat(names, 10)
    np.savez(tmp_path / "regions.npz", **arrays)
    line = f"--dataset {tmp_path / 'regions.npz'} --partition by_group --model mlp --set model.width=4 --rounds 2"
    answer = called(capsys, "run", "-a", "copfl", *line.split(), "--out", tmp_path / "run", "--json")
    assert json.loads(answer.out)["client_names"] == names
    (run,) = reading.read_all([tmp_path / "run"])
    assert run.client_titles == ["site 0 (north)", "site 1 (south)", "site 2 (west)"]
    found = page.document_of([run])
    assert any("(north)" in note or "(south)" in note or "(west)" in note for *_, note in found.tiles)
    charts_of = {chart.name: chart for section in found.sections for chart in section.charts}
    for name in ("clients", "gain", "weight", "cross", "data"):
        chart = charts_of[name]
        assert isinstance(chart, Dots | Heat)
        assert set(chart.rows) == set(run.client_titles)
    assert isinstance(where := charts_of["where"], Heat)
    assert where.columns == ["0 (north)", "1 (south)", "2 (west)"]
    options = ["-a", "fedavg,local", "--seeds", "0", "--no-tune", "--no-plots", "--jobs", "1", "--json"]
    answer = called(capsys, "compare", *options, *line.split(), "--out", tmp_path / "compared")
    assert json.loads(answer.out)["client_names"] == [names]


def test_the_tiles_of_a_comparison_say_how_many_rows_have_none() -> None:
    names = ("accuracy", "bytes_up", "bytes_down", "seconds")
    row = {
        "mean": dict.fromkeys(names, 0.5),
        "spread": dict.fromkeys(names, 0.1),
        "per_seed": {"accuracy": [0.5]},
        "curves": [{"round": [1], "accuracy": [0.5]}],
        "differences": {},
        "gained": None,
        "rises": False,
        "rounds": None,
        "bytes": None,
    }
    content = {
        "title": "digits",
        "averaged": "the last evaluation",
        "common_value": 0.5,
        "seeds": [0],
        "reference": None,
        "over": {},
        "notes": [],
        "partition": ["iid"],
        "share_that_gains": {},
        "rows": [{**row, "label": f"row {n}"} for n in range(11)],
    }
    tiles = comparison_page._document(content, ACCURACY).tiles
    assert len(tiles) == 9
    assert tiles[-1] == ("and 3 more", "", "in the table")
