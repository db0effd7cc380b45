"""A comparison in Python: a few lines, data frames and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.errors import UsageError


def test_a_comparison_is_pleasant_to_hold(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    how: dict[str, Any] = {"clients": 2, "rounds": 2, "tune": {}, "seeds": range(2), "rivals": False}
    found = copfl.compare("fedavg,local", (x, (x[:, 0] > 0).astype(int)), out=tmp_path, **how)
    lines = repr(found).splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("accuracy in %")
    assert sorted(line.partition(", ")[2] for line in lines[1:]) == ["not distinguishable", "the reference"]
    rows, clients, rounds = (found.to_pandas(of) for of in ("rows", "clients", "rounds"))
    assert rows["row"].tolist() == ["fedavg", "local"]
    assert (len(clients), len(rounds)) == (2 * 2 * 2, 2 * 2 * 2)
    mean = clients.groupby("row")["accuracy"].mean()
    np.testing.assert_allclose(mean[rows["row"]], rows["accuracy"])
    gap = found.rows[1].differences["accuracy"]
    assert rows["verdict"].tolist() == ["reference", gap.verdict]
    assert (rows["difference_low"][1], rows["difference_high"][1]) == tuple(gap.both)
    assert np.isnan(rows["p"][0])
    assert rows["p"][1] == gap.p
    assert found._repr_html_().count("<table>") >= 2
    (axes,) = found.plot(tmp_path / "curves.png").axes
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert all(float(round).is_integer() for round in axes.get_xticks())
    with pytest.raises(UsageError, match='did you mean "rows"'):
        found.to_pandas("row")
