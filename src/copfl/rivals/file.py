"""The rivals of a run in its folder: rivals.json.

A run writes it, and its report reads it; `choose` has the same in its ranking.
"""

from pathlib import Path
from typing import Any

import numpy as np

from copfl import files, foreign
from copfl.measures.metrics import MetricInfo
from copfl.rivals.records import Rivals, RivalValues
from copfl.stats import Interval
from copfl.tables import plain

FILE = "rivals.json"


def as_json(rivals: Rivals) -> dict[str, Any]:
    """The content of the file; a value per site, null where there is none."""
    return dict(
        plain(
            {
                "metrics": [metric.as_json() for metric in rivals.metrics],
                "chosen": rivals.chosen,
                "by_site": list(rivals.by_site),
                "values": {
                    name: {"validated": values.validated, "tested": dict(values.tested)}
                    for name, values in rivals.values.items()
                },
                "personal": dict(rivals.personal),
                "interval": [list(bounds) for bounds in rivals.interval],
                "left_out": dict(rivals.left_out),
                "inputs": rivals.inputs,
                "models": rivals.models,
            }
        )
    )


def write(rivals: Rivals, folder: Path) -> None:
    """Writes the file into a run folder.

    Args:
        rivals: Of a run.
        folder: Of the run.
    """
    files.write_json(folder / FILE, as_json(rivals))


def read(folder: Path) -> Rivals | None:
    """The content of the file in a run folder; None where there is none."""
    return foreign.of_run(folder / FILE, from_json)


def from_json(content: dict[str, Any]) -> Rivals:
    """The record of what `as_json` gave."""

    def numbers(by_metric: dict[str, Any]) -> dict[str, Any]:
        return {name: np.array(values, np.float64) for name, values in by_metric.items()}

    def bound(value: float | None, unknown: float) -> float:
        return unknown if value is None else float(value)

    return Rivals(
        metrics=tuple(MetricInfo(**metric) for metric in content["metrics"]),
        values={
            name: RivalValues(np.array(values["validated"], np.float64), numbers(values["tested"]))
            for name, values in content["values"].items()
        },
        chosen=str(content["chosen"]),
        by_site=tuple(map(str, content["by_site"])),
        personal=numbers(content["personal"]),
        interval=tuple(
            Interval(bound(low, -np.inf), bound(high, np.inf)) for low, high in content["interval"]
        ),
        left_out={str(name): str(why) for name, why in content["left_out"].items()},
        inputs=str(content["inputs"]),
        models=str(content["models"]),
    )
