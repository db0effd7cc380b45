"""The models of a finished run: a client's model, its predictions, and a model for a new client."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import message_to_new_client
from copfl.core.batches import plan
from copfl.core.evaluation import on_host_arrays, primary_metrics
from copfl.core.optim import Optimizer, begin
from copfl.core.task import Data, Personal, Task
from copfl.core.train import train
from copfl.data import reading, tables
from copfl.data.arrays import from_arrays, npz_content
from copfl.data.federation import tensors
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset, Inputs, Samples, by_name, each, shown
from copfl.data.schemes import names_of_clients
from copfl.data.targets import named, targets_of
from copfl.engine import checkpoint
from copfl.errors import DataError, RunError, UsageError, at_least
from copfl.experiment import model_tables
from copfl.experiment.client_models import vector_of
from copfl.experiment.folder import RunFolder
from copfl.experiment.migration import renamed_tensor
from copfl.experiment.run import Experiment, prepare

IMAGES = (".png", ".jpg", ".jpeg")
BATCH = 500  # samples that are predicted at once
SHOWN = 10  # names of clients in a message
FOLDS = 3  # of the cross-validation within the client's samples
RATES = (1, 3, 10)  # multiples of the run's learning rate that are tried
EPOCHS = (0, 1, 3, 10, 30)  # tried


class Predictions(NamedTuple):
    """The predictions of a model for some samples."""

    # Probabilities [n, classes] or [n, labels]; of a regression values [n, targets].
    outputs: NDArray[np.float64]
    score: float | None  # the primary metric of the samples with a target; None without any


class Further(NamedTuple):
    """The samples of a file that are predicted."""

    x: Inputs
    y: NDArray[Any]  # the targets of those that have one
    has_target: NDArray[np.bool_]  # [n]
    notes: list[str]  # what is unusual about them


class Content(NamedTuple):
    """What a file has, before it is checked."""

    arrays: dict[str, Any]  # x; y of the samples with a target, if any; and what else an .npz file has
    has_target: NDArray[np.bool_] | None = None  # [n]; None: all or none
    notes: Sequence[str] = ()
    target: str = "the array y"  # what the file would have


class NewClient(NamedTuple):
    """A model fine-tuned for a client that did not take part, and its primary metric on test samples."""

    model: Personal
    start: str  # what it was trained from
    lr: float
    epochs: int
    scores: list[float]  # the primary metric of the start, and after each epoch
    alone: list[float]  # the same for training alone, from the initial weights
    train: int  # samples
    test: int


@dataclass(frozen=True, eq=False)
class RunModels:
    """The models of a finished run; its folder is only read."""

    path: Path
    experiment: Experiment

    def number_of(self, client: int | str) -> int:
        """The number of a client; a text may also be its name in the data's client column, or "0 (north)"."""
        federation, clients, text = self.experiment.federation, self.experiment.clients, str(client)
        names = names_of_clients(federation.dataset, federation.partition)
        shown = [f"{n} ({name})" for n, name in enumerate(names)]
        number = int(text) if text.isdecimal() else -1
        found = [n for n in range(clients) if n == number or client in (names[n], shown[n])]
        if len(found) == 1:
            return found[0]
        if found:
            either = " or ".join(f'"{shown[n]}"' for n in found)
            raise UsageError(f"{client} is the number of a client and the name of another; write {either}")
        known = "" if names[0] == "0" else f": {', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)}"
        raise UsageError(f"there is no client {client}; the run has clients 0 to {clients - 1}{known}")

    def client(self, client: int | str) -> Personal:
        """The personal model of this client, by its number or name."""
        models, number = RunFolder(self.path).models(self.experiment.task), self.number_of(client)
        found = models.get(number)
        if found is None:
            reason = "models are saved when a run ends, unless run.save_models is off"
            raise RunError(
                f"{models.of(number)} does not exist: {reason}. `copfl resume {self.path}` ends it"
            )
        return found.model

    def new_client(self) -> Personal:
        """The model that a client which has never taken part receives from the server."""
        algorithm, task, clients = self.experiment.algorithm, self.experiment.task, self.experiment.clients
        like = {"server": algorithm.server_init(task, clients)}
        path = self.path / "checkpoint" / "state.safetensors"
        server = checkpoint.load(path, like, renamed_tensor)[0]["server"]
        trained = torch.from_numpy(self.experiment.settings.split_clients[0])
        down = message_to_new_client(algorithm, server, trained)
        return algorithm.personal_model(task, algorithm.client_init(task), down)

    def predict(
        self,
        model: Personal,
        x: Inputs,
        y: NDArray[Any] | None = None,
        has_target: NDArray[np.bool_] | None = None,
    ) -> Predictions:
        """The predictions of the model for raw samples, shaped as in the run's data.

        `y` are targets, for the score: of all samples, or of those that `has_target` [n] names.
        """
        task, size = self.experiment.task, len(next(iter(by_name(x).values())))
        if task.criterion.kind == NEXT_TOKEN:
            kind = "the run's model predicts the next token of a text"
            raise UsageError(f"{kind}; export it to use it elsewhere")

        def answers(start: int) -> torch.Tensor:
            return task.predict(model, tensors(each(lambda array: array[start : start + BATCH], x)))

        with torch.no_grad():
            predictions = torch.cat([answers(start) for start in range(0, size, BATCH)])
        outputs, targets = on_host_arrays(task, predictions, torch.as_tensor(0 if y is None else y))
        tested = outputs if has_target is None else outputs[has_target]
        score = None if y is None or not len(y) else task.metrics[0].of(tested, targets)
        return Predictions(outputs.reshape(size, -1), score)

    def personalize(
        self, data: Dataset, epochs: int | None = None, lr: float | None = None, seed: int = 0
    ) -> NewClient:
        """The new client's model, fine-tuned on the train samples of this data set.

        The start (the global model, the mean of the personal models, or the nearest client's), the learning
        rate and the epochs are those with the best cross-validation score on the train samples; a single
        sample trains the global model at the run's rate for one epoch.
        """
        optimizer: Optimizer | None = getattr(self.experiment.algorithm, "optimizer", None)
        if optimizer is None or not hasattr(optimizer, "lr"):
            raise UsageError("the run's algorithm has no optimizer, so it cannot train a new client")
        if epochs is not None:
            at_least(1, epochs=epochs)
        task, experiment, few = self.experiment.task, self.experiment, len(data.train) < 2
        how = Training(task, optimizer, experiment.settings.batch, seed, experiment.clients)
        usual = [float(f"{factor * optimizer.lr:.3g}") for factor in ((1,) if few else RATES)]
        rates = usual if lr is None else [lr]
        counts = [epochs] if epochs is not None else [1] if few else list(EPOCHS)

        def best(w: Tensor) -> Choice:
            if few:
                return Choice(rates[0], counts[0], (0.0, 0.0))
            return choose(how, w, data.train, rates, counts)

        def scores(models: list[Tensor]) -> list[float]:
            with torch.no_grad():
                return [primary_metrics(task, w, [test])[0] for w in models]

        starts, test = self._starts(data), data_of(data.test)
        choices = {name: best(w) for name, w in starts.items()}
        start = max(choices, key=lambda name: choices[name].score)
        alone, chosen = best(task.initial), choices[start]
        models = fine_tuned(with_rate(how, chosen.lr), starts[start], data.train, chosen.epochs)
        others = fine_tuned(with_rate(how, alone.lr), task.initial, data.train, alone.epochs)
        return NewClient(
            models[-1], start, chosen.lr, chosen.epochs, scores(models), scores(others),
            len(data.train), len(data.test),
        )  # fmt: skip

    def _starts(self, data: Dataset) -> dict[str, Tensor]:
        """The models a new client may start from, by name; without saved models, the global one."""
        starts = {"the global model": vector_of(self.new_client())}
        if (self.path / "models").is_dir() and len(data.train) > 1:
            trained = self.experiment.settings.split_clients[0].tolist()
            models = {n: vector_of(self.client(n)) for n in trained}
            closest = nearest(self.experiment.task, models, data.train)
            starts["the mean of the personal models"] = torch.stack(list(models.values())).mean(0)
            starts[f"the model of client {closest}, the nearest"] = models[closest]
        return starts

    def samples(self, path: Path) -> Dataset:
        """The labelled samples of a file, checked against the run's: an .npz file or a table.

        An .npz file has the arrays x and y. Sentences are a column of a table; other tables are encoded as in
        the run. A fifth is test, unless the file has x_test and y_test.
        """
        content, known = self._content(path), self.experiment.federation.dataset
        if "y" not in content.arrays:
            raise DataError(
                f"{path} lacks {content.target}; a model is trained on samples with their targets"
            )
        if content.has_target is not None and not content.has_target.all():
            row = int(np.flatnonzero(~content.has_target)[0]) + 1
            raise DataError(
                f"{path} has nothing in {content.target} in row {row}; complete it or remove the row"
            )
        arrays = dict(content.arrays)
        for name in arrays.keys() & {"y", "y_test"}:
            arrays[name] = named(arrays[name], known.classes)
        dataset = from_arrays(**arrays, classes=known.classes, kind=known.kind, name=path.stem)
        return self._checked(path, dataset)

    def further(self, path: Path) -> Further:
        """The samples of a file or folder to predict; all, some or none of them may have a target.

        Sentences are the lines of a .txt file, or a column of a table; images are a file, or all files of a
        folder. An .npz file and other tables are as in `samples`.
        """
        content, known = self._content(path), self.experiment.federation.dataset
        x, y = content.arrays["x"], content.arrays.get("y")
        size = len(next(iter(by_name(x).values())))
        has_target = content.has_target
        if has_target is None:
            has_target = np.full(size, y is not None)
        any_target = known.train.y[np.zeros(size, np.int64)]  # only x is checked
        arrays = {"x": x, "y": any_target, "x_test": x, "y_test": any_target}
        dataset = from_arrays(**arrays, classes=known.classes, kind=known.kind, name=path.stem)
        targets = known.train.y[:0]
        if y is not None and len(y):
            if len(has_target) != size:
                raise DataError(f"{path} has {size:,} samples and {len(has_target):,} targets")
            targets = targets_of([named(y, known.classes)], known.kind, known.classes).parts[0]
        return Further(self._checked(path, dataset).train.x, targets, has_target, list(content.notes))

    def _checked(self, path: Path, dataset: Dataset) -> Dataset:
        """The data set, if a sample has the form of the run's."""
        known = self.experiment.federation.dataset.train.x
        form, expected = shown(dataset.train.x), shown(known)
        if form != expected and "input_ids" not in by_name(known):  # sentences may have any length
            raise DataError(f"a sample of {path} is {form}, but one of the run is {expected}")
        return dataset

    def _content(self, path: Path) -> Content:
        """The arrays of a file; of sentences and images without a table, x alone."""
        suffix = path.suffix.lower()
        if not path.exists():
            raise DataError(
                f"there is no file or folder {path}; name the samples: an .npz file, a table or images"
            )
        if path.is_dir() or suffix in IMAGES:
            return Content({"x": self.images(path)}, target="targets")
        if suffix == ".txt":
            lines = reading.read_bytes(path, tables.LARGEST_FILE).decode(errors="replace").splitlines()
            return Content({"x": self.tokens([line for line in lines if line.strip()])}, target="targets")
        if suffix in tables.READERS:
            return self._table(path)
        arrays = npz_content(path)
        if "x" not in arrays:
            raise DataError(f"{path} lacks the array x; it has {', '.join(arrays) or 'none'}")
        if "y" not in arrays or arrays["y"].dtype.kind != "f" or arrays["y"].ndim != 1:
            return Content(arrays)
        has_target = ~np.isnan(arrays["y"])
        return Content({**arrays, "y": arrays["y"][has_target]}, has_target)

    def _table(self, path: Path) -> Content:
        """The rows of a table, as the run's were read. A row without a target is predicted, and not scored."""
        options, columns = self.experiment.tables["data"], tables.read_table(path)
        known = self.experiment.federation.dataset
        usual = "target" if "target" in columns else "label"
        names = tables.names_of(str(options.get("target", usual)), columns)
        target = f"the column {' and '.join(names)} to predict"
        if known.encode is not None:
            x, notes = known.encode(columns)
        else:
            x, notes = self._sentences(path, columns), []
        if any(name not in columns for name in names):
            return Content({"x": x}, notes=notes, target=target)
        rows = list(zip(*(columns[name] for name in names), strict=True))
        has_target = np.array([None not in row for row in rows])
        kept = [row for row in rows if None not in row]
        if not kept:
            return Content({"x": x}, has_target, notes, target)
        if known.kind == CLASSIFICATION:
            y: NDArray[Any] = tables.words([row[0] for row in kept])
        else:
            with raised_as(DataError, f"{path}: {target} must have numbers: {{}}", ValueError, TypeError):
                y = np.array(kept, np.float64)
            y = y[:, 0] if known.train.y.ndim == 1 else y
        return Content({"x": x, "y": y}, has_target, notes, target)

    def _sentences(self, path: Path, columns: tables.Table) -> Inputs:
        """The column of the texts, as the run's model takes them."""
        text = self.experiment.tables["data"].get("text", "text")
        if text not in columns:
            raise DataError(f'{path} has no column "{text}" of sentences; it has {", ".join(columns)}')
        if None in columns[text]:
            raise DataError(f'{path} has no "{text}" in row {columns[text].index(None) + 1}; complete it')
        return self.tokens([str(sentence) for sentence in columns[text]])

    def tokens(self, sentences: Sequence[str]) -> Inputs:
        """Sentences as the run's model takes them."""
        if not sentences:
            raise DataError("there is no sentence to classify; give at least one")
        return model_tables.tokenizer_of(self.experiment.tables["model"])(sentences)

    def images(self, path: Path) -> Inputs:
        """An image file, or those of a folder by name, in the size and colours of the run's images."""
        known = self.experiment.federation.dataset.train.x
        if isinstance(known, dict) or known.ndim != 4 or known.dtype != np.uint8:
            raise DataError(f"{path} has images, but a sample of the run is {shown(known)}")
        found = [path] if path.is_file() else sorted(path.iterdir())
        files = [file for file in found if file.suffix.lower() in IMAGES]
        if not files:
            raise DataError(f"{path} has no images; expected {', '.join(IMAGES)}")
        channels, *size = known.shape[1:]
        images = [(reading.read_bytes(file, reading.LARGEST_IMAGE_FILE), str(file)) for file in files]
        return np.stack([reading.decode(raw, name, tuple(size), gray=channels == 1) for raw, name in images])


def load(path: Path, **values: Any) -> RunModels:
    """The models of the run in this folder; values are passed again, as to `run`."""
    folder = RunFolder(path)
    settings = folder.tables()
    precision = "fp64" if settings["run"].get("precision") == "fp64" else "fp32"
    local = {"run": {"device": "cpu", "engine": "sequential", "chunk": 0, "precision": precision}}
    given = {**folder.values(), **values}
    return RunModels(path, prepare([settings, local], partition=folder.partition(), **given))


# A model for a client that did not take part: start, learning rate and epochs by its own samples


class Training(NamedTuple):
    """How a new client's model is trained."""

    task: Task
    optimizer: Optimizer
    batch: int
    seed: int
    id: int  # of the new client: the order of its samples depends on it


class Choice(NamedTuple):
    """The best learning rate and number of epochs from one start, and their score on held-out samples."""

    lr: float
    epochs: int
    score: tuple[float, float]  # accuracy, or what else is best when high, then minus the loss


def data_of(samples: Samples) -> Data:
    """The samples of one client as tensors."""
    return Data(tensors(samples.x), tensors(samples.y), torch.tensor(len(samples)))


def nearest(task: Task, models: Mapping[int, Tensor], samples: Samples) -> int:
    """The client whose model has the lowest loss on these samples."""
    data = data_of(samples)
    with torch.no_grad():
        losses = {client: float(task.evaluate(w, data)[0]) for client, w in models.items()}
    return min(losses, key=lambda client: losses[client] if losses[client] == losses[client] else np.inf)


def fine_tuned(how: Training, w: Tensor, samples: Samples, epochs: int) -> list[Tensor]:
    """The model before training, and after each epoch."""
    task, data, found = how.task, data_of(samples), [w]
    batches = plan(how.seed, 0, [how.id], [len(samples)], batch=how.batch, epochs=epochs, random=task.random)
    moments = begin(how.optimizer, how.optimizer.init(w[: task.d]), w[: task.d])
    with torch.no_grad():
        for epoch in tree.row(batches, 0):
            w, moments, _ = train(task, how.optimizer, w, moments, data, (epoch,))
            found.append(w)
    return found


def with_rate(how: Training, lr: float) -> Training:
    """The same with another learning rate."""
    return how._replace(optimizer=dataclasses.replace(how.optimizer, lr=lr))  # type: ignore[type-var]


def choose(
    how: Training, w: Tensor, samples: Samples, rates: Sequence[float], epochs: Sequence[int]
) -> Choice:
    """The learning rate and epochs with the best mean score over the folds; of equals, the first."""
    folds = _folds(samples, how.seed)
    scores: dict[tuple[float, int], list[tuple[float, float]]] = {}
    for fold in range(folds.max() + 1):
        held_out = data_of(samples.take(folds == fold))
        for lr in rates:
            models = fine_tuned(with_rate(how, lr), w, samples.take(folds != fold), max(epochs))
            for count in epochs:
                with torch.no_grad():
                    loss, score = how.task.evaluate(models[count], held_out)
                found = (float(score), -float(loss)) if torch.isfinite(loss) else (-np.inf, -np.inf)
                scores.setdefault((lr, count), []).append(found)
    means = {key: tuple(np.mean(own, 0).tolist()) for key, own in scores.items()}
    lr, count = max(means, key=lambda key: means[key])
    return Choice(lr, count, means[lr, count])


def _folds(samples: Samples, seed: int) -> NDArray[np.int64]:
    """The fold of each sample, every class in proportion."""
    order = np.random.default_rng(seed).permutation(len(samples))
    order = order[np.argsort(samples.strata[order], kind="stable")]
    folds = np.empty(len(samples), np.int64)
    folds[order] = np.arange(len(samples)) % min(FOLDS, len(samples))
    return folds
