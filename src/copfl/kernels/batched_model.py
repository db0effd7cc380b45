"""A model run for many clients at once, each with its own weights: it makes `vmap` fast.

vmap alone turns a convolution with a weight per client into a grouped convolution, which no library does
well. Here the clients' samples are batched in one axis, so that everything without parameters (ReLU, pooling,
sums), and every frozen layer, runs unchanged, and the layers with trained parameters are batched matrix
products over the clients. Layers without such a form run under vmap, each in its place. A model that itself
has trained parameters, outside of its layers, is left to vmap.

Activations are channels-last: a convolution is then a gather of patches and one product, whose result has
that layout.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from copfl.kernels.batched_layers import LAYERS, Batched, BatchedAny, BatchedBatchNorm
from copfl.kernels.draws import Draws, Keyed
from copfl.kernels.fused import aligned, over_rows
from copfl.kernels.modules import BatchNorm, Inputs, arguments_of, is_grouped, is_plain, logits_of
from copfl.kernels.private_torch import backward, gradient

# Where short products are faster. There, a model of which a part is frozen computes with short activations,
# too: its frozen weights are short, and the trained ones are rounded in every pass.
SHORT_DEVICES = {"cuda"}


class ParameterLayout(Protocol):
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

    def __init__(
        self, module: nn.Module, layout: ParameterLayout, products: torch.dtype | None = None
    ) -> None:
        frozen = any(name not in layout.names for name, _ in module.named_parameters())
        self.short = products if frozen and _device(module) in SHORT_DEVICES else None
        own = [module.get_submodule(name.rpartition(".")[0]) for name in layout.names]
        # All activations may be short where no trained layer is a convolution or has statistics.
        self.whole = None if any(isinstance(m, nn.Conv2d | BatchNorm) for m in own) else self.short
        shared = {id(t): _rounded(t, self.whole) for t in (*module.parameters(), *module.buffers())}
        norms = [m for m in module.modules() if isinstance(m, BatchNorm)]  # their statistics stay as they are
        shared |= {id(t): t for norm in norms for t in (*norm.parameters(), *norm.buffers())}
        self.module, self.layout = copy.deepcopy(module, shared), layout  # the tensors are not copied
        for part in self.module.modules():
            if self.whole is not None and "dtype" in vars(part):  # of what it makes itself, such as masks
                vars(part)["dtype"] = self.whole
            if vars(part).get("inplace") is True:  # autograd copies a view's gradient before and after
                vars(part)["inplace"] = False
        self.layers: dict[str, Batched] = {}
        uses = _uses(self.module, set(layout.names))
        _replace(self.module, "", {use for use, _ in uses}, self.layers)
        self.head = self.module.get_submodule(layout.head)
        self.places = [  # where a tensor is needed: the layer, its name there and in the vector
            (layer, use[len(name) + 1 :], source)
            for name, layer in self.layers.items()
            for use, source in uses
            if use.startswith(name + ".")
        ]
        sources = [source for *_, source in self.places]
        self.tied = {source for source in sources if sources.count(source) > 1}
        for name, layer in self.layers.items():
            layer.products = products
            if isinstance(layer, BatchedAny):
                constants = (n for n in layout.names[layout.trained :] if n.startswith(name + "."))
                layer.constants = tuple(n[len(name) + 1 :] for n in constants)

    def __call__(
        self,
        tensors: dict[str, Tensor],
        x: Inputs,
        valid: Tensor | None,
        training: bool,
        *,
        key: Tensor | None = None,
        gradients: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits [N, B, ...], features [N, B, f] and the buffers after, of samples [N, B, ...].

        In training without a key nothing is drawn at random: only batch norms are in training mode.
        """
        parameter = next(iter(tensors.values()))
        rows = next(iter(x.values())).shape[:2] if isinstance(x, dict) else x.shape[:2]
        for layer in self.layers.values():
            layer.valid, layer.samples = valid, rows.numel()
        for layer, name, source in self.places:
            layer.values[name] = _rounded(tensors[source], self.whole)
            if gradients and source in gradients and source not in self.tied:  # autograd adds those
                layer.gradients[name] = gradients[source]
        arrays = x if isinstance(x, dict) else {"": x}
        arrays = {name: _rounded(t, self.whole).flatten(0, 1) for name, t in arrays.items()}
        last = torch.channels_last
        arrays = {k: t.contiguous(memory_format=last) if t.dim() == 4 else t for k, t in arrays.items()}
        samples = arrays if isinstance(x, dict) else arrays[""]
        positional, keywords = arguments_of(self.module, samples)
        features: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        draws = Draws(key) if training and key is not None else None
        self.module.train(draws is not None)
        for layer in self.layers.values():
            layer.like[0].train(draws is not None)
            if isinstance(layer, BatchedAny):
                layer.draws = draws
            elif isinstance(layer, BatchedBatchNorm):
                layer.training = training and not layer.like[0].frozen
        try:
            with draws or contextlib.nullcontext(), self._short_products():
                logits = logits_of(self.module(*positional, **keywords)).to(parameter.dtype)
        finally:
            hook.remove()
            after = {f"{name}.{k}": t for name, layer in self.layers.items() for k, t in layer.after.items()}
            for layer in self.layers.values():
                layer.values, layer.gradients, layer.valid, layer.after = {}, {}, None, {}
        seen = features[-1].to(parameter.dtype)
        return logits.reshape(*rows, *logits.shape[1:]), seen.reshape(*rows, -1), after

    def _short_products(self) -> contextlib.AbstractContextManager[object]:
        """Short products of the frozen layers, without a cache: a recorded program keeps no tensors."""
        if self.short is None or self.whole is not None:
            return contextlib.nullcontext()
        return torch.autocast(_device(self.module), self.short, cache_enabled=False)

    def forward(
        self, parameters: Tensor, buffers: Tensor, x: Inputs | Keyed, valid: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The logits, the features and the buffers after, of one client; vmap calls it once for all."""
        return self._forward(parameters, buffers, x, valid, Tape() if training else None)

    def _forward(
        self,
        parameters: Tensor,
        buffers: Tensor,
        x: Inputs | Keyed,
        valid: Tensor | None,
        tape: Tape | None,
        head: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        key = x.key if isinstance(x, Keyed) else None
        arrays = x.x if isinstance(x, Keyed) else x
        names = tuple(arrays) if isinstance(arrays, dict) else None
        inputs = tuple(arrays.values()) if isinstance(arrays, dict) else (arrays,)
        run = ForwardPass(self, tape, names)
        return _forward(parameters, buffers, valid, key, head, run, *inputs)

    def gradient(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        parameters: Tensor,
        buffers: Tensor,
        x: Inputs | Keyed,
        valid: Tensor | None,
        head: Tensor | None,
        training: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the loss of logits and features, its value, and the buffers after, of one client.

        A `head` replaces the one in the parameters, and the gradient is then its own.
        """
        tape = Tape(training)
        logits, features, after = self._forward(parameters, buffers, x, valid, tape, head)

        grads, (value, _) = gradient(lambda *given: (loss(*given), ()), logits, features)
        return _backward(grads[0], grads[1], tape), value.detach(), after


def _device(module: nn.Module) -> str:
    return next(p.device.type for p in module.parameters())


def _rounded(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in this dtype, if it has numbers; None: as it is."""
    if dtype is None or not t.is_floating_point():
        return t
    return nn.Parameter(t.detach().to(dtype), t.requires_grad) if isinstance(t, nn.Parameter) else t.to(dtype)


def _uses(module: nn.Module, trained: set[str]) -> list[tuple[str, str]]:
    """The trained tensors' names in the module and in the vector; tied ones have several in the module."""
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [(name, names[id(t)]) for name, t in every if names[id(t)] in trained]


def batched_module(
    module: nn.Module, layout: ParameterLayout, products: torch.dtype | None = None
) -> BatchedModule | None:
    """The model for batched clients, or None if the model itself has parameters outside of its layers."""
    trained = set(layout.names)
    if _can(module) or any(name in trained for name in (*module._parameters, *module._buffers)):
        return None
    batched = BatchedModule(module, layout, products)
    mapped = [layer.like[0] for layer in batched.layers.values() if isinstance(layer, BatchedAny)]
    # The statistics of a batch norm inside of such a module would be lost.
    return None if any(isinstance(m, BatchNorm) for like in mapped for m in like.modules()) else batched


def _can(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d) and not (is_plain(layer) or is_grouped(layer)):
        return False
    return type(layer) in LAYERS and not (isinstance(layer, BatchNorm) and layer.weight is None)


def _replace(module: nn.Module, path: str, trained: set[str], layers: dict[str, Batched]) -> None:
    """Replaces the layers with trained tensors; all others see the samples of all clients as one batch."""
    for name, child in list(module._modules.items()):  # a module under two names twice
        place = f"{path}.{name}" if path else name
        if child is None:
            continue
        if any(f"{place}.{own}" in trained for own in (*child._parameters, *child._buffers)):
            known = (layer for layer in layers.values() if layer.like[0] is child)
            form = LAYERS[type(child)] if _can(child) else BatchedAny
            layers[place] = next(known, None) or form(child)
            setattr(module, name, layers[place])
        else:
            _replace(child, place, trained, layers)


# -- the two operations of a training step -------------------------------------------------------------------
#
# A training step is a forward and a backward operation with the objective between them, which vmap maps as
# usual: so any objective works. The Tape has the state of autograd from the first to the second.


class Tape:
    """One forward pass, until its backward pass."""

    def __init__(self, training: bool = True) -> None:
        self.training = training  # whether batch norms and random numbers are those of training

    parameters: list[Tensor]
    gradient: Tensor  # [N, d], where the backward pass will write
    parts: list[Tensor]  # its parts, one per parameter
    outputs: list[Tensor]


class ForwardPass(NamedTuple):
    """What a forward pass needs beside tensors."""

    model: BatchedModule
    tape: Tape | None  # for a backward pass; None: in evaluation mode, without one
    names: tuple[str, ...] | None  # of the arrays of a sample; None: there is one array


@over_rows
def _forward(
    parameters: Tensor,
    buffers: Tensor,
    valid: Tensor | None,
    key: Tensor | None,
    head: Tensor | None,
    run: ForwardPass,
    *inputs: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, features and the buffers after; with a tape, in its mode and for a backward pass."""
    model, tape = run.model, run.tape
    x = inputs[0] if run.names is None else dict(zip(run.names, inputs, strict=True))
    statistics, fixed = model.layout.split(buffers, buffers=True), model.layout.split(parameters)
    if tape is None:
        with torch.no_grad():
            return (*model({**fixed, **statistics}, x, None, False)[:2], buffers)
    trained, split = (parameters, model.layout.split) if head is None else (head, model.layout.split_head)
    tape.gradient = aligned(trained.shape, trained.dtype, trained.device)
    gradients = split(tape.gradient)
    tensors = {name: t.detach().requires_grad_() for name, t in split(trained).items()}
    tape.parameters, tape.parts = list(tensors.values()), list(gradients.values())
    with torch.enable_grad():
        logits, features, after = model(
            {**fixed, **tensors, **statistics}, x, valid, tape.training, key=key, gradients=gradients
        )
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
        ends, towards = zip(*pairs, strict=True)
        gradients = backward(ends, towards, tuple(tape.parameters))
    for part, found in zip(tape.parts, gradients, strict=True):
        if found is None:
            part.zero_()
        elif found.data_ptr() != part.data_ptr():  # else a layer wrote it there already
            part.copy_(found)
    return tape.gradient
