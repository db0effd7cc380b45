"""The choice of a first run in its folder: choice.json.

A run writes it; the summary and the report read it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from copfl import files
from copfl.experiment.first_run.candidates import FirstRunChoice, Validated
from copfl.tables import plain

FILE = "choice.json"


def as_json(choice: FirstRunChoice) -> dict[str, Any]:
    """The content of the file; null where a site has no loss."""
    return dict(plain({**choice._asdict(), "validated": choice.validated._asdict()}))


def write(choice: FirstRunChoice, folder: Path) -> None:
    """Writes the file into a run folder.

    Args:
        choice: What was chosen.
        folder: Of the run.
    """
    files.write_bytes(folder / FILE, (json.dumps(as_json(choice)) + "\n").encode())


def read(folder: Path) -> FirstRunChoice | None:
    """The content of the file in a run folder; None where there is none."""
    path = folder / FILE
    if not path.is_file():
        return None
    content = json.loads(path.read_text("utf-8"))
    validated = content["validated"]
    by_site = {name: np.array(values, np.float64) for name, values in validated["by_site"].items()}
    return FirstRunChoice(
        content["federation"], tuple(content["sites"]), Validated(**{**validated, "by_site": by_site})
    )
