"""Local training: nothing is shared. The lower bound that every federation has to exceed."""

from __future__ import annotations

from dataclasses import dataclass

from copfl.parts.averaging import Averaging


@dataclass(frozen=True)
class Local(Averaging):
    """Each client trains a model of its own on its own data; the messages are empty."""

    personal = ("head", "body", "buffers")
