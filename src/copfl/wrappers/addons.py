"""Training add-ons: what can be added to every algorithm, so that a comparison can give all of them the same.

ema          A client predicts with an exponential moving average of the weights that its rounds ended in.
lr_schedule  The learning rate falls over the rounds.
bn_stats     A client predicts with batch-norm statistics computed on all its samples.
"""

from copfl.core.algorithm import AnyAlgorithm
from copfl.errors import one_of
from copfl.wrappers.bn_stats import LocalBnStats
from copfl.wrappers.ema import Ema
from copfl.wrappers.lr_schedule import LrSchedule

SCHEDULES = ("constant", "cosine", "linear", "steps")
STATISTICS = ("running", "local")


def with_addons(
    algorithm: AnyAlgorithm,
    ema: float = 0.0,
    lr_schedule: str = "constant",
    lr_rounds: int = 0,
    bn_stats: str = "running",
) -> AnyAlgorithm:
    """The algorithm with these training add-ons; at their defaults it is unchanged.

    The learning rate falls to zero in `lr_rounds` rounds; in steps, to a tenth at half of them and to a hundredth at
    three quarters.
    """
    one_of(SCHEDULES, **{"addons.lr_schedule": lr_schedule})
    one_of(STATISTICS, **{"addons.bn_stats": bn_stats})
    if lr_schedule != "constant":
        algorithm = LrSchedule(algorithm, lr_schedule, lr_rounds)
    if bn_stats == "local":
        algorithm = LocalBnStats(algorithm)
    if ema:
        algorithm = Ema(algorithm, ema)
    return algorithm
