"""What a first run on texts trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.data.samples import Dataset, Samples
from copfl.experiment import rounds_search, texts_search
from copfl.experiment.first_run.first_run import is_open
from copfl.experiment.rounds_search import Lowest
from copfl.experiment.texts_search import EMBEDDING, WORDS, WORDS_ALONE, best_of, chosen_for_texts
from copfl.settings.complete import complete
from copfl.settings.schema import Run
from copfl.telling import heard


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


def test_words_win_unless_another_is_lower_by_more_than_the_margin() -> None:
    assert (
        best_of({WORDS: Lowest(9, 0.5), WORDS_ALONE: Lowest(3, 0.495), EMBEDDING: Lowest(40, 0.6)}) == WORDS
    )
    assert (
        best_of({WORDS: Lowest(9, 0.5), WORDS_ALONE: Lowest(3, 0.4), EMBEDDING: Lowest(40, 0.6)})
        == WORDS_ALONE
    )
    assert best_of({WORDS: Lowest(9, 0.5), EMBEDDING: Lowest(40, 0.3)}) == EMBEDDING


def test_it_is_open_only_where_nobody_chose() -> None:
    run = complete({}, values={"data": texts()})
    assert is_open(run, [{"data": {"value": texts()}}])
    assert not is_open(run, [{"algorithm": {"name": "fedavg"}}])
    assert not is_open(run, [{"model": {"value": object()}}])


@pytest.mark.parametrize(
    ("lowest", "method", "model", "rounds"),
    [
        (0, "wide_levels", "words", (2, 3)),
        (1, "wide_levels", "words", (3, 3)),
        (2, "fedper", "embedding", (4, 0)),
    ],
)
def test_what_has_the_lowest_loss_is_trained(
    monkeypatch: pytest.MonkeyPatch, lowest: int, method: str, model: str, rounds: tuple[int, int]
) -> None:
    results: Iterator[Lowest] = iter([Lowest(2 + n, 0.1 if n == lowest else 0.5) for n in range(3)])
    monkeypatch.setattr(texts_search, "held_out", lambda run: [])
    monkeypatch.setattr(texts_search, "searched", lambda *_: next(results))

    def completed(layer: Any) -> Run:
        return complete(layer, values={"data": texts()})

    said: list[str] = []
    with heard(said.append):
        run = chosen_for_texts(completed({}), completed)
    assert (run.algorithm.name, run.model.name) == (method, model)
    assert (run.run.rounds, run.run.rounds_alone, run.run.find_rounds) == (*rounds, "done")
    assert run.algorithm.options.get("alone", False) == (lowest == 1)
    assert [WORDS, WORDS_ALONE, EMBEDDING][lowest] + " is taken" in said[-1]


def test_a_first_run_on_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_search, "MOST_CHOICES", 1)
    monkeypatch.setattr(rounds_search, "PATIENCE", 3)
    result = copfl.run(None, texts(), rivals=False, find_rounds="first")
    run = result.experiment.run
    assert (run.algorithm.name, run.model.name) in (("wide_levels", "words"), ("fedper", "embedding"))
    assert run.run.find_rounds == "done"
    assert result.final("accuracy").mean() > 0.9
