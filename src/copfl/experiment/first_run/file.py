"""The choice of a first run in its folder: choice.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from copfl import files, foreign
from copfl.experiment.first_run.candidates import Choice, Validated
from copfl.tables import plain

FILE = "choice.json"


def as_json(choice: Choice) -> dict[str, Any]:
    """The content of the file; null where a site has no loss."""
    return dict(plain({**choice._asdict(), "validated": choice.validated._asdict()}))


def write(choice: Choice, folder: Path) -> None:
    """Writes the file into a run folder."""
    files.write_bytes(folder / FILE, (json.dumps(as_json(choice)) + "\n").encode())


def read(folder: Path) -> Choice | None:
    """The content of the file in a run folder; None where there is none."""
    return foreign.of_run(folder / FILE, _choice)


def _choice(content: dict[str, Any]) -> Choice:
    found = content["validated"]
    validated = Validated(
        by_site={name: np.array(values, np.float64) for name, values in found["by_site"].items()},
        left_out={name: str(why) for name, why in found["left_out"].items()},
        is_rmse=bool(found["is_rmse"]),
        folds=int(found["folds"]),
    )
    return Choice(str(content["federation"]), tuple(map(str, content["sites"])), validated)
