"""GPFL's trained parts beside the model: an embedding of each class, and the valve of the features."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.core.criteria import mean_of_valid
from copfl.core.random_starts import normals
from copfl.core.task import Batch, Data, KeyedInputs, Task, opened
from copfl.errors import UsageError, how_to_set
from copfl.kernels.private_torch import gradient


class Layer(NamedTuple):
    """Linear, ReLU, LayerNorm, from f features to f."""

    weight: Tensor  # [f, f]
    bias: Tensor  # [f]
    scale: Tensor  # [f]
    shift: Tensor  # [f]

    def __call__(self, condition: Tensor) -> Tensor:
        hidden = F.relu(F.linear(condition, self.weight, self.bias))
        return F.layer_norm(hidden, hidden.shape[-1:], self.scale, self.shift)


class Parts(NamedTuple):
    """One vector of trained numbers as its tensors."""

    embeddings: Tensor  # [C, f], E
    gamma: Layer
    beta: Layer

    def valve(self, condition: Tensor) -> Tensor:
        """[2, f] for `opened`: 1 + gamma(u) and beta(u)."""
        return torch.stack([1 + self.gamma(condition), self.beta(condition)])


def initial(task: Task) -> Tensor:
    """[e]: normal embeddings; Linear layers with the variance that torch gives them; norms of 1 and 0."""
    classes, f = head_shape(task)
    drawn = normals(task, classes * f + 2 * (f * f + f), 0)
    embeddings, *linear = torch.split(drawn, [classes * f, f * f + f, f * f + f])
    layers = [torch.cat([part * (3 * f) ** -0.5, part.new_ones(f), part.new_zeros(f)]) for part in linear]
    return torch.cat([embeddings, *layers])


def size_of(task: Task) -> int:
    """e, of the vector of the parts."""
    classes, f = head_shape(task)
    return classes * f + 2 * (f * f + 3 * f)


def parts_of(task: Task, vector: Tensor) -> Parts:
    """The tensors of this vector [e]."""
    classes, f = head_shape(task)
    embeddings, *layers = torch.split(vector, [classes * f, f * f + 3 * f, f * f + 3 * f])

    def layer(part: Tensor) -> Layer:
        weight, *vectors = torch.split(part, [f * f, f, f, f])
        return Layer(weight.view(f, f), *vectors)

    return Parts(embeddings.view(classes, f), *map(layer, layers))


def head_shape(task: Task) -> tuple[int, int]:
    """[C, f] of the head's matrix; UsageError if the head is no Linear layer of the classes' logits."""
    shape, kind = task.layout.head_shape, task.criterion.kind
    if kind != "classification" or len(shape) != 2 or shape[0] != task.classes:
        raise UsageError(
            f"gpfl has an embedding for each class and a Linear head after a valve; this task is {kind}, "
            f'with the head "{task.layout.head}". Choose another algorithm, or name a Linear head, such as '
            f"{how_to_set('model.head', 'fc')}"
        )
    return shape[0], shape[1]


@dataclass(frozen=True, eq=False)
class Valved:
    """The task whose vector is w's parameters, the parts' vector and w's statistics; its loss is GPFL's."""

    task: Task
    of_all: Tensor  # [f], g
    of_client: Tensor  # [f], q
    frozen: Tensor  # [C, f], the embeddings as received
    strength: float  # lambda, of the distance to the embeddings
    decay: float  # mu, of the parts

    @property
    def d(self) -> int:
        return self.task.d + size_of(self.task)

    def batch(self, data: Data, batch: Batch) -> tuple[KeyedInputs, Tensor]:
        """The samples and labels of one step."""
        return self.task.batch(data, batch)

    def loss(self, features: Tensor, head: Tensor, parts: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        """The client's cross-entropy, that of the cosines with E, and lambda times the distance to E."""
        tensors = parts_of(self.task, parts)
        own, common = (opened(features, tensors.valve(u)) for u in (self.of_client, self.of_all))
        of_client = self.task.objective(self.task.head_outputs(head, own), own, y, valid)
        cosines = F.normalize(common) @ F.normalize(tensors.embeddings).T
        of_classes = mean_of_valid(F.cross_entropy(cosines, y, reduction="none"), valid)
        difference = common - self.frozen[y]
        if valid is not None:
            difference = torch.where(valid[:, None], difference, 0)
        distance: Tensor = torch.linalg.vector_norm(difference)
        return of_client + of_classes + self.strength * distance

    def gradient(
        self,
        both: Tensor,
        buffers: Tensor,
        x: KeyedInputs,
        y: Tensor,
        valid: Tensor | None = None,
        objective: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The body's through the features; the head's and the parts' from the features of the same batch."""
        task, d = self.task, self.task.d
        w, parts = torch.cat([both[:d], buffers]), both[d:]
        head = task.layout.entries(w, "head")

        def through_features(logits: Tensor, features: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
            return self.loss(features, head, parts, y, valid) + 0 * logits.sum()  # the head's own is zero

        grad, value, after = task.gradient(both[:d], buffers, x, y, valid, through_features)
        _, features = task.forward(w, x, training=True, valid=valid)

        def of_rest(rest: Tensor) -> tuple[Tensor, tuple[()]]:
            return self.loss(features, rest[: len(head)], rest[len(head) :], y, valid), ()

        (of_both,), _ = gradient(of_rest, torch.cat([head, parts]))
        of_head, of_parts = of_both[: len(head)], of_both[len(head) :]
        grad = task.layout.with_entries(torch.cat([grad, torch.zeros_like(buffers)]), "head", of_head)[:d]
        return torch.cat([grad, of_parts + self.decay * parts]), value, after
