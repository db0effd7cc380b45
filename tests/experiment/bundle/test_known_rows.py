"""Rows that a model was trained on: the file of their hashes may be somebody else's."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from copfl.errors import RunError
from copfl.experiment.bundle import known_rows


@pytest.mark.parametrize("content", ["claims", "nothing"])
def test_hashes_that_occupy_the_machine_are_damaged(content: str, tmp_path: Path) -> None:
    """A few bytes, whose header names 256 TiB."""
    bundle = tmp_path / "models" / "client-0"
    bundle.mkdir(parents=True)
    entry = io.BytesIO()
    if content == "claims":
        header = {"descr": "<u8", "fortran_order": False, "shape": (2**45,)}
        np.lib.format.write_array_header_1_0(entry, header)
    with zipfile.ZipFile(tmp_path / known_rows.FINGERPRINTS, "w") as archive:
        for name in ("rows.npy", "samples.npy"):
            archive.writestr(name, entry.getvalue())
    with pytest.raises(RunError, match=r"fingerprints\.npz is damaged"):
        known_rows.about(bundle, np.zeros((3, 2), np.float32), None)
