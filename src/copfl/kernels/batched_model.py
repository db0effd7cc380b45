"""A model run for many clients at once, each with its own weights: the inner layer that makes `vmap` fast.

vmap alone turns a convolution with a weight per client into a grouped convolution, which no library does well. Here the
clients' samples are folded into the batch axis, so that everything without parameters (ReLU, pooling, sums) runs as it
is, and the layers with parameters are batched matrix products over the clients. A model that has parameters elsewhere
than in the layers below is left to vmap.

Activations are kept channels-last: a convolution is then a gather of patches and one product, and its result lies
right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl.kernels.fused import aligned_like, in_front
from copfl.kernels.layers import convolve, normalise, product
from copfl.kernels.modules import BatchNorm, Convolution


class Batched(nn.Module):
    """A layer whose parameters have a client axis; they are set around each call."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.like = [like]  # in a list, so that its parameters are not this module's
        self.values: dict[str, Tensor] = {}  # [N, ...]
        self.valid: Tensor | None = None  # [N, B] bool
        self.after: dict[str, Tensor] = {}  # the buffers after the call
        self.products: torch.dtype | None = None  # the dtype of matrix products; None: that of the numbers
        self.places: dict[
            str, Tensor
        ] = {}  # where a parameter's gradient is wanted; a layer may leave that to others

    def clients(self) -> int:
        return next(iter(self.values.values())).shape[0]


class BatchedLinear(Batched):
    def forward(self, x: Tensor) -> Tensor:
        n, weight = self.clients(), self.values["weight"]
        rows = x.reshape(n, -1, x.shape[-1])  # [N, B..., in]
        bias = self.values.get("bias")
        y = product(rows, weight.transpose(1, 2), self.products)
        if bias is not None:
            y = y + bias[:, None]
        return y.reshape(*x.shape[:-1], weight.shape[1])


class BatchedConv2d(Batched):
    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        n = self.clients()
        inside = x.permute(0, 2, 3, 1)
        place = self.places.pop(
            "weight", None
        )  # a layer that is called twice has two gradients: autograd adds them up
        y = convolve(
            inside,
            self.values["weight"],
            n,
            like.kernel_size,
            like.stride,
            like.padding,
            self.products,
            place,
        )
        if "bias" in self.values:
            y = y + self.values["bias"].repeat_interleave(x.shape[0] // n, 0)[:, None, None]
        return y.permute(0, 3, 1, 2)


class BatchedBatchNorm(Batched):
    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        n, channels = self.clients(), x.shape[1]
        inside = x if x.dim() == 2 else x.movedim(1, -1)
        rows = inside.reshape(n, -1, channels)  # [N, B*H*W, C]
        mean, var = self.values["running_mean"], self.values["running_var"]
        weight, bias = self.values["weight"], self.values["bias"]
        if self.training:
            share, count = None, rows.shape[1]
            lr_factor: float | Tensor = like.momentum
            factor: float | Tensor = count / max(count - 1, 1)
            if self.valid is not None:
                valid = self.valid.to(x.dtype)
                share = valid.repeat_interleave(count // valid.shape[1], 1)  # [N, B*H*W]
                counts = valid.sum(1, keepdim=True) * (count // valid.shape[1])
                lr_factor = like.momentum * (counts > 0).to(x.dtype)  # a batch of nobody teaches nothing
                factor = counts / (counts - 1).clamp(min=1)
            y, batch_mean, batch_var = normalise(rows, weight, bias, share, like.eps)
            self.after = {
                "running_mean": torch.lerp(mean, batch_mean, lr_factor),
                "running_var": torch.lerp(var, batch_var * factor, lr_factor),
            }
        else:
            scale = weight * torch.rsqrt(var + like.eps)
            y = torch.addcmul((bias - mean * scale)[:, None], rows, scale[:, None])
        y = y.reshape(inside.shape)
        return y if x.dim() == 2 else y.movedim(-1, 1)


class BatchedGroupNorm(Batched):
    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        return _affine(self, F.group_norm(x, like.num_groups, eps=like.eps), channel=1)


class BatchedLayerNorm(Batched):
    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        return _affine(self, F.layer_norm(x, like.normalized_shape, eps=like.eps), channel=-1)


class BatchedEmbedding(Batched):
    def forward(self, x: Tensor) -> Tensor:
        n, table = self.clients(), self.values["weight"]  # [N, words, width]
        shift = torch.arange(n, device=x.device).repeat_interleave(x.shape[0] // n) * table.shape[1]
        return F.embedding(x + shift.view(-1, *[1] * (x.dim() - 1)), table.flatten(0, 1))


def _affine(layer: Batched, x: Tensor, channel: int) -> Tensor:
    """x scaled and shifted along one axis, by each client's own numbers."""
    for name, apply in (("weight", torch.mul), ("bias", torch.add)):
        if name in layer.values:
            value = layer.values[name].repeat_interleave(x.shape[0] // layer.clients(), 0)
            x = apply(x, value.reshape(x.shape[0], *([1] * (x.dim() - 2)), -1).movedim(-1, channel))
    return x


LAYERS: dict[type[nn.Module], type[Batched]] = {
    nn.Linear: BatchedLinear,
    nn.Conv2d: BatchedConv2d,
    Convolution: BatchedConv2d,
    BatchNorm: BatchedBatchNorm,
    nn.GroupNorm: BatchedGroupNorm,
    nn.LayerNorm: BatchedLayerNorm,
    nn.Embedding: BatchedEmbedding,
}


class BatchedModule:
    """A model's forward pass over folded clients."""

    def __init__(self, module: nn.Module, head: str, products: torch.dtype | None = None) -> None:
        self.module = copy.deepcopy(module)
        self.layers: dict[str, Batched] = {}
        _replace(self.module, "", self.layers)
        self.head = self.layers[head]
        for layer in self.layers.values():
            layer.products = products

    def __call__(
        self,
        tensors: dict[str, Tensor],
        x: Tensor,
        valid: Tensor | None,
        training: bool,
        places: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits [N, B, classes], features [N, B, f] and the buffers after, of samples [N, B, ...]."""
        n, batch = x.shape[:2]
        for name, layer in self.layers.items():
            layer.values, layer.places, layer.valid = _of(tensors, name), _of(places or {}, name), valid
        folded = x.flatten(0, 1)
        if folded.dim() == 4:
            folded = folded.contiguous(memory_format=torch.channels_last)
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self.module.train(training)
            logits = self.module(folded)
        finally:
            hook.remove()
        after = {f"{name}.{key}": t for name, layer in self.layers.items() for key, t in layer.after.items()}
        for layer in self.layers.values():
            layer.values, layer.places, layer.valid, layer.after = {}, {}, None, {}
        return logits.reshape(n, batch, -1), seen[-1].reshape(n, batch, -1), after


def _of(tensors: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    """The tensors of one layer, by their names within it."""
    return {key.rpartition(".")[2]: t for key, t in tensors.items() if key.rpartition(".")[0] == layer}


def batched_module(module: nn.Module, head: str, products: torch.dtype | None = None) -> BatchedModule | None:
    """The model for folded clients, or None where it holds parameters that these layers do not know."""
    known = {id(p) for layer in module.modules() if _can(layer) for p in layer.parameters(recurse=False)}
    known |= {id(b) for layer in module.modules() if _can(layer) for b in layer.buffers(recurse=False)}
    floats = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    if not _can(module.get_submodule(head)) or any(id(t) not in known for t in floats) or _can(module):
        return None
    return BatchedModule(module, head, products)


def _can(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return plain and not isinstance(layer.padding, str)
    if isinstance(layer, BatchNorm) and layer.weight is None:
        return False
    return type(layer) in LAYERS


def _replace(module: nn.Module, path: str, layers: dict[str, Batched]) -> None:
    for name, child in list(module.named_children()):
        place = f"{path}.{name}" if path else name
        if _can(child):
            layers[place] = LAYERS[type(child)](child)
            setattr(module, name, layers[place])
        else:
            _replace(child, place, layers)


# -- what a Task calls, inside vmap ----------------------------------------------------------------------------------
#
# A training step is two operations with the objective between them, which vmap maps as it maps everything else: so any
# objective works. What autograd must remember from the first to the second is kept on the Tape.


class Tape:
    """One forward pass, waiting for its backward pass."""

    parameters: list[Tensor]
    gradient: Tensor  # [N, d], where the backward pass will write
    places: list[Tensor]  # its parts, one per parameter
    outputs: list[Tensor]


class _Forward(torch.autograd.Function):
    """Logits, features and the buffers after, of samples as the model takes them; recorded where there is a tape."""

    @staticmethod
    def forward(
        parameters: Tensor, buffers: Tensor, x: Tensor, valid: Tensor | None, model: Model, tape: Tape | None,
        head: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        mask, front = (None if t is None else t[None] for t in (valid, head))
        logits, features, after = _forward(parameters[None], buffers[None], x[None], mask, model, tape, front)
        return logits[0], features[0], after[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        parameters: Tensor,
        buffers: Tensor,
        x: Tensor,
        valid: Tensor | None,
        model: Model,
        tape: Tape | None,
        head: Tensor | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        w, statistics, samples = (
            in_front(info, dim, t) for dim, t in zip(in_dims[:3], (parameters, buffers, x), strict=True)
        )
        mask = None if valid is None else in_front(info, in_dims[3], valid)
        front = None if head is None else in_front(info, in_dims[6], head)
        return _forward(w, statistics, samples, mask, model, tape, front), (0, 0, 0)


class _Backward(torch.autograd.Function):
    """The gradient of the parameters, from those of the logits and the features that the tape recorded."""

    @staticmethod
    def forward(to_logits: Tensor, to_features: Tensor, tape: Tape) -> Tensor:
        return _backward(to_logits.unsqueeze(0), to_features.unsqueeze(0), tape)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], to_logits: Tensor, to_features: Tensor, tape: Tape
    ) -> tuple[Tensor, int]:
        return _backward(
            in_front(info, in_dims[0], to_logits), in_front(info, in_dims[1], to_features), tape
        ), 0


class Layout(Protocol):
    """How vectors are cut into tensors by name: core.layout.Layout."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def trained(self) -> int: ...

    def split(self, part: Tensor, buffers: bool = False) -> dict[str, Tensor]: ...

    def split_head(self, part: Tensor) -> dict[str, Tensor]: ...


class Model(NamedTuple):
    """A model for folded clients, and how to cut its tensors out of the rows of vectors."""

    run: BatchedModule
    layout: Layout


def _forward(
    parameters: Tensor, buffers: Tensor, x: Tensor, valid: Tensor | None, model: Model, tape: Tape | None,
    head: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    statistics, still = model.layout.split(buffers, buffers=True), model.layout.split(parameters)
    if tape is None:
        with torch.no_grad():
            return (*model.run({**still, **statistics}, x, None, False)[:2], buffers)
    moving, cut = (parameters, model.layout.split) if head is None else (head, model.layout.split_head)
    (tape.gradient,) = aligned_like((moving,), *moving.shape)
    places = cut(tape.gradient)
    tensors = {name: t.detach().requires_grad_() for name, t in cut(moving).items()}
    tape.parameters, tape.places = list(tensors.values()), list(places.values())
    with torch.enable_grad():
        logits, features, after = model.run({**still, **tensors, **statistics}, x, valid, True, places)
        tape.outputs = [logits, features]
    moved = [after[name].flatten(1) for name in model.layout.names[model.layout.trained :]]
    return logits.detach(), features.detach(), torch.cat(moved, 1).detach() if moved else buffers


def _backward(to_logits: Tensor, to_features: Tensor, tape: Tape) -> Tensor:
    outputs, tape.outputs = tape.outputs, []  # what autograd remembers may go
    pairs = [(o, g) for o, g in zip(outputs, (to_logits, to_features), strict=True) if o.requires_grad]
    with (
        torch.enable_grad()
    ):  # the features of a model that is all head are the samples: nothing leads back from them
        found = torch.autograd.grad(
            [o for o, _ in pairs], tape.parameters, [g for _, g in pairs], allow_unused=True
        )
    for place, grad in zip(tape.places, found, strict=True):
        if grad is None:
            place.zero_()
        elif grad.data_ptr() != place.data_ptr():  # else a layer wrote it there already
            place.copy_(grad)
    return tape.gradient


def forward(
    parameters: Tensor, buffers: Tensor, x: Tensor, valid: Tensor | None, model: Model, tape: Tape | None,
    head: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Logits, features and the buffers after; a `head` stands in for the parameters' own, and is alone on the tape."""
    return _forward_of(parameters, buffers, x, valid, model, tape, head)


_forward_of: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Forward.apply
backward: Callable[..., Tensor] = _Backward.apply
