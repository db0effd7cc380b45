"""One thread per test process, the same examples in every run, and what makes the whole suite quicker."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing asks the hub; read when it is imported
os.environ["OMP_NUM_THREADS"] = "1"  # in the processes that tests start too: there is one test per processor
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of those processes would compile copfl again

import pytest
from hypothesis import settings

import copfl
from tests.slow import SLOW

HERE = Path(__file__).parent
sys.dont_write_bytecode = False  # or the workers of pytest would hand that variable on
settings.register_profile("copfl", deadline=None, max_examples=25 if SLOW else 12, derandomize=True)
settings.load_profile("copfl")

# A shell starts what runs in its background with Ctrl-C ignored, and so would be everything that the tests
# start: those that send SIGINT to a process would wait for ever.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _names_no_code() -> Iterator[None]:
    """What a test names, or calls in the name of a user, the next one has not named."""
    from copfl.settings import named_code

    with named_code.scope():
        yield


@pytest.fixture(scope="session", autouse=True)
def _images_without_rivals() -> Iterator[int]:
    """scikit-learn's models of pictures take seconds, and hundreds of tests train on digits."""
    from copfl.experiment import rivals

    most = rivals.MOST_VALUES
    with mock.patch.object(rivals, "MOST_VALUES", 0):
        yield most


@pytest.fixture
def rivals_of_images(_images_without_rivals: int) -> Iterator[None]:
    """Images and signals have the rivals that a run gives them."""
    with mock.patch("copfl.experiment.rivals.MOST_VALUES", _images_without_rivals):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported for thousands of tests stays, so nothing is gained by looking for garbage meanwhile.

    The process that hands out tests to others imports none of them, and begins seconds earlier without torch.
    """
    if not session.config.getoption("numprocesses", 0):
        import torch

        from tests import (
            vision as vision,
        )  # for tests that import peft, also by commands of the documentation

        torch.set_num_threads(1)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """As many as there are processors: more would slow each other, and tests of times. Each takes 1.2 GB."""
    from copfl.engine.machine import processors

    return min(processors(), 8)


def pytest_configure(config: pytest.Config) -> None:
    """`pytest` alone leaves out the jobs; a file, a folder or marks that somebody names get all of theirs."""
    alone = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr
    if alone and not SLOW:
        config.option.markexpr = "not job"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m job` goes into tests/jobs, too."""
    return False if config.option.markexpr == "job" and collection_path == HERE / "jobs" else None


@pytest.hookimpl(tryfirst=True)  # the marks choose what runs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: a worker that begins one of them when the others have nothing left lets them wait."""
    for item in items:
        if "jobs" in item.path.relative_to(HERE).parts[:1]:
            item.add_marker("job")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """What is imported stays: garbage collection, which comparisons ask for after every run, need not look at it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        20_000, 20, 20
    )  # tests leave little: to look for it after every 700 objects takes longer


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from the user's cache folder, and nothing is left in it."""
    with mock.patch.dict(os.environ, COPFL_CACHE=str(tmp_path_factory.mktemp("cache"))):
        yield


@pytest.fixture(scope="session", autouse=True)
def usual_engine() -> Iterator[None]:
    """No run measures which engine is the fastest, but those of engine/test_autotune.py and those of subprocesses."""
    from copfl.engine import autotune

    with mock.patch.object(autotune, "seconds", return_value=0.0):
        yield


@pytest.fixture(scope="session")
def rivals_once() -> Callable[..., Any]:
    """What a site has alone, trained once for the same rows: many tests have the same small data."""
    from copfl.rivals.site import site_rivals

    known: dict[Any, Any] = {}

    def once(rows: Any, kind: str, classes: int, metric: Any, effort: Any, seed: int) -> Any:
        key = hashlib.sha256(pickle.dumps((rows, kind, classes, effort, seed))).digest(), metric
        if key not in known:
            known[key] = site_rivals(rows, kind, classes, metric, effort, seed)
        return known[key]

    return once


@pytest.fixture(scope="module", autouse=True)
def small_rivals(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a site has alone has few trees and one penalty, but where it is tested, and in the documents.

    It took nine tenths of the time of tests of comparisons.
    """
    if {"rivals", "jobs"} & {*request.path.parts}:
        yield
        return
    from copfl.experiment import rivals
    from copfl.rivals import effort

    few = mock.patch.multiple(effort, MOST_TREES=effort.FEWEST_TREES, LINEAR_SECONDS=0.0)
    with few, mock.patch.object(rivals, "site_rivals", request.getfixturevalue("rivals_once")):
        yield


@pytest.fixture(scope="session", autouse=True)
def one_command_line() -> Iterator[None]:
    """The commands and their options are put together once, and not for each of the hundreds that tests call."""
    import typer

    with mock.patch.object(typer.main, "get_command", functools.cache(typer.main.get_command)):
        yield


@pytest.fixture(scope="session", autouse=True)
def one_search_for_words() -> Iterator[None]:
    """The words of a document, which take long on purpose, are made once, and not by each who compares them."""
    with mock.patch.object(hashlib, "scrypt", functools.cache(hashlib.scrypt)):
        yield


@pytest.fixture(scope="session", autouse=True)
def no_power_cut() -> Iterator[None]:
    """A sync waits for the disk, for what no test can see; commands that are processes of their own do wait."""

    def fsync(handle: int) -> None:
        os.fstat(handle)  # one that is closed is told all the same

    with mock.patch.object(os, "fsync", fsync):
        yield


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs of the same four clients, by algorithm, which tests look at and do not change."""
    home = tmp_path_factory.mktemp("runs")
    for name in ("copfl", "local", "fedavg"):
        copfl.run(
            name,
            clients=4,
            rounds=5,
            checkpoint_every=2,
            model="mlp",
            model_options={"width": 8},
            algorithm_options={"budget": 0.5} if name == "copfl" else {},  # masks that grow
            out=home / name,
        )
    return {name: home / name for name in ("copfl", "local", "fedavg")}
