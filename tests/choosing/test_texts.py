"""What a first run on texts trains."""

from __future__ import annotations

import numpy as np
import pytest

import copfl
from copfl.choosing import evaluate, folds
from copfl.choosing.candidates import ALONE, NETWORK, WORDS
from copfl.choosing.first_run import is_open
from copfl.data.samples import Dataset, Samples
from copfl.settings.complete import complete


def texts() -> Dataset:
    """Two desks with two topics; every text has a word of its topic among fillers."""
    rng = np.random.default_rng(0)
    y, site = rng.integers(0, 2, 48), np.repeat([0, 1], 24)
    own = np.array([["goal", "team", "match"], ["market", "bank", "price"]])[y, rng.integers(0, 3, 48)]
    x = np.array(
        [f"the {word} was on {filler}" for word, filler in zip(own, rng.integers(0, 5, 48), strict=True)]
    )
    samples = Samples(x, y, site)
    return Dataset("news", samples, samples, ("sport", "money"), ("a", "b"))


def test_it_is_open_only_where_nobody_chose() -> None:
    run = complete({}, values={"data": texts()})
    assert is_open(run, [{"data": {"value": texts()}}])
    assert not is_open(run, [{"algorithm": {"name": "fedavg"}}])
    assert not is_open(run, [{"model": {"value": object()}}])


@pytest.mark.job
def test_a_first_run_on_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "MOST_BY_STEPS", 1)
    monkeypatch.setattr(evaluate, "PATIENCE", 3)
    result = copfl.run(None, texts(), find_rounds="first")
    run = result.experiment.run
    assert result.choice is not None
    assert {"constant", WORDS, WORDS + ALONE, NETWORK, "linear alone"} == set(result.choice.validated.means)
    assert (run.algorithm.name, run.model.name) in (("wide_levels", "words"), ("fedper", "embedding"))
    assert run.run.find_rounds == "done"
    assert result.final("accuracy").mean() > 0.9
