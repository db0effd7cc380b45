"""The choice of a first run in its folder: choice.json.

A run writes it; the summary and the report read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from copfl import files, foreign
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
    files.write_json(folder / FILE, as_json(choice))


def read(folder: Path) -> FirstRunChoice | None:
    """The content of the file in a run folder; None where there is none."""
    return foreign.of_run(folder / FILE, _choice)


def _choice(content: dict[str, Any]) -> FirstRunChoice:
    read = content["validated"]
    validated = Validated(
        by_site={name: np.array(values, np.float64) for name, values in read["by_site"].items()},
        left_out={name: str(why) for name, why in read["left_out"].items()},
        is_rmse=bool(read["is_rmse"]),
        folds=int(read["folds"]),
    )
    return FirstRunChoice(str(content["federation"]), tuple(map(str, content["sites"])), validated)
