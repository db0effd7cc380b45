"""Settings as Flower's run config has them: flat keys, plain values, and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copfl.settings.checking import SettingError
from copfl.settings.flat import flattened, nested
from copfl.settings.toml import Tables
from tests.texts import CHARACTERS

WORDS = st.text(CHARACTERS, max_size=8)
PLAIN = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), WORDS)
NAMES = st.from_regex(r"[a-z][a-z_]{0,5}", fullmatch=True, alphabet=CHARACTERS)


@given(
    st.dictionaries(
        NAMES, st.dictionaries(NAMES, PLAIN | st.lists(PLAIN, max_size=3), min_size=1), max_size=3
    )
)
def test_what_is_flattened_comes_back(tables: dict[str, dict[str, Any]]) -> None:
    flat = flattened(tables)
    assert all(isinstance(value, bool | int | float | str) for value in flat.values())
    assert nested(flat) == tables


def test_a_list_is_its_json_and_so_is_a_text_that_begins_like_one() -> None:
    tables: Tables = {"algorithm": {"personal": ["head"], "name": "a"}, "samples": {"classes": ['"a"', "[b"]}}
    flat = flattened({**tables, "task": {"loss": "[x"}})
    assert flat["algorithm.personal"] == '["head"]'
    assert flat["task.loss"] == '"[x"'
    assert nested(flat) == {**tables, "task": {"loss": "[x"}}


def test_tables_of_pyproject_toml_are_read_too() -> None:
    assert nested({"run": {"rounds": 3}, "run.clients": 2, "task.metrics": "[]"}) == {
        "run": {"rounds": 3, "clients": 2},
        "task": {"metrics": []},
    }


@pytest.mark.parametrize(
    ("run_config", "error"),
    [
        ({"rounds": 3}, "rounds=3 is no setting; a setting is TABLE.KEY"),
        ({"run": {"rounds": 3}, "run.rounds": 4}, "run.rounds=4 is given twice"),
        ({"run.a.b": 3}, "run.a.b is no setting"),
        ({"run.a": {"b": 3}}, "run.a.b is no setting"),
        ({"task.metrics": "[a"}, "task.metrics='\\[a' must be a list such as"),
    ],
)
def test_what_is_no_run_config_is_one_error(run_config: dict[str, Any], error: str) -> None:
    with pytest.raises(SettingError, match=error):
        nested(run_config)
