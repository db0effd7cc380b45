"""Local training: nothing is shared. The lower bound that every federation has to exceed."""

from dataclasses import dataclass
from typing import ClassVar

from copfl.parts.averaging import Averaging


@dataclass(frozen=True)
class Local(Averaging):
    """Each client trains a model of its own on its own data; the messages are empty."""

    weights: ClassVar[str] = "equal"  # type: ignore[misc]  # no option: nothing is averaged
    personal = ("head", "body", "buffers")
