"""Even batches: no step of an epoch is of fewer samples than another, but for one.

The last batch of a pass is of what is left, which may be one sample: then this one counts as much as all of another
batch together, and the next round it is another one. Two sums of secure rounds would differ by their gradients.
"""

from dataclasses import dataclass
from typing import ClassVar

from copfl.core import AnyAlgorithm
from copfl.core.algorithm import traits
from copfl.wrappers.base import Wrapper


@dataclass(frozen=True)
class EvenBatches(Wrapper):
    """The algorithm on batches of the same size; one that makes no training steps has none, and is the same."""

    even_batches: ClassVar[bool] = True


def with_even_batches(algorithm: AnyAlgorithm, even: bool) -> AnyAlgorithm:
    """The algorithm with even batches; unchanged where none are asked for, or it makes no training steps.

    Args:
        algorithm: One without other wrappers: they go around this one.
        even: Whether batches are even.
    """
    return EvenBatches(algorithm) if even and traits(algorithm).optimizer is not None else algorithm
