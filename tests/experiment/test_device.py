"""Which device a run has where nobody names one; what a GPU computes: benchmarks/exam.py and tests/elsewhere.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import copfl
from copfl.engine import autotune
from copfl.experiment import preparation
from copfl.experiment.preparation import on_device
from copfl.settings.complete import complete
from copfl.telling import heard


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that says that it has a GPU; the devices for which a run was prepared."""
    names: list[str] = []

    def device_of(name: str) -> torch.device:
        names.append(name)
        return torch.device("cpu")

    monkeypatch.setattr(preparation, "device_of", device_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return names


@pytest.mark.parametrize(
    ("cpu", "gpu", "chosen", "text"),
    [
        (2.0, None, "cpu", "device cpu: the rounds take about 2 s on cpu, at most; --device names one"),
        (90.0, 30.0, "cuda", "device cuda: the rounds take about 90 s on cpu and 30 s on cuda, at most"),
        (90.0, 120.0, "cpu", "device cpu: the rounds take about 90 s on cpu and 120 s on cuda"),
    ],
)
def test_the_faster_device_is_taken_and_named_in_a_line(
    cpu: float, gpu: float | None, chosen: str, text: str, asked: list[str]
) -> None:
    lines: list[str] = []
    run = complete({"model": {"name": "mlp"}, "algorithm": {"name": "fedavg"}})
    assert run.run.device == "auto"
    with (
        mock.patch.object(autotune, "total_seconds", return_value=cpu),
        mock.patch.object(autotune, "gpu_seconds", return_value=gpu) as timed,
        heard(lines.append),
    ):
        assert on_device(run).run.device == chosen
    assert timed.called == (gpu is not None)
    (line,) = [line for line in lines if line.startswith("device ")]
    assert line.startswith(text)
    assert asked == ["cpu", *(["cuda"] if gpu else [])]


@pytest.mark.parametrize("settings", [{"workers": 2}, {"threads": 2}, {"device": "cpu"}])
def test_what_only_a_cpu_has_decides(settings: dict[str, Any], asked: list[str]) -> None:
    run = complete({"algorithm": {"name": "fedavg"}, "run": settings})
    with heard(pytest.fail):
        assert on_device(run).run.device == "cpu"
    assert not asked


def test_without_a_gpu_nothing_is_said_and_the_folder_names_the_cpu(tmp_path: Path) -> None:
    lines: list[str] = []
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run = complete({"algorithm": {"name": "fedavg"}})
    with heard(lines.append):
        assert on_device(run).run.device == "cpu"
    assert not lines
    copfl.run("fedavg", model="mlp", rounds=1, out=tmp_path / "run")
    assert 'device = "cpu"' in (tmp_path / "run" / "run.toml").read_text()
