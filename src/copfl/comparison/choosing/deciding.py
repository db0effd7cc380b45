"""What so few clients can decide: how large a difference must be to be shown, and how many candidates may race.

`choose` says it before the race. An interval over n clients has the half width t(n - 1) · s / √n, where s is the
standard deviation of the difference over the clients. More candidates need a wider interval, for each of them may be
the best by luck (Bonferroni). With four clients and 61 comparisons it is 6.9 s: nothing but a disaster is shown.
"""

import math
from typing import NamedTuple

from copfl.stats import LEVEL, t_quantile

CORRECTION = 2.5  # by which the number of candidates may widen an interval
FEWEST = 2  # candidates: a method and training alone


class Decidable(NamedTuple):
    """What a race of so many candidates over so many clients can show."""

    clients: int
    candidates: int
    samples: int  # for validation, of a client in the median

    @property
    def of_two(self) -> float:
        """The smallest difference of two methods that is shown, in standard deviations over the clients."""
        return smallest_shown(self.clients, 1)

    @property
    def of_all(self) -> float:
        """The same, corrected for the number of candidates."""
        return smallest_shown(self.clients, max(1, self.candidates - 1))

    @property
    def text(self) -> str:
        """For the reader, before the race; empty where clients are many."""
        if self.of_all <= 1:
            return ""
        if math.isinf(self.of_two):
            return "One client decides nothing: an interval over clients needs two of them."
        return (
            f"What {self.clients} clients can decide: with {self.candidates} candidates a difference is shown if it is "
            f"{self.of_all:.1f} times its standard deviation over the clients (of two candidates, {self.of_two:.1f} "
            f"times). A client has {self.samples:,} validation samples in the median. So expect to learn which "
            "methods fail; among those that are near the best, the order may be luck."
        )


def smallest_shown(clients: int, comparisons: int) -> float:
    """The half width of a corrected interval over clients, in standard deviations of the difference.

    Args:
        clients: How many there are.
        comparisons: How many differences are looked at, for which the interval is corrected.
    """
    if clients < 2:
        return math.inf
    return t_quantile(1 - (1 - LEVEL) / (2 * comparisons), clients - 1) / math.sqrt(clients)


def most_candidates(clients: int) -> int:
    """As many candidates as widen the interval of two by CORRECTION at most: 13 for four clients, 161 for ten."""
    if clients < 2:
        return FEWEST
    most = FEWEST
    while most < 1000 and smallest_shown(clients, most) <= CORRECTION * smallest_shown(clients, 1):
        most += 1
    return most
