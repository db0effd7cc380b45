"""The paper's parts, each usable alone: MAMO trains, PWPM chooses what is personal, COWA weighs."""

from copfl.parts.cowa import Cowa
from copfl.parts.mamo import Mamo
from copfl.parts.pwpm import Pwpm

__all__ = ["Cowa", "Mamo", "Pwpm"]
