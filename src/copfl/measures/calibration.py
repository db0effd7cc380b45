"""Whether probabilities mean what they say: calibration curves, class frequencies as a reference, temperatures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.measures.metrics import CALIBRATION_BINS

Probabilities = NDArray[np.float64]  # [n, classes]
Classes = NDArray[Any]  # [n]

DEVIATION = 0.5  # of log T before any sample is seen: T is between 0.4 and 2.7 with a probability of 95 %
LARGEST = 3.0  # of |log T|


class CalibrationBin(NamedTuple):
    """The samples whose confidence is between two bounds."""

    low: float
    high: float
    samples: int
    confidence: float  # mean
    accuracy: float


def calibration_bins(probabilities: Probabilities, y: Classes) -> tuple[CalibrationBin, ...]:
    """Accuracy by confidence, in bins of equal width; those without samples are left out."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == y
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    bins = np.searchsorted(edges[1:-1], confidence)
    return tuple(
        CalibrationBin(
            float(edges[n]),
            float(edges[n + 1]),
            int((bins == n).sum()),
            float(confidence[bins == n].mean()),
            float(right[bins == n].mean()),
        )
        for n in np.unique(bins).tolist()
    )


def frequencies(y: Classes, classes: int) -> Probabilities:
    """[classes], how often each class is in a client's training samples, with one more sample of all alike.

    So a class that the client has not seen has a probability, and its log loss is finite.
    """
    return (np.bincount(y, minlength=classes) + 1 / classes) / (len(y) + 1)


def tempered(probabilities: Probabilities, temperature: float) -> Probabilities:
    """softmax(logits / T) of the probabilities softmax(logits), Guo et al. (2017), eq. 9."""
    if temperature == 1:
        return probabilities
    powers = probabilities ** (1 / temperature)
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def fitted_temperature(probabilities: Probabilities, y: Classes) -> float:
    """The temperature with the lowest log loss on validation samples; 1 without any.

    Paper: Guo et al. minimise the log loss alone. A client may have ten validation samples, whose best
    temperature is then often 0 or infinite; so log T has a normal prior around 0, and the result is the
    maximum of the posterior. Of hundreds of samples it is the paper's.
    """
    from scipy.optimize import minimize_scalar

    if not len(y):
        return 1.0
    logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))

    def loss(log_temperature: float) -> float:
        scaled = logs * np.exp(-log_temperature)
        largest = scaled.max(1)
        total = largest + np.log(np.exp(scaled - largest[:, None]).sum(1))
        right = np.take_along_axis(scaled, y[:, None], 1)[:, 0]
        return float((total - right).sum() + (log_temperature / DEVIATION) ** 2 / 2)

    found = minimize_scalar(loss, bounds=(-LARGEST, LARGEST), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x))


def pooled(parts: Sequence[tuple[Probabilities, Classes]]) -> tuple[CalibrationBin, ...]:
    """The calibration of several clients' samples together."""
    if not parts:
        return ()
    probabilities, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return calibration_bins(probabilities, y)
