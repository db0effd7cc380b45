"""What a finished run is good for: a client's model to take away, its answers, and a model for a newcomer."""

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
from copfl.data import reading
from copfl.data.arrays import from_arrays
from copfl.data.samples import Dataset
from copfl.engine import checkpoint
from copfl.errors import DataError, RunError, UsageError
from copfl.experiment.folder import RunFolder
from copfl.experiment.run import Experiment, prepare


class Answers(NamedTuple):
    """What a model says to some samples."""

    classes: NDArray[np.int64]  # [n]
    probabilities: NDArray[np.float64]  # [n, classes]
    accuracy: float | None  # where the labels were given


class NewClient(NamedTuple):
    """A model fitted to a client that was not there, and its accuracy on that client's own test samples."""

    model: Personal
    accuracy: list[float]  # before, and after each epoch
    train: int  # samples
    test: int


@dataclass(frozen=True, eq=False)
class Trained:
    """A run whose models are there; nothing in its folder is changed."""

    path: Path
    experiment: Experiment

    def client(self, number: int) -> Personal:
        """What this client predicts with."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        clients = self.experiment.clients
        if not 0 <= number < clients:
            raise UsageError(f"there is no client {number}; the run has clients 0 to {clients - 1}")
        path = self.path / "models" / f"client-{number:04d}.safetensors"
        if not path.is_file():
            raise RunError(
                f"{path} is not there: models are saved when a run ends, unless run.save_models is off. "
                f"`copfl resume {self.path}` ends it"
            )
        try:
            return self._flat(load_file(path))
        except (SafetensorError, KeyError, ValueError) as error:
            raise RunError(f"{path} is damaged or of another model ({error}); start the run again") from error

    def _flat(self, tensors: dict[str, torch.Tensor]) -> Personal:
        if "share" not in tensors:
            return self.experiment.task.layout.join(tensors)
        parts: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            number, slash, rest = name.partition("/")
            if slash:
                parts.setdefault(int(number), {})[rest] = tensor
        experts = [self.experiment.task.layout.join(parts[number]) for number in sorted(parts)]
        return Experts(torch.stack(experts), tensors["share"])

    def new_client(self) -> torch.Tensor:
        """The model that a client which has never taken part gets from the server."""
        e = self.experiment
        like = {"server": e.algorithm.server_init(e.task, e.clients)}
        server = checkpoint.load(self.path / "checkpoint" / "state.safetensors", like)[0]["server"]
        down = e.algorithm.downlink(server, torch.arange(min(2, e.clients)))
        fresh = e.algorithm.client_init(e.task)
        models = []
        for row in range(min(2, e.clients)):
            model = e.algorithm.personal_model(e.task, fresh, tree.row(down, row))
            if isinstance(model, Experts):
                raise UsageError(
                    "this algorithm's clients predict with a mixture of models; there is no single one to fit"
                )
            models.append(model)
        if not torch.equal(models[0], models[-1]):
            raise UsageError(
                "this algorithm's server sends every client something else, and has nothing for a newcomer"
            )
        return models[0]

    def answers(self, model: Personal, x: NDArray[Any], y: NDArray[Any] | None = None) -> Answers:
        """What the model says to raw samples, as many and as shaped as in the run's data."""
        logs = []
        for start in range(0, len(x), 500):
            with torch.no_grad():
                logs.append(
                    self.experiment.task.answers(
                        model, torch.from_numpy(np.ascontiguousarray(x[start : start + 500]))
                    )
                )
        probabilities = torch.cat(logs).double().exp().numpy()
        classes = probabilities.argmax(1)
        return Answers(classes, probabilities, None if y is None else float((classes == y).mean()))

    def personalize(
        self, dataset: Dataset, epochs: int = 5, lr: float | None = None, seed: int = 0
    ) -> NewClient:
        """The newcomer's model, trained on the train samples of this data set alone, for some epochs."""
        e = self.experiment
        if epochs < 1:
            raise UsageError(f"epochs={epochs} must be at least 1")
        optimizer: Optimizer | None = getattr(e.algorithm, "optimizer", None)
        if optimizer is None:
            raise UsageError(
                "the run's algorithm has no optimizer of its own, so a newcomer cannot be trained with it"
            )
        if lr is not None:
            optimizer = dataclasses.replace(optimizer, lr=lr)  # type: ignore[type-var]
        w = self.new_client()
        splits = [dataset.train, dataset.test]
        ours, theirs = (
            Data(torch.from_numpy(s.x), torch.from_numpy(s.y), torch.tensor(len(s))) for s in splits
        )
        batches = plan(seed, 0, [e.clients], [len(dataset.train)], batch=e.loop.batch, epochs=epochs)
        moments = begin(optimizer, optimizer.init(w[: e.task.d]), w[: e.task.d])
        with torch.no_grad():
            accuracy = [float(e.task.evaluate(w, theirs)[1])]
            for batch in tree.row(batches, 0):
                w, moments, _ = train(e.task, optimizer, w, moments, ours, (batch,))
                accuracy.append(float(e.task.evaluate(w, theirs)[1]))
        return NewClient(w, accuracy, len(dataset.train), len(dataset.test))

    def samples(self, path: Path, labelled: bool) -> tuple[Dataset, bool]:
        """The samples of an .npz file, checked against the run's own, and whether they came with labels."""
        arrays: dict[str, Any] = dict(reading.npz_arrays(path))
        if "x" not in arrays or (labelled and "y" not in arrays):
            raise DataError(
                f"{path} lacks the array {'y' if 'x' in arrays else 'x'}; it holds {', '.join(arrays) or 'none'}"
            )
        known = "y" in arrays
        if labelled:
            found = from_arrays(**arrays, name=path.stem)
        else:  # nothing is held back
            y = arrays.get("y", np.zeros(len(arrays["x"]), np.int64))
            found = from_arrays(arrays["x"], y, arrays["x"], y, name=path.stem)
        own, classes = self.experiment.federation.dataset.train.x, self.experiment.task.classes
        if (found.train.x.shape[1:], found.train.x.dtype) != (own.shape[1:], own.dtype):
            raise DataError(
                f"a sample of {path} is {found.train.x.dtype} {list(found.train.x.shape[1:])}, the run's are "
                f"{own.dtype} {list(own.shape[1:])}; they must be alike"
            )
        if max(int(found.train.y.max()), int(found.test.y.max())) >= classes:
            raise DataError(
                f"{path} has labels above {classes - 1}; the run knows classes 0 to {classes - 1}"
            )
        return found, known


def load(path: Path, **values: Any) -> Trained:
    """The run in this folder; what was passed to `run` as a value (`algorithm`, `data`, `model`) is passed again."""
    folder = RunFolder(path)
    tables = folder.tables()
    precision = "fp64" if tables["run"].get("precision") == "fp64" else "fp32"
    here = {"run": {"device": "cpu", "engine": "sequential", "chunk": 0, "precision": precision}}
    return Trained(path, prepare([tables, here], partition=folder.partition(), **values))
