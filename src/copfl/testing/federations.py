"""Small federations, in double precision, for checks and tests of algorithms."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from copfl import models
from copfl.core import Task, task_of, tree
from copfl.core.criteria import CRITERIA
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import RISK, SURVIVAL, Dataset, Samples
from copfl.kernels.draws import seeded

SIZES = (5, 9, 3, 12)  # unequal on purpose: one batch, two, less than one, three


class LoRALinear(nn.Module):
    """A linear layer with an adapter whose parameters have the names that peft gives them."""

    def __init__(self, layer: nn.Linear, r: int, scaling: float) -> None:
        super().__init__()
        self.base_layer, self.scaling = layer, {"default": scaling}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        result: Tensor = self.base_layer(x) + self.scaling["default"] * product
        return result


def add_lora(body: nn.Sequential, needs: Sequence[str]) -> None:
    """An adapter on the last linear layer of the body; the layer's own weights are trained only if needed."""
    place = max(place for place, layer in enumerate(body) if isinstance(layer, nn.Linear))
    body[place] = layer = LoRALinear(cast(nn.Linear, body[place]), r=2, scaling=2.0)
    layer.base_layer.weight.requires_grad_("*.base_layer.weight" in needs)
    layer.base_layer.bias.requires_grad_(False)


def small_federation(
    norm: str,
    sizes: tuple[int, ...],
    device: str = "cpu",
    needs: Sequence[str] = (),
    dropout: float = 0.0,
    trains: str = "",
) -> tuple[Task, FederatedData]:
    """A tiny CNN in float64, random 8x8 images of 4 classes, one client per size, and six public images.

    With `needs`, those of an algorithm over adapters, the CNN has one. `dropout` is the fraction of the
    features that a training step leaves out. With `trains`, the only model of an algorithm, it is that.
    """
    rng = np.random.default_rng(0)
    count = sum(sizes)
    samples = Samples(rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8), rng.integers(0, 4, count))
    cuts = np.split(np.arange(count), np.cumsum(sizes)[:-1])
    dataset = Dataset("random", samples, samples, ("a", "b", "c", "d"), mean=(0.5,), std=(0.5,), augment=True)
    federation = FederatedData(dataset, Partition(tuple(cuts), tuple(cuts), "by hand", {}), device)
    model = models.build(trains, (1, 8, 8), 4, 0) if trains else _network(norm, needs, dropout)
    public = torch.from_numpy(rng.integers(0, 256, (6, 1, 8, 8), dtype=np.uint8))
    options: dict[str, Any] = {"mean": dataset.mean, "std": dataset.std, "public": public, "device": device}
    task = task_of(model, 4, dtype=torch.float64, **options)
    return task.probed(tree.row(federation.train.rows([0]), 0)), federation


def _network(norm: str, needs: Sequence[str], dropout: float) -> nn.Module:
    model = models.SmallCNN((1, 8, 8), 4, width=2, hidden=5, norm=norm)
    if needs:
        add_lora(cast(nn.Sequential, model.body), needs)
    if dropout:
        cast(nn.Sequential, model.body).append(nn.Dropout(dropout))
    with seeded(0):
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


class TwoInputs(nn.Module):
    """A tiny network for samples of two arrays, `a` [3] and `b` [2]."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, outputs)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.a(a) + self.b(b)))
        return result


def other_federation(kind: str, trains: str = "") -> tuple[Task, FederatedData]:
    """Samples of two arrays with four classes, or samples of one array with two numbers to predict or with survival.

    The latter two by the only model of an algorithm, if there is one.
    """
    rng, count, classes = np.random.default_rng(0), sum(SIZES), kind == "classification"
    a, b = rng.normal(size=(count, 3)), rng.normal(size=(count, 2))
    b = np.stack([rng.exponential(size=count), rng.random(count) < 0.7], 1) if kind == SURVIVAL else b
    samples = Samples({"a": a, "b": b}, rng.integers(0, 4, count)) if classes else Samples(a, b)
    cuts = tuple(np.split(np.arange(count), np.cumsum(SIZES)[:-1]))
    names = ("a", "b", "c", "d") if classes else RISK if kind == SURVIVAL else ("y", "z")
    dataset = Dataset("random", samples, samples, names, kind=kind)
    with seeded(0):
        alone = models.build(
            trains or "mlp", (3,), len(names), 0, **(dict[str, Any]() if trains else {"width": 5})
        )
        model = TwoInputs(4) if classes else alone
    public = {"a": torch.from_numpy(a[:6]), "b": torch.from_numpy(b[:6])} if classes else None
    criterion = CRITERIA[kind]()
    task = task_of(model, len(names), criterion=criterion, dtype=torch.float64)
    federation = FederatedData(dataset, Partition(cuts, cuts, "by hand", {}))
    return dataclasses.replace(task, public=public), federation
