from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.audit.small import run_folder
from tests.commands import Answer, called

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("audit") / "run")


@pytest.mark.job
def test_the_command_from_end_to_end(run: Path, capsys: Capture) -> None:
    answer = called(capsys, "audit", run)
    assert (answer.code, answer.err) == (0, "")
    for words in (
        "Contribution of each client",
        "Spearman's rank correlation",
        "site 2",
        "fedce: weight",
        "One seed was run",
    ):
        assert words in answer.out, words
    assert "Kendall" not in answer.out  # it is in the files
    assert "Kendall" in (run / "audit.md").read_text()
    content = json.loads((run / "audit.json").read_text())
    assert content["clients"] == ["client 0", "client 1", "client 2"]
    said = called(capsys, "audit", run, "--json")
    assert (said.code, json.loads(said.out)) == (0, content)
    assert called(capsys, "audit", run, "--quiet") == Answer(0, "", "")


def test_an_audit_without_a_terminal_prints_lines(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("copfl.telling.FIRST", 0)
    line = ("audit", run, "--no-retrain", "--baselines", "none")
    answer = called(capsys, *line, "--out", tmp_path / "a")
    assert re.match(r"audit, round [\d,]+/[\d,]+: \d+:\d\d left\n", answer.err)
    assert called(capsys, *line, "--out", tmp_path / "b", "--json").err == ""


def test_the_report_shows_the_audit(run: Path, capsys: Capture) -> None:
    assert called(capsys, "audit", run, "--quiet", "--no-retrain", "--baselines", "none").code == 0
    assert called(capsys, "report", run).code == 0
    page = (run / "report.html").read_text()
    for words in ("Do the weights match", "Rank by weight and by contribution", "Shapley: personal"):
        assert words in page, words
    assert "leave-one-out: others" not in page
    (run / "audit.json").write_text("{")
    answer = called(capsys, "report", run)
    assert answer.code == 2
    assert "makes it again" in answer.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name one run folder, or --synthetic"),
        (["{run}", "--synthetic"], "name one run folder, or --synthetic"),
        (["{run}", "--seeds", "0,x"], "write whole numbers such as 0,1,2"),
        (["{run}", "--orders", "0"], "orders=0 must be a number of at least 1"),
        (["{run}", "--baselines", "fedcee"], 'did you mean "fedce"?'),
        (["nowhere"], "there is no folder nowhere; a run folder was expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_audited(run: Path, capsys: Capture, words: list[str], said: str) -> None:
    answer = called(capsys, "audit", *(word.format(run=run) for word in words))
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_stopped_and_how_to_go_on(run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("copfl.audit.audit.run_audit", stopped)
    answer = called(capsys, "audit", run)
    assert answer.code == 130
    assert "the same command continues from here" in answer.err
