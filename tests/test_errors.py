from __future__ import annotations

import pytest

from copfl.errors import (
    CopflError,
    DataError,
    RunError,
    Stopped,
    UsageError,
    above,
    at_least,
    fraction_of,
    how_to_set,
    on_command_line,
    one_of,
    stoppable,
    unknown,
)


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


@pytest.mark.parametrize("wrong", [-1.0, 0.0, float("nan"), float("inf")])
def test_numbers_out_of_range(wrong: float) -> None:
    with pytest.raises(UsageError, match=f"^b={wrong} must be a number above 0$"):
        above(0, a=1e-9, b=wrong)
    with pytest.raises(UsageError, match=f"^b={wrong} must be a number of at least 1$"):
        at_least(1, a=1, b=wrong)
    with pytest.raises(
        UsageError, match=f"^b={wrong} must be above 0 and at most 1: it is a fraction of the cake$"
    ):
        fraction_of("the cake", a=1.0, b=wrong)


def test_a_name_out_of_a_few() -> None:
    one_of(("both", "none"), score="both", other="none")
    with pytest.raises(UsageError, match='no score "bth"; did you mean "both"'):
        one_of({"both": 1, "none": 2}, score="bth")


def fail_after(cause: BaseException) -> None:
    try:
        raise cause
    finally:
        raise RuntimeError("on the way out")


def test_ctrl_c_explains_how_to_continue() -> None:
    with pytest.raises(Stopped, match="go on"), stoppable("go on"):
        raise KeyboardInterrupt


def test_ctrl_c_is_known_behind_the_failure_that_it_caused() -> None:
    """As torch fails when it is interrupted on its way out of vmap."""
    with pytest.raises(Stopped, match="go on"), stoppable("go on"):
        fail_after(KeyboardInterrupt())


def test_the_innermost_message_wins() -> None:
    with pytest.raises(Stopped, match="inner"), stoppable("outer"), stoppable("inner"):
        raise KeyboardInterrupt


def test_a_failure_of_another_cause_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="way out"), stoppable("go on"):
        fail_after(ValueError())


def test_a_setting_is_named_as_the_user_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        ("optimizer.lr", 0.1, "--lr"): ("--lr 0.1", "lr=0.1"),
        ("partition.name", "iid", "--partition"): ("--partition iid", "partition='iid'"),
        ("data.drop", "id", ""): ("--set data.drop=id", "data_options={'drop': 'id'}"),
        ("data.drop", "first name,id", ""): (
            "--set 'data.drop=first name,id'",
            "data_options={'drop': 'first name,id'}",
        ),
        ("data.group", "a $", "--group"): ("--group 'a $'", "group='a $'"),
        ("kind", "regression", "--task"): ("--task regression", "task='regression'"),
        ("task.metrics", "auc", "--metrics"): ("--metrics auc", "task={'metrics': 'auc'}"),
    }
    for arguments, (on_line, in_python) in cases.items():
        assert how_to_set(*arguments) == in_python
        with on_command_line():
            assert how_to_set(*arguments) == on_line
        assert how_to_set(*arguments) == in_python
