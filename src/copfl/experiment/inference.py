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
from copfl.core.task import Data, Experts, Personal, Task
from copfl.core.train import train
from copfl.data import reading, tables
from copfl.data.arrays import from_arrays, npz_content
from copfl.data.federation import tensors
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset, Inputs, Samples, by_name, each, shown
from copfl.data.schemes import names_of_clients
from copfl.data.targets import named
from copfl.engine import checkpoint
from copfl.errors import DataError, RunError, UsageError, at_least, raised_as
from copfl.experiment import model_tables
from copfl.experiment.folder import RunFolder, vector_of
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
    score: float | None  # the primary metric, if targets were given


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
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        number = self.number_of(client)
        path = self.path / "models" / f"client-{number:04d}.safetensors"
        if not path.is_file():
            reason = "models are saved when a run ends, unless run.save_models is off"
            raise RunError(f"{path} does not exist: {reason}. `copfl resume {self.path}` ends it")
        damaged = f"{path} is damaged or of another model ({{}}); start the run again"
        with raised_as(RunError, damaged, SafetensorError, KeyError, ValueError):
            return self._joined(load_file(path))

    def _joined(self, tensors: dict[str, torch.Tensor]) -> Personal:
        layout, share = self.experiment.task.layout, tensors.get("share")
        if share is None:
            return layout.join(tensors)
        parts = [
            {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith(f"{n}/")}
            for n in range(len(share))
        ]
        return Experts(torch.stack([layout.join(part) for part in parts]), share, tensors.get("near"))

    def new_client(self) -> Personal:
        """The model that a client which has never taken part receives from the server."""
        algorithm, task, clients = self.experiment.algorithm, self.experiment.task, self.experiment.clients
        like = {"server": algorithm.server_init(task, clients)}
        path = self.path / "checkpoint" / "state.safetensors"
        server = checkpoint.load(path, like, renamed_tensor)[0]["server"]
        trained = torch.from_numpy(self.experiment.settings.split_clients[0])
        down = message_to_new_client(algorithm, server, trained)
        return algorithm.personal_model(task, algorithm.client_init(task), down)

    def predict(self, model: Personal, x: Inputs, y: NDArray[Any] | None = None) -> Predictions:
        """The predictions of the model for raw samples, shaped as in the run's data."""
        task, size = self.experiment.task, len(next(iter(by_name(x).values())))
        if task.criterion.kind == NEXT_TOKEN:
            kind = "the run's model predicts the next token of a text"
            raise UsageError(f"{kind}; export it to use it elsewhere")

        def answers(start: int) -> torch.Tensor:
            return task.predict(model, tensors(each(lambda array: array[start : start + BATCH], x)))

        with torch.no_grad():
            predictions = torch.cat([answers(start) for start in range(0, size, BATCH)])
        outputs, targets = on_host_arrays(task, predictions, torch.as_tensor(0 if y is None else y))
        score = None if y is None else task.metrics[0].of(outputs, targets)
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

    def samples(self, path: Path, labelled: bool) -> tuple[Dataset, bool]:
        """The samples of a file or folder, checked against the run's, and whether they have labels.

        An .npz file has the arrays x and y. Sentences are the lines of a .txt file, or a column of a table;
        images are a file, or all files of a folder. A table of numbers is encoded as in the run.
        """
        arrays, known = self._content(path), self.experiment.federation.dataset
        missing = [name for name in ("x", *(["y"] if labelled else [])) if name not in arrays]
        if missing:
            raise DataError(f"{path} lacks the array {missing[0]}; it has {', '.join(arrays) or 'none'}")
        given = {name: named(y, known.classes) for name, y in arrays.items() if name in ("y", "y_test")}
        if not labelled:  # all samples, not split into train and test
            size = len(next(iter(by_name(arrays["x"]).values())))
            y = given.get("y", known.train.y[np.zeros(size, np.int64)])
            given = {"y": y, "x_test": arrays["x"], "y_test": y}
            arrays = {name: array for name, array in arrays.items() if name in ("x", "y")}
        dataset = from_arrays(**{**arrays, **given}, classes=known.classes, kind=known.kind, name=path.stem)
        found, wanted = (shown(x) for x in (dataset.train.x, known.train.x))
        if found != wanted and "input_ids" not in by_name(known.train.x):  # sentences may have any length
            raise DataError(f"a sample of {path} is {found}, but one of the run is {wanted}")
        return dataset, "y" in arrays

    def _content(self, path: Path) -> dict[str, Any]:
        """The arrays of a file, or x alone of sentences and images."""
        suffix = path.suffix.lower()
        if path.is_dir() or suffix in IMAGES:
            return {"x": self.images(path)}
        if suffix == ".txt":
            lines = reading.read_bytes(path, tables.LARGEST_FILE).decode(errors="replace").splitlines()
            return {"x": self.tokens([line for line in lines if line.strip()])}
        if suffix not in tables.READERS:
            return npz_content(path)
        options, columns = self.experiment.tables["data"], tables.read_table(path)
        text, usual = options.get("text", "text"), "target" if "target" in columns else "label"
        target = options.get("target", usual)
        known = self.experiment.federation.dataset
        if known.encode is not None:
            x = known.encode(columns)
            if target not in columns:
                return {"x": x}
            labels_of = tables.words if known.kind == CLASSIFICATION else tables.floats
            return {"x": x, "y": labels_of(columns[target])}
        if text not in columns:
            raise DataError(f'{path} has no column "{text}" of sentences; it has {", ".join(columns)}')
        if None in columns[text]:
            raise DataError(f'{path} has no "{text}" in row {columns[text].index(None) + 1}; complete it')
        labels = {"y": np.array([str(y) for y in columns[target]])} if target in columns else {}
        return {"x": self.tokens([str(sentence) for sentence in columns[text]]), **labels}

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
