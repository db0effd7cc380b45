"""The report of a site, made by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from copfl.experiment.bundle.description import Array, Description, Input, Origin, Output, Score
from copfl.federation.node.site import AuditSummary, Measurement, SentKind, SiteGain, SiteReport
from copfl.measures.metrics import ACCURACY
from copfl.stats import Interval


def gain(difference: float, low: float, high: float) -> SiteGain:
    return SiteGain(80, 0.7 + difference, 0.7, 4, difference, Interval(low, high))


LOG = AuditSummary(
    [SentKind("keys", 5, 900), SentKind("update and metrics", 5, 2_500_000)], 1, 1.25, 3, 14, "", "ab" * 32
)
DESCRIPTION = Description(
    model={"name": "mlp"},
    adapter={},
    task={},
    seed=0,
    dtype="float32",
    input=Input({"x": Array("float32", (4,))}),
    output=Output("classification", 2, ("no", "yes")),
    origin=Origin(
        "fedper in a federation", "visits", "after local training", 5, 3, round=4, select="best", client=1
    ),
    scores=(Score("accuracy", "test", 0.75, 80), Score("accuracy", "validation", 0.8, 20)),
    copfl="1",
)
ROUNDS = [
    Measurement(
        n,
        {
            f"accuracy{of}": 0.5 + 0.05 * n - less
            for of, less in (("", 0), ("_before", 0.1), ("_global", 0.2))
        },
    )
    for n in range(1, 6)
]
SITE = SiteReport(
    state=Path("/var/lib/copfl"),
    run="20261117-101500-ab12cd",
    model=Path("/var/lib/copfl/20261117-101500-ab12cd/model"),
    description=DESCRIPTION,
    metric=ACCURACY,
    rounds=ROUNDS,
    alone=[Measurement(n, {"accuracy": 0.55 + 0.03 * n}) for n in range(1, 6)],
    gain=gain(0.05, 0.01, 0.09),
    no_gain="",
    log=LOG,
    spent="epsilon 1.25 of 8 at delta 1e-05, 5 releases in 1 runs",
)


def changed(**fields: Any) -> SiteReport:
    """The site with other fields."""
    return dataclasses.replace(SITE, **fields)
