"""The models of a finished run: a client's model, its predictions, and a model for a new client."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from copfl.core import tree
from copfl.core.batches import plan
from copfl.core.optim import Optimizer, begin
from copfl.core.task import Data, Experts, Personal
from copfl.core.train import train
from copfl.data.arrays import from_arrays, npz_content
from copfl.data.federation import tensors
from copfl.data.samples import Dataset, Inputs, by_name, each, shown
from copfl.data.targets import named
from copfl.engine import checkpoint
from copfl.errors import DataError, RunError, UsageError, at_least
from copfl.experiment.folder import RunFolder
from copfl.experiment.migration import renamed_tensor
from copfl.experiment.run import Experiment, prepare

BATCH = 500  # samples that are predicted at once


class Predictions(NamedTuple):
    """The predictions of a model for some samples."""

    classes: NDArray[np.int64]  # [n]
    probabilities: NDArray[np.float64]  # [n, classes]
    accuracy: float | None  # if labels were given


class NewClient(NamedTuple):
    """A model fine-tuned for a client that did not take part, and its accuracy on test samples."""

    model: Personal
    accuracy: list[float]  # before, and after each epoch
    train: int  # samples
    test: int


@dataclass(frozen=True, eq=False)
class RunModels:
    """The models of a finished run; its folder is only read."""

    path: Path
    experiment: Experiment

    def client(self, number: int) -> Personal:
        """The personal model of this client."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        clients = self.experiment.clients
        if not 0 <= number < clients:
            raise UsageError(f"there is no client {number}; the run has clients 0 to {clients - 1}")
        path = self.path / "models" / f"client-{number:04d}.safetensors"
        if not path.is_file():
            reason = "models are saved when a run ends, unless run.save_models is off"
            raise RunError(f"{path} does not exist: {reason}. `copfl resume {self.path}` ends it")
        try:
            return self._joined(load_file(path))
        except (SafetensorError, KeyError, ValueError) as error:
            raise RunError(f"{path} is damaged or of another model ({error}); start the run again") from error

    def _joined(self, tensors: dict[str, torch.Tensor]) -> Personal:
        layout, share = self.experiment.task.layout, tensors.get("share")
        if share is None:
            return layout.join(tensors)
        parts = [
            {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith(f"{n}/")}
            for n in range(len(share))
        ]
        return Experts(torch.stack([layout.join(part) for part in parts]), share)

    def new_client(self) -> torch.Tensor:
        """The model that a client which has never taken part receives from the server."""
        algorithm, task, clients = self.experiment.algorithm, self.experiment.task, self.experiment.clients
        like = {"server": algorithm.server_init(task, clients)}
        path = self.path / "checkpoint" / "state.safetensors"
        server = checkpoint.load(path, like, renamed_tensor)[0]["server"]
        ids = torch.arange(min(2, clients))
        down, client = algorithm.downlink(server, ids), algorithm.client_init(task)
        models = [algorithm.personal_model(task, client, tree.row(down, row)) for row in ids.tolist()]
        first, last = models[0], models[-1]
        if isinstance(first, Experts) or isinstance(last, Experts):
            raise UsageError(
                "its clients predict with a mixture of models; there is no single one to fine-tune"
            )
        if not torch.equal(first, last):
            raise UsageError(
                "this algorithm's server sends each client its own model, and none to a new client"
            )
        return first

    def predict(self, model: Personal, x: Inputs, y: NDArray[Any] | None = None) -> Predictions:
        """The predictions of the model for raw samples, shaped as in the run's data."""
        task, size = self.experiment.task, len(next(iter(by_name(x).values())))

        def answers(start: int) -> torch.Tensor:
            return task.answers(model, tensors(each(lambda array: array[start : start + BATCH], x)))

        with torch.no_grad():
            logs = torch.cat([answers(start) for start in range(0, size, BATCH)])
        probabilities = logs.double().exp().numpy()
        classes = probabilities.argmax(1)
        return Predictions(classes, probabilities, None if y is None else float((classes == y).mean()))

    def personalize(
        self, data: Dataset, epochs: int = 5, lr: float | None = None, seed: int = 0
    ) -> NewClient:
        """The new client's model, fine-tuned on the train samples of this data set."""
        task = self.experiment.task
        at_least(1, epochs=epochs)
        optimizer: Optimizer | None = getattr(self.experiment.algorithm, "optimizer", None)
        if optimizer is None:
            raise UsageError("the run's algorithm has no optimizer, so it cannot train a new client")
        if lr is not None:
            optimizer = dataclasses.replace(optimizer, lr=lr)  # type: ignore[type-var]
        w = self.new_client()
        samples, test = (
            Data(tensors(s.x), tensors(s.y), torch.tensor(len(s))) for s in (data.train, data.test)
        )
        batch, new_id = self.experiment.settings.batch, self.experiment.clients
        batches = plan(seed, 0, [new_id], [len(data.train)], batch=batch, epochs=epochs)
        moments = begin(optimizer, optimizer.init(w[: task.d]), w[: task.d])
        with torch.no_grad():
            accuracy = [float(task.evaluate(w, test)[1])]
            for epoch in tree.row(batches, 0):
                w, moments, _ = train(task, optimizer, w, moments, samples, (epoch,))
                accuracy.append(float(task.evaluate(w, test)[1]))
        return NewClient(w, accuracy, len(data.train), len(data.test))

    def samples(self, path: Path, labelled: bool) -> tuple[Dataset, bool]:
        """The samples of an .npz file, checked against the run's, and whether they have labels."""
        arrays, known = npz_content(path), self.experiment.federation.dataset
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
        if found != wanted:
            raise DataError(f"a sample of {path} is {found}, but one of the run is {wanted}")
        return dataset, "y" in arrays


def load(path: Path, **values: Any) -> RunModels:
    """The models of the run in this folder; values are passed again, as to `run`."""
    folder = RunFolder(path)
    tables = folder.tables()
    precision = "fp64" if tables["run"].get("precision") == "fp64" else "fp32"
    local = {"run": {"device": "cpu", "engine": "sequential", "chunk": 0, "precision": precision}}
    return RunModels(path, prepare([tables, local], partition=folder.partition(), **values))
