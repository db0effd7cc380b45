"""The paper's parts, each usable alone: MAMO trains, PWPM chooses what is personal, COWA weighs.

And the steps that several algorithms are made of, or that have a name of their own, as pure functions:

keeping    what of w stays home and what is shared         mixtures   two models that answer together
masks      vectors under a personal mask                   experts    weights that fall with the loss
phases     training of two parts, or of two models         transfer   lessons on public samples
classes    features class by class, and their alignment    quadratic  small quadratic programmes
"""

from copfl.parts.cowa import Cowa
from copfl.parts.mamo import Mamo
from copfl.parts.pwpm import Pwpm

__all__ = ["Cowa", "Mamo", "Pwpm"]
