"""Options out of range are refused with a message that names the option."""

from __future__ import annotations

import pytest

from copfl.algorithms import ALGORITHMS
from copfl.errors import UsageError

OUT_OF_RANGE: dict[str, list[tuple[str, float]]] = {
    "fedala": [("fraction", 0.0), ("fraction", 1.5), ("tensors", 0), ("step", -1.0), ("mix_epochs", -1)],
    "fedcalm": [("margin", -1.0), ("limit", -1.0), ("epochs", 0)],
    "fedpac": [("head_speed", 0.0), ("alignment", -1.0), ("epochs", 0), ("head_epochs", -1)],
    "fedpoe": [("holdout", 1), ("holdout", -1), ("stored", 0), ("period", 0), ("rate", -1.0)],
    "ktpfl": [("temperature", 0.0), ("batch", 0), ("penalty", -1.0), ("distil_epochs", -1)],
    "fedavg_ft": [("tune_epochs", -1)],
    "fedprox": [("mu", -1)],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused(name: str) -> None:
    for option, value in OUT_OF_RANGE[name]:
        with pytest.raises(UsageError, match=f"{option}={value}"):
            ALGORITHMS[name](**{option: value})
