from __future__ import annotations

import dataclasses
import json
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
from copfl.experiment.gains import Analysis, Cross
from copfl.report import document, page, run_data
from tests.commands import called


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
        "accuracy", "clients", "weight", "gradient_score", "prediction_score", "masks", "shared", "where", "layers",
        "data", "bytes", "seconds",
    ]  # fmt: skip
    for name in drawn:
        assert f'id="plot-{name}"' in html
        assert f'id="part-table-{name}"' in html
    assert "copfl run --config run.toml" in html
    assert "[algorithm]\nname = &#34;copfl&#34;" in html  # run.toml, whole
    assert len(re.findall(r"<h1>", html)) == 1


def test_the_page_opens_with_who_gains_and_what_it_cost(runs: dict[str, Path]) -> None:
    (run,) = run_data.read_all([runs["copfl"]])
    assert page.of_runs([run])[0].endswith("the run did not train them alone as a baseline.")
    alone = run.last("accuracy") - np.array([0.1, 0.05, 0.0, -0.02])
    measured = dataclasses.replace(run, analysis=Analysis(alone, Cross([0], np.ones((1, 1)))))
    first, who, cost = page.of_runs([measured])
    assert first.startswith("2 of 4 clients gain over training alone. Mean gain: +3.2 points (95 % interval")
    assert "not" not in first or "no gain is distinguishable" in first
    assert (
        who == "Largest gains: client 0 (+10.0), client 1 (+5.0). No gain: client 3 (-2.0), client 2 (+0.0)."
    )
    assert re.fullmatch(r"Cost: 5 rounds in \d+:\d\d, .* up and .* down per client and round.", cost)
    html = document.render(page.document_of([measured]))
    assert html.index('id="part-conclusion"') < html.index('class="plot"')
    assert len(html) < 300_000  # the limit is 2 MB


def test_the_classes_have_a_table(runs: dict[str, Path]) -> None:
    (run,) = run_data.read_all([runs["copfl"]])
    per_class = [(3, 4), *[(0, 0)] * 9]
    cross = Cross([0], np.ones((1, 1)), per_class=per_class)
    run = dataclasses.replace(run, analysis=Analysis(np.zeros(4), cross))
    (table,) = next(s for s in page.sections([run]) if s.name == "data").tables
    assert table.head == ["class", "clients that have it", "training samples", "accuracy"]
    assert run.label_counts is not None
    counts = run.label_counts[:, 0]
    assert table.rows[0] == ["0", f"{(counts > 0).sum()} of 4", str(counts.sum()), "75.0 % of 4"]
    assert table.rows[1][-1] == "-"


def test_the_weights_are_coloured_around_the_equal_share(runs: dict[str, Path]) -> None:
    (run,) = run_data.read_all([runs["copfl"]])
    drawn = data_of(document.render(page.document_of([run])))["figures"]
    assert drawn["weight"]["centre"] == 0.25
    assert drawn["weight"]["centre_title"] == "mark: the equal weight 1/4 = 0.250"
    assert drawn["gradient_score"]["centre"] is None


def test_the_curve_is_the_mean_of_the_records(runs: dict[str, Path]) -> None:
    (run,) = run_data.read_all([runs["copfl"]])
    curve = page.sections([run])[0].charts[0]
    assert isinstance(curve, Lines)
    assert curve.lines[0].y == pytest.approx([100 * r["mean"]["accuracy"] for r in run.records])
    assert curve.lines[0].low == pytest.approx(100 * np.quantile(run.metric("accuracy"), 0.1, axis=1))
    worst = run.metric("accuracy")[-1].argmin()
    assert curve.lines[0].remarks[-1].startswith(f"lowest: client {worst}, ")


def test_several_runs_are_paired_client_by_client(runs: dict[str, Path]) -> None:
    found = run_data.read_all([runs["copfl"], runs["local"], runs["fedavg"]])
    gain = 100 * (found[1].last("accuracy") - found[0].last("accuracy"))
    pairs = run_data.paired(found)
    assert [pair.label for pair in pairs] == ["local, sgd 0.1", "fedavg, sgd 0.1"]
    assert 100 * pairs[0].difference == pytest.approx(gain)
    table = page._pairs(found[0], pairs)
    label, mean, bounds, verdict, *counts = table.rows[0]
    assert (label, mean) == ("local, sgd 0.1", f"{gain.mean():+.1f}")
    assert counts == [str((gain > 0).sum()), str((gain == 0).sum()), str((gain < 0).sum())]
    low, high = map(float, bounds.split(" to "))
    assert low <= gain.mean() <= high
    assert verdict == ("not distinguishable" if low <= 0 <= high else "higher" if low > 0 else "lower")
    assert f"local, sgd 0.1: {verdict}, {mean} points ({bounds})." in page.of_runs(found)[0]
    names = list(data_of(document.render(page.document_of(found)))["figures"])
    assert {"differences", "clients-1-copfl", "clients-3-fedavg"} <= set(names)
    chart = next(c for c in page.sections(found)[0].charts if c.name == "clients-1-copfl")
    assert isinstance(chart, Dots)
    assert chart.series[-1].name == "local training only"
    assert chart.series[-1].y == pytest.approx(100 * found[1].last("accuracy"))


def test_runs_of_other_clients_are_not_paired(runs: dict[str, Path]) -> None:
    found = run_data.read_all([runs["copfl"], runs["local"]])
    found[1] = dataclasses.replace(found[1], partition="other")
    assert run_data.paired(found) == []
    assert "there are no paired differences" in document.render(page.document_of(found))


def test_a_run_without_rounds_has_a_page(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["copfl"], tmp_path / "run")
    for name in ("rounds.jsonl", "timing.jsonl"):
        (tmp_path / "run" / name).write_bytes(b"")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    html = document.render(page.document_of(run_data.read_all([tmp_path / "run"])))
    assert "no round has ended yet" in html
    assert list(data_of(html)["figures"]) == ["data"]


def test_what_a_user_called_things_cannot_break_out(runs: dict[str, Path]) -> None:
    (run,) = run_data.read_all([runs["copfl"]])
    bad = '</script><script>alert("x")</script><!--'
    run = dataclasses.replace(
        run, label=bad, environment={**run.environment, "classes": [bad] * 10, "command": bad}
    )
    html = document.render(page.document_of([run]))
    assert "<script>alert" not in html
    assert data_of(html)["figures"]["data"]["columns"][0] == bad


def test_the_page_allows_itself_no_network(runs: dict[str, Path]) -> None:
    html = document.render(page.document_of(run_data.read_all([runs["copfl"]])))
    assert "default-src 'none'" in html
    assert "connect-src 'none'" in html
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="(?!data:)', html)


def test_a_long_table_shows_some_rounds_and_says_so() -> None:
    line = Line("mean", [float(n) for n in range(500)])
    table = document.table_of(Lines("a", "A", "", list(range(1, 501)), "y", [line]))
    assert len(table.rows) == document.TABLE_ROWS
    assert (table.rows[0][0], table.rows[-1][0]) == ("1", "500")
    assert table.notes == ["60 of 500 rounds; rounds.jsonl contains all."]


def test_what_was_not_measured_is_a_dash() -> None:
    heat = Heat("h", "H", "", ["client 0"], ["1", "2"], [[None, 0.25]], "weight", "round", digits=2)
    table = document.table_of(heat)
    assert (table.head, table.rows) == (["client", "round 1", "round 2"], [["client 0", "-", "0.25"]])
    assert charts.figure(heat)["values"] == [[None, 0.25]]


def test_every_chart_is_a_picture_for_papers(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    words = ("report", runs["copfl"], "--out", tmp_path / "r.html", "--figures", tmp_path / "a")
    assert called(capsys, *words).code == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {f"{name}.{kind}" for name in ("accuracy", "clients", "where") for kind in ("png", "svg")} <= set(
        first
    )
    # The same bytes each time: comparison/test_plots.py.
    assert b"client 3" in first["clients.svg"]


def test_a_comparison_has_a_page_that_says_what_is_distinguishable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(label: str, accuracy: list[float], gain: tuple[float, float, float] | None) -> dict[str, Any]:
        names = ("accuracy", "bytes_up", "bytes_down", "seconds")
        over = {}
        if gain is not None:
            verdict = "lower" if gain[2] < 0 else "not distinguishable"
            over["accuracy"] = {"mean": gain[0], "over_seeds": gain[1:], "verdict": verdict}
        return {
            "label": label,
            "mean": dict.fromkeys(names, 0.5),
            "spread": dict.fromkeys(names, 0.1),
            "per_seed": {"accuracy": accuracy},
            "curves": [{"round": [1, 2], "accuracy": [own / 2, own]} for own in accuracy],
            "differences": over,
        }

    rows = [row("copfl", [0.9, 0.8], None), row("fedavg", [0.5, 0.6], (-0.3, -0.5, -0.1))]
    rows.append(row("local", [0.9, 0.7], (-0.05, -0.4, 0.3)))
    content = {
        "title": "digits",
        "averaged": "the last evaluation",
        "seeds": [0, 1],
        "reference": "copfl",
        "over": {},
        "notes": [],
        "rows": rows,
    }
    path = tmp_path / "table.json"
    path.write_text(json.dumps({**content, "share_that_gains": {"copfl": [1.0, 0.5]}}))
    assert called(capsys, "report", tmp_path) == (0, f"{tmp_path / 'report.html'}\n", "")
    html = (tmp_path / "report.html").read_text()
    assert "Lower: fedavg -30.0 [-50.0, -10.0]. Not distinguishable: local -5.0 [-40.0, +30.0]." in html
    assert "better than under local training: copfl 75 %." in html
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


def test_help_waits_for_no_large_library() -> None:
    heavy = ("torch", "jinja2", "matplotlib")
    code = f"import sys, copfl.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
