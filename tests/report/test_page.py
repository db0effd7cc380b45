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

from copfl.errors import UsageError
from copfl.report import chart, charts, matplotlib_charts, page, pairs, plotly_charts, run_data
from copfl.report.chart import Dots, Heat, Line, Lines
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
        "held", "bytes", "seconds",
    ]  # fmt: skip
    for name in drawn:
        assert f'id="plot-{name}"' in html
        assert f'id="part-table-{name}"' in html
    assert "copfl run --config run.toml" in html
    assert "[algorithm]\nname = &#34;copfl&#34;" in html  # run.toml, whole
    assert len(re.findall(r"<h1>", html)) == 1


def test_the_figures_are_what_plotly_takes(runs: dict[str, Path]) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="plotly is an extra")
    drawn = data_of(page.render(run_data.read_all([runs["copfl"], runs["local"]])))["figures"]
    for figure in drawn.values():
        plain = json.loads(
            re.sub(r"var\(--c(\d)\)", r"#00000\1", json.dumps(figure))
        )  # the page looks its colours up
        graph_objects.Figure(plain)  # raises for a property that there is not


def test_the_curve_is_the_mean_of_the_records(runs: dict[str, Path]) -> None:
    (told,) = run_data.read_all([runs["copfl"]])
    curve = charts.accuracy([told])[0]
    assert isinstance(curve, Lines)
    assert curve.lines[0].y == pytest.approx([100 * r["mean"]["accuracy"] for r in told.records])
    assert curve.lines[0].low == pytest.approx(100 * np.quantile(told.metric("accuracy"), 0.1, axis=1))
    worst = told.metric("accuracy")[-1].argmin()
    assert curve.lines[0].remarks[-1].startswith(f"lowest: client {worst}, ")


def test_several_runs_are_paired_client_by_client(runs: dict[str, Path]) -> None:
    stories = run_data.read_all([runs["copfl"], runs["local"], runs["fedavg"]])
    first, second = pairs.paired(stories)
    gain = 100 * (stories[1].last("accuracy") - stories[0].last("accuracy"))
    assert (first.label, second.label, first.against) == ("local", "fedavg", "copfl")
    assert first.mean == pytest.approx(gain.mean())
    assert first.counts == ((gain > 0).sum(), (gain == 0).sum(), (gain < 0).sum())
    assert first.clients.low <= first.mean <= first.clients.high
    names = list(data_of(page.render(stories))["figures"])
    assert {"differences", "clients-1-copfl", "clients-3-fedavg"} <= set(names)
    beside = next(c for c in charts.accuracy(stories) if c.name == "clients-1-copfl")
    assert isinstance(beside, Dots)
    assert beside.series[-1].name == "local training only"
    assert beside.series[-1].y == pytest.approx(100 * stories[1].last("accuracy"))


def test_runs_of_other_clients_are_not_paired(runs: dict[str, Path]) -> None:
    stories = run_data.read_all([runs["copfl"], runs["local"]])
    stories[1] = dataclasses.replace(stories[1], partition="other")
    assert pairs.paired(stories) == []
    assert "there are no paired differences" in page.render(stories)


def test_a_run_without_rounds_has_a_page(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["copfl"], tmp_path / "run")
    for name in ("rounds.jsonl", "timing.jsonl"):
        (tmp_path / "run" / name).write_bytes(b"")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    html = page.render(run_data.read_all([tmp_path / "run"]))
    assert "no round has ended yet" in html
    assert list(data_of(html)["figures"]) == ["held"]


def test_what_a_user_called_things_cannot_break_out(runs: dict[str, Path]) -> None:
    (told,) = run_data.read_all([runs["copfl"]])
    bad = '</script><script>alert("x")</script><!--'
    told = dataclasses.replace(
        told, label=bad, environment={**told.environment, "classes": [bad] * 10, "command": bad}
    )
    html = page.render([told])
    assert "<script>alert" not in html
    assert data_of(html)["figures"]["held"]["data"][0]["x"][0] == bad


def test_the_page_allows_itself_no_network(runs: dict[str, Path]) -> None:
    html = page.render(run_data.read_all([runs["copfl"]]))
    assert "default-src 'none'" in html
    assert "connect-src 'none'" in html
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="(?!data:)', html)


def test_a_long_table_shows_some_rounds_and_says_so() -> None:
    line = Line("mean", [float(n) for n in range(500)])
    table = chart.table(Lines("a", "A", "", list(range(1, 501)), "y", [line]))
    assert len(table.rows) == chart.ROWS
    assert (table.rows[0][0], table.rows[-1][0]) == ("1", "500")
    assert table.note == "60 of 500 rounds; rounds.jsonl has them all."


def test_what_was_not_measured_is_a_dash() -> None:
    heat = Heat("h", "H", "", ["client 0"], ["1", "2"], [[None, 0.25]], "share", "round", digits=2)
    assert chart.table(heat) == (["client", "round 1", "round 2"], [["client 0", "–", "0.25"]], "")
    assert plotly_charts.figure(heat)["data"][0]["z"] == [[None, 0.25]]


def test_pictures_for_papers_are_the_same_bytes_each_time(runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    drawn = [one for section in charts.sections(run_data.read_all([runs["copfl"]])) for one in section.charts]
    chosen = [one for one in drawn if one.name in ("accuracy", "clients", "where")]
    first = matplotlib_charts.write(chosen, tmp_path / "a")
    second = matplotlib_charts.write(chosen, tmp_path / "b")
    assert [p.name for p in first] == [
        f"{n}.{k}" for n in ("accuracy", "clients", "where") for k in ("png", "svg")
    ]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert "client 3" in (tmp_path / "a" / "clients.svg").read_text()


def test_without_plotly_it_is_said_what_to_install(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page._plotly.cache_clear()
    answer = called(capsys, "report", runs["copfl"], "--out", tmp_path / "r.html")
    assert answer.code == 2
    assert "pip install 'copfl[report]'" in answer.err
    with pytest.raises(UsageError, match="plotly is not installed"):
        page.render(run_data.read_all([runs["copfl"]]))


def test_help_waits_for_neither_torch_nor_plotly() -> None:
    heavy = ("torch", "plotly", "jinja2", "matplotlib")
    code = f"import sys, copfl.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
