"""Each client's model, as an evaluation measured it: in memory, or in a run folder.

Training gives the models to a keeper, and a result asks it for them.
"""

import contextlib
import copy
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from copfl import files, foreign
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.evaluation import mixture_of
from copfl.core.layout import Layout
from copfl.core.task import Experts, Personal, Task, opened
from copfl.engine.rounds import State
from copfl.errors import RunError, raised_as

# The stages of a client's model.
TRAINED = "after local training"  # what the tables' main column measures
RECEIVED = "before local training"  # of a client that was never evaluated, or whose last update diverged
GLOBAL = "global"  # what a client receives that has never taken part
WEIGHTS = "weights.safetensors"
UNSETTLED = "weights-unsettled.safetensors"  # of a round after the last checkpoint


class Stage(NamedTuple):
    """Where in the run a model was taken."""

    name: str
    round: int  # the last whose aggregate or local update is in it, from 1


class ClientModel(NamedTuple):
    """A model and its stage."""

    model: Personal
    stage: Stage


class ClientModels(Protocol):
    """The models of a run by the number of the client; see engine.rounds.Models."""

    def wanted(self, client: int) -> bool: ...

    def put(self, client: int, model: Personal, round: int, stage: str = TRAINED) -> None: ...

    def drop(self, client: int) -> None: ...

    def settle(self, round: int) -> None:
        """There is a checkpoint of this round: the models up to it stay, later ones will be trained again."""

    def get(self, client: int) -> ClientModel | None: ...

    def stage(self, client: int) -> Stage | None: ...


@dataclass
class InMemory:
    """The models of a run without a folder; `only`: of these clients."""

    only: Collection[int] | None = None
    models: dict[int, ClientModel] = field(default_factory=dict)

    def wanted(self, client: int) -> bool:
        return self.only is None or client in self.only

    def put(self, client: int, model: Personal, round: int, stage: str = TRAINED) -> None:
        # A copy: the model is a row of all clients', which would stay in memory with it.
        self.models[client] = ClientModel(tree.each(torch.clone, model), Stage(stage, round))

    def drop(self, client: int) -> None:
        self.models.pop(client, None)

    def settle(self, round: int) -> None:
        pass  # without a folder, nothing is trained again

    def get(self, client: int) -> ClientModel | None:
        return self.models.get(client)

    def stage(self, client: int) -> Stage | None:
        return self.models[client].stage if client in self.models else None


@dataclass(frozen=True)
class InFolder:
    """The models in the folder models/ of a run: a folder per client with the weights.

    A run that was stopped goes on from its last checkpoint. So a model of a later round replaces an earlier
    one only with the next checkpoint.
    """

    path: Path
    layout: Layout

    def of(self, client: int) -> Path:
        """The folder of this client's model."""
        return self.path / f"client-{client:04d}"

    def wanted(self, client: int) -> bool:
        return True

    def put(self, client: int, model: Personal, round: int, stage: str = TRAINED) -> None:
        write_weights(self.of(client) / UNSETTLED, self.layout, model, Stage(stage, round))

    def drop(self, client: int) -> None:
        for name in (UNSETTLED, WEIGHTS):
            (self.of(client) / name).unlink(missing_ok=True)

    def settle(self, round: int) -> None:
        for path in sorted(self.path.glob(f"*/{UNSETTLED}")):
            if read_stage(path).round <= round:
                os.replace(path, path.with_name(WEIGHTS))
            else:
                path.unlink()

    def get(self, client: int) -> ClientModel | None:
        path = self.of(client) / WEIGHTS
        return read_weights(path, self.layout) if path.is_file() else None

    def stage(self, client: int) -> Stage | None:
        path = self.of(client) / WEIGHTS
        return read_stage(path) if path.is_file() else None


def write_weights(path: Path, layout: Layout, model: Personal, stage: Stage) -> None:
    """The tensors by name, with the stage as metadata.

    Args:
        path: Of the file.
        layout: Of the vector.
        model: That is written.
        stage: Which round it is of.
    """
    from safetensors.torch import save

    # One entry: safetensors writes several in any order, and the same model should be the same bytes.
    about = {"stage": json.dumps(stage._asdict())}
    # On disk before the checkpoint of its round: the checkpoint does not have this model.
    files.write_bytes(path, save(named_tensors(layout, model), about))


def read_weights(path: Path, layout: Layout) -> ClientModel:
    """The content of a file that `write_weights` wrote; RunError if it is damaged, or of another model.

    Args:
        path: Of the file.
        layout: Of the vector.
    """
    from safetensors.torch import load_file

    stage = read_stage(path)
    with _reading(path):
        return ClientModel(joined(layout, load_file(path)), stage)


def remembers_samples(path: Path) -> bool:
    """Whether the model in this file has features of training samples."""
    from safetensors import safe_open

    with _reading(path), safe_open(path, framework="pt") as file:
        names = set(file.keys())
        return "memory.used" in names and bool(file.get_tensor("memory.used").any())


def read_stage(path: Path) -> Stage:
    """The stage of the model in this file."""
    from safetensors import safe_open

    with _reading(path), safe_open(path, framework="pt") as file:
        return Stage(**foreign.json_of(file.metadata()["stage"]))


def _reading(path: Path) -> contextlib.AbstractContextManager[None]:
    from safetensors import SafetensorError

    damaged = f"{path} is damaged or of another model ({{}}); start the run again"
    return raised_as(RunError, damaged, SafetensorError, KeyError, TypeError, ValueError, OSError)


def named_tensors(layout: Layout, model: Personal) -> dict[str, Tensor]:
    """A model's tensors by name; a mixture's with the expert's number in front, and the shares.

    Args:
        layout: Of the vector.
        model: A vector, or a mixture of several.
    """
    if isinstance(model, Experts):
        parts = {f"{i}/{k}": v for i, w in enumerate(model.w) for k, v in named_tensors(layout, w).items()}
        return parts | mixture_tensors(model)
    d = layout.parameters
    tensors = layout.split(model[:d]) | layout.split(model[d:], buffers=True)
    return {name: t.cpu().clone() for name, t in tensors.items()}


def mixture_tensors(model: Experts) -> dict[str, Tensor]:
    """What a mixture has beside its models, by name."""
    return {name: t.cpu().clone() for name, t in tree.named(model) if name != "w"}


def joined(layout: Layout, tensors: dict[str, Tensor]) -> Personal:
    """The model, from its tensors by name: the inverse of `named_tensors`.

    Args:
        layout: Of the vector.
        tensors: By name.
    """
    share = tensors.get("share")
    if share is None or "share" in layout.names:
        return _vector(layout, tensors)
    if not len(share):
        raise ValueError("it is a mixture of no models")
    experts = [
        _vector(
            layout, {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith(f"{n}/")}
        )
        for n in range(len(share))
    ]
    return mixture_of({**tensors, "w": torch.stack(experts)})


def _vector(layout: Layout, tensors: dict[str, Tensor]) -> Tensor:
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} has the shape {list(tensors[name].shape)}, not {list(shape)}")
    return layout.join(tensors)


def with_entries(task: Task, w: Tensor) -> nn.Module:
    """A copy of the task's module with the entries of w.

    Args:
        task: With the module.
        w: A vector.
    """
    net = copy.deepcopy(task.module)
    # Frozen tensors and integers keep their values.
    net.load_state_dict(named_tensors(task.layout, w), strict=False)
    return net


class Valve:
    """A hook before a module: it sees relu(scale * features + shift)."""

    def __init__(self, valve: Tensor) -> None:
        self.valve = valve

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        features, *rest = inputs
        return opened(features, self.valve), *rest


def with_valve(net: nn.Module, head: str, valve: Tensor) -> nn.Module:
    """The network, whose head now sees its features through this valve.

    Args:
        net: The network.
        head: The name of its head.
        valve: A factor for each feature.
    """
    net.get_submodule(head).register_forward_pre_hook(Valve(valve.cpu().clone()))
    return net


def network_of(task: Task, model: Personal) -> nn.Module:
    """A copy of the task's module with this model; of a mixture, with the expert of the largest share.

    Args:
        task: With the module.
        model: A vector, or a mixture of several.
    """
    net = with_entries(task, vector_of(model))
    valve = model.valve if isinstance(model, Experts) else None
    return net if valve is None else with_valve(net, task.layout.head, valve)


def vector_of(model: Personal) -> Tensor:
    """The model as one vector; of a mixture, the expert with the largest share."""
    return model.w[int(model.share.argmax())] if isinstance(model, Experts) else model


def received_model(algorithm: AnyAlgorithm, task: Task, state: State, client: int) -> Personal:
    """The model that this client has after the last round, before it would train again.

    Args:
        algorithm: What the clients train with.
        task: What they learn.
        state: After the last round.
        client: Its number.
    """
    ids = torch.tensor([client], device=task.device)
    record, down = state.clients.rows(ids), algorithm.downlink(state.server, ids)
    model: Personal = algorithm.personal_model(task, tree.row(record, 0), tree.row(down, 0))
    return tree.each(Tensor.cpu, model)
