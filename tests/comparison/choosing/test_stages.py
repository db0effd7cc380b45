"""Which candidates go on: by hand, with trials that train nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from copfl.choosing.evaluate import Evaluated
from copfl.comparison.choosing import trying as module
from copfl.comparison.choosing.stages import fill
from copfl.comparison.choosing.trying import Attempt, Trial, Trying, joined
from copfl.comparison.jobs.processes import Pool
from copfl.settings.complete import complete

RUN = complete({"algorithm": {"name": "fedper"}, "run": {"rounds": 10, "find_rounds": "off"}})
ROWS, FOLDS = 20, 5


def room() -> Any:
    return SimpleNamespace(folds=SimpleNamespace(number=FOLDS, whole=SimpleNamespace(train=[range(ROWS)])))


class Told:
    """Candidates whose losses and rounds are told; it notes what was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, losses: dict[str, float], rounds: int = 10) -> None:
        self.asked: list[tuple[str, tuple[int, ...], int]] = []
        trials: dict[Path, Trial] = {}

        def train(trying: Trying, attempts: Sequence[Attempt], files: dict[str, Path]) -> None:
            for attempt in attempts:
                self.asked.append((attempt.label, attempt.numbers, attempt.run.run.seed))
                held = np.isin(np.arange(ROWS) % FOLDS, attempt.numbers)
                size = 0.1 + 0.1 * list(losses).index(attempt.label)  # no difference is the same on all rows
                noise = size * np.where(np.arange(ROWS) // FOLDS % 2, 1, -1)
                own = np.where(held, losses[attempt.label] + noise, np.nan)
                trained = min(rounds, attempt.run.run.rounds) * len(attempt.numbers)
                trials[files[attempt.label]] = Trial(Evaluated([own], rounds), trained, 1.0)
                files[attempt.label].parent.mkdir(exist_ok=True)
                files[attempt.label].touch()

        monkeypatch.setattr(Trying, "_train", train)
        monkeypatch.setattr(module, "_read", lambda file, room: trials[file])


def attempts(*labels: str) -> list[Attempt]:
    return [
        Attempt(label, RUN.replaced({"algorithm": {"epochs": n + 1}}), (0,), steps=True, to_the_end=False)
        for n, label in enumerate(labels)
    ]


def tried(tmp_path: Path, budget: float, *labels: str, seeds: Sequence[int] = (0,), **how: Any) -> Any:
    trying = Trying(tmp_path, RUN, room(), "", Pool(1), rounds=budget)
    usual: dict[str, Any] = {"alone": ["local"], "is_rmse": False, "only_shown": False}
    return fill(trying, attempts(*labels), dict, seeds=seeds, **{**usual, **how})


def test_all_go_on_where_the_budget_is_large_and_the_worse_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch, {"best": 1.0, "near": 1.01, "far": 2.0, "local": 3.0})
    standing = tried(tmp_path, 10_000, "best", "near", "far", "local", seeds=(0, 7))
    assert standing.given_up == {"far": "worse than the best, after 1 fold of 5"}  # local: a verdict needs it
    assert [standing.folds(label) for label in ("best", "near", "far", "local")] == [5, 5, 1, 5]
    assert [standing.seeds(label) for label in ("best", "near", "far", "local")] == [2, 2, 1, 2]
    assert told.asked[:4] == [(label, (0,), 0) for label in ("best", "near", "far", "local")]
    assert told.asked[-1] == ("near", (0, 1, 2, 3, 4), 7)


def test_a_third_goes_on_where_the_budget_is_small_and_never_more_than_it_pays_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of ten rounds are sixty; of what is left, two can be tried on all folds, and 80 rounds are enough."""
    labels = ("local", *"abcde")
    Told(monkeypatch, {label: 1 + n / 1000 for n, label in enumerate(labels)})
    standing = tried(tmp_path, 60 + 80, *labels)
    assert standing.trying.spent == 140
    assert [label for label in labels if standing.folds(label) == 5] == ["local", "a"]
    assert set(standing.given_up.values()) == {"given up for the budget, after 1 fold of 5"}


def test_what_does_not_fit_is_not_begun_and_what_has_open_rounds_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch, {"local": 1.0, "best": 0.5, "late": 0.1})
    long = [
        one._replace(run=RUN.replaced({"run": {"rounds": 30}})) for one in attempts("local", "best", "late")
    ]
    trying = Trying(tmp_path, RUN, room(), "", Pool(1), rounds=45)
    assert trying.all_of(long) == {"local", "best", "late"}  # each stops after ten rounds
    assert trying.spent == 30
    assert [label for label, _, _ in told.asked] == ["local", "best", "late"]
    few = Trying(tmp_path / "few", RUN, room(), "", Pool(1), rounds=25)
    assert few.all_of(long) == {"local", "best"}  # with 25 rounds at most, and with 15
    assert few.all_of(long[2:]) == set()
    named = Trying(tmp_path / "named", RUN, room(), "", Pool(1), rounds=45)
    assert named.all_of([one._replace(to_the_end=True) for one in long[:1]]) == {"local"}
    assert (
        Trying(tmp_path / "n", RUN, room(), "", Pool(1), rounds=25).all_of(
            [one._replace(to_the_end=True) for one in long[:1]]
        )
        == set()
    )


def test_what_the_budget_left_on_one_fold_is_given_up_unless_it_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels were tried on all folds at once, a network on one; then the budget was over."""
    for loss, given_up in ((1.01, ["net"]), (0.99, ["net"]), (0.5, [])):
        Told(monkeypatch, {"levels": 1.0, "net": loss, "local": 1.0})
        trying = Trying(tmp_path / f"{loss}", RUN, room(), "", Pool(1), rounds=60)
        levels, net = attempts("levels", "net")
        standing = fill(
            trying,
            [levels._replace(numbers=(0, 1, 2, 3, 4)), net],
            lambda: {"linear alone": Evaluated([np.full(ROWS, 1.2)])},
            alone=["local"],
            is_rmse=False,
            only_shown=False,
            seeds=(0,),
        )
        assert list(standing.given_up) == given_up
        assert trying.spent == 60


def test_addons_are_tried_with_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, {"best": 1.0, "near": 1.01, "local": 1.02, "best with add-ons": 0.9})
    seen: list[Sequence[str]] = []

    def more(best: Sequence[str]) -> list[Attempt]:
        seen.append(best)
        return [attempts("best")[0]._replace(label="best with add-ons")]

    standing = tried(tmp_path, 10_000, "best", "near", "local", more=more)
    assert seen == [["best", "near"]]
    assert ("best with add-ons", (0,), 0) in told.asked
    assert standing.order()[0] == "best with add-ons"


def test_a_rival_that_no_site_can_take_gives_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Told(monkeypatch, {"best": 1.0, "near": 1.01})

    def rival() -> dict[str, Evaluated]:
        return {"linear alone": Evaluated([np.zeros(ROWS)])}

    for shown, given_up in ((True, set()), (False, {"near"})):
        trying = Trying(tmp_path / str(shown), RUN, room(), "", Pool(1))
        standing = fill(
            trying, attempts("best", "near"), rival, alone=[], is_rmse=False, only_shown=shown, seeds=(0,)
        )
        assert set(standing.given_up) == given_up


def test_what_is_alone_is_given_up_only_beside_what_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of what is alone is in the verdict, although a method is far better."""
    Told(monkeypatch, {"best": 0.1, "local": 1.0, "local lr=9": 2.0})
    trying = Trying(tmp_path, RUN, room(), "", Pool(1))
    standing = fill(
        trying,
        attempts("best", "local", "local lr=9"),
        lambda: {"linear alone": Evaluated([np.full(ROWS, 1.1)])},
        alone=["local", "local lr=9"],
        is_rmse=False,
        only_shown=False,
        seeds=(0,),
    )
    assert standing.given_up == {"local lr=9": "worse than the best, after 1 fold of 5"}
    assert standing.folds("local") == 5


def test_folds_and_seeds_are_joined_by_hand() -> None:
    nan = np.nan
    one = Evaluated([np.array([1.0, nan, 3.0])], 10, 1.0), Evaluated([np.array([3.0, nan, nan])], 13, 4.0)
    attempt = attempts("best")[0]
    found = joined([(attempt, Trial(evaluated, 5, 1.0)) for evaluated in one])
    assert np.array_equal(found.losses[0], [2.0, nan, 3.0], equal_nan=True)
    assert found.rounds == 12
    assert found.temperature == pytest.approx(2.0)
    assert dataclasses.is_dataclass(Trying)
