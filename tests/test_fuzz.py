"""Every reader of foreign input accepts it or raises a CopflError, and nothing else.

The corpus has inputs that failed once, found by `python fuzz/run.py`; each is named after its target.
Hypothesis searches for more in every run, for a few seconds. The fuzzer tries a million cases.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import string
from pathlib import Path
from typing import Any

import pytest
from fuzz.run import changed, memory_limit
from fuzz.targets import SETTINGS, TARGETS, check_tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from copfl.errors import CopflError
from copfl.federation.server.rounds import numbers
from tests.slow import SLOW
from tests.texts import CHARACTERS

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())
MIB = 2048  # memory that a reader may allocate
# Of each reader. The fuzzer tries a million.
EXAMPLES = 40 if SLOW else 15
quick = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def is_accepted(name: str, data: bytes) -> bool:
    """Whether the target accepts the input; False if it refuses it."""
    with memory_limit(MIB), contextlib.suppress(CopflError):
        TARGETS[name].read(data)
        return True
    return False


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore")
def test_inputs_that_failed_once(path: Path) -> None:
    name = path.name.partition("-")[0]
    TARGETS[name].examples()
    is_accepted(name, path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_changed_examples(name: str) -> None:
    """The same cases in every run. The first ones are the unchanged examples; some must be accepted."""
    draw, examples = random.Random(name), TARGETS[name].examples()
    cases = [*examples, *(changed(draw, examples) for _ in range(EXAMPLES - len(examples)))]
    assert sum(is_accepted(name, data) for data in cases) > 0


plain = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(CHARACTERS, max_size=20),
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
    """They are refused, or their run.toml is read back unchanged."""
    with contextlib.suppress(CopflError):
        check_tables(tables)


@quick
@given(
    st.one_of(st.text(CHARACTERS, max_size=60), st.sampled_from(SETTINGS)), st.text(CHARACTERS, max_size=5)
)
def test_any_text_after_set(first: str, second: str) -> None:
    is_accepted("set", f"{first}{second}".encode("utf-8", "surrogatepass"))


@quick
@given(
    st.sampled_from(["npz", "npy", "archive", "image", "cifar_batch", "partition_file", "rounds_file"]),
    st.binary(),
)
@pytest.mark.filterwarnings("ignore")
def test_any_bytes_in_a_file(name: str, data: bytes) -> None:
    is_accepted(name, data)


@quick
@given(st.binary(min_size=40, max_size=300))
@pytest.mark.filterwarnings("ignore")
def test_arrays_of_any_dtype_and_shape(data: bytes) -> None:
    is_accepted("arrays", data)


@quick
@given(
    st.dictionaries(st.text(CHARACTERS, max_size=8), st.one_of(plain, st.floats(1e300, 1e308)), max_size=6),
    st.booleans(),
)
def test_reported_metrics_are_finite_or_none(metrics: dict[str, Any], nested: bool) -> None:
    accepted = numbers({"a": metrics} if nested else metrics)
    assert all(v is None or math.isfinite(v) for v in accepted.values())
    json.dumps(accepted, allow_nan=False)
