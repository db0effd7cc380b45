"""What a first run on texts trains, found on held-out training samples.

A linear model of hashed words, trained by all or by each client alone, and a network of embeddings (FedPer with
FedExP's step of the server) see the same held-out samples. The run has what has the lowest loss, for as many rounds as
had it. No test sample decides anything.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence

from copfl.errors import UsageError
from copfl.experiment.preparation import Tell
from copfl.experiment.rounds_search import CHOSEN, MARGIN, Lowest, held_out, losses_of, lowest_loss
from copfl.settings.layers import Layer
from copfl.settings.schema import Run

NETWORK = "embedding"  # the model of texts, where nobody chose one
LEVELS: Layer = {"model": {"name": "words"}, "algorithm": {"name": "wide_levels"}}
ALONE: Layer = {"model": {"name": "words"}, "algorithm": {"name": "wide_levels", "alone": True}}
FEDPER: Layer = {"algorithm": {"name": "fedper"}, "server": {"name": "fedexp"}}
WORDS, WORDS_ALONE, EMBEDDING = (
    "words with levels",
    "words of each client alone",
    "a network (FedPer, FedExP)",
)


def is_open(run: Run, layers: Sequence[Layer], values: Collection[str]) -> bool:
    """Whether the run is on texts from scratch, and nobody chose how to train.

    Args:
        run: The settings, with what suits the data.
        layers: What a person or a program set.
        values: The kinds whose value a program passed.
    """
    is_chosen = any(layer.get(kind) or kind in values for layer in layers for kind in CHOSEN)
    return not is_chosen and run.model.name == NETWORK and run.run.participation == 1


def chosen_for_texts(run: Run, completed: Callable[[Layer], Run], tell: Tell | None = None) -> Run:
    """The settings that train, with their rounds.

    Args:
        run: The settings; their `run.find_rounds` is "first".
        completed: Completes the settings with one more layer.
        tell: Gets a line about each step.
    """
    tell = tell or (lambda line: None)
    tell(
        f"choosing among {WORDS}, {WORDS_ALONE} and {EMBEDDING}, on held-out training samples; "
        "--algorithm names a method"
    )
    runs = {WORDS: completed(LEVELS), WORDS_ALONE: completed(ALONE), EMBEDDING: completed(FEDPER)}
    lowest: dict[str, Lowest] = {}
    left_out: list[str] = []
    for name, candidate in runs.items():
        try:
            lowest[name] = lowest_loss(losses_of(list(held_out(candidate)), tell))
        except UsageError as error:  # such as targets that the method does not have
            left_out.append(f"{name} cannot train on them: {error}")
    if not lowest:
        raise UsageError("; ".join(left_out))
    best = best_of(lowest)
    text = ", ".join(f"{name} {one.loss:.4g}" for name, one in lowest.items())
    tell(f"loss on held-out samples: {text}; {best} is taken, for {lowest[best].round} rounds")
    for line in left_out:
        tell(line)
    rounds_alone = lowest[WORDS_ALONE].round if best != EMBEDDING and WORDS_ALONE in lowest else 0
    settings = dataclasses.replace(
        runs[best].run, rounds=lowest[best].round, rounds_alone=rounds_alone, find_rounds="done"
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
