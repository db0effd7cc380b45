"""What comes from outside is accepted or refused by a CopflError; nothing else ever comes out of it.

The corpus holds inputs that once did something else, found by `python fuzz/run.py`; each is named after its target.
Hypothesis looks for more in every run, for a few seconds; the fuzzer does so for a million cases.
"""

from __future__ import annotations

import contextlib
import random
import resource
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz.run import changed
from fuzz.targets import SETTINGS, TARGETS, resolved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from copfl.errors import CopflError

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())
quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@contextlib.contextmanager
def bounded(gibibytes: int = 2) -> Iterator[None]:
    """Inside, this process gets no more than so much memory beyond what it has."""
    have = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (have + gibibytes * 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fed(name: str, data: bytes) -> None:
    with bounded(), contextlib.suppress(CopflError):
        TARGETS[name].one(data)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore")
def test_what_once_failed(path: Path) -> None:
    name = path.name.partition("-")[0]
    TARGETS[name].seeds()
    fed(name, path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_a_few_changed_examples(name: str) -> None:
    """The same cases in every run; the first of them are the examples themselves, and some are accepted."""
    target, draw, accepted = TARGETS[name], random.Random(name), 0
    seeds = target.seeds()
    for case in range(40):
        data = seeds[case] if case < len(seeds) else changed(draw, seeds)
        with bounded(), contextlib.suppress(CopflError):
            target.one(data)
            accepted += 1
    assert accepted > 0


plain = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.none(),
)
titles = st.sampled_from(
    ["run", "copfl", "optimizer", "partition", "model", "data", "mlp", "robust", "attack", "classes"]
)
keys = st.one_of(
    st.sampled_from(
        ["name", "lr", "rate", "clients", "seed", "batch", "width", "device", "dir", "per_client", "value"]
    ),
    st.text(string.ascii_lowercase, min_size=1, max_size=8),
)


@quick
@given(st.dictionaries(titles, st.dictionaries(keys, plain, max_size=4), max_size=4))
def test_tables_of_any_values(tables: dict[str, dict[str, Any]]) -> None:
    """They are refused, or run.toml says exactly what was chosen."""
    with contextlib.suppress(CopflError):
        resolved(tables)


@quick
@given(st.one_of(st.text(max_size=60), st.sampled_from(SETTINGS)), st.text(max_size=5))
def test_any_words_after_set(first: str, second: str) -> None:
    fed("set", f"{first}{second}".encode("utf-8", "surrogatepass"))


@quick
@given(
    st.sampled_from(["npz", "npy", "archive", "image", "cifar_batch", "partition_file", "rounds_file"]),
    st.binary(),
)
@pytest.mark.filterwarnings("ignore")
def test_any_bytes_in_a_file(name: str, data: bytes) -> None:
    fed(name, data)


@quick
@given(st.binary(min_size=40, max_size=300))
@pytest.mark.filterwarnings("ignore")
def test_arrays_of_any_dtype_and_shape(data: bytes) -> None:
    fed("arrays", data)


@quick
@given(
    st.dictionaries(st.text(max_size=8), st.one_of(plain, st.floats(1e300, 1e308)), max_size=6), st.booleans()
)
def test_whatever_a_node_says_of_itself_is_written_down_or_left_out(
    figures: dict[str, Any], nested: bool
) -> None:
    import json
    import math

    from copfl.flower.server import numbers

    found = numbers({"a": figures} if nested else figures)
    assert all(v is None or math.isfinite(v) for v in found.values())
    json.dumps(found, allow_nan=False)
