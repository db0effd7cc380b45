"""What is trained where nobody names an algorithm, and how: the rule that studies/defaults found.

It uses only what is known before training. FedPAC with FedExP's step of the server was rarely far from the
best; where clients have no class in common it was below training alone, and APFL equals it. For values it is
Ditto, with a pull to the common model that falls with the samples that a client sees. For labels it is
FedPer where a client sees few samples, else LG-FedAvg. For the next token and for survival it is FedAvg with
fine-tuning. The batch size and the learning rate follow from the number of samples that a client has, and sees
in all rounds; a named algorithm has them too. In runs that are long enough a client predicts with an average
of its weights.
"""

import math
from typing import NamedTuple

from copfl.data.samples import CLASSIFICATION, MULTILABEL, NEXT_TOKEN, REGRESSION, SURVIVAL
from copfl.settings.schema import Run
from copfl.settings.toml import Tables

FEW_SAMPLES = 200  # of a client: in batches of 32 a round would have too few steps
FEW_SEEN = 6_400  # samples that a client sees in all rounds: in batches of 32 a run would have too few steps
AT_RISK = 128  # samples of a batch of survival, whose risks are compared: all of a small client's
SHORT_RUN = 3_200  # samples that a client sees in all rounds: with a small rate it would not get far
LONG_RUN = 20  # rounds: over fewer, an average of a client's weights lags behind the last ones
MOST_EPOCHS = 5  # of FedPAC's body in a round of a shorter run, as in its paper
FEW_SHARERS = 3  # clients that have a class: with fewer, its centroid follows the client that follows it
ALONE = 1.5  # clients that have a class: with fewer, hardly any class is trained by two
WEAK = 0.1  # the weight of FedPAC's alignment to such centroids
PULL = 30.0  # Ditto's lambda times the samples that a client sees in all rounds
AVERAGE = 0.8  # the decay of that average; studies/adaptive
TEXT_MODELS = (
    "embedding",
    "words",
    "causal_cnn",
)  # a word's embedding is seldom trained, and wants a larger rate


class Known(NamedTuple):
    """What is known of a federation before anything is trained."""

    kind: str  # of task, see copfl.data.samples
    samples: float  # of a client for training, a mean; infinite where it is not known
    rounds: int
    model: str
    pretrained: bool = False
    sums_only: bool = False  # the server may see sums of uploads only, as with privacy
    head_only: bool = False  # there is no body that could be shared beside a personal head
    sharers: float = math.inf  # clients that have a class, a mean; infinite where it is not known
    adapted: bool = False  # of a pretrained model only adapters are trained
    steps: int = 0  # that somebody chose in place of an epoch

    @property
    def seen(self) -> float:
        """Samples that a client trains on, in all rounds together."""
        return self.rounds * self.samples


class UsualTraining(NamedTuple):
    """How a client trains, whatever the algorithm."""

    lr: float  # of Adam
    schedule: str  # of the learning rate over the rounds
    batch: int

    @property
    def addons(self) -> dict[str, str]:
        """The table [addons]."""
        return {} if self.schedule == "constant" else {"lr_schedule": self.schedule}


class FirstChoice(NamedTuple):
    """An algorithm with all that its training needs."""

    algorithm: str
    options: dict[str, float]
    server: str
    training: UsualTraining
    ema: float = 0.0  # of the weights that a client predicts with; 0: none

    @property
    def layer(self) -> Tables:
        """The settings, as in run.toml."""
        averaged = {"ema": self.ema} if self.ema else {}
        return {
            "algorithm": {"name": self.algorithm, **self.options},
            "optimizer": {"name": "adam", "lr": self.training.lr},
            "server": {"name": self.server},
            "addons": {**self.training.addons, **averaged},
            "run": {"batch": self.training.batch},
        }


def training_of(known: Known) -> UsualTraining:
    """How to train first.

    Args:
        known: The federation.
    """
    if known.kind == SURVIVAL:
        return UsualTraining(1e-2 if known.head_only else 3e-3, "constant", AT_RISK)
    has_few = known.samples < FEW_SAMPLES or known.seen < FEW_SEEN
    batch = 16 if known.pretrained else 8 if has_few else 32
    if known.model in TEXT_MODELS:
        return UsualTraining(1e-2, "cosine", batch)
    return UsualTraining(3e-3 if _is_short(known) else 1e-3, "constant", batch)


def first_choice(known: Known) -> FirstChoice:
    """What to train first.

    Args:
        known: The federation.
    """
    training = training_of(known)
    if known.kind == SURVIVAL:
        return FirstChoice("fedavg_ft", {}, "mean", training)
    if known.head_only:
        return FirstChoice("fedavg_ft", {}, "mean" if known.sums_only else "fedexp", training)
    ema = AVERAGE if known.rounds >= LONG_RUN and not known.pretrained else 0.0
    if known.kind == REGRESSION:  # FedPAC needs classes
        pull = min(1.0, PULL / max(known.seen, 1))  # 0 rounds are refused later
        return FirstChoice("ditto", {"lam": float(f"{pull:.2g}")}, "mean", training, ema)
    if known.kind == MULTILABEL and not (_is_short(known) or known.pretrained):
        return FirstChoice("lg_fedavg", {}, "mean", training, ema)  # a client's own body gets far enough
    if known.kind == MULTILABEL:
        server = "mean" if known.sums_only or known.pretrained else "fedexp"
        return FirstChoice("fedper", {}, server, training, ema)
    if known.kind == NEXT_TOKEN and not known.sums_only:
        # From scratch a common head had the lower perplexity; pretrained models were not compared.
        return FirstChoice("fedper" if known.pretrained else "fedavg_ft", {}, "fedexp", training, ema)
    if known.sums_only:
        return FirstChoice("fedper", {}, "mean", training)  # FedPAC needs single uploads
    if known.sharers < ALONE and not known.pretrained:
        return FirstChoice("apfl", {}, "mean", training, ema)  # its own model is trained as if alone
    options = {"head_speed": 3.0}
    if known.sharers < FEW_SHARERS and training.schedule == "constant" and not known.pretrained:
        options["alignment"] = WEAK  # where the rate falls, the alignment does not diverge
    if known.rounds < LONG_RUN and _is_short(known) and not (known.pretrained or known.steps):
        # In few rounds of one epoch the common body does not get as far as each client's own.
        options["epochs"] = min(math.ceil(LONG_RUN / max(known.rounds, 1)), MOST_EPOCHS)  # 0 is refused later
    return FirstChoice("fedpac", options, "fedexp", training, ema)


def _is_short(known: Known) -> bool:
    """Whether a model from scratch, or adapters that learn classes, see few samples at a client, in all rounds."""
    is_measured = not known.pretrained or (known.adapted and known.kind == CLASSIFICATION)
    return known.seen < SHORT_RUN and is_measured


def why(run: Run) -> str:
    """Why the rule chose this algorithm, for a person.

    Args:
        run: A run in which no algorithm was named.
    """
    if run.algorithm.name == "wide_levels":
        return "a linear model of words has the lowest loss on held-out training samples, or was named"
    if run.algorithm.name == "fedpac":
        return "seldom far from the best in 22 federations"
    if run.algorithm.name == "apfl":
        return "hardly any class is at two clients, where a common model is worse than training alone"
    if run.algorithm.name == "fedavg_ft" and (run.data.event or run.data.kind == SURVIVAL):
        return "few events at a client do not determine a model of its own, and FedPAC needs classes"
    if run.algorithm.name == "fedavg_ft":
        return "FedPAC needs classes, and a body that is shared beside a personal head"
    if run.algorithm.name == "lg_fedavg":
        return "FedPAC needs classes; each client sees enough samples for a body of its own"
    if run.algorithm.name == "fedper" and (run.privacy or run.robust):
        return "FedPAC needs single uploads, and here the server sees sums"
    if run.algorithm.name == "ditto":
        pull = f"lam={run.algorithm.options['lam']:g}"
        return f"FedPAC needs classes; {pull} pulls each client's own model a little to the common one"
    return "FedPAC needs classes"
