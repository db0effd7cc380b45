"""The rivals of a federation: of each kind of model, its metrics at every site.

A run makes a `Rivals`; summary, report, comparisons and `choose` show it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.measures.metrics import MetricInfo
from copfl.stats import Interval, Numbers, mean_of_known

Array = NDArray[Any]

CONSTANT, LINEAR, FOREST, BOOSTED = "constant", "linear", "forest", "boosted"
# From the simplest; of equals the first is chosen.
TITLES = {
    CONSTANT: "the constant answer",
    LINEAR: "a linear model",
    FOREST: "a random forest",
    BOOSTED: "boosted trees",
}
# What they are, in words.
OF_SCIKIT_LEARN = "scikit-learn's models"
OF_SURVIVAL = "Kaplan and Meier's curve (the constant answer) and Cox's model with a ridge (the linear one)"


class SiteRows(NamedTuple):
    """The rows of one site. Targets are as in `copfl.data.samples.Samples.y`."""

    x: Any  # [n, columns], dense; of texts the counts of words, sparse
    y: Array
    x_test: Any
    y_test: Array
    unit: Array | None = None  # of the training rows: what belongs together; None: each is alone


class Rival(NamedTuple):
    """One model at one site."""

    validated: float  # the primary metric, cross-validated within the training rows; nan: not defined
    answers: Array  # to the test rows, as the metrics take predictions
    inside: Array  # to the training rows, of models that did not see them; nan: there is none
    fitted: tuple[Any, ...]  # on all training rows: an `estimators.Fitted` for each column of targets
    loss: float  # the mean of the proper loss, cross-validated within the training rows; nan: not defined


class RivalValues(NamedTuple):
    """One kind of model at every site that has rivals; nan at the others. [sites] each."""

    validated: Numbers  # the primary metric, cross-validated within the training rows
    tested: Mapping[str, Numbers]  # by metric, on the test rows


@dataclass(frozen=True, eq=False, repr=False)
class Rivals:
    """What each site has alone, beside what it gets from the federation.

    Args:
        metrics: That the models are judged by, the primary one first.
        values: Of each kind of model by its name, the simplest first.
        chosen: The best kind for the federation, by the cross-validated values.
        by_site: The best kind at each site, by the same; "" at a site without rivals.
        personal: By metric, the models of the federation on the same test rows, [sites]; nan: not known.
        interval: By site, of the gain of its model over the chosen kind, over the site's test rows.
        left_out: Why a kind of model was not trained, by its name.
        inputs: What the models were trained on, in words.
        models: What they are, in words.
    """

    metrics: tuple[MetricInfo, ...]
    values: Mapping[str, RivalValues]
    chosen: str
    by_site: tuple[str, ...]
    personal: Mapping[str, Numbers] = field(default_factory=dict)
    interval: tuple[Interval, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    inputs: str = "the same rows and columns"
    models: str = OF_SCIKIT_LEARN

    def __repr__(self) -> str:
        """The mean of each kind of model over the sites, and which one is chosen."""
        means = {name: self.metric.text(self.means(name)[self.metric.name]) for name in self.values}
        said = (
            f"{TITLES[n]} {mean}{self.metric.unit}{' (chosen)' * (n == self.chosen)}"
            for n, mean in means.items()
        )
        return f"{self.models} at each site alone, {self.metric.title}: {', '.join(said)}"

    @property
    def metric(self) -> MetricInfo:
        """The primary metric."""
        return self.metrics[0]

    @property
    def best(self) -> Numbers:
        """The primary metric of the chosen kind on the test rows, [sites]."""
        return self.values[self.chosen].tested[self.metric.name]

    @property
    def constant(self) -> Numbers:
        """The primary metric of the constant answer on the test rows, [sites]."""
        return self.values[CONSTANT].tested[self.metric.name]

    def gain(self, personal: Numbers) -> Numbers:
        """By how much these values of the primary metric are better than the chosen kind, [sites]."""
        return np.asarray(self.metric.gain(personal, self.best))

    def means(self, name: str) -> dict[str, float]:
        """By metric, the mean over the sites of one kind of model, on the test rows."""
        return {metric: float(mean_of_known(values)) for metric, values in self.values[name].tested.items()}
