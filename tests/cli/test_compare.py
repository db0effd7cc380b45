from __future__ import annotations

import json
from pathlib import Path

import pytest

from copfl import charts
from copfl.comparison.jobs import copies, runner
from copfl.engine import machine
from tests.commands import called
from tests.comparison.small import clouds, line


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return clouds(tmp_path / "clouds.npz")


Capture = pytest.CaptureFixture[str]


def test_compare_prints_and_writes_the_table(tmp_path: Path, data: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    rows = ("-a", "copfl,local:lr=0.05", "--seeds", "0,1", "--reference", "local lr=0.05")
    words = line(data, out, *rows, "--jobs", "1", "--no-tune")
    answer = called(capsys, *words)
    assert answer.code == 0
    assert answer.out.startswith("clouds.npz, 2 clients, 3 rounds, seeds 0, 1; unequal learning rates: acc")
    assert "Difference to local lr=0.05" in answer.out
    assert "Sites: 2 clients, partition iid." in answer.out
    assert "[4/4 runs] local lr=0.05, seed 1: done" in answer.err
    assert (out / "table.txt").read_text().strip() in answer.out
    quiet = called(capsys, *words, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    content = json.loads(called(capsys, *words, "--json").out)
    assert content == json.loads((out / "table.json").read_text())


def test_a_file_says_the_same_as_the_line_and_the_line_wins(
    tmp_path: Path, data: Path, capsys: Capture
) -> None:
    file = tmp_path / "compare.toml"
    file.write_text(f"""
[compare]
seeds = [0]
tune = {{ lr = [0.1, 0.01] }}
reference = "alone"
[data]
name = "{data}"
[model]
name = "mlp"
width = 4
[partition]
name = "iid"
[run]
clients = 2
rounds = 7
[[entry]]
name = "copfl"
[[entry]]
name = "local"
label = "alone"
""")
    words = ["--rounds", "2", "--jobs", "1", "--no-plots", "--json"]
    content = json.loads(called(capsys, "compare", "-c", file, "--out", tmp_path / "out", *words).out)
    assert [row["label"] for row in content["rows"]] == ["copfl", "alone"]
    assert content["title"] == "clouds.npz, 2 clients, 2 rounds, seed 0"
    assert content["reference"] == "alone"
    assert len(content["rows"][0]["trials"]) == 2


def test_sweep_prints_a_map(tmp_path: Path, data: Path, capsys: Capture) -> None:
    grid = ("--over", "copfl.rate=0.1,0.2", "--over", "copfl.budget=0.3,0.6")
    words = ["sweep", *line(data, tmp_path / "out")[1:], *grid]
    answer = called(capsys, *words, "--seeds", "0", "--jobs", "1")
    assert answer.code == 0
    assert "copfl.rate down, copfl.budget across" in answer.out
    assert answer.out.count("rate=0.1 budget=0.3") == 2  # in the table, and in that of convergence
    assert answer.err.count("done") == 4


def test_a_run_file_can_be_swept(tmp_path: Path, data: Path, capsys: Capture) -> None:
    assert called(capsys, "run", "-a", "local", *line(data, tmp_path / "run")[1:-1], "--seed", "5").code == 0
    words = ["sweep", "-c", tmp_path / "run" / "run.toml", "--over", "lr=0.1,0.2", "--seeds", "5"]
    answer = called(capsys, *words, "--out", tmp_path / "out", "--jobs", "1", "--no-plots", "--json")
    content = json.loads(answer.out)
    assert [row["label"] for row in content["rows"]] == ["lr=0.1", "lr=0.2"]
    assert content["title"].startswith("local on clouds.npz")


@pytest.mark.job
def test_without_matplotlib_it_says_how_to_have_pictures(
    tmp_path: Path, data: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)
    words = [word for word in line(data, tmp_path / "out") if word != "--no-plots"]
    answer = called(capsys, *words, "-a", "local", "--seeds", "0", "-j", "1")
    assert answer.code == 0
    assert charts.MISSING in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to compare; name some algorithms: --algorithms copfl,fedavg,local"),
        (["-a", "copfl", "--seeds", ""], "--seeds names no seed; name one at least"),
        (["-a", "copfl", "--tune", "lrr=1,2"], 'the key "lrr" must be a setting such as lr'),
        (["-a", "copfl", "--set", "fedper.epochs=2"], 'settings of "fedper" are for no entry'),
        (["-a", "copfl", "--jobs", "-1"], "jobs=-1 must be"),
    ],
)
def test_errors_are_one_paragraph_with_the_remedy(
    tmp_path: Path, data: Path, capsys: Capture, words: list[str], message: str
) -> None:
    answer = called(capsys, *line(data, tmp_path / "out"), *words)
    assert answer.code == 2
    assert answer.out == ""
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_stopped_it_says_how_to_go_on(
    tmp_path: Path, data: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "execute", stopped)
    answer = called(capsys, *line(data, tmp_path / "out"), "-a", "local", "--seeds", "0", "-j", "1")
    assert (answer.code, answer.err) == (130, "copfl: stopped; the same command continues from here\n")


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        (["--device", "cuda"], ["cuda"]),
        ([], ["cpu"]),
        (["--device", "cuda", "--jobs", "1"], []),
        (["--on", "slurm"], []),
    ],
)
def test_processes_are_begun_before_torch_is_imported(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str], begun: list[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(machine, "processors", lambda: 2)
    monkeypatch.setattr(copies, "process_context", calls.append)
    answer = called(capsys, "compare", "-a", "copfl", "--seeds", "", *words)
    assert "--seeds names no seed" in answer.err
    assert calls == begun
