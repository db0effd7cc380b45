"""What is trained where nobody names an algorithm: the rule that studies/defaults found.

It uses only what is known before training. FedPAC with FedExP's step of the server was rarely far from the best.
The batch size and the learning rate follow from the number of samples that a client has, and sees in all rounds.
"""

from typing import NamedTuple

from copfl.data.samples import CLASSIFICATION
from copfl.settings.toml import Tables

FEW_SAMPLES = 200  # of a client: in batches of 32 a round would have too few steps
SHORT_RUN = 3_200  # samples that a client sees in all rounds: with a small rate it would not get far
TEXT_MODELS = ("embedding", "causal_cnn")  # a word's embedding is seldom trained, and wants a larger rate


class Known(NamedTuple):
    """What is known of a federation before anything is trained."""

    kind: str  # of task, see copfl.data.samples
    samples: float  # of a client for training, a mean; infinite where it is not known
    rounds: int
    model: str
    pretrained: bool = False
    sums_only: bool = False  # the server may see sums of uploads only, as with privacy
    head_only: bool = False  # there is no body that could be shared beside a personal head


class FirstChoice(NamedTuple):
    """An algorithm with all that its training needs."""

    algorithm: str
    options: dict[str, float]
    server: str
    lr: float  # of Adam
    schedule: str  # of the learning rate over the rounds
    batch: int

    @property
    def layer(self) -> Tables:
        """The settings, as in run.toml."""
        return {
            "algorithm": {"name": self.algorithm, **self.options},
            "optimizer": {"name": "adam", "lr": self.lr},
            "server": {"name": self.server},
            "addons": {} if self.schedule == "constant" else {"lr_schedule": self.schedule},
            "run": {"batch": self.batch},
        }


def first_choice(known: Known) -> FirstChoice:
    """What to train first.

    Args:
        known: The federation.
    """
    batch = 16 if known.pretrained else 8 if known.samples < FEW_SAMPLES else 32
    lr, schedule = 1e-3, "constant"
    if known.model in TEXT_MODELS:
        lr, schedule = 1e-2, "cosine"
    elif known.rounds * known.samples < SHORT_RUN and not known.pretrained:
        lr = 3e-3
    if known.head_only:
        return FirstChoice("fedavg_ft", {}, "mean" if known.sums_only else "fedexp", lr, schedule, batch)
    if known.kind != CLASSIFICATION:
        return FirstChoice("fedper", {}, "fedexp", lr, schedule, batch)  # FedPAC needs classes
    if known.sums_only:
        return FirstChoice("fedper", {}, "mean", lr, schedule, batch)  # FedPAC needs single uploads
    return FirstChoice("fedpac", {"head_speed": 3.0}, "fedexp", lr, schedule, batch)
