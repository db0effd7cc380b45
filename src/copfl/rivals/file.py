"""The rivals of a run as JSON: rivals.json of a run and of a site; `choose` has the same in its ranking."""

from typing import Any

import numpy as np

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
