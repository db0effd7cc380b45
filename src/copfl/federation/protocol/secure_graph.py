"""How many neighbours a client of SecAgg+ needs, and how many shares reveal a secret (Bell et al., 2020).

Clients form a ring in random order, and each shares its secrets with the k nearest. The server breaks a sum
if it separates the honest clients that stay into two parts, or collects enough shares of both secrets of one
client: together with a probability below 2**-SECURITY. A sum fails because too few neighbours of a client
stay with a probability below 2**-CORRECTNESS.
"""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from typing import NamedTuple

SECURITY, CORRECTNESS = 40, 20  # sigma and eta of the paper
CORRUPT, DROPPED = (
    0.33,
    0.05,
)  # fractions of the clients that work with the server, and that are lost in a sum
SMALLEST_RING = 50  # clients; with fewer all are neighbours, which costs little and needs no probability
SMALL = 1e-14  # against rounding in an insecure direction


class Degree(NamedTuple):
    """A number of neighbours, and what it implies for every client."""

    neighbours: int
    corrupt: int  # neighbours that work with the server, at most
    staying: int  # neighbours that stay until the end, at least


Threshold = Callable[[Degree], int]


def smallest_threshold(holders: int, corrupt: int) -> int:
    """The fewest shares that may reveal a secret, of so many holders of a share.

    The server may ask an honest holder for a share of one of two secrets. It has all shares of the corrupt
    ones. So it has both secrets if 2 t <= holders + corrupt (Bonawitz et al., 2017, section 6.2).

    Args:
        holders: Clients that have a share of a secret.
        corrupt: Holders that work with the server, at most.
    """
    return (holders + corrupt) // 2 + 1


def complete_threshold(clients: int) -> int:
    """The smallest threshold if all clients are neighbours, and fewer than a third work with the server."""
    return smallest_threshold(clients, -(-clients // 3) - 1)


def ring_threshold(degree: Degree) -> int:
    """The smallest threshold in a ring, where a client has a share of its own secrets, too."""
    return smallest_threshold(degree.neighbours + 1, degree.corrupt)


@cache
def smallest_degree(
    clients: int, corrupt: float = CORRUPT, dropped: float = DROPPED, threshold: Threshold = ring_threshold
) -> Degree:
    """The smallest even number of neighbours that is secure; all other clients if no smaller one is.

    Args:
        clients: How many are in the sum.
        corrupt: The fraction of the clients that work with the server, at most.
        dropped: The fraction that is lost in a sum, at most.
        threshold: The shares that a degree demands to reveal a secret.
    """
    for neighbours in range(2, clients - 1, 2):
        if is_connected(clients, neighbours, corrupt, dropped):
            degree = degree_of(clients, neighbours, corrupt, dropped)
            if degree.staying >= threshold(degree):
                return degree
    return degree_of(clients, clients - 1, corrupt, dropped)


@cache
def degree_of(clients: int, neighbours: int, corrupt: float = CORRUPT, dropped: float = DROPPED) -> Degree:
    """What a number of neighbours implies.

    Args:
        clients: How many are in the sum.
        neighbours: Of each client.
        corrupt: The fraction of the clients that work with the server, at most.
        dropped: The fraction that is lost in a sum, at most.
    """
    adversaries, staying = _at_most(corrupt, clients), math.ceil((1 - dropped - SMALL) * clients)
    secure, correct = (Fraction(1, clients * 2**bits) for bits in (SECURITY + 1, CORRECTNESS))
    return Degree(
        neighbours,
        next(n for n, p in enumerate(_up_to(clients, adversaries, neighbours)) if 1 - p <= secure),
        next(n for n, p in enumerate(_up_to(clients, staying, neighbours)) if p >= correct),
    )


def is_connected(clients: int, neighbours: int, corrupt: float = CORRUPT, dropped: float = DROPPED) -> bool:
    """Whether the honest clients that stay are connected, except with a small probability.

    To separate them takes two gaps of k/2 successive clients that are all corrupt or lost.

    Args:
        clients: How many are in the sum.
        neighbours: Of each client.
        corrupt: The fraction of the clients that work with the server, at most.
        dropped: The fraction that is lost in a sum, at most.
    """
    bad = _at_most(corrupt, clients) + _at_most(dropped, clients)
    if neighbours > bad:
        return True
    pairs_of_gaps = Fraction(clients * (clients - neighbours - 1), 2)
    probability = pairs_of_gaps * Fraction(math.perm(bad, neighbours), math.perm(clients, neighbours))
    return probability < Fraction(1, 2 ** (SECURITY + 1))


def _at_most(fraction: float, clients: int) -> int:
    return math.floor((fraction + SMALL) * clients)


def _up_to(clients: int, marked: int, drawn: int) -> Iterator[Fraction]:
    """The probability that at most 0, 1, 2, ... of the drawn clients are marked: hypergeometric."""
    ways, all_ways = 0, math.comb(clients, drawn)
    for n in range(drawn + 1):
        ways += math.comb(marked, n) * math.comb(clients - marked, drawn - n)
        yield Fraction(ways, all_ways)
