"""What the probabilities of each client's model are worth, measured once, when the run ends.

Beside accuracy: log loss, AUC and calibration error. They are computed from the predictions of the model that
the client gets, and not in every round: AUC needs the predictions of all test samples on the host.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from copfl.charts import Chart, Dots, Line, Lines, values_of
from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.core.task import Data, Personal, Task
from copfl.data.samples import CLASSIFICATION
from copfl.experiment.bundle.description import Score
from copfl.experiment.finding import Finding, Trained
from copfl.experiment.recording import Recording
from copfl.measures.calibration import CalibrationBin, fitted_temperature, frequencies, pooled, tempered
from copfl.measures.metrics import METRICS, Array, surprises
from copfl.sections import Section
from copfl.stats import Numbers, mean_of_known, over_clients
from copfl.tables import listed, plain

MEASURED = ("log_loss", "auc", "calibration_error")  # the metrics, of copfl.measures.metrics
NAMED = 5  # clients that a sentence names


class Probabilities(NamedTuple):
    """The clients' probabilities on their test samples, [clients]; nan where the samples do not define it."""

    log_loss: Numbers
    auc: Numbers
    calibration_error: Numbers
    reference: Numbers  # the log loss of the class frequencies in the client's training samples
    excess: Numbers  # the low end of the 95 % interval of log loss minus reference, over test samples
    temperature: Numbers  # fitted on its validation samples; without any, `usual`
    calibration: tuple[CalibrationBin, ...]  # of the test samples of all clients together

    @property
    def worse(self) -> list[int]:
        """The clients whose probabilities are worse than the frequencies of the classes, by more than noise."""
        return [int(n) for n in np.flatnonzero(self.excess > 0)]


class OfClient(NamedTuple):
    """The probabilities of one client's model; as of `Probabilities`."""

    values: dict[str, float]  # by the names of MEASURED, "reference" and "excess"; none without test samples
    temperature: float
    tested: tuple[Array, Array] | None  # the probabilities of its test samples, and their classes

    def scores(self, split: str, but: Collection[str] = ()) -> list[Score]:
        """The scores of a bundle; `but`: metrics that it has already.

        Args:
            split: The name of the samples.
            but: Metrics that the bundle has already.
        """
        names = [name for name in MEASURED if name not in but and np.isfinite(self.values.get(name, np.nan))]
        count = 0 if self.tested is None else len(self.tested[1])
        return [Score(name, split, self.values[name], count) for name in names]


def of_client(
    task: Task, model: Personal, train: Array, test: Data, validation: Data | None, usual: float
) -> OfClient:
    """The probabilities of a client's model, in a simulation as at a node.

    Args:
        task: What is learned: classes.
        model: The client's.
        train: The classes of its training samples.
        test: Its test samples.
        validation: Its validation samples, which alone decide on the temperature where there are any.
        usual: The temperature without them.
    """
    temperature = usual
    with torch.no_grad():
        if validation is not None and int(validation.size):
            answers, y = predicted(task, model, validation)
            temperature = fitted_temperature(answers, y) if np.isfinite(answers).all() else usual
        if not int(test.size) or not len(train):
            return OfClient({}, temperature, None)
        answers, y = predicted(task, model, test)
    if not np.isfinite(answers).all():
        return OfClient({}, temperature, None)
    answers = tempered(answers, temperature)
    values = {name: METRICS[name].of(answers, y) for name in MEASURED}
    constant = np.repeat(frequencies(train, task.classes)[None], len(y), axis=0)
    of_model, reference = (surprises(p, y) for p in (answers, constant))
    low = over_clients(of_model - reference).low  # over samples; of one it is unbounded
    values |= {"reference": float(reference.mean()), "excess": low if np.isfinite(low) else np.nan}
    return OfClient(values, temperature, (answers, y))


def measured(trained: Trained) -> Probabilities | None:
    """The probabilities of the clients' models; None where targets are no classes."""
    task, federation, models = trained.task, trained.federation, trained.models
    usual = trained.settings.temperature  # of clients without validation samples
    if task.criterion.kind != CLASSIFICATION:
        return None
    values = {name: np.full(federation.clients, np.nan) for name in (*MEASURED, "reference", "excess")}
    temperature = np.full(federation.clients, usual)
    for_calibration: list[tuple[Array, Array]] = []
    for n in range(federation.clients):
        if (client_model := models.get(n)) is None:
            continue
        train = federation.train.targets(n).cpu().numpy()
        test = tree.row(federation.test.rows([n]), 0)
        held_out = federation.validation
        validation = None if held_out is None else tree.row(held_out.rows([n]), 0)
        of_one = of_client(task, client_model.model, train, test, validation, usual)
        temperature[n] = of_one.temperature
        for name, value in of_one.values.items():
            values[name][n] = value
        for_calibration += [] if of_one.tested is None else [of_one.tested]
    return Probabilities(**values, temperature=temperature, calibration=pooled(for_calibration))


def as_json(probabilities: Probabilities) -> dict[str, Any]:
    """For probabilities.json and the summary of a run."""
    return dict(
        plain(probabilities._asdict() | {"calibration": [one._asdict() for one in probabilities.calibration]})
    )


def _probabilities(content: dict[str, Any]) -> Probabilities:
    bins = tuple(
        CalibrationBin(
            float(one["low"]),
            float(one["high"]),
            int(one["samples"]),
            float(one["confidence"]),
            float(one["accuracy"]),
        )
        for one in content["calibration"]
    )
    values = {name: np.array(content[name], np.float64) for name in Probabilities._fields[:-1]}
    return Probabilities(**values, calibration=bins)


def in_words(probabilities: Probabilities, names: Sequence[str]) -> list[str]:
    """The means over clients, and a sentence about clients for which the class frequencies are better.

    Args:
        probabilities: The probabilities.
        names: Of the clients.
    """
    if np.isnan(probabilities.log_loss).all():
        return []
    means = []
    for name in MEASURED:
        metric, value = METRICS[name], float(mean_of_known(getattr(probabilities, name)))
        reference = METRICS["log_loss"].text(float(mean_of_known(probabilities.reference)))
        beside = f" (class frequencies in training: {reference})" if name == "log_loss" else ""
        means.append(f"{metric.title} {metric.text(value)}{metric.unit}{beside}")
    sentences = [f"Probabilities, mean over sites: {', '.join(means)}."]
    text = METRICS["log_loss"].text
    if probabilities.worse:
        shown = [
            f"{names[n]} ({text(probabilities.log_loss[n])}; frequencies {text(probabilities.reference[n])})"
            for n in probabilities.worse
        ]
        sentences.append(
            "Worse than always answering the frequencies of the classes, by log loss and more than the noise of the "
            f"test samples: {listed(shown, NAMED)}. Do not use probabilities of these models; their most probable "
            "class may still be right."
        )
    if others := int((probabilities.log_loss > probabilities.reference).sum()) - len(probabilities.worse):
        sentences.append(
            f"{others} {'other ' * bool(probabilities.worse)}site{'s' * (others > 1)} of {len(names)}: "
            "probabilities that "
            "are not shown to be better than the frequencies of the classes."
        )
    fitted = probabilities.temperature[probabilities.temperature != 1]
    if len(fitted):
        low, high = f"{fitted.min():.2f}", f"{fitted.max():.2f}"
        bounds = low if low == high else f"{low} to {high}"
        sentences.append(f"Temperatures of the probabilities, by held-out samples: {bounds}.")
    return sentences


def _charts(calibration: Probabilities, run: Recording) -> Iterator[Chart]:
    """Accuracy by the probability of the answer, and each client's log loss beside class frequencies'."""
    if not calibration.calibration or not run.records:
        return
    if len(calibration.log_loss) != len(run.client_titles):
        raise ValueError("probabilities.json has another number of sites")
    bins = calibration.calibration
    confidence = [100 * one.confidence for one in bins]
    about = (
        "Test samples of all sites by the probability that their models give to the answer. Where "
        "probabilities mean what they say, the curve is on the diagonal; below it, models are too certain."
    )
    lines = [
        Line(
            "models", [100 * one.accuracy for one in bins], remarks=[f"{one.samples} samples" for one in bins]
        ),
        Line("as they say", confidence, colour=1, dash=1),
    ]
    title, x_title = "Calibration", "probability of the answer, %"
    yield Lines("calibration", title, about, confidence, "accuracy, %", lines, " %", x_title=x_title)
    about = (
        "The log loss of each site's model on its test samples, lower is better. A model right of the "
        "frequencies of the classes in the site's training samples has probabilities that are worth nothing."
    )
    series = [
        Line("personal model", values_of(calibration.log_loss), symbol=0),
        Line("class frequencies", values_of(calibration.reference), colour=1, symbol=1),
    ]
    yield Dots("log-loss", "Log loss per site", about, run.client_titles, "log loss", series, digits=3)


PROBABILITIES = Finding(
    file="probabilities.json",
    as_json=as_json,
    parse=_probabilities,
    measured=measured,
    sentences=lambda found, run: in_words(found, run.short_names),
    section=lambda found, run: Section(
        "probabilities", "Probabilities", "What are probabilities worth?", [*_charts(found, run)]
    ),
)
