"""The models that come with copfl; any other nn.Module works as well.

Each has `.features(x)`, everything before the answer, and `.head`, the last Linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl.errors import UsageError, unknown


def pruned(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The model without the taps of its convolutions that only ever meet padding on such samples, in place.

    It answers as before, and trains as before: those taps never had a gradient. Kernels are cut where a convolution has
    a single output, as at the end of a deep network for small images; elsewhere a dead tap is a rare thing.
    """
    sizes: dict[nn.Conv2d, set[tuple[int, ...]]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda conv, x: sizes.setdefault(conv, set()).add(tuple(x[0].shape[-2:]))
        )
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
    ]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    for conv, seen in sizes.items():
        plain = conv.dilation == (1, 1) and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
        if not plain or len(seen) > 1:  # called on maps of several sizes, it may need all of its taps
            continue
        axes = list(zip(*seen, conv.kernel_size, conv.stride, conv.padding, strict=True))
        kept = [slice(pad, min(kernel, pad + length)) for length, kernel, _, pad in axes]
        single = all((length + 2 * pad - kernel) // stride == 0 for length, kernel, stride, pad in axes)
        if single and min(_lengths(kept)) > 0 and _lengths(kept) != conv.kernel_size:
            conv.weight = nn.Parameter(conv.weight.detach()[:, :, kept[0], kept[1]].clone())
            conv.kernel_size, conv.padding = _lengths(kept), (0, 0)
    return model


def _lengths(kept: Sequence[slice]) -> tuple[int, int]:
    down, across = (taps.stop - taps.start for taps in kept)
    return down, across


class MLP(nn.Module):
    """Two hidden layers over flattened input."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.features(x))
        return result


class SmallCNN(nn.Module):
    """Two convolutions and a hidden layer, for small images."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, width: int = 16, hidden: int = 64, norm: str = "none"
    ) -> None:
        super().__init__()
        if len(shape) != 3:
            raise UsageError(
                f"cnn wants images [channels, height, width], not samples of shape {list(shape)}; try mlp"
            )
        channels, height, tall = shape
        spots = (height // 4) * (tall // 4)
        if spots == 0:
            raise UsageError(f"cnn wants images of at least 4x4 pixels, not {height}x{tall}; try mlp")
        plain = norm == "none"  # a bias that the norm subtracts again has no gradient but noise
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=plain), _norm(norm, width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=plain), _norm(norm, 2 * width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2 * width * spots, hidden), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(hidden, classes)

    def features(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.features(x))
        return result


class Block(nn.Module):
    """ResNet's basic block: two 3x3 convolutions and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = _norm(norm, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = _norm(norm, outside)
        self.around = nn.Sequential()
        if stride != 1 or inside != outside:
            self.around = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), _norm(norm, outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.around(x))


class ResNet18(nn.Module):
    """ResNet-18. stem="imagenet": 7x7 stride 2 and a max-pool, as in the paper's protocol; stem="cifar": 3x3, no pool.

    With the ImageNet stem on 32x32 images the last stage sees 1x1 maps: 38 % of the parameters ever get a gradient.
    kernels="pruned" leaves the others out: the same answers and the same training from a model of 4.2 million. Only
    what picks a share of all parameters, as FedSelect does, picks others.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        stem: str = "imagenet",
        norm: str = "batch",
        width: int = 64,
        kernels: str = "full",
    ) -> None:
        super().__init__()
        if len(shape) != 3:
            raise UsageError(
                f"resnet18 wants images [channels, height, width], not samples of shape {list(shape)}; try mlp"
            )
        if stem not in ("imagenet", "cifar"):
            raise unknown("stem", stem, ("imagenet", "cifar"))
        if kernels not in ("full", "pruned"):
            raise unknown("kernels", kernels, ("full", "pruned"))
        conv = (
            nn.Conv2d(shape[0], width, 7, 2, 3, bias=False)
            if stem == "imagenet"
            else nn.Conv2d(shape[0], width, 3, 1, 1, bias=False)
        )
        self.stem = nn.Sequential(conv, _norm(norm, width), nn.ReLU())
        if stem == "imagenet":
            self.stem.append(nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        inside = width
        for depth in range(4):
            outside = width * 2**depth
            stages += [Block(inside, outside, 1 if depth == 0 else 2, norm), Block(outside, outside, 1, norm)]
            inside = outside
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if kernels == "pruned":
            pruned(self, shape)

    def features(self, x: Tensor) -> Tensor:
        result: Tensor = self.stages(self.stem(x))
        return result.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.features(x))
        return result


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(math.gcd(32, channels), channels)
    if kind == "none":
        return nn.Identity()
    raise unknown("norm", kind, ("batch", "group", "none"))


MODELS: dict[str, Callable[..., nn.Module]] = {"cnn": SmallCNN, "mlp": MLP, "resnet18": ResNet18}


def describe() -> dict[str, str]:
    """One line per model."""
    return {
        "cnn": "two convolutions and a hidden layer, for small images (norm=none|batch|group)",
        "mlp": "two hidden layers over flattened input",
        "resnet18": "ResNet-18 (stem=imagenet|cifar, norm=batch|group, kernels=full|pruned)",
    }


def build(name: str, shape: tuple[int, ...], classes: int, seed: int, **keywords: object) -> nn.Module:
    """A freshly initialised model for samples of this shape; the same seed gives the same weights."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return MODELS[name](shape, classes, **keywords)
        except (
            RuntimeError,
            MemoryError,
            OverflowError,
            TypeError,
        ) as error:  # what torch says to numbers too large
            why = str(error).partition("\n")[0]
            given = ", ".join(f"{key}={str(value)[:40]}" for key, value in keywords.items())
            raise UsageError(
                f"the model {name} with {given or 'its own numbers'} cannot be made for samples of shape {list(shape)} "
                f"and {classes} classes: {why[:200]}; give smaller numbers"
            ) from error
