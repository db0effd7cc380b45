"""What is found wrong with a command line before torch is imported is what `complete` finds."""

import re
from pathlib import Path

import pytest

from copfl.algorithms import ALGORITHMS
from copfl.errors import CopflError
from copfl.settings.complete import complete
from copfl.settings.data import data_of
from copfl.settings.layers import Layer, check_line

WRONG: list[Layer] = [
    {"algorithm": {"name": "fedavgg"}},
    {"algorithm": {"name": "FedAvG"}, "optimizer": {"name": "sgd"}},
    {"data": {"name": "digitz"}},
    {"data": {"name": "none/rows.csv"}},
    {"data": {"name": "rows.doc"}},
    {"run": {"rounds": 0}},
    {"run": {"round": 3}},
    {"run": {"engine": "sequentiel"}},
    {"optimizer": {"lr": -1}},
    {"rum": {"rounds": 3}},
    {"model": {"name": 3}},
]


@pytest.mark.parametrize("layer", WRONG)
def test_the_error_is_that_of_the_run(layer: Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CopflError) as late:
        data_of(complete(layer).data)
    with pytest.raises(type(late.value), match=f"^{re.escape(str(late.value))}$"):
        check_line(layer)


def test_what_may_be_right_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")  # `complete` says what to write
    Path("rows.csv").write_text("a,b\n1,2\n")
    check_line({}, ["all", 'copfl:score="a,b",local', "mine", "other:FedMine", *ALGORITHMS])
    for name in ("digits", "rows.csv", "hf:some/set", "mine:load"):
        check_line({"data": {"name": name}, "algorithm": {"anything": 3}})


def test_a_row_of_a_comparison_is_known() -> None:
    with pytest.raises(CopflError, match='did you mean "local"'):
        check_line({}, ["copfl, locl:lr=0.1"])
