from __future__ import annotations

import pytest

from copfl.errors import CopflError, DataError, RunError, UsageError, unknown


@pytest.mark.parametrize("kind", [UsageError, DataError, RunError])
def test_all_errors_are_caught_as_one(kind: type[CopflError]) -> None:
    assert issubclass(kind, CopflError)


def test_a_near_miss_is_guessed() -> None:
    error = unknown("algorithm", "fedpack", ["fedpac", "copfl"])
    assert isinstance(error, UsageError)
    assert str(error) == 'no algorithm "fedpack"; did you mean "fedpac"? Known: copfl, fedpac'


def test_a_far_miss_is_not_guessed() -> None:
    assert str(unknown("model", "zzz", ["cnn", "mlp"])) == 'no model "zzz". Known: cnn, mlp'


def test_nothing_known_is_said() -> None:
    assert str(unknown("model", "cnn", [])) == 'no model "cnn". Known: none'


def test_a_name_that_is_no_text_is_still_an_error_a_person_can_read() -> None:
    assert "Known: both, none" in str(unknown("score", None, ("both", "none")))
    assert 'no score "3"' in str(unknown("score", 3, ("both",)))
