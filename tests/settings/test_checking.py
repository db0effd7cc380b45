"""Names and keywords as people write them, checked against the signatures they are for."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copfl import foreign
from copfl.errors import UsageError
from copfl.settings import checking, toml
from tests.texts import CHARACTERS


def factory(
    count: int = 1,
    rate: float = 0.5,
    name: str = "a",
    flag: bool = False,
    parts: tuple[str, ...] = (),
    maybe: int | None = None,
    anything: Any = None,
) -> None:
    """Takes one keyword of every kind."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"count": 3}, {"count": 3}),
        ({"rate": 1}, {"rate": 1.0}),
        ({"name": "b"}, {"name": "b"}),
        ({"flag": True}, {"flag": True}),
        ({"parts": ["head", "stem"]}, {"parts": ("head", "stem")}),
        ({"parts": "head"}, {"parts": ("head",)}),
        ({"maybe": None}, {"maybe": None}),
        ({"maybe": 2}, {"maybe": 2}),
        ({"anything": [1, "x"]}, {"anything": [1, "x"]}),
    ],
)
def test_keywords_get_the_types_the_factory_wants(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = checking.checked("it", factory, given)
    assert found == expected
    assert [type(v) for v in found.values()] == [type(v) for v in expected.values()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 1.5}, r"it\.count=1\.5 must be a whole number"),
        ({"count": True}, r"it\.count=True must be a whole number"),
        ({"rate": "high"}, r"it\.rate='high' must be a number"),
        ({"rate": float("nan")}, r"it\.rate=nan must be a finite number"),
        ({"rate": float("inf")}, r"it\.rate=inf must be a finite number"),
        ({"name": 3}, r"it\.name=3 must be a word"),
        ({"flag": 1}, r"it\.flag=1 must be true or false"),
        ({"parts": [3]}, r"it\.parts=3 must be a word"),
        ({"maybe": "x"}, r"it\.maybe='x' must be a whole number or left out"),
        ({"rat": 0.5}, r'it\.rat=0\.5 is no setting; did you mean "rate"\?'),
    ],
)
def test_a_misfit_says_what_is_allowed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checking.checked("it", factory, given)


def test_annotations_that_name_what_is_not_there_are_no_obstacle() -> None:
    def strange(width: NotThere = 3) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Annotated with a name that does not exist."""

    assert checking.checked("it", strange, {"width": 5}) == {"width": 5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("algorithm.rate=0.15", ("algorithm", "rate", 0.15)),
        ("run.threads = 2", ("run", "threads", 2)),
        ("algorithm.merge=union", ("algorithm", "merge", "union")),
        ('algorithm.merge="union"', ("algorithm", "merge", "union")),
        ("optimizer.keep=false", ("optimizer", "keep", False)),
        ('algorithm.personal=["head", "body.4"]', ("algorithm", "personal", ["head", "body.4"])),
        ("model.head=", ("model", "head", "")),
    ],
)
def test_a_setting_is_read_as_toml_or_as_a_word(text: str, expected: tuple[str, str, Any]) -> None:
    assert toml.assignment(text) == expected


@pytest.mark.parametrize("text", ["rate=2", "algorithm.rate", "=", "algorithm.=2", ".rate=2", ""])
def test_what_is_no_setting_says_how_one_looks(text: str) -> None:
    with pytest.raises(UsageError, match=r"must be TABLE\.KEY=VALUE"):
        toml.assignment(text)


plain = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(CHARACTERS),
)


@given(st.dictionaries(st.sampled_from("abcdef"), st.one_of(plain, st.lists(plain, max_size=3)), max_size=4))
def test_what_is_written_is_read_back(table: dict[str, Any]) -> None:
    text = toml.written({"run": table, "model": {"name": "x"}})
    read = toml.read(text.encode(), "it")
    assert read == {
        "run": foreign.cleaned(table),
        "model": {"name": "x"},
    }  # control characters as their codes
    assert tomllib.loads(text)["run"] == table


def test_a_run_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for content, message in (
        (b"[run\n", "not valid TOML"),
        (b"\xff\xfe\x00", "not valid TOML: .*can't decode"),
        (b"rounds = 3\n", '"rounds" is outside any table'),
    ):
        path = tmp_path / "run.toml"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message) as error:
            toml.read_file(path)
        assert str(path) in str(error.value)
    with pytest.raises(UsageError, match=r"cannot read .*gone.toml: No such file"):
        toml.read_file(tmp_path / "gone.toml")
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        toml.read_file(tmp_path)


@dataclasses.dataclass
class Maker:
    """Something of a user's own that can be called and has no hash."""

    width: int = 4

    def __call__(self, shape: tuple[int, ...], depth: int = 2) -> int:
        return self.width * depth


def test_a_factory_without_a_hash_is_read_like_any_other() -> None:
    with pytest.raises(TypeError):
        hash(Maker())
    assert checking.parameters_of(Maker(), skip=("shape",))["depth"].default == 2
    assert checking.checked("model", Maker(), {"depth": 3}) == {"depth": 3}
    with pytest.raises(UsageError, match="dept"):
        checking.checked("model", Maker(), {"dept": 3})
