"""A model run for many clients at once, each with its own weights: the inner layer that makes `all_at_once` fast.

vmap alone turns a convolution with a weight per client into a grouped convolution, which no library does well. Here the
clients' samples are folded into the batch axis, so that everything without parameters (ReLU, pooling, sums) runs as it
is, and the layers with parameters are batched matrix products over the clients. A model that has parameters elsewhere
than in the layers below is left to vmap.

Activations are kept channels-last: a convolution is then a gather of patches and one product, and its result lies
right.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl.elementwise import compiles
from copfl.layout import Layout
from copfl.models import BatchNorm


class Side(nn.Module):
    """A layer whose parameters have a client axis; they are set around each call."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.like = [like]  # in a list, so that its parameters are not this module's
        self.values: dict[str, Tensor] = {}  # [N, ...]
        self.real: Tensor | None = None  # [N, B] bool
        self.after: dict[str, Tensor] = {}  # the buffers after the call
        self.products: torch.dtype | None = None  # the dtype of matrix products; None: that of the numbers

    def clients(self) -> int:
        return next(iter(self.values.values())).shape[0]


class SideLinear(Side):
    def forward(self, x: Tensor) -> Tensor:
        n, weight = self.clients(), self.values["weight"]
        rows = x.reshape(n, -1, x.shape[-1])  # [N, B..., in]
        bias = self.values.get("bias")
        y = _product(rows, weight.transpose(1, 2), self.products)
        if bias is not None:
            y = y + bias[:, None]
        return y.reshape(*x.shape[:-1], weight.shape[1])


class SideConv2d(Side):
    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        n = self.clients()
        inside = x.permute(0, 2, 3, 1)
        y = _Convolve.apply(
            inside, self.values["weight"], n, like.kernel_size, like.stride, like.padding, self.products
        )
        if "bias" in self.values:
            y = y + self.values["bias"].repeat_interleave(x.shape[0] // n, 0)[:, None, None]
        return y.permute(0, 3, 1, 2)


class SideBatchNorm(Side):
    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        n, channels = self.clients(), x.shape[1]
        inside = x if x.dim() == 2 else x.movedim(1, -1)
        rows = inside.reshape(n, -1, channels)  # [N, B*H*W, C]
        mean, var = self.values["running_mean"], self.values["running_var"]
        weight, bias = self.values["weight"], self.values["bias"]
        if self.training:
            share = None
            if self.real is not None:
                share = self.real.to(x.dtype).repeat_interleave(rows.shape[1] // self.real.shape[1], 1)  # [N, B*H*W]
            y, batch_mean, batch_var, count = _Normalise.apply(rows, weight, bias, share, like.eps)
            some = like.momentum * (count > 0).to(x.dtype)  # a batch of nobody teaches nothing
            unbiased = batch_var * (count / (count - 1).clamp(min=1))
            self.after = {
                "running_mean": torch.lerp(mean, batch_mean, some),
                "running_var": torch.lerp(var, unbiased, some),
            }
        else:
            scale = weight * torch.rsqrt(var + like.eps)
            y = rows * scale[:, None] + (bias - mean * scale)[:, None]
        y = y.reshape(inside.shape)
        return y if x.dim() == 2 else y.movedim(-1, 1)


class SideGroupNorm(Side):
    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        return _affine(self, F.group_norm(x, like.num_groups, eps=like.eps), channel=1)


class SideLayerNorm(Side):
    def forward(self, x: Tensor) -> Tensor:
        like: Any = self.like[0]
        return _affine(self, F.layer_norm(x, like.normalized_shape, eps=like.eps), channel=-1)


class SideEmbedding(Side):
    def forward(self, x: Tensor) -> Tensor:
        n, table = self.clients(), self.values["weight"]  # [N, words, width]
        shift = torch.arange(n, device=x.device).repeat_interleave(x.shape[0] // n) * table.shape[1]
        return F.embedding(x + shift.view(-1, *[1] * (x.dim() - 1)), table.flatten(0, 1))


def _affine(layer: Side, x: Tensor, channel: int) -> Tensor:
    """x scaled and shifted along one axis, by each client's own numbers."""
    for name, apply in (("weight", torch.mul), ("bias", torch.add)):
        if name in layer.values:
            value = layer.values[name].repeat_interleave(x.shape[0] // layer.clients(), 0)
            x = apply(x, value.reshape(x.shape[0], *([1] * (x.dim() - 2)), -1).movedim(-1, channel))
    return x


LAYERS: dict[type[nn.Module], type[Side]] = {
    nn.Linear: SideLinear,
    nn.Conv2d: SideConv2d,
    BatchNorm: SideBatchNorm,
    nn.GroupNorm: SideGroupNorm,
    nn.LayerNorm: SideLayerNorm,
    nn.Embedding: SideEmbedding,
}


class SideBySide:
    """A model's forward pass over folded clients."""

    def __init__(self, module: nn.Module, head: str, products: torch.dtype | None = None) -> None:
        self.module = copy.deepcopy(module)
        self.layers: dict[str, Side] = {}
        _replace(self.module, "", self.layers)
        self.head = self.layers[head]
        for layer in self.layers.values():
            layer.products = products

    def __call__(
        self, tensors: dict[str, Tensor], x: Tensor, real: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits [N, B, classes], features [N, B, f] and the buffers after, of samples [N, B, ...]."""
        n, batch = x.shape[:2]
        for name, layer in self.layers.items():
            layer.values = {key.rpartition(".")[2]: t for key, t in tensors.items() if key.rpartition(".")[0] == name}
            layer.real = real
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
            layer.values, layer.real, layer.after = {}, None, {}
        return logits.unflatten(0, (n, batch)), seen[-1].flatten(1).unflatten(0, (n, batch)), after


def side_by_side(module: nn.Module, head: str, products: torch.dtype | None = None) -> SideBySide | None:
    """The model for folded clients, or None where it holds parameters that these layers do not know."""
    known = {id(p) for layer in module.modules() if _can(layer) for p in layer.parameters(recurse=False)}
    known |= {id(b) for layer in module.modules() if _can(layer) for b in layer.buffers(recurse=False)}
    floats = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    if not _can(module.get_submodule(head)) or any(id(t) not in known for t in floats) or _can(module):
        return None
    return SideBySide(module, head, products)


def _can(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return plain and not isinstance(layer.padding, str)
    if isinstance(layer, BatchNorm) and layer.weight is None:
        return False
    return type(layer) in LAYERS


def _replace(module: nn.Module, path: str, layers: dict[str, Side]) -> None:
    for name, child in list(module.named_children()):
        place = f"{path}.{name}" if path else name
        if _can(child):
            layers[place] = LAYERS[type(child)](child)
            setattr(module, name, layers[place])
        else:
            _replace(child, place, layers)


# -- the two layers whose backward pass is written by hand ---------------------------------------------------------


def patches(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """The windows of x [B, H, W, C]: [B, Ho, Wo, C, kh, kw]."""
    if kernel == (1, 1) and padding == (0, 0):
        return x[:, :: stride[0], :: stride[1], :, None, None]
    if compiles(x):
        from copfl import gpu_kernels

        sides = zip(x.shape[1:3], kernel, stride, padding, strict=True)
        out = tuple((size + 2 * p - k) // s + 1 for size, k, s, p in sides)
        return gpu_kernels.patches(x, out, kernel, stride, padding)
    if padding != (0, 0):
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    return x.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])


def unpatch(rows: Tensor, size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """The sum of windows [B, Ho, Wo, C, kh, kw] back where they came from, [B, H, W, C]: the adjoint of `patches`."""
    batch, high, wide, channels, kh, kw = rows.shape
    if (kh, kw) == (1, 1) and stride == (1, 1):
        return rows[..., 0, 0]
    if compiles(rows):
        from copfl import gpu_kernels

        return gpu_kernels.unpatch(rows, size, stride, padding)
    x = rows.new_zeros(batch, size[0] + 2 * padding[0], size[1] + 2 * padding[1], channels)
    for i in range(kh):
        for j in range(kw):
            down, across = slice(i, i + stride[0] * high, stride[0]), slice(j, j + stride[1] * wide, stride[1])
            x[:, down, across] += rows[..., i, j]
    return x[:, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    """a @ b over the clients, in this dtype, back in a's own."""
    return torch.bmm(a, b) if dtype is None else torch.bmm(a.to(dtype), b.to(dtype)).to(a.dtype)


class _Convolve(torch.autograd.Function):
    """x [N*B, H, W, C] with a kernel per client [N, O, C, kh, kw]: [N*B, Ho, Wo, O]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        n: int,
        kernel: Any,
        stride: Any,
        padding: Any,
        products: torch.dtype | None,
    ) -> Tensor:
        windows = patches(x, kernel, stride, padding)
        high, wide = windows.shape[1:3]
        rows = windows.reshape(n, -1, windows[0, 0, 0].numel())  # [N, B*Ho*Wo, C*kh*kw]
        ctx.save_for_backward(rows, weight)
        ctx.how = (tuple(x.shape), (high, wide), kernel, stride, padding, products)
        y = _product(rows, weight.flatten(2).transpose(1, 2), products)
        return y.view(x.shape[0], high, wide, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        shape, out, kernel, stride, padding, products = ctx.how
        grad = grads[0].reshape(weight.shape[0], -1, weight.shape[1])  # [N, B*Ho*Wo, O]
        to_weight = _product(grad.transpose(1, 2), rows, products).view(weight.shape)
        to_x = None
        if ctx.needs_input_grad[0]:
            back = _product(grad, weight.flatten(2), products).view(shape[0], *out, shape[3], *kernel)
            to_x = unpatch(back, shape[1:3], stride, padding)
        return to_x, to_weight, None, None, None, None, None


class _Normalise(torch.autograd.Function):
    """Batch norm of rows [N, R, C] over R, only those with a share; also the mean, the variance and the count."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, share: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = x.new_full((x.shape[0], 1), x.shape[1]) if share is None else share.sum(1, keepdim=True)
        if compiles(x):
            from copfl import gpu_kernels

            y, mean, var, inverse = gpu_kernels.normalise(x, weight, bias, share, eps)
        else:
            y, mean, var, inverse = _normalise(x, weight, bias, share, count.clamp(min=1), eps)
        ctx.save_for_backward(x, weight, mean, inverse, count, share)
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count, share = ctx.saved_tensors
        if compiles(x):
            from copfl import gpu_kernels

            back = gpu_kernels.normalise_back(grads[0], x, weight, mean, inverse, share)
        else:
            back = _normalise_back(grads[0], x, weight, mean, inverse, count.clamp(min=1), share)
        return (*back, None, None)


def _normalise(
    x: Tensor, weight: Tensor, bias: Tensor, share: Tensor | None, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if share is None:
        var, mean = torch.var_mean(x, 1, correction=0)
    else:
        mean = torch.einsum("nrc,nr->nc", x, share) / count
        var = torch.einsum("nrc,nr->nc", (x - mean[:, None]) ** 2, share) / count
    inverse = torch.rsqrt(var + eps)
    scale = weight * inverse
    return x * scale[:, None] + (bias - mean * scale)[:, None], mean, var, inverse


def _normalise_back(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, count: Tensor, share: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = (x - mean[:, None]) * inverse[:, None]
    to_bias = grad.sum(1)
    to_weight = (grad * scaled).sum(1)
    # d/dx of (x - mean) / std: the mean and the variance depend on every row that has a share.
    pull = (to_bias[:, None] + scaled * to_weight[:, None]) / count[:, None]
    if share is not None:
        pull = pull * share[..., None]
    return (weight * inverse)[:, None] * (grad - pull), to_weight, to_bias


# -- what a Task calls, inside vmap ----------------------------------------------------------------------------------
#
# A training step is two operations with the objective between them, which vmap maps as it maps everything else: so any
# objective works. What autograd must remember from the first to the second is kept on the Tape.


class Tape:
    """One forward pass, waiting for its backward pass."""

    parameters: Tensor
    outputs: tuple[Tensor, Tensor]


class Forward(torch.autograd.Function):
    """Logits, features and the buffers after, of samples as the model takes them; recorded where there is a tape."""

    @staticmethod
    def forward(
        parameters: Tensor, buffers: Tensor, x: Tensor, real: Tensor | None, model: Model, tape: Tape | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        alone = [None if t is None else t.unsqueeze(0) for t in (parameters, buffers, x, real)]
        logits, features, after = _forward(*alone, model, tape)  # type: ignore[arg-type]
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
        real: Tensor | None,
        model: Model,
        tape: Tape | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        rows = _in_front(info, in_dims[:4], (parameters, buffers, x, real))
        return _forward(*rows, model, tape), (0, 0, 0)  # type: ignore[arg-type]


class Backward(torch.autograd.Function):
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
        a, b = _in_front(info, in_dims[:2], (to_logits, to_features))
        return _backward(a, b, tape), 0  # type: ignore[arg-type]


class Model(NamedTuple):
    """A model for folded clients, and how to cut its tensors out of the rows of vectors."""

    run: SideBySide
    layout: Layout


def _forward(
    parameters: Tensor, buffers: Tensor, x: Tensor, real: Tensor | None, model: Model, tape: Tape | None
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = model.layout.split(buffers, buffers=True)
    if tape is None:
        with torch.no_grad():
            return (*model.run({**model.layout.split(parameters), **statistics}, x, None, False)[:2], buffers)
    with torch.enable_grad():
        tape.parameters = parameters.detach().requires_grad_()
        tensors = {**model.layout.split(tape.parameters), **statistics}
        *tape.outputs, after = model.run(tensors, x, real, True)  # type: ignore[misc]
    moved = [after[name].flatten(1) for name in model.layout.names[model.layout.trained :]]
    logits, features = (t.detach() for t in tape.outputs)
    return logits, features, torch.cat(moved, 1).detach() if moved else buffers


def _backward(to_logits: Tensor, to_features: Tensor, tape: Tape) -> Tensor:
    outputs, tape.outputs = tape.outputs, ()  # type: ignore[assignment]
    pairs = [(o, g) for o, g in zip(outputs, (to_logits, to_features), strict=True) if o.requires_grad]
    with torch.enable_grad():  # the features of a model that is all head are the samples: nothing leads back from them
        (grad,) = torch.autograd.grad([o for o, _ in pairs], tape.parameters, [g for _, g in pairs])
    return grad


def _in_front(info: Any, dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The tensors with the client axis in front, where vmap had put it anywhere or nowhere."""
    rows: list[Tensor | None] = []
    for dim, tensor in zip(dims, tensors, strict=True):
        if tensor is None:
            rows.append(None)
        else:
            rows.append(tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0))
    return rows
