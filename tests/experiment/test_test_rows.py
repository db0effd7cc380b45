"""What a run trains on, and what it chooses, is the same whatever its test rows say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import copfl
from copfl.core import tree
from copfl.data.samples import Dataset
from copfl.settings.user_code import as_dataset


def patients(kind: str) -> Dataset:
    """Visits of patients at three sites; a patient's visits are on one side."""
    rng, rows = np.random.default_rng(0), 150
    frame = pd.DataFrame({"site": np.repeat(["a", "b", "c"], 50), "patient": rng.integers(0, 15, rows)})
    frame["age"], frame["dose"] = rng.normal(size=rows).round(4), rng.normal(size=rows).round(4)
    if kind == "survival":
        time = rng.exponential(np.exp(-frame["age"])) + 0.01
        frame["years"], frame["died"] = np.minimum(time, 2), (time < 2).astype(int)
        options = {"kind": "survival", "target": "years", "event": "died"}
    else:
        frame["ill"] = np.where(frame["age"] + rng.normal(size=rows) > 0, "yes", "no")
        options = {"target": "ill"}
    return as_dataset(frame, client="site", group="patient", **options)


@pytest.mark.job
@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("fedper", "survival"), *((name, "classification") for name in ("fedper", "levels", "trees", ""))],
)
def test_no_test_row_has_a_say(algorithm: str, kind: str) -> None:
    """Other features and targets of the test rows change what is measured, and nothing that is trained or chosen."""
    data = patients(kind)
    assert not {*data.train.unit} & {*data.test.unit}  # type: ignore[misc]
    rng = np.random.default_rng(1)
    order = rng.permutation(len(data.test))
    other = replace(data, test=replace(data.test, x=-3 * data.test.x, y=data.test.y[order][::-1].copy()))
    settings: dict[str, Any] = {"rounds": 2, "engine": "sequential", "local_baseline": False, "seed": 0}
    settings["rivals"] = not algorithm  # where nobody names one, they decide too
    one, two = (copfl.run(algorithm or None, given, **settings) for given in (data, other))
    assert one.experiment.run.algorithm == two.experiment.run.algorithm
    for a, b in zip(tree.leaves(one.state.server), tree.leaves(two.state.server), strict=True):
        assert a.equal(b)
    for client in range(3):
        weights = (tree.leaves(result.client_model(client)) for result in (one, two))
        assert all(a.equal(b) for a, b in zip(*weights, strict=True))
    name = one.primary.name
    assert not np.array_equal(one.final(name), two.final(name))
    if one.rivals is not None and two.rivals is not None:
        assert one.rivals.chosen == two.rivals.chosen
    if one.choice is not None and two.choice is not None:
        assert one.choice.federation == two.choice.federation
        assert one.choice.sites == two.choice.sites
