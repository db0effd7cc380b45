"""The paper's parts, each usable alone: MAMO (optimizer), PWPM (masks), COWA (weights).

And the steps that several algorithms share, or that have a name of their own, as pure functions:

averaging  FedAvg, and the personal and shared part of w    mixtures   mixtures of two models and of many
phases     training in two phases                           transfer   distillation on public samples
classes    features class by class, and their alignment     quadratic  small quadratic programmes
adapters   the matrices of LoRA in w
"""

from copfl.parts.cowa import Cowa
from copfl.parts.mamo import Mamo
from copfl.parts.phases import Phases
from copfl.parts.pwpm import Pwpm

__all__ = ["Cowa", "Mamo", "Phases", "Pwpm"]
