"""Metrics of a model on one client's test samples, as named values; scikit-learn computes them.

Predictions are probabilities [n, k] (classification, multilabel), values [n] or [n, k] (regression), or the
log-probabilities of every token [n, T, k], or of the right token [n, T] (next_token), or risks [n, k] (survival).
Targets are as in
`copfl.data.samples.Samples.y`. A metric that these samples do not define, such as the AUC of one class, is
nan: missing, and not 0.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.errors import UsageError, unknown
from copfl.measures.survival import concordance, risks, uno_concordance
from copfl.stats import Numbers
from copfl.tables import interval, with_spread

Array = NDArray[Any]

C_INDEX = "c_index"
CALIBRATION_BINS = 15
LEAST = float(np.finfo(np.float32).eps)  # a probability that counts as 0 has a logarithm; as in scikit-learn
TOO_FEW = "[too few to say]"  # in place of an interval that is wider than the scale of its metric
PADDING = -100  # a target token that does not count, as in copfl.core.criteria


@dataclass(frozen=True)
class MetricInfo:
    """What readers of results need to know about a metric."""

    name: str = "accuracy"
    higher_is_better: bool = True
    fraction: bool = (
        True  # from 0 to 1, and shown in %; a metric that is none has no worst value but infinity
    )

    @property
    def title(self) -> str:
        """Such as "macro F1"."""
        return SPELLED.get(self.name) or " ".join(SPELLED.get(word, word) for word in self.name.split("_"))

    @property
    def label(self) -> str:
        """The title with the unit, such as "accuracy, %"."""
        return f"{self.title}, %" if self.fraction else self.title

    @property
    def in_unit(self) -> str:
        """Such as "accuracy in %"."""
        return f"{self.title} in %" if self.fraction else self.title

    @property
    def factor(self) -> float:
        """From a value to the shown number."""
        return 100.0 if self.fraction else 1.0

    @property
    def unit(self) -> str:
        """After a shown number."""
        return " %" if self.fraction else ""

    @property
    def points(self) -> str:
        """The unit of differences, such as ", in points"."""
        return ", in points" if self.fraction else ""

    @property
    def gains(self) -> str:
        """What gains are measured in, such as "points of accuracy"; positive is better."""
        name = f"points of {self.title}" if self.fraction else self.title
        return name if self.higher_is_better else f"{name}, positive where it is lower"

    @property
    def worst_value(self) -> float:
        """Of a model whose output is not finite."""
        if self.fraction:
            return 0.0 if self.higher_is_better else 1.0
        return -math.inf if self.higher_is_better else math.inf

    def text(self, mean: float | None, spread: float = math.nan, sign: str = "") -> str:
        """The value as it is shown, without the unit."""
        shown = math.nan if mean is None else self.factor * mean
        return with_spread(shown, self.factor * spread, sign + self._digits(shown))

    def _digits(self, shown: float) -> str:
        """One decimal of a percentage, three digits of another number; z: zero has no sign of its own."""
        if self.fraction or not math.isfinite(shown) or shown == 0:
            return "z.1f"
        return f"z.{min(4, max(0, 2 - math.floor(math.log10(abs(shown)))))}f"

    def interval(self, low: float, high: float) -> str:
        """The bounds of a difference as they are shown."""
        bounds = (self.factor * low, self.factor * high)
        if self.fraction and max(map(abs, (low, high))) > 1 and math.isfinite(low):  # wider than the scale
            return TOO_FEW
        return interval(*bounds, "+" + self._digits(max(map(abs, bounds))))

    def verdict(self, verdict: str) -> str:
        """The verdict on a difference; of a metric that is better when low, with its meaning."""
        meaning = {} if self.higher_is_better else {"higher": "higher, worse", "lower": "lower, better"}
        return meaning.get(verdict, verdict)

    def best(self, values: Sequence[float]) -> float:
        """The best of the values; nan of none."""
        return (max if self.higher_is_better else min)(values, default=math.nan)

    def score(self, value: float) -> float:
        """Larger is better, and what is not defined is worst."""
        return -math.inf if math.isnan(value) else value if self.higher_is_better else -value

    def gain(self, own: Array, other: Array) -> Array:
        """By how much the first is better than the second."""
        return own - other if self.higher_is_better else other - own

    def as_json(self) -> dict[str, Any]:
        """For environment.json; `metrics_of` reads it."""
        return {"name": self.name, "higher_is_better": self.higher_is_better, "fraction": self.fraction}


ACCURACY = MetricInfo()


def metrics_of(environment: Mapping[str, Any]) -> tuple[MetricInfo, ...]:
    """The metrics of a run, from its environment.json; the first is primary. Older runs have accuracy."""
    return tuple(MetricInfo(**found) for found in environment.get("metrics", [{}]))


@dataclass(frozen=True)
class Metric(MetricInfo):
    """A number that judges predictions: all that copfl knows of it, but that a node may allow its name."""

    kinds: tuple[str, ...] = ()  # of tasks that it is defined for; none: of all
    # Of predictions and targets; it may raise a ValueError.
    function: Callable[[Array, Array], float] = lambda predictions, targets: math.nan
    spelled: str = ""  # in titles; "": as its name, with spaces
    # Where it is a mean over rows: their numbers, and what of their mean it is. So an interval takes milliseconds.
    of_rows: Callable[[Array, Array], Numbers] | None = None
    of_mean: Callable[[Numbers], Numbers] | None = None  # None: the mean itself

    def of(self, predictions: Array, targets: Array) -> float:
        """The metric of these samples; nan if they do not define it."""
        if not len(targets) or np.isnan(predictions).any():
            return float("nan")
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # the result reports it: nan
            try:
                value = float(self.function(predictions, targets))
            except ValueError:
                return float("nan")
        return value if np.isfinite(value) else float("nan")


def metric(name: str, kind: str) -> Metric:
    """The metric of this name; UsageError if there is none, or if a task of this kind does not define it."""
    if name not in METRICS:
        raise unknown("metric", name, METRICS)
    known_metric = METRICS[name]
    if kind not in known_metric.kinds:
        known = ", ".join(other.name for other in METRICS.values() if kind in other.kinds)
        raise UsageError(f'the metric "{name}" is not defined for {kind}; defined are {known}')
    return known_metric


def _accuracy(predictions: Array, targets: Array) -> float:
    """The fraction that is right: of the samples, of their labels, or of each sample's tokens."""
    if targets.dtype.kind == "f":
        return float((_labels(predictions) == targets).mean())
    counts = targets != PADDING
    right = (predictions.argmax(axis=-1) == targets) & counts
    if targets.ndim == 1:
        return float(right.mean())
    return float(np.mean((right.sum(axis=1) / counts.sum(axis=1))[counts.any(axis=1)]))


def _macro_f1(predictions: Array, targets: Array) -> float:
    """The mean F1 over the classes or labels that appear in the targets or the predictions."""
    guesses = _labels(predictions) if targets.ndim > 1 else predictions.argmax(axis=1)
    average = "binary" if targets.shape[1:] == (1,) else "macro"  # of one label, not of its two values
    return _sklearn("f1_score", targets, guesses, average=average, zero_division=np.nan)


def _auc(predictions: Array, targets: Array) -> float:
    """The mean area under the ROC curves of each class against the rest; of two classes, the second's.

    By ranks, as Mann and Whitney's U: an interval asks for thousands of areas, which take scikit-learn half a minute.
    """
    from scipy.stats import rankdata

    columns = np.arange(predictions.shape[1])
    if targets.ndim == 1:
        columns = columns[1:] if len(columns) == 2 else columns
        targets = targets[:, None] == np.arange(predictions.shape[1])
    positive = targets[:, columns] > 0.5
    ones = positive.sum(0)
    zeros = len(positive) - ones
    defined = (ones > 0) & (zeros > 0)
    ranks = rankdata(predictions[:, columns], axis=0)
    pairs = np.where(positive, ranks, 0).sum(0) - ones * (ones + 1) / 2
    return float(np.mean(pairs[defined] / (ones * zeros)[defined]))


def _right(predictions: Array, targets: Array) -> Numbers:
    """1 of a row whose class is right, 0 of another; of labels the fraction that is right."""
    if targets.ndim == 1:
        return np.asarray(predictions.argmax(-1) == targets, np.float64)
    return np.asarray(((predictions > 0.5) == (targets > 0.5)).mean(1), np.float64)


def _residuals(predictions: Array, targets: Array) -> Numbers:
    """[rows, values]; the predictions of one value may be [rows, 1], and its targets [rows]."""
    count = len(targets)
    return np.asarray(predictions.reshape(count, -1) - targets.reshape(count, -1), np.float64)


def _errors(predictions: Array, targets: Array) -> Numbers:
    return np.asarray(np.abs(_residuals(predictions, targets)).mean(1))


def _squares(predictions: Array, targets: Array) -> Numbers:
    return np.asarray(_residuals(predictions, targets)[:, 0] ** 2)


def surprises(predictions: Array, targets: Array) -> Array:
    """The negative logarithm of the probability of what is right, of each row; of labels the mean."""
    if targets.ndim == 1:
        right = np.take_along_axis(predictions, targets[:, None], axis=1)
    else:
        right = np.where(targets > 0.5, predictions, 1 - predictions)
    return np.asarray(-np.log(np.maximum(right, LEAST)).mean(1))


def _log_loss(predictions: Array, targets: Array) -> float:
    """The mean over rows of `surprises`."""
    return float(surprises(predictions, targets).mean())


def _calibration_error(predictions: Array, targets: Array) -> float:
    """The mean distance of confidence and accuracy over bins of equal width, weighted by their samples."""
    if targets.ndim == 1:
        confidence, right = predictions.max(axis=1), predictions.argmax(axis=1) == targets
    else:
        confidence, right = predictions.ravel(), targets.ravel()
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    bins = np.searchsorted(edges[1:-1], confidence)
    gaps = np.bincount(bins, weights=confidence - right, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def _balanced_accuracy(predictions: Array, targets: Array) -> float:
    """The mean over the classes in the targets of the fraction that is right."""
    return _sklearn("balanced_accuracy_score", targets, predictions.argmax(axis=1))


def _of_values(name: str, predictions: Array, targets: Array, **options: Any) -> float:
    """scikit-learn's metric of values, [n, k]; the mean over several targets."""
    n = len(targets)
    return _sklearn(name, targets.reshape(n, -1), predictions.reshape(n, -1), **options)


def _sklearn(name: str, targets: Array, predictions: Array, **options: Any) -> float:
    """scikit-learn's metric of this name; it is imported here, as that takes a second."""
    from sklearn import metrics

    return float(getattr(metrics, name)(targets, predictions, **options))


def _perplexity(predictions: Array, targets: Array) -> float:
    """The exponential of the mean negative log-probability of the right token."""
    counts = targets != PADDING
    if predictions.ndim > targets.ndim:
        predictions = np.take_along_axis(predictions, np.where(counts, targets, 0)[..., None], -1)[..., 0]
    return float(np.exp(-predictions[counts].mean())) if counts.any() else float("nan")


def _c_index(predictions: Array, targets: Array) -> float:
    return concordance(risks(predictions), targets)


def _uno_c_index(predictions: Array, targets: Array) -> float:
    return uno_concordance(risks(predictions), targets)


def _labels(predictions: Array) -> Array:
    """Probabilities of labels as 0 and 1."""
    return (predictions > 0.5).astype(np.float64)


CLASSES = ("classification", "multilabel")
RMSE = partial(_of_values, "root_mean_squared_error")
MAE = partial(_of_values, "mean_absolute_error")
R2 = partial(_of_values, "r2_score", force_finite=False)
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # The name, whether higher is better, whether it is a fraction, the kinds of tasks, the function, the title.
        Metric("accuracy", True, True, (*CLASSES, "next_token"), _accuracy, of_rows=_right),
        Metric("balanced_accuracy", True, True, ("classification",), _balanced_accuracy),
        Metric("macro_f1", True, True, CLASSES, _macro_f1, "macro F1"),
        Metric("auc", True, True, CLASSES, _auc, "AUC"),
        Metric("log_loss", False, False, CLASSES, _log_loss, of_rows=surprises),
        Metric("calibration_error", False, True, CLASSES, _calibration_error),
        Metric("rmse", False, False, ("regression",), RMSE, "RMSE", _squares, np.sqrt),
        Metric("mae", False, False, ("regression",), MAE, "MAE", _errors),
        Metric("r2", True, False, ("regression",), R2, "R²"),
        Metric("perplexity", False, False, ("next_token",), _perplexity),
        Metric(C_INDEX, True, True, ("survival",), _c_index, "C-index"),
        Metric("uno_c_index", True, True, ("survival",), _uno_c_index, "Uno's C-index"),
    )
}
# Names as titles have them, and such words in the name of a metric of yours: F1 of "weighted_f1".
SPELLED = {word.lower(): word for metric in METRICS.values() for word in metric.spelled.split()}
SPELLED |= {name: metric.spelled for name, metric in METRICS.items() if metric.spelled}
USUAL_METRIC = {
    "classification": "accuracy",
    "multilabel": "macro_f1",
    "regression": "rmse",
    "next_token": "perplexity",
    "survival": C_INDEX,
}


def usual_metrics(kind: str) -> tuple[Metric, ...]:
    """The metrics of a task where none are named."""
    return (METRICS[USUAL_METRIC[kind]],)
