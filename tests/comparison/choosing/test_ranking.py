"""What a choice prints: the answer first, then the ranking, then what it rests on."""

import dataclasses
from pathlib import Path

import pytest

from copfl.comparison.choosing.ranking import ALIKE, CHOSEN, WIDTH, Choice, Ranked
from copfl.comparison.choosing.verdict import FEDERATE, UNDECIDED, Verdict
from copfl.measures.metrics import ACCURACY
from copfl.stats import Difference, Interval

BOUNDS = Interval(-0.1, 0.06)
GAP = Difference(-0.02, BOUNDS, BOUNDS, BOUNDS, 0.5)
LONG = "dropped for the budget, at round 6, not better than a constant answer yet"
WHY = "fedper +3.0 points [+1.0, +5.0] to training alone, after 10 of 10 rounds, 3 seeds"
CHOICE = Choice(
    title="visits.csv, 4 sites",
    chosen="fedper",
    ranking=[
        Ranked("fedper", 10, 3, 0.672, None, CHOSEN),
        Ranked("levels", 10, 3, 0.652, GAP, ALIKE),
        Ranked("trees", 6, 1, 0.609, GAP, LONG),
        Ranked("ditto", 6, 1, 0.608, GAP, LONG),
        Ranked("ktpfl", 0, 0, float("nan"), None, "could not run"),
    ],
    verdict=Verdict(FEDERATE, f"To federate pays: {WHY}."),
    metric=ACCURACY,
    spent=60,
    notes=["Sites: 4 sites."],
    folder=Path("runs/choose"),
    tested="fedper on visits: accuracy 73.1 %",
)


def test_it_begins_with_the_answer() -> None:
    text = str(CHOICE)
    question, chosen, pays, tested, gap, head, rule, first = text.splitlines()[:8]
    assert question == "Which method for visits.csv, 4 sites?"
    assert chosen == "fedper is chosen. It has the best mean, and is not shown to be better than levels."
    assert pays == (
        "Does it pay to federate? To federate pays. Mean accuracy on validation samples: fedper 67.2 %."
    )
    assert tested == "Tested: fedper on visits: accuracy 73.1 %"
    assert not gap
    assert head.split()[:2] == ["rounds", "seeds"]
    assert set(rule) == {"-"}
    assert first.split() == ["fedper", "10", "3", "67.2", "chosen"]
    assert max(map(len, text.splitlines())) <= WIDTH
    undecided = dataclasses.replace(CHOICE, verdict=Verdict(UNDECIDED, f"Not enough evidence: {WHY}."))
    assert "Does it pay to federate? Not enough evidence." in str(undecided)


@pytest.mark.parametrize(
    "said",
    [
        f"To federate pays: {WHY}.",
        "1 of 5 candidates: could not run (ktpfl).",
        "60 rounds in all.",
        "Sites: 4 sites.",
        f"{LONG}: trees, ditto.",  # which the table shortens
    ],
)
def test_the_details_below_have_everything_else(said: str) -> None:
    answer, _, details = str(CHOICE).partition("\nDetails\n")
    assert said in " ".join(details.split())
    assert "  dropped for the budget\n" in answer
    assert LONG not in answer
