"""`copfl doctor`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import copfl
from copfl.cli import doctor
from copfl.errors import EXTRAS
from tests.commands import called

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
FOR_DEVELOPERS = {"all", "browser", "docs", "test"}


def test_it_shows_what_is_installed_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    answer = called(capsys, "doctor")
    assert answer.code == 0
    assert re.findall(r"^(\S+):$", answer.out, re.MULTILINE) == [
        "Versions", "GPUs", "Extras", "Folders", "Self-test",
    ]  # fmt: skip
    assert re.search(
        r"^  cpu: passed, accuracy \d+\.\d % after 10 rounds, \d+\.\d s$", answer.out, re.MULTILINE
    )


def test_a_self_test_that_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no such kernel")

    monkeypatch.setattr(copfl, "run", broken, raising=False)
    answer = called(capsys, "doctor")
    assert answer.code == 1
    assert "  cpu: FAILED, OSError: no such kernel, " in answer.out
    assert called(capsys, "doctor", "--no-self-test").code == 0


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"transformers": "5.0"}.get)
    assert doctor._extra("adapters", ("transformers", "peft")).endswith(
        "without peft; pip install 'copfl[adapters]'"
    )


def test_the_extras_are_those_of_the_package() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    packages = {
        name: tuple(re.split(r"[<>=\[]", requirement)[0] for requirement in extras[name])
        for name in extras.keys() - FOR_DEVELOPERS
    }
    assert packages == EXTRAS
