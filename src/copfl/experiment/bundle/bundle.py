"""A model bundle in use: predictions for new samples, and their evaluation.

`copfl.load` and the commands `predict`, `evaluate` and `export` return or use a `Bundle`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl import foreign
from copfl.core.evaluation import on_host_arrays
from copfl.core.task import Personal, Task
from copfl.data.clients.federation import tensors
from copfl.data.samples import CLASSIFICATION, MULTILABEL, NEXT_TOKEN, Inputs, by_name, each
from copfl.errors import CopflError, RunError, UsageError, above, raised_as, warn
from copfl.experiment.bundle import building, description, known_rows
from copfl.experiment.bundle.base import copy_base
from copfl.experiment.bundle.description import Description
from copfl.experiment.bundle.inputs import Labelled, Preparation
from copfl.experiment.bundle.places import BASE, FILE, located
from copfl.experiment.bundle.predictor import Predictor
from copfl.experiment.bundle.writing import write_bundle
from copfl.experiment.models.client_models import WEIGHTS, read_weights
from copfl.experiment.survival import medians_of, survival_of
from copfl.measures.calibration import CalibrationBin, calibration_bins, tempered
from copfl.measures.metrics import METRICS
from copfl.measures.survival import risks

BATCH = 250  # samples that are predicted at once, as in an evaluation
OWN_BASE = "base"  # of a bundle that was exported for transport
BASES = (OWN_BASE, f"../{BASE}")  # where the base of a bundle may be


@dataclass(frozen=True)
class Evaluation:
    """How good the predictions for some samples are."""

    samples: int
    metrics: dict[str, float]  # nan where the samples do not define one
    classes: list[Any]
    confusion: NDArray[np.int64] | None = None  # [right class, predicted class]
    calibration: tuple[CalibrationBin, ...] = ()  # bins without samples are left out


@dataclass(frozen=True, eq=False, repr=False)
class Bundle:
    """One model with everything that its use needs; `copfl.load` reads it.

    >>> bundle = copfl.load("runs/mine", client=3)                      # doctest: +SKIP
    >>> bundle.predict(dataframe), bundle.predict_proba(dataframe)      # doctest: +SKIP

    Args:
        description: What the model takes and returns, how it is built, and how good it is.
        task: The network, with its objective and metrics.
        model: The trained weights, or a mixture of several.
        path: The folder that it was read from; None: it has none.
    """

    description: Description
    task: Task
    model: Personal
    path: Path | None = None

    def __repr__(self) -> str:
        origin, output = self.description.origin, self.description.output
        whose = (
            "global model"
            if origin.client is None
            else f"model of {origin.name or f'client {origin.client}'}"
        )
        return f"Bundle of the {whose}, {origin.title}: {output.kind} of {output.count}"

    @property
    def classes(self) -> NDArray[Any]:
        """The classes or labels in the order of the probabilities; of a regression, the targets' names."""
        return np.array(self.description.output.classes)

    @cached_property
    def module(self) -> Predictor:
        """The model as a torch module: raw samples as tensors in, probabilities or values out."""
        return Predictor(self.task, self.model, self.description.output.temperature)

    @cached_property
    def preparation(self) -> Preparation:
        """How new samples become inputs of the network."""
        base = None if self.path is None else base_of(self.path, self.description)
        with _describing(self.path):
            tokenizer = building.tokenizer_of(self.description, base)
        return Preparation(self.description.input, self.description.output, tokenizer)

    def outputs(self, x: Inputs) -> NDArray[np.float64]:
        """Probabilities [n, classes] or [n, labels], values [n, targets], or risks or incidences [n, outputs].

        Args:
            x: Inputs of the network, as `preparation` makes them.
        """
        if self.description.output.kind == NEXT_TOKEN:
            raise UsageError(
                "the model predicts the next token of a text, which has no classes; `copfl export` writes it "
                "for programs that generate text"
            )
        size = len(next(iter(by_name(x).values())))

        def part(start: int) -> Tensor:
            return self.task.predict(self.model, tensors(each(lambda a: a[start : start + BATCH], x)))

        with torch.no_grad(), _describing(self.path):
            predictions = torch.cat([part(start) for start in range(0, size, BATCH)])
        answers, _ = on_host_arrays(self.task, predictions, torch.zeros(0))
        return tempered(answers.reshape(size, -1), self.description.output.temperature)

    def predict(self, data: Any, *, missing: str | None = None) -> NDArray[Any]:
        """The class of each sample; of a regression the values, of labels 0 or 1 for each, of survival the risks.

        Unknown categories and filled values are reported as a warning.

        Args:
            data: A data frame, columns by name, arrays, or a list of texts.
            missing: "fill" takes a missing value of a table as the column's mean, no category or an empty
                text; "refuse" is an error. By default values are filled where training did so.
        """
        return self.decided(self._outputs_of(data, missing))

    def predict_proba(self, data: Any, *, missing: str | None = None) -> NDArray[np.float64]:
        """The probabilities [n, classes], in the order of `classes`.

        Args:
            data: As of `predict`.
            missing: As of `predict`.
        """
        if self.description.output.is_regression:
            raise UsageError("the model predicts values, which have no probabilities; use predict")
        if self.description.output.is_survival:
            raise UsageError("a probability of survival is of a time; use predict_survival(data, times)")
        return self._outputs_of(data, missing)

    def predict_survival(
        self, data: Any, times: Sequence[float], *, missing: str | None = None
    ) -> NDArray[np.float64]:
        """The probability [n, times] of each sample that there is no event up to each of these times.

        nan beyond the longest time that is known: of the site's training samples, or the last of the intervals.

        Args:
            data: As of `predict`.
            times: In the unit of the training data.
            missing: As of `predict`.
        """
        return self.survival(self._outputs_of(data, missing), times)

    def predict_median(self, data: Any, *, missing: str | None = None) -> NDArray[np.float64]:
        """The time [n] at which the probability of no event falls to a half; infinite: not while it is known.

        Args:
            data: As of `predict`.
            missing: As of `predict`.
        """
        return self.medians(self._outputs_of(data, missing))

    def survival(self, outputs: NDArray[np.float64], times: Sequence[float]) -> NDArray[np.float64]:
        """The probabilities of survival at times.

        Args:
            outputs: As `outputs` gives them.
            times: As of `predict_survival`.
        """
        self._require_curve()
        for time in times:
            above(0, time=time)
        cuts, hazard = self.task.criterion.cuts, self.description.output.hazard
        return survival_of(outputs, np.asarray(times, np.float64), cuts, hazard)

    def medians(self, outputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """The median times.

        Args:
            outputs: As `outputs` gives them.
        """
        self._require_curve()
        return medians_of(outputs, self.task.criterion.cuts, self.description.output.hazard)

    @property
    def has_curve(self) -> bool:
        """Whether the model tells probabilities of survival, and not risks alone."""
        output = self.description.output
        return output.is_survival and (output.hazard is not None or bool(self.task.criterion.cuts))

    def _require_curve(self) -> None:
        if not self.description.output.is_survival:
            raise UsageError(f"the model is of {self.description.output.kind}, not of survival; use predict")
        if not self.has_curve:
            raise UsageError(
                "the model tells which risk is larger, and has no baseline hazard, which only a site with training "
                "samples and events has; name the model of a client, or train with the objective discrete_time"
            )

    def _outputs_of(self, data: Any, missing: str | None) -> NDArray[np.float64]:
        x, notes, _ = self.preparation.of(data, missing)
        if notes:
            warn("; ".join(notes))
        return self.outputs(x)

    def decided(self, outputs: NDArray[np.float64]) -> NDArray[Any]:
        """The predictions.

        Args:
            outputs: Probabilities or values, as `outputs` or `predict_proba` gives them.
        """
        output = self.description.output
        if output.is_survival:
            return risks(outputs)
        if output.kind == CLASSIFICATION:
            classes: NDArray[Any] = self.classes[outputs.argmax(1)]
            return classes
        if output.kind == MULTILABEL:
            return (outputs > 0.5).astype(np.int64)
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs

    def columns(
        self, outputs: NDArray[np.float64], times: Sequence[float] | None = None
    ) -> dict[str, list[Any]]:
        """The predictions as columns: prediction, and probability_CLASS of each class.

        Several labels or values are prediction_NAME each. Of survival the prediction is the risk, and with `times`
        there are survival_TIME of each of them, and the median; None where it is not known.

        Args:
            outputs: Probabilities or values, as of `decided`.
            times: As of `predict_survival`; None: risks alone.
        """
        output, decided = self.description.output, self.decided(outputs)
        if times is not None:
            self._require_curve()
        if decided.ndim == 1:
            columns = {"prediction": decided.tolist()}
        else:
            columns = {f"prediction_{name}": decided[:, n].tolist() for n, name in enumerate(output.names)}
        if output.is_survival:
            if times is None:
                return columns
            survival_columns = dict(
                zip((f"survival_{time:g}" for time in times), self.survival(outputs, times).T, strict=True)
            )
            survival_columns["median"] = self.medians(outputs)
            return columns | {
                name: [float(value) if np.isfinite(value) else None for value in values]
                for name, values in survival_columns.items()
            }
        if not output.is_regression:
            columns |= {f"probability_{name}": outputs[:, n].tolist() for n, name in enumerate(output.names)}
        return columns

    def evaluate(self, data: Any, targets: Any, *, missing: str | None = None) -> Evaluation:
        """All metrics of the predictions for these samples, with a confusion matrix and the calibration.

        Args:
            data: As of `predict`.
            targets: A class or value for each sample.
            missing: As of `predict`.
        """
        x, notes, _ = self.preparation.of(data, missing)
        outputs = self.outputs(x)  # first: it says what cannot be evaluated, whatever the targets are
        y = self.preparation.targets(targets)
        if said := [*notes, *filter(None, [known_rows.about(self.path, x, y)])]:
            warn("; ".join(said))
        return self.measured(outputs, y)

    def measured(self, outputs: NDArray[np.float64], y: NDArray[Any]) -> Evaluation:
        """The evaluation of predictions.

        Args:
            outputs: Probabilities or values, as of `decided`.
            y: The targets as `preparation.targets` gives them.
        """
        output, known = self.description.output, {m.name: m for m in self.task.metrics}
        known |= {name: m for name, m in METRICS.items() if output.kind in m.kinds}
        metrics = {name: metric.of(outputs, y) for name, metric in known.items()}
        if output.kind != CLASSIFICATION:
            return Evaluation(len(y), metrics, output.classes)
        confusion = np.zeros((output.count, output.count), np.int64)
        np.add.at(confusion, (y, outputs.argmax(1)), 1)
        return Evaluation(len(y), metrics, output.classes, confusion, calibration_bins(outputs, y))

    def score(self, outputs: NDArray[np.float64], y: NDArray[Any]) -> float:
        """The primary metric.

        Args:
            outputs: Probabilities or values, as of `decided`.
            y: The targets as `preparation.targets` gives them.
        """
        return self.task.metrics[0].of(outputs, y)

    def read(self, path: str | Path, *, missing: str | None = None) -> Labelled:
        """The samples of a file, with their targets as it has them; `preparation.targets` makes them numbers.

        Args:
            path: An .npz file, a table, a .txt file with a text per line, an image, or a folder of images.
            missing: As of `predict`, or "drop": a row with a missing value is no sample. That is the default
                where training did not fill them.
        """
        return self.preparation.read(Path(path), missing)

    def save(self, path: str | Path) -> Path:
        """Writes the bundle with all that it needs into a new folder, for transport.

        Args:
            path: The folder.
        """
        target = Path(path)
        if target.exists():
            raise UsageError(f"{target} exists already; name a new folder")
        base = None if self.path is None else base_of(self.path, self.description)
        if base is not None:
            copy_base(base, target / OWN_BASE)
        facts = self.description
        own = dataclasses.replace(
            facts,
            base="" if base is None else OWN_BASE,
        )
        write_bundle(target, own, self.task.layout, self.model)
        return target

    def estimator(self) -> Any:
        """The model as a fitted estimator of scikit-learn."""
        from copfl.experiment.bundle.estimator import estimator_of

        return estimator_of(self)


# Folders


def read_bundle(path: str | Path, client: int | str | None = None, model: Any = None) -> Bundle:
    """The model in a bundle, of a node, or of one client in a run folder, as it is stored.

    Args:
        path: The folder of a bundle, of a run, or the state-dir of a node.
        client: In a run folder, as of `copfl.load`.
        model: As of `copfl.load`.
    """
    folder = located(Path(path), client)
    foreign.inside(folder, folder / FILE)
    facts = description.read(folder)
    base = base_of(folder, facts)
    names = _names(foreign.inside(folder, folder / WEIGHTS))
    size = sum(file.stat().st_size for file in (folder / WEIGHTS, *(base.glob("*") if base else ())))
    with _describing(folder):
        task = building.build(facts, base, names, size, model)
    if set(task.layout.names) != names:
        other = sorted(set(task.layout.names) ^ names)[0]
        raise RunError(f"{folder / WEIGHTS} is of another model: {other}; restore it from a copy")
    return Bundle(facts, task, read_weights(folder / WEIGHTS, task.layout).model, folder)


@contextlib.contextmanager
def _describing(folder: Path | None) -> Iterator[None]:
    """RunError in place of an error of torch or another library, about a description that no run wrote."""
    try:
        yield
    except CopflError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        which = FILE if folder is None else folder / FILE
        raise RunError(
            f"{which} describes no model that can be made ({why}); restore it from a copy"
        ) from error


def base_of(folder: Path, facts: Description) -> Path | None:
    """The folder of what was not trained; RunError if it is not there.

    Args:
        folder: Of the bundle.
        facts: Its description.
    """
    if not facts.base:
        return None
    if facts.base not in BASES:
        raise RunError(f'{folder / FILE} names the base "{facts.base}", which is none of {", ".join(BASES)}')
    base = folder / facts.base
    if not base.is_dir():
        raise RunError(
            f"{folder} lacks its base, {facts.base}: the bundles of a run share it. Take a complete copy: "
            "`copfl export RUN --client N --format bundle --out FOLDER`"
        )
    return foreign.inside(folder if facts.base == OWN_BASE else folder.parent, base)


def _names(path: Path) -> set[str]:
    """The names of the trained tensors in a file of weights."""
    from safetensors import SafetensorError, safe_open

    damaged = f"{path} is damaged ({{}}); restore it from a copy"
    with raised_as(RunError, damaged, SafetensorError, OSError), safe_open(path, framework="pt") as file:
        names = set(file.keys())
    return {name.partition("/")[2] for name in names if "/" in name} or names
