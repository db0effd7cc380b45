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
from copfl.errors import UsageError
from copfl.report import page, run_data, sections
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


def test_the_figures_are_what_plotly_takes(runs: dict[str, Path]) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="plotly is an extra")
    drawn = data_of(page.render(run_data.read_all([runs["copfl"], runs["local"]])))["figures"]
    for figure in drawn.values():
        plain = json.loads(
            re.sub(r"var\(--c(\d)\)", r"#00000\1", json.dumps(figure))
        )  # the page replaces its colours
        graph_objects.Figure(plain)  # raises for a property that there is not


def test_the_curve_is_the_mean_of_the_records(runs: dict[str, Path]) -> None:
    (run,) = run_data.read_all([runs["copfl"]])
    curve = sections.sections([run])[0].charts[0]
    assert isinstance(curve, Lines)
    assert curve.lines[0].y == pytest.approx([100 * r["mean"]["accuracy"] for r in run.records])
    assert curve.lines[0].low == pytest.approx(100 * np.quantile(run.metric("accuracy"), 0.1, axis=1))
    worst = run.metric("accuracy")[-1].argmin()
    assert curve.lines[0].remarks[-1].startswith(f"lowest: client {worst}, ")


def test_several_runs_are_paired_client_by_client(runs: dict[str, Path]) -> None:
    found = run_data.read_all([runs["copfl"], runs["local"], runs["fedavg"]])
    gain = 100 * (found[1].last("accuracy") - found[0].last("accuracy"))
    assert list(sections.gains(found)) == ["local, sgd 0.1", "fedavg, sgd 0.1"]
    assert sections.gains(found)["local, sgd 0.1"] == pytest.approx(gain)
    table = page._pairs(found)
    assert table is not None
    label, mean, bounds, *counts = table.rows[0]
    assert (label, mean) == ("local, sgd 0.1", f"{gain.mean():+.1f}")
    assert counts == [str((gain > 0).sum()), str((gain == 0).sum()), str((gain < 0).sum())]
    low, high = map(float, bounds.split(" to "))
    assert low <= gain.mean() <= high
    names = list(data_of(page.render(found))["figures"])
    assert {"differences", "clients-1-copfl", "clients-3-fedavg"} <= set(names)
    chart = next(c for c in sections.sections(found)[0].charts if c.name == "clients-1-copfl")
    assert isinstance(chart, Dots)
    assert chart.series[-1].name == "local training only"
    assert chart.series[-1].y == pytest.approx(100 * found[1].last("accuracy"))


def test_runs_of_other_clients_are_not_paired(runs: dict[str, Path]) -> None:
    found = run_data.read_all([runs["copfl"], runs["local"]])
    found[1] = dataclasses.replace(found[1], partition="other")
    assert sections.gains(found) == {}
    assert "there are no paired differences" in page.render(found)


def test_a_run_without_rounds_has_a_page(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["copfl"], tmp_path / "run")
    for name in ("rounds.jsonl", "timing.jsonl"):
        (tmp_path / "run" / name).write_bytes(b"")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    html = page.render(run_data.read_all([tmp_path / "run"]))
    assert "no round has ended yet" in html
    assert list(data_of(html)["figures"]) == ["data"]


def test_what_a_user_called_things_cannot_break_out(runs: dict[str, Path]) -> None:
    (run,) = run_data.read_all([runs["copfl"]])
    bad = '</script><script>alert("x")</script><!--'
    run = dataclasses.replace(
        run, label=bad, environment={**run.environment, "classes": [bad] * 10, "command": bad}
    )
    html = page.render([run])
    assert "<script>alert" not in html
    assert data_of(html)["figures"]["data"]["data"][0]["x"][0] == bad


def test_the_page_allows_itself_no_network(runs: dict[str, Path]) -> None:
    html = page.render(run_data.read_all([runs["copfl"]]))
    assert "default-src 'none'" in html
    assert "connect-src 'none'" in html
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="(?!data:)', html)


def test_a_long_table_shows_some_rounds_and_says_so() -> None:
    line = Line("mean", [float(n) for n in range(500)])
    table = page.table_of(Lines("a", "A", "", list(range(1, 501)), "y", [line]))
    assert len(table.rows) == page.TABLE_ROWS
    assert (table.rows[0][0], table.rows[-1][0]) == ("1", "500")
    assert table.notes == ["60 of 500 rounds; rounds.jsonl contains all."]


def test_what_was_not_measured_is_a_dash() -> None:
    heat = Heat("h", "H", "", ["client 0"], ["1", "2"], [[None, 0.25]], "weight", "round", digits=2)
    table = page.table_of(heat)
    assert (table.head, table.rows) == (["client", "round 1", "round 2"], [["client 0", "-", "0.25"]])
    assert charts.figure(heat)["data"][0]["z"] == [[None, 0.25]]


def test_pictures_for_papers_are_the_same_bytes_each_time(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    for name in ("a", "b"):
        words = ("report", runs["copfl"], "--out", tmp_path / "r.html", "--figures", tmp_path / name)
        assert called(capsys, *words).code == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {f"{name}.{kind}" for name in ("accuracy", "clients", "where") for kind in ("png", "svg")} <= set(
        first
    )
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert b"client 3" in first["clients.svg"]


def test_without_plotly_it_is_said_what_to_install(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page._plotly.cache_clear()
    answer = called(capsys, "report", runs["copfl"], "--out", tmp_path / "r.html")
    assert answer.code == 2
    assert "pip install 'copfl[report]'" in answer.err
    with pytest.raises(UsageError, match="needs plotly, which is not installed"):
        page.render(run_data.read_all([runs["copfl"]]))


def test_help_waits_for_neither_torch_nor_plotly() -> None:
    heavy = ("torch", "plotly", "jinja2", "matplotlib")
    code = f"import sys, copfl.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
