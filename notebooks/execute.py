"""Executes notebooks from top to bottom and stores their outputs: python notebooks/execute.py [NOTEBOOK ...].

The cells are plain Python without magic commands, so no kernel is needed. Stored are what a cell prints, with FOLDER
for a temporary one, its figures, and the value of its last line.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def outputs(
    content: dict[str, Any], replaced: Mapping[str, str] | None = None
) -> Iterator[list[dict[str, Any]]]:
    """The outputs of each code cell, in the format of a notebook.

    Args:
        content: The notebook.
        replaced: Parts of the code, with what is executed instead of them.
    """
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(content["cells"]):
        if cell["cell_type"] != "code":
            continue
        code, printed = "".join(cell["source"]), io.StringIO()
        for part, other in (replaced or {}).items():
            code = code.replace(part, other)
        with contextlib.redirect_stdout(printed):
            value = _executed(code, f"cell {number}", names)
        text = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "FOLDER", printed.getvalue())
        lines = text.splitlines(keepends=True)
        yield [{"output_type": "stream", "name": "stdout", "text": lines}] * bool(lines) + [
            *(_picture(plt.figure(figure)) for figure in plt.get_fignums()),
            *([] if value is None else [_picture(value) if isinstance(value, Figure) else _shown(value)]),
        ]
        plt.close("all")


def _executed(code: str, cell: str, names: dict[str, object]) -> object:
    """The value of the last line, if it is an expression; None of others."""
    body = ast.parse(code).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), cell, "exec", dont_inherit=True), names)
    return (
        None
        if last is None
        else eval(compile(ast.Expression(last.value), cell, "eval", dont_inherit=True), names)
    )


def _shown(value: Any) -> dict[str, Any]:
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data = {"text/html": value._repr_html_().splitlines(keepends=True), **data}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def _picture(figure: Any) -> dict[str, Any]:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
    data = {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": [str(figure)]}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def main() -> None:
    for path in map(Path, sys.argv[1:] or sorted(map(str, HERE.glob("*.ipynb")))):
        content = json.loads(path.read_text("utf-8"))
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        for count, (cell, found) in enumerate(zip(cells, outputs(content), strict=True), 1):
            cell["execution_count"], cell["outputs"] = count, found
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(path)


if __name__ == "__main__":
    main()
