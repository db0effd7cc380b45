"""Rivals in processes of their own: the bits of one process, errors as there, and nothing left running."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, REGRESSION
from copfl.errors import RunError
from copfl.measures.metrics import METRICS
from copfl.rivals import process
from copfl.rivals.effort import FEWEST_TREES, PENALTIES, Effort
from copfl.rivals.process import SiteTask
from copfl.rivals.site import site_rivals
from tests.rivals.test_site import two_classes

EFFORT = Effort(PENALTIES, FEWEST_TREES, FEWEST_TREES, 1.0)


def tasks(count: int = 1, kind: str = CLASSIFICATION) -> dict[int, SiteTask]:
    """Of sites 1, 3, 5, ..., each with more rows than the one before."""
    of_sites = {}
    for n in range(count):
        rows = two_classes(train=40 + 10 * n, seed=n)
        if kind == REGRESSION:
            rows = rows._replace(y=rows.x.sum(1))
        metric = METRICS["rmse" if kind == REGRESSION else "accuracy"]
        of_sites[2 * n + 1] = SiteTask(rows, kind, 2, metric, EFFORT, n)
    return of_sites


@pytest.mark.job
@pytest.mark.parametrize(("kind", "processes"), [(CLASSIFICATION, 2), (REGRESSION, 1)])
def test_they_have_the_bits_of_one_process(kind: str, processes: int) -> None:
    sites = tasks(3, kind)
    with process.beside(sites, processes) as trained:
        of_sites = trained()
    assert list(of_sites) == [1, 3, 5]
    for site, rivals in of_sites.items():
        expected = site_rivals(*sites[site])
        assert list(rivals) == list(expected)
        for name, rival in rivals.items():
            assert rival.validated == expected[name].validated
            assert np.array_equal(rival.answers, expected[name].answers)
            assert np.array_equal(rival.inside, expected[name].inside, equal_nan=True)
            new = sites[site].rows.x_test + 0.5
            assert np.array_equal(rival.fitted[0](new), expected[name].fitted[0](new))


@pytest.mark.job
def test_more_processes_than_sites_are_not_started() -> None:
    with process.beside(tasks(), 5) as trained:
        assert list(trained()) == [1]


def test_an_error_of_a_site_is_raised_as_in_one_process() -> None:
    with process.beside(tasks(kind=NEXT_TOKEN), 1) as trained, pytest.raises(ValueError, match="next token"):
        trained()


def test_a_process_that_was_killed_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = "import os, sys; sys.stdin.buffer.read(); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", killed))
    lacking = (
        r"\(exit code -9\), perhaps out of memory; with .*workers.* they are trained one after the other"
    )
    with process.beside(tasks(), 1) as trained, pytest.raises(RunError, match=lacking):
        trained()


def test_a_process_that_cannot_be_started_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "COMMAND", ("/no/such/python",))
    with pytest.raises(RunError, match="cannot be started"), process.beside(tasks(), 1):
        pass


def test_nothing_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block ends by an error, as by Ctrl-C, while they train."""
    started: list[subprocess.Popen[bytes]] = []
    start = process._started
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))

    def watched() -> subprocess.Popen[bytes]:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(process, "_started", watched)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), process.beside(tasks(2), 2):
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 60
    assert [child.returncode for child in started] == [-9, -9]


@pytest.mark.job
def test_it_imports_no_torch_and_no_module_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "sklearn", "numpy", "pickle", "copfl"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    code = "import sys, copfl.rivals.process; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    with process.beside(tasks(), 1) as trained:
        assert list(trained()) == [1]
