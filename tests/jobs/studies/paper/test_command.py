"""`copfl reproduce` finds the study where the repository is, and says so where it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from copfl.cli import reproduce
from tests.commands import called, environment

ROOT = Path(__file__).resolve().parents[4]


def test_the_study_is_beside_the_source_tree_or_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reproduce.repository_of_the_study() == ROOT
    monkeypatch.setattr(
        reproduce, "__file__", str(tmp_path / "lib/python3/site-packages/copfl/cli/reproduce.py")
    )
    monkeypatch.chdir(ROOT)
    assert reproduce.repository_of_the_study() == ROOT


def test_without_the_repository_there_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        reproduce, "__file__", str(tmp_path / "lib/python3/site-packages/copfl/cli/reproduce.py")
    )
    monkeypatch.chdir(tmp_path)
    for words in (("table1", "--from-records"), ("--help",), ()):
        answer = called(capsys, "reproduce", *words)
        assert (answer.code, answer.out) == (2, "")
        assert "the reproduction is a study of the repository" in answer.err
        assert "clone the repository and run `copfl reproduce` in its folder" in answer.err


def test_the_options_are_those_of_the_study(capsys: pytest.CaptureFixture[str]) -> None:
    answer = called(capsys, "reproduce", "--help")
    assert answer.code == 0
    assert answer.out.startswith("Usage: copfl reproduce [OPTIONS] EXPERIMENT")
    assert "--from-records" in answer.out
    misspelt = called(capsys, "reproduce", "table1", "--from-record")
    assert misspelt.code == 2
    assert "--from-records" in misspelt.err
    assert called(capsys, "reproduce").code == 2  # which experiment?


def test_python_m_in_the_repository_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, "-m", "studies.paper", "--help"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, called(capsys, "reproduce", "--help").out)
