"""Comparisons with partial participation: every client has a value, but one that trains alone and never did."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from copfl.comparison.compare import compare
from copfl.experiment.final import FINAL
from tests.comparison.small import base, clouds


def test_every_client_has_a_value(tmp_path: Path) -> None:
    data = clouds(tmp_path / "clouds.npz")
    settings = base(data, clients=6, participation=0.2, rounds=2)
    table = compare(["fedavg", "local"], seeds=[0], tune={}, out=tmp_path / "a", base_tables=settings)
    fedavg, local = (row.outcomes[0] for row in table.rows)
    assert fedavg.final_evaluation is not None
    assert local.final_evaluation is not None
    never = fedavg.final_evaluation.never_trained
    assert never
    assert local.final_evaluation.never_trained == never
    of_fedavg, of_local = (np.array(run.clients["accuracy"]) for run in (fedavg, local))
    assert not np.isnan(of_fedavg).any()
    assert np.flatnonzero(np.isnan(of_local)).tolist() == never
    notes = [note for note in table.notes if "never trained" in note]
    assert len(notes) == 2
    assert (
        notes[1]
        == f"local: {len(never)} clients never trained; {len(never)} of these get no model and have no value."
    )
    # Stopped before the file was written: trained again, to the same values.
    next((tmp_path / "a").rglob(FINAL.file)).unlink()
    again = compare(["fedavg", "local"], seeds=[0], tune={}, out=tmp_path / "a", base_tables=settings)
    for one, other in zip(table.rows, again.rows, strict=True):
        np.testing.assert_array_equal(
            one.outcomes[0].clients["accuracy"], other.outcomes[0].clients["accuracy"]
        )
