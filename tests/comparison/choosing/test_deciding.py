"""What so few clients can decide, by hand."""

import math

import pytest

from copfl.comparison.choosing.deciding import Decidable, most_candidates, smallest_shown


def test_the_smallest_difference_that_is_shown_by_hand() -> None:
    """t(3) is 3.182 at 95 % and 7.453 at 99.5 %, and the root of four is 2."""
    assert smallest_shown(4, 1) == pytest.approx(3.182 / 2, abs=1e-3)
    assert smallest_shown(4, 10) == pytest.approx(7.453 / 2, abs=1e-3)
    assert math.isinf(smallest_shown(1, 1))


def test_more_clients_allow_more_candidates() -> None:
    counts = [most_candidates(clients) for clients in (1, 2, 3, 4, 5, 10)]
    assert counts == [2, 3, 6, 13, 23, 161]
    for clients in (3, 4, 5):
        most = most_candidates(clients)
        assert (
            smallest_shown(clients, most - 1)
            <= 2.5 * smallest_shown(clients, 1)
            < smallest_shown(clients, most)
        )


def test_what_is_said_before_the_race() -> None:
    text = Decidable(4, 11, 40).text
    assert text.startswith(
        "What 4 clients can decide: with 11 candidates a difference is shown if it is 3.7 times"
    )
    assert "(of two candidates, 1.6 times). A client has 40 validation samples" in text
    assert Decidable(1, 2, 40).text.startswith("One client decides nothing")
    assert Decidable(50, 62, 40).text == ""
