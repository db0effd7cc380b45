"""What a first run on texts trains, found on held-out training samples.

A linear model of hashed words, trained by all or by each client alone, and a network of embeddings (FedPer with
FedExP's step of the server) see the same held-out samples. The run has what has the lowest loss, for as many rounds as
had it. No test sample decides anything.
"""

import dataclasses
import logging
from collections.abc import Callable

from copfl.errors import UsageError, option
from copfl.experiment.rounds_search import MARGIN, Lowest, held_out, searched
from copfl.settings.merging import Layer
from copfl.settings.schema import Run

logger = logging.getLogger(__name__)
NETWORK = "embedding"  # the model of texts, where nobody chose one
LEVELS: Layer = {"model": {"name": "words"}, "algorithm": {"name": "wide_levels"}}
ALONE: Layer = {"model": {"name": "words"}, "algorithm": {"name": "wide_levels", "alone": True}}
FEDPER: Layer = {"algorithm": {"name": "fedper"}, "server": {"name": "fedexp"}}
WORDS, WORDS_ALONE, EMBEDDING = (
    "words with levels",
    "words of each client alone",
    "a network (FedPer, FedExP)",
)


def chosen_for_texts(run: Run, completed: Callable[[Layer], Run]) -> Run:
    """The settings that train, with their rounds.

    Args:
        run: The settings; their `run.find_rounds` is "first".
        completed: Completes the settings with one more layer.
    """
    logger.info(
        f"choosing among {WORDS}, {WORDS_ALONE} and {EMBEDDING}, on held-out training samples; "
        f"{option('algorithm')} names a method"
    )
    runs = {WORDS: completed(LEVELS), WORDS_ALONE: completed(ALONE), EMBEDDING: completed(FEDPER)}
    lowest: dict[str, Lowest] = {}
    left_out: list[str] = []
    for name, candidate in runs.items():
        try:
            lowest[name] = searched(list(held_out(candidate)))
        except UsageError as error:  # such as targets that the method does not have
            left_out.append(f"{name} cannot train on them: {error}")
    if not lowest:
        raise UsageError("; ".join(left_out))
    best = best_of(lowest)
    text = ", ".join(f"{name} {one.loss:.4g}" for name, one in lowest.items())
    logger.info(f"loss on held-out samples: {text}; {best} is taken, for {lowest[best].round} rounds")
    for line in left_out:
        logger.info(line)
    rounds_alone = lowest[WORDS_ALONE].round if best != EMBEDDING and WORDS_ALONE in lowest else 0
    settings = dataclasses.replace(
        runs[best].run,
        rounds=lowest[best].round,
        rounds_alone=rounds_alone,
        find_rounds="done",
        temperature=lowest[best].temperature,
    )
    return dataclasses.replace(runs[best], run=settings)


def best_of(lowest: dict[str, Lowest]) -> str:
    """The candidate with the lowest loss; the network must be lower by MARGIN, and so must words alone.

    Args:
        lowest: By name.
    """

    def loss(name: str) -> float:
        return lowest[name].loss * (1 if name == WORDS else 1 + MARGIN)

    return min(lowest, key=loss)
