"""The notebooks run from top to bottom, and their stored outputs are those of their code."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slow import slow

FOLDER = Path(__file__).resolve().parents[3] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHORTER = {"ROUNDS = 40": "ROUNDS = 2", "ROUNDS = 10": "ROUNDS = 2", '"rounds": 20': '"rounds": 2'} | {
    '["local", "fedavg", "fedavg_ft", "fedper"], [0, 1, 2]': '["local", "fedavg"], [0, 1]'
}
NUMBER = re.compile(r"\d+(?:\.\d+)?")
CLOSE, SHARE = (
    3.0,
    0.9,
)  # so many of the numbers differ by no more: other processors round otherwise, and times vary
Outputs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def outputs() -> Callable[..., Iterator[Outputs]]:
    """Executes a notebook as notebooks/execute.py does, which stores the outputs."""
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Iterator[Outputs]] = module.outputs
    return function


def code_cells(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def kinds(found: Outputs) -> list[str]:
    return [output["output_type"] for output in found]


def printed(found: Outputs) -> str:
    return "".join(line for output in found if output["output_type"] == "stream" for line in output["text"])


def words(text: str) -> list[str]:
    """What a text says without its numbers; a column is as wide as its longest number."""
    return re.sub(r"[-+]", " ", NUMBER.sub("0", text)).split()


def test_there_are_four() -> None:
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, outputs: Callable[..., Iterator[Outputs]]) -> None:
    """With fewer rounds; a cell prints and draws as many things as are stored."""
    content = json.loads(path.read_text("utf-8"))
    assert content["nbformat"] == 4
    stored = code_cells(content)
    assert [cell["execution_count"] for cell in stored] == list(range(1, len(stored) + 1))
    found = list(outputs(content, SHORTER))
    assert [kinds(cell["outputs"]) for cell in stored] == [kinds(one) for one in found], (
        "python notebooks/execute.py stores the outputs again"
    )
    whole = itertools.takewhile(lambda pair: not shortened(pair[0]), zip(stored, found, strict=True))
    for cell, now in whole:
        assert printed(cell["outputs"]) == printed(now)


def shortened(cell: dict[str, Any]) -> bool:
    return any(part in "".join(cell["source"]) for part in SHORTER)


@slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_those_of_the_code(
    path: Path, outputs: Callable[..., Iterator[Outputs]]
) -> None:
    content = json.loads(path.read_text("utf-8"))
    for cell, found in zip(code_cells(content), outputs(content), strict=True):
        stored, now = printed(cell["outputs"]), printed(found)
        assert words(stored) == words(now)
        pairs = zip(NUMBER.findall(stored), NUMBER.findall(now), strict=True)
        close = [abs(float(old) - float(new)) <= CLOSE for old, new in pairs]
        assert sum(close) >= SHARE * len(close), f"of {len(close)} numbers, {sum(close)} are as stored"
