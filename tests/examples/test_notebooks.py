"""The notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
SHORTER = {"ROUNDS = 40": "ROUNDS = 2", "ROUNDS = 10": "ROUNDS = 2", '"rounds": 20': '"rounds": 2'} | {
    '["local", "fedavg", "fedavg_ft", "fedper"], [0, 1, 2]': '["local", "fedavg"], [0, 1]'
}


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells are plain Python without magic commands, so no kernel is needed."""
    mpl.use("agg")
    content = json.loads(path.read_text("utf-8"))
    assert content["nbformat"] == 4
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(content["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert (cell["outputs"], cell["execution_count"]) == ([], None), (
            f"cell {number} has outputs: strip them"
        )
        code = "".join(cell["source"])
        for long, short in SHORTER.items():
            code = code.replace(long, short)
        exec(compile(code, f"{path.name}, cell {number}", "exec", dont_inherit=True), names)
    assert capsys.readouterr().out
