"""What is tried for images, survival and several labels, and that a run of each has a verdict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.choosing import candidates as trying
from copfl.choosing.candidates import Candidate, Facts, candidates_for, only
from copfl.choosing.evaluate import evaluate
from copfl.data.samples import CLASSIFICATION, KINDS, MULTILABEL, SURVIVAL

RIVALS = ("constant", "linear", "forest")


def images(rows: int = 30) -> list[Any]:
    """Three sites of 8 x 8 pictures, bright in one of three corners."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(3):
        y = rng.integers(0, 3, rows)
        x = 0.3 * rng.normal(size=(rows, 1, 8, 8)).astype(np.float32)
        for n, corner in enumerate(y):
            x[n, 0, 4 * (corner // 2) :, 4 * (corner % 2) :][:4, :4] += 1
        found.append((x, y))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["mlp", "cnn", "embedding"])
def test_something_is_trained_together_and_something_alone(kind: str, model: str) -> None:
    facts = Facts(kind, model, 100, 5 if model == "mlp" else 0, RIVALS)
    found = candidates_for(facts).candidates
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    assert any(one.is_alone for one in found)
    assert any(not one.is_alone for one in found)
    for one in found:
        assert one.alone_of in ("", *names)
        assert one.if_near in ("", *names)
        assert bool(one.rival) + bool(one.alone_of) + (one.layer is not None) == 1


def test_a_named_method_is_the_only_candidate_of_its_side() -> None:
    together = [one.name for one in only("fedper", RIVALS, True).candidates if not one.is_alone]
    assert together == ["fedper"]


@pytest.mark.job
@pytest.mark.usefixtures("rivals_of_images")
def test_a_first_run_on_images_compares_the_network_with_what_sites_have_alone() -> None:
    result = copfl.run(dataset=images(), rounds=4)
    assert result.choice is not None
    tried = {"constant", "network", "network alone", "linear alone", "forest alone"}
    assert tried <= set(result.choice.validated.means)
    assert result.choice.federation in (
        "network",
        "network alone",
        trying.APFL,
    )  # a run cannot train the others
    assert result.verdict is not None
    assert math.isfinite(result.verdict.these.gain)
    assert len(result.verdict.sites) == 3


def test_what_is_for_sites_that_contradict_each_other_waits_for_training_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from copfl.choosing import evaluate as module
    from copfl.choosing.evaluate import Evaluated

    losses = {"network": 0.1, "network alone": 0.9}

    class Rows:
        folds = type("F", (), {"number": 1, "by_steps": 1})
        samples = type("S", (), {"kind": CLASSIFICATION})

    def by_steps(experiments: Any, *_: Any) -> Evaluated:
        return Evaluated([np.full(30, losses[experiments[0]])])

    monkeypatch.setattr(module, "by_steps", by_steps)
    monkeypatch.setattr(module, "_experiments", lambda run, *_: [run])
    monkeypatch.setattr(module, "baseline_of", lambda run: f"{run} alone")
    tried = candidates_for(Facts(CLASSIFICATION, "cnn", 90, 0, ()))

    def run_of(candidate: Candidate) -> Any:
        return candidate.name

    evaluated, left_out = evaluate(tried, run_of, Rows, dict)  # type: ignore[arg-type]
    assert set(evaluated) == {"network", "network alone"}
    assert "contradict" in left_out[trying.APFL]
    losses |= {"network alone": 0.1, trying.APFL: 0.05}
    assert trying.APFL in evaluate(tried, run_of, Rows, dict)[0]  # type: ignore[arg-type]


@pytest.mark.job
def test_a_first_run_on_times_until_an_event() -> None:
    rng = np.random.default_rng(0)
    sites = []
    for _ in range(3):
        x = rng.normal(size=(40, 2)).astype(np.float32)
        time = rng.exponential(np.exp(-1.5 * x[:, 0]))
        sites.append((x, np.stack([time + 0.01, rng.random(40) < 0.8], 1)))
    result = copfl.run(dataset=sites, task=SURVIVAL)
    assert result.choice is not None
    means = result.choice.validated.means
    assert means["network"] < means["constant"]
    assert {"network alone", "linear alone"} <= set(means)
    assert result.verdict is not None


def test_several_labels_are_chosen_for() -> None:
    names = [one.name for one in candidates_for(Facts(MULTILABEL, "mlp", 100, 5, RIVALS)).candidates]
    assert names == ["constant", "levels", "levels with slopes", "trees", "linear alone", "forest alone"]
