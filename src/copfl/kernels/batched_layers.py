"""Layers with a client axis in their parameters, over the samples of all clients in one axis."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from copfl.kernels.draws import Draws
from copfl.kernels.fused import compiles
from copfl.kernels.layers import Geometry, Groups, convolve, convolve_groups, normalise, product
from copfl.kernels.modules import BatchNorm, Convolution, is_plain, mappable_attention


class Batched(nn.Module):
    """A layer whose parameters have a client axis; they are set around each call."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.like = [like]  # in a list, so that its parameters are not this module's
        self.values: dict[str, Tensor] = {}  # [N, ...]
        self.valid: Tensor | None = None  # [N, B] bool
        self.samples = 0  # N * B
        self.after: dict[str, Tensor] = {}  # the buffers after the call
        self.products: torch.dtype | None = None  # the dtype of matrix products; None: that of the input
        self.gradients: dict[str, Tensor] = {}  # where a layer may write a parameter's gradient

    def clients(self) -> int:
        return next(iter(self.values.values())).shape[0]

    def value(self, name: str) -> Tensor | None:
        """The parameter of every client [N, ...]; a frozen one is the same for all."""
        if name in self.values:
            return self.values[name]
        frozen = getattr(self.like[0], name)
        return None if frozen is None else frozen.expand(self.clients(), *frozen.shape)

    def __getattr__(self, name: str) -> Any:
        """Settings of the layer that this one replaces, which a model may read."""
        if "like" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.like[0], name)


class BatchedLinear(Batched):
    def forward(self, x: Tensor) -> Tensor:
        n, like = self.clients(), self.like[0]
        rows = x.reshape(n, -1, x.shape[-1])  # [N, B..., in]
        bias = self.value("bias")
        if "weight" in self.values and compiles(x):
            # As a convolution of one pixel, which writes the weight's gradient to its place in the vector.
            gradient, point = self.gradients.pop("weight", None), Geometry((1, 1), (1, 1), (0, 0))
            place = None if gradient is None else gradient[..., None, None]
            weight, pixels = self.values["weight"][..., None, None], rows.reshape(-1, 1, 1, x.shape[-1])
            y = convolve(pixels, weight, point, self.products, place).view(n, rows.shape[1], -1)
        elif "weight" in self.values:
            y = product(rows, self.values["weight"].transpose(1, 2), self.products)
        else:
            y = F.linear(rows, like.weight)  # type: ignore[arg-type]
        if bias is not None:
            y = y + bias[:, None]
        return y.reshape(*x.shape[:-1], -1)


class BatchedConv2d(Batched):
    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        geometry = Geometry(like.kernel_size, like.stride, like.padding)
        how = Groups(like.stride, like.padding, like.dilation, like.groups)
        # Taken once: a layer that is called twice has two gradients, which autograd must add.
        gradient = self.gradients.pop("weight", None)
        if "weight" not in self.values:
            y = F.conv2d(x, like.weight, None, *how).permute(0, 2, 3, 1)
        elif is_plain(like):
            y = convolve(x.permute(0, 2, 3, 1), self.values["weight"], geometry, self.products, gradient)
        else:
            y = convolve_groups(x.permute(0, 2, 3, 1), self.values["weight"], how, gradient)
        bias = self.value("bias")
        if bias is not None:
            y = y + bias.repeat_interleave(x.shape[0] // self.clients(), 0)[:, None, None]
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
        weight, bias = self.value("weight"), self.value("bias")
        assert weight is not None
        assert bias is not None
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
        y = y if x.dim() == 2 else y.movedim(-1, 1)
        return y if like.tail is None else like.tail(y)


class BatchedNorm(Batched):
    """Group norm or layer norm: normalised for all, then scaled and shifted by each client's parameters."""

    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        if isinstance(like, nn.GroupNorm):
            x, channel = F.group_norm(x, like.num_groups, eps=like.eps), 1
        else:
            x, channel = F.layer_norm(x, like.normalized_shape, eps=like.eps), -1
        for name, apply in (("weight", torch.mul), ("bias", torch.add)):
            values = self.value(name)
            if values is not None:
                value = values.repeat_interleave(x.shape[0] // self.clients(), 0)
                x = apply(x, value.reshape(x.shape[0], *([1] * (x.dim() - 2)), -1).movedim(-1, channel))
        return x


class BatchedEmbedding(Batched):
    def forward(self, x: Tensor) -> Tensor:
        n, table = self.clients(), self.values["weight"]  # [N, words, width]
        if x.shape[0] == 1:  # the same for every sample, as the positions in a sentence are
            x = x.expand(self.samples, *x.shape[1:])
        shift = torch.arange(n, device=x.device).repeat_interleave(x.shape[0] // n) * table.shape[1]
        return F.embedding(x + shift.view(-1, *[1] * (x.dim() - 1)), table.flatten(0, 1))


class BatchedAny(Batched):
    """Any other module with parameters: vmap over the clients, in this place alone."""

    draws: Draws | None = None
    constants: tuple[str, ...] = ()  # its float buffers

    def forward(self, *arrays: Any, **options: Any) -> Any:
        n = self.clients()
        inputs, structure = tree_flatten((arrays, options))
        batched = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
        rows = [inputs[place].unflatten(0, (n, -1)) for place in batched]

        shown: list[Any] = []  # the outputs of one client, for their structure

        def one(values: dict[str, Tensor], key: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
            for place, row in zip(batched, rows, strict=True):
                inputs[place] = row
            positional, named = tree_unflatten(inputs, structure)
            draws = None if self.draws is None else Draws(key, self.draws.calls)
            with draws or contextlib.nullcontext():
                shown[:] = [torch.func.functional_call(self.like[0], values, positional, named)]
            if self.draws is not None and draws is not None:
                self.draws.calls = draws.calls
            return tuple(t for t in tree_flatten(shown)[0] if isinstance(t, Tensor))

        key = torch.arange(n, device=rows[0].device) if self.draws is None else self.draws.key
        with mappable_attention():
            results = iter(torch.func.vmap(one, randomness="error")(self.values, key, *rows))
        self.after = {name: self.values[name] for name in self.constants}
        return tree_map(lambda t: next(results).flatten(0, 1) if isinstance(t, Tensor) else t, shown)[0]


LAYERS: dict[type[nn.Module], type[Batched]] = {
    nn.Linear: BatchedLinear,
    nn.Conv2d: BatchedConv2d,
    Convolution: BatchedConv2d,
    BatchNorm: BatchedBatchNorm,
    nn.GroupNorm: BatchedNorm,
    nn.LayerNorm: BatchedNorm,
    nn.Embedding: BatchedEmbedding,
}
