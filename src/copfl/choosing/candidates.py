"""What is tried for which kind of data, where nobody named a method: the one module that says it.

To add a candidate, write it into the list of its kind in `candidates_for`: a name, and the settings that make it. The
rest follows: it trains on the folds of the others, is chosen where its loss is the lowest, and is in every table.
"""

from __future__ import annotations

from typing import NamedTuple

from copfl.data.samples import CLASSIFICATION, MULTILABEL, NEXT_TOKEN, REGRESSION, SURVIVAL
from copfl.rivals.records import CONSTANT
from copfl.settings.merging import Layer

MOST_SLOPES = 300  # features: each site's slopes enter the equations, which then take minutes
NETWORK_ROWS = 5_000  # of the federation: a network rarely wins with fewer, and takes most of the time
LEVELS, SLOPES, TREES, NETWORK = "levels", "levels with slopes", "trees", "network"
WORDS = "words with levels"
APFL = "apfl"
LOCAL = "local"  # the algorithm that trains alone
ALONE = " alone"  # at the end of the name of what sends nothing


class Facts(NamedTuple):
    """What is known of a federation before anything is tried."""

    kind: str  # of task, see copfl.data.samples
    model: str  # that suits the samples
    rows: int  # for training, of all sites
    features: int  # numbers of a row of a table; 0: the samples are no table of one target
    rivals: tuple[str, ...]  # what each site can train alone with scikit-learn, the simplest first
    wants_network: bool = False  # whatever the number of rows, as somebody named its rate
    is_mixed: bool = False  # the first choice is a mixture of its own and the common model already


class Candidate(NamedTuple):
    """A method of the federation, or what each site trains alone."""

    name: str
    layer: Layer | None = (
        None  # the settings that make it, below those that somebody chose; None: see `alone_of`
    )
    rival: str = ""  # the kind of model of scikit-learn that it is
    alone_of: str = ""  # the candidate whose training it is, with nothing that leaves a site
    by_steps: bool = False  # it can train for any number of rounds: it has those with the lowest loss
    keeps_own: bool = False  # a site can predict with a rival of its own instead
    is_local: bool = False  # it is the algorithm that trains alone
    # It is for sites that contradict each other, and is tried where this one, which is alone, is not shown to be worse.
    if_near: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether nothing of it leaves a site."""
        return bool(self.rival or self.alone_of or self.is_local)


class Tried(NamedTuple):
    """The candidates, the simplest first, and what is not among them."""

    candidates: tuple[Candidate, ...]
    left_out: dict[str, str]  # why, by name


def candidates_for(facts: Facts) -> Tried:
    """What is tried for these data."""
    left_out: dict[str, str] = {}
    if facts.features:
        if facts.features > MOST_SLOPES:
            left_out[SLOPES] = f"there are {facts.features:,} features, and more than {MOST_SLOPES} take long"
        methods = [
            Candidate(LEVELS, {"algorithm": {"name": "levels"}}, keeps_own=True),
            Candidate(SLOPES, {"algorithm": {"name": "levels", "varying": "all"}}, keeps_own=True),
            Candidate(TREES, {"algorithm": {"name": "trees"}}),  # its trees have a size of their own
        ]
        if facts.rows >= NETWORK_ROWS or facts.wants_network:
            methods.append(Candidate(NETWORK, {}, by_steps=True))
    elif facts.model == "embedding":
        words: Layer = {"model": {"name": "words"}, "algorithm": {"name": "wide_levels"}}
        network: Layer = {"algorithm": {"name": "fedper"}, "server": {"name": "fedexp"}}
        methods = [
            Candidate(WORDS, words, by_steps=True),
            Candidate(WORDS + ALONE, alone_of=WORDS, by_steps=True),
            Candidate(NETWORK, network, by_steps=True),
        ]
    else:
        methods = [
            Candidate(NETWORK, {}, by_steps=True),
            Candidate(NETWORK + ALONE, alone_of=NETWORK, by_steps=True),
        ]
        if facts.kind == CLASSIFICATION and not facts.is_mixed:
            apfl: Layer = {"algorithm": {"name": "apfl"}}
            methods.append(Candidate(APFL, apfl, by_steps=True, if_near=NETWORK + ALONE))
    return Tried(
        tuple(with_rivals([one for one in methods if one.name not in left_out], facts.rivals)), left_out
    )


def only(name: str, rivals: tuple[str, ...], has_alone: bool) -> Tried:
    """The candidates where somebody named a method: it, and what sites have alone.

    Args:
        name: Of the method.
        rivals: As of `Facts`.
        has_alone: Whether its training alone is tried, too.
    """
    alone = [Candidate(name + ALONE, alone_of=name, by_steps=True)] if has_alone else []
    return Tried(tuple(with_rivals([Candidate(name, {}, by_steps=True), *alone], rivals)), {})


def with_rivals(methods: list[Candidate], kinds: tuple[str, ...]) -> list[Candidate]:
    """The constant answer first, as the simplest, and the other rivals last.

    Args:
        methods: Of the federation, and their training alone.
        kinds: Of rivals, as of `Facts`.
    """
    rivals = [Candidate(kind if kind == CONSTANT else kind + ALONE, rival=kind) for kind in kinds]
    return [*rivals[:1], *methods, *rivals[1:]]


# By kind of task, the name of the loss that is compared where it is not the log loss.
MEASURES = {
    CLASSIFICATION: "",
    MULTILABEL: "",
    REGRESSION: "",
    NEXT_TOKEN: "loss of a token",
    SURVIVAL: "partial log-likelihood of an event, less is better,",
}
