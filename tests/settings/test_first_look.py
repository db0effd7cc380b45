"""What is found wrong with a command line before torch is imported is what `complete` finds."""

import re
from pathlib import Path

import pytest

from copfl.algorithms import ALGORITHMS
from copfl.errors import CopflError
from copfl.settings.complete import complete
from copfl.settings.data import data_of
from copfl.settings.first_look import Layer, check_algorithm_name, look

WRONG: list[Layer] = [
    {"algorithm": {"name": "fedavgg"}},
    {"algorithm": {"name": "FedAvG"}, "optimizer": {"name": "sgd"}},
    {"data": {"name": "digitz"}},
    {"data": {"name": "none/rows.csv"}},
    {"data": {"name": "rows.doc"}},
    {"data": {"name": "rows.csv", "target": "wrong"}},
    {"data": {"name": "rows.csv", "target": "b", "client": "hospital"}},
    {"data": {"name": "rows.csv", "target": "b", "drop": "a,wrong"}},
    {"data": {"name": "rows.csv", "targets": "b"}},
    {"data": {"name": "digits", "target": "digit"}},
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
    Path("rows.csv").write_text(" a ,b\n1,2\n")
    with pytest.raises(CopflError) as late:
        data_of(complete(layer).data)
    with pytest.raises(type(late.value), match=f"^{re.escape(str(late.value))}$"):
        look(layer)


def test_what_may_be_right_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")  # `complete` says what to write
    Path("rows.csv").write_text("a,b\n1,2\n")
    for name in ("mine", "other:FedMine", *ALGORITHMS):
        check_algorithm_name(name)
    for name in ("digits", "rows.csv", "hf:some/set", "mine:load"):
        look({"data": {"name": name}, "algorithm": {"anything": 3}})
    Path("damaged.csv").write_bytes(b"\xff,a\n")  # the reader says so
    Path("long.csv").write_text("a" * 2**21)  # its first line is not read by itself
    for file, target in (("rows.csv", "a,b"), ("damaged.csv", "none"), ("long.csv", "none")):
        look({"data": {"name": file, "target": target}})
