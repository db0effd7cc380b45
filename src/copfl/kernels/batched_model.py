"""A model run for many clients at once, each with its own weights: it makes `vmap` fast.

vmap alone turns a convolution with a weight per client into a grouped convolution, which no library does
well. Here the clients' samples are batched in one axis, so that everything without parameters (ReLU, pooling,
sums) runs unchanged, and the layers with parameters are batched matrix products over the clients. A model
with parameters outside of the layers below is left to vmap.

Activations are channels-last: a convolution is then a gather of patches and one product, whose result has
that layout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl.kernels.fused import aligned_like, over_rows
from copfl.kernels.layers import Geometry, convolve, normalise, product
from copfl.kernels.modules import BatchNorm, Convolution, is_plain


class Batched(nn.Module):
    """A layer whose parameters have a client axis; they are set around each call."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.like = [like]  # in a list, so that its parameters are not this module's
        self.values: dict[str, Tensor] = {}  # [N, ...]
        self.valid: Tensor | None = None  # [N, B] bool
        self.after: dict[str, Tensor] = {}  # the buffers after the call
        self.products: torch.dtype | None = None  # the dtype of matrix products; None: that of the input
        self.gradients: dict[str, Tensor] = {}  # where a layer may write a parameter's gradient

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
        geometry = Geometry(like.kernel_size, like.stride, like.padding)
        # Taken once: a layer that is called twice has two gradients, which autograd must add.
        gradient = self.gradients.pop("weight", None)
        y = convolve(x.permute(0, 2, 3, 1), self.values["weight"], geometry, self.products, gradient)
        if "bias" in self.values:
            y = y + self.values["bias"].repeat_interleave(x.shape[0] // self.clients(), 0)[:, None, None]
        return y.permute(0, 3, 1, 2)


class BatchedBatchNorm(Batched):
    def train(self, mode: bool = True) -> BatchedBatchNorm:
        """In training mode, unless it is frozen."""
        return super().train(mode and not self.like[0].frozen)

    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        n, channels = self.clients(), x.shape[1]
        inside = x if x.dim() == 2 else x.movedim(1, -1)
        rows = inside.reshape(n, -1, channels)  # [N, B*H*W, C]
        mean, var = self.values["running_mean"], self.values["running_var"]
        weight, bias = self.values["weight"], self.values["bias"]
        if self.training:
            weights, count = None, rows.shape[1]
            momentum: float | Tensor = like.momentum
            correction: float | Tensor = count / max(count - 1, 1)
            if self.valid is not None:
                valid = self.valid.to(x.dtype)
                weights = valid.repeat_interleave(count // valid.shape[1], 1)  # [N, B*H*W]
                counts = valid.sum(1, keepdim=True) * (count // valid.shape[1])
                # A batch without valid samples changes nothing.
                momentum = like.momentum * (counts > 0).to(x.dtype)
                correction = counts / (counts - 1).clamp(min=1)
            y, batch_mean, batch_var = normalise(rows, weight, bias, weights, like.eps)
            self.after = {
                "running_mean": torch.lerp(mean, batch_mean, momentum),
                "running_var": torch.lerp(var, batch_var * correction, momentum),
            }
        else:
            scale = weight * torch.rsqrt(var + like.eps)
            y = torch.addcmul((bias - mean * scale)[:, None], rows, scale[:, None])
            self.after = {"running_mean": mean, "running_var": var}
        y = y.reshape(inside.shape)
        return y if x.dim() == 2 else y.movedim(-1, 1)


class BatchedNorm(Batched):
    """Group norm or layer norm: normalised for all, then scaled and shifted by each client's parameters."""

    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        if isinstance(like, nn.GroupNorm):
            x, channel = F.group_norm(x, like.num_groups, eps=like.eps), 1
        else:
            x, channel = F.layer_norm(x, like.normalized_shape, eps=like.eps), -1
        for name, apply in (("weight", torch.mul), ("bias", torch.add)):
            if name in self.values:
                value = self.values[name].repeat_interleave(x.shape[0] // self.clients(), 0)
                x = apply(x, value.reshape(x.shape[0], *([1] * (x.dim() - 2)), -1).movedim(-1, channel))
        return x


class BatchedEmbedding(Batched):
    def forward(self, x: Tensor) -> Tensor:
        n, table = self.clients(), self.values["weight"]  # [N, words, width]
        shift = torch.arange(n, device=x.device).repeat_interleave(x.shape[0] // n) * table.shape[1]
        return F.embedding(x + shift.view(-1, *[1] * (x.dim() - 1)), table.flatten(0, 1))


LAYERS: dict[type[nn.Module], type[Batched]] = {
    nn.Linear: BatchedLinear,
    nn.Conv2d: BatchedConv2d,
    Convolution: BatchedConv2d,
    BatchNorm: BatchedBatchNorm,
    nn.GroupNorm: BatchedNorm,
    nn.LayerNorm: BatchedNorm,
    nn.Embedding: BatchedEmbedding,
}


class Layout(Protocol):
    """How vectors are split into tensors by name: core.layout.Layout."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def trained(self) -> int: ...

    @property
    def head(self) -> str: ...

    def split(self, part: Tensor, buffers: bool = False) -> dict[str, Tensor]: ...

    def split_head(self, part: Tensor) -> dict[str, Tensor]: ...


class BatchedModule:
    """A model's forward pass over batched clients."""

    def __init__(self, module: nn.Module, layout: Layout, products: torch.dtype | None = None) -> None:
        self.module, self.layout = copy.deepcopy(module), layout
        self.layers: dict[str, Batched] = {}
        names = {id(t): name for name, t in _tensors(self.module, remove_duplicate=True)}
        uses = [(name, names[id(t)]) for name, t in _tensors(self.module, remove_duplicate=False)]
        _replace(self.module, "", self.layers)
        self.head = self.module.get_submodule(layout.head)
        self.uses = [use for use in uses if use[0].rpartition(".")[0] in self.layers]
        sources = [source for _, source in self.uses]
        self.tied = {source for source in sources if sources.count(source) > 1}
        for layer in self.layers.values():
            layer.products = products

    def __call__(
        self,
        tensors: dict[str, Tensor],
        x: Tensor,
        valid: Tensor | None,
        training: bool,
        gradients: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits [N, B, classes], features [N, B, f] and the buffers after, of samples [N, B, ...]."""
        n, batch = x.shape[:2]
        for layer in self.layers.values():
            layer.valid = valid
        for use, source in self.uses:
            layer_name, _, key = use.rpartition(".")
            self.layers[layer_name].values[key] = tensors[source]
            if gradients and source in gradients and source not in self.tied:  # autograd adds those
                self.layers[layer_name].gradients[key] = gradients[source]
        samples = x.flatten(0, 1)
        if samples.dim() == 4:
            samples = samples.contiguous(memory_format=torch.channels_last)
        features: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        try:
            self.module.train(training)
            logits = self.module(samples)
        finally:
            hook.remove()
        after = {f"{name}.{key}": t for name, layer in self.layers.items() for key, t in layer.after.items()}
        for layer in self.layers.values():
            layer.values, layer.gradients, layer.valid, layer.after = {}, {}, None, {}
        return logits.reshape(n, batch, -1), features[-1].reshape(n, batch, -1), after

    def forward(
        self, parameters: Tensor, buffers: Tensor, x: Tensor, valid: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The logits, the features and the buffers after, of one client; vmap calls it once for all."""
        return _forward(parameters, buffers, x, valid, self, Tape() if training else None)

    def gradient(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        parameters: Tensor,
        buffers: Tensor,
        x: Tensor,
        valid: Tensor | None,
        head: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the loss of logits and features, its value, and the buffers after, of one client.

        A `head` replaces the one in the parameters, and the gradient is then its own.
        """
        tape = Tape()
        logits, features, after = _forward(parameters, buffers, x, valid, self, tape, head)

        def value_of(logits: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
            value = loss(logits, features)
            return value, value.detach()

        grads, value = torch.func.grad(value_of, argnums=(0, 1), has_aux=True)(logits, features)
        return _backward(grads[0], grads[1], tape), value, after


def _tensors(module: nn.Module, *, remove_duplicate: bool) -> list[tuple[str, Tensor]]:
    """Parameters and float buffers by name; of one under several names, the first or all."""
    found = (
        *module.named_parameters(remove_duplicate=remove_duplicate),
        *module.named_buffers(remove_duplicate=remove_duplicate),
    )
    return [(name, t) for name, t in found if t.is_floating_point()]


def batched_module(
    module: nn.Module, layout: Layout, products: torch.dtype | None = None
) -> BatchedModule | None:
    """The model for batched clients, or None if it has parameters outside of these layers."""
    layers = [layer for layer in module.modules() if _can(layer)]
    known = {id(t) for layer in layers for t in (*layer._parameters.values(), *layer._buffers.values())}
    floats = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    if not _can(module.get_submodule(layout.head)) or any(id(t) not in known for t in floats) or _can(module):
        return None
    return BatchedModule(module, layout, products)


def _can(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return is_plain(layer)
    return type(layer) in LAYERS and not (isinstance(layer, BatchNorm) and layer.weight is None)


def _replace(module: nn.Module, path: str, layers: dict[str, Batched]) -> None:
    for name, child in list(module._modules.items()):  # a module under two names twice
        place = f"{path}.{name}" if path else name
        if child is not None and _can(child):
            known = (layer for layer in layers.values() if layer.like[0] is child)
            layer = next(known, None) or LAYERS[type(child)](child)
            layers[place] = layer
            setattr(module, name, layer)
        elif child is not None:
            _replace(child, place, layers)


# -- the two operations of a training step -------------------------------------------------------------------
#
# A training step is a forward and a backward operation with the objective between them, which vmap maps as
# usual: so any objective works. The Tape has the state of autograd from the first to the second.


class Tape:
    """One forward pass, until its backward pass."""

    parameters: list[Tensor]
    gradient: Tensor  # [N, d], where the backward pass will write
    parts: list[Tensor]  # its parts, one per parameter
    outputs: list[Tensor]


@over_rows
def _forward(
    parameters: Tensor,
    buffers: Tensor,
    x: Tensor,
    valid: Tensor | None,
    model: BatchedModule,
    tape: Tape | None,
    head: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, features and the buffers after; with a tape, in training mode and for a backward pass."""
    statistics, fixed = model.layout.split(buffers, buffers=True), model.layout.split(parameters)
    if tape is None:
        with torch.no_grad():
            return (*model({**fixed, **statistics}, x, None, False)[:2], buffers)
    trained, split = (parameters, model.layout.split) if head is None else (head, model.layout.split_head)
    (tape.gradient,) = aligned_like((trained,), *trained.shape)
    gradients = split(tape.gradient)
    tensors = {name: t.detach().requires_grad_() for name, t in split(trained).items()}
    tape.parameters, tape.parts = list(tensors.values()), list(gradients.values())
    with torch.enable_grad():
        logits, features, after = model({**fixed, **tensors, **statistics}, x, valid, True, gradients)
        tape.outputs = [logits, features]
    moved = [after[name].flatten(1) for name in model.layout.names[model.layout.trained :]]
    return logits.detach(), features.detach(), torch.cat(moved, 1).detach() if moved else buffers


@over_rows
def _backward(to_logits: Tensor, to_features: Tensor, tape: Tape) -> Tensor:
    """The gradient of the parameters, from those of the logits and the features of the tape."""
    outputs, tape.outputs = tape.outputs, []  # frees what autograd has saved
    # The features of a model that is all head are the samples: they need no gradient.
    pairs = [(o, g) for o, g in zip(outputs, (to_logits, to_features), strict=True) if o.requires_grad]
    with torch.enable_grad():
        gradients = torch.autograd.grad(
            [o for o, _ in pairs], tape.parameters, [g for _, g in pairs], allow_unused=True
        )
    for part, gradient in zip(tape.parts, gradients, strict=True):
        if gradient is None:
            part.zero_()
        elif gradient.data_ptr() != part.data_ptr():  # else a layer wrote it there already
            part.copy_(gradient)
    return tape.gradient
