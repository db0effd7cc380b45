"""The built-in models.

Each has `.head`, the last Linear; those of images and signals have `.features(x)`, its input.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl.errors import UsageError, at_least, one_of, unknown
from copfl.kernels.draws import seeded
from copfl.models.trees import TREES, Trees, trees_of_step

MOST_LAYERS = 32  # of dilated convolutions: 2^32 tokens
WEIGHT_OF_PAIRS = 0.5  # of neighbours in a text beside its words, which are seen more often
IMAGE = ("images", "channels", "height", "width")


def pruned(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The model without the kernel positions that only meet padding on samples of this shape, in place.

    Its outputs and its training stay the same: those positions never had a gradient. Kernels are pruned where
    a convolution has a single output, as at the end of a deep network for small images.
    """
    sizes: dict[nn.Conv2d, set[tuple[int, ...]]] = {}

    def note(conv: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(conv, nn.Conv2d):
            sizes.setdefault(conv, set()).add(tuple(inputs[0].shape[-2:]))

    training = model.training
    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
    finally:
        model.train(training)
        hook.remove()
    for conv, seen in sizes.items():
        plain = conv.dilation == (1, 1) and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
        if not plain or len(seen) > 1:  # called on maps of several sizes, it may need all positions
            continue
        axes = list(zip(*seen, conv.kernel_size, conv.stride, conv.padding, strict=True))
        rows, columns = (slice(pad, min(kernel, pad + length)) for length, kernel, _, pad in axes)
        size = rows.stop - rows.start, columns.stop - columns.start
        single = all((length + 2 * pad - kernel) // stride == 0 for length, kernel, stride, pad in axes)
        if single and min(size) > 0 and size != conv.kernel_size:
            conv.weight = nn.Parameter(conv.weight.detach()[:, :, rows, columns].clone())
            conv.kernel_size, conv.padding = size, (0, 0)
    return model


class Model(nn.Module):
    """A model whose logits are the head of its features."""

    body: nn.Module
    head: nn.Module

    def features(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.features(x))
        return result


def _check_axes(model: str, shape: tuple[int, ...], kind: str, *axes: str) -> None:
    if len(shape) != len(axes):
        form = f"{kind} [{', '.join(axes)}]"
        raise UsageError(f"{model} needs {form}, not samples of shape {list(shape)}; try mlp")


class MLP(Model):
    """Two hidden layers over flattened input"""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, classes)


class Linear(Model):
    """One linear layer over flattened input: linear or logistic regression"""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Flatten()
        self.head = nn.Linear(math.prod(shape), classes)


class SmallCNN(Model):
    """Two convolutions and a hidden layer, for small images (norm=none|batch|frozen|group)"""

    def __init__(
        self, shape: tuple[int, ...], classes: int, width: int = 16, hidden: int = 64, norm: str = "none"
    ) -> None:
        super().__init__()
        _check_axes("cnn", shape, *IMAGE)
        channels, height, across = shape
        pixels = (height // 4) * (across // 4)
        if pixels == 0:
            raise UsageError(f"cnn needs images of at least 4x4 pixels, not {height}x{across}; try mlp")
        layers: list[nn.Module] = []
        for inside, outside in ((channels, width), (width, 2 * width)):
            # No bias before a norm, which would subtract it again.
            layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=norm == "none"), _norm(norm, outside)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * pixels, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, classes)


class Block(nn.Module):
    """ResNet's basic block: two 3x3 convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = _norm(norm, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = _norm(norm, outside)
        self.around = nn.Sequential()
        if stride != 1 or inside != outside:
            conv = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.around = nn.Sequential(conv, _norm(norm, outside))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.around(x))


class ResNet18(Model):
    """ResNet-18 (stem=imagenet|cifar, norm=batch|frozen|group, kernels=full|pruned)

    stem="imagenet": 7x7, stride 2 and a max-pool, as in the paper; stem="cifar": 3x3, no pool. With the
    ImageNet stem on 32x32 images the last stage has 1x1 maps: only 38 % of the parameters ever get a
    gradient. kernels="pruned" leaves the others out: the same outputs and training with 4.2 million
    parameters. Only algorithms that select a fraction of all parameters, such as FedSelect, select others.
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
        _check_axes("resnet18", shape, *IMAGE)
        one_of(("imagenet", "cifar"), stem=stem)
        one_of(("full", "pruned"), kernels=kernels)
        kernel, stride, padding = (7, 2, 3) if stem == "imagenet" else (3, 1, 1)
        conv = nn.Conv2d(shape[0], width, kernel, stride, padding, bias=False)
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


class FrozenBatchNorm(nn.BatchNorm2d):
    """Batch norm that trains in evaluation mode: with its initial statistics, mean 0 and variance 1."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        """In evaluation mode, always."""
        return super().train(False)


def _norm(kind: str, channels: int) -> nn.Module:
    one_of(("batch", "frozen", "group", "none"), norm=kind)
    if kind in ("batch", "frozen"):
        return (FrozenBatchNorm if kind == "frozen" else nn.BatchNorm2d)(channels)
    return nn.GroupNorm(math.gcd(32, channels), channels) if kind == "group" else nn.Identity()


# Sequences: texts, signals and tokens


class Embedding(nn.Module):
    """The mean of the words' embeddings, for texts; has its own tokens (words, width)"""

    def __init__(self, shape: object, classes: int, words: int = 5000, width: int = 64) -> None:
        super().__init__()
        at_least(1, words=words, width=width)
        self.embedding = nn.Embedding(words + 1, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = _mask(input_ids, attention_mask)
        embedded = self.embedding(input_ids)  # [b, t, width]
        weight = mask[..., None].to(embedded.dtype)
        mean = (embedded * weight).sum(-2) / weight.sum(-2).clamp(min=1)
        logits: Tensor = self.head(self.body(mean))
        return logits


class Intercept(nn.Module):
    """A number per output that is added to it."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Words(nn.Module):
    """A linear model of hashed words and pairs of words, for texts; has its own tokens (words, pairs)

    Each word that a text has counts 1 / the square root of their number, and each pair of neighbours the same, and half
    as much. Without pairs it is a model of words. The head is the intercept alone. It begins at zero, as nothing in it
    needs a random start.
    """

    def __init__(self, shape: object, classes: int, words: int = 2**15, pairs: int = 2**15) -> None:
        super().__init__()
        at_least(1, words=words)
        at_least(0, pairs=pairs)
        self.words = words
        self.embedding = nn.Embedding(1 + words + pairs, classes)
        nn.init.zeros_(self.embedding.weight)
        self.head = Intercept(classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        weights = self.weights(input_ids, attention_mask)
        logits: Tensor = self.head((self.embedding(input_ids) * weights[..., None]).sum(-2))
        return logits

    def weights(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[..., t]: what each token of a text counts."""
        seen = _mask(input_ids, attention_mask).to(self.embedding.weight.dtype)
        words = seen * (input_ids <= self.words)
        of_words, of_pairs = (
            part / part.sum(-1, keepdim=True).clamp(min=1).sqrt() for part in (words, seen - words)
        )
        return of_words + WEIGHT_OF_PAIRS * of_pairs

    def texts_with(self, input_ids: Tensor, attention_mask: Tensor | None, valid: Tensor) -> Tensor:
        """[tokens]: in how many of the valid texts [n] each word and each pair is."""
        seen = (_mask(input_ids, attention_mask) > 0) & valid[:, None]
        ids = torch.where(seen, input_ids, 0).sort(-1).values
        first = torch.cat([torch.ones_like(seen[:, :1]), ids[:, 1:] != ids[:, :-1]], -1) & (ids > 0)
        empty = self.embedding.weight.new_zeros(len(self.embedding.weight))
        return empty.index_add(0, ids.flatten(), first.flatten().to(empty))


def _mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Where a text has a word."""
    return (input_ids > 0) if attention_mask is None else attention_mask


class SignalCNN(Model):
    """Two convolutions over time, for signals (width, kernel)"""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 32, kernel: int = 5) -> None:
        super().__init__()
        _check_axes("cnn1d", shape, "signals", "channels", "steps")
        at_least(1, width=width, kernel=kernel)
        self.body = nn.Sequential(
            nn.Conv1d(shape[0], width, kernel, stride=2, padding=kernel // 2),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, kernel, stride=2, padding=kernel // 2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width, classes)


class CausalCNN(nn.Module):
    """Convolutions over earlier tokens, for the next token (width, layers)"""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        at_least(1, width=width, layers=layers)
        if layers > MOST_LAYERS:  # a file may have any number, and each is made before anything is counted
            raise UsageError(
                f"layers={layers} is too many; a layer sees twice as far, so use at most {MOST_LAYERS}"
            )
        self.embedding = nn.Embedding(classes, width)
        self.body = nn.ModuleList(
            nn.Conv1d(width, width, 2, dilation=2**n, padding=2**n) for n in range(int(layers))
        )
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """A place depends on earlier ones alone, so padding at the end needs no mask."""
        steps = input_ids.shape[-1]
        features = self.embedding(input_ids).transpose(-1, -2)  # [b, width, t]
        for layer in self.body:
            features = features + torch.relu(layer(features)[..., :steps])
        logits: Tensor = self.head(features.transpose(-1, -2))
        return logits


MODELS: dict[str, Callable[..., nn.Module]] = {
    "causal_cnn": CausalCNN,
    "cnn": SmallCNN,
    "cnn1d": SignalCNN,
    "embedding": Embedding,
    "linear": Linear,
    "mlp": MLP,
    "resnet18": ResNet18,
    "trees": Trees,
    "words": Words,
}
# Models with their own tokens, whose texts are hashed words.
OF_HASHED_WORDS = ("embedding", "words")
SOURCES = {
    "hf:NAME": "a model of transformers: a folder, or a name at the Hugging Face hub",
    "timm:NAME": "an image classifier of timm",
    "torchvision:NAME": "an image classifier of torchvision",
}


def build(
    name: str, shape: tuple[int, ...], classes: int, seed: int, kind: str = "", **keywords: Any
) -> nn.Module:
    """A freshly initialised model for samples of this shape; the same seed gives the same weights.

    Args:
        name: Of MODELS.
        shape: Of one sample.
        classes: Number of outputs.
        seed: Of the weights.
        kind: Of the task, where it is known: trees of several classes are more.
        keywords: The options of the model.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    given = ", ".join(f"{key}={str(value)[:40]}" for key, value in keywords.items()) or "default options"
    with seeded(seed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # an error below
        try:
            if name == "trees":
                keywords["trees"] = keywords.get("trees", TREES) * trees_of_step(kind, classes)
            model = MODELS[name](shape, classes, **keywords)
        except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # of too large numbers
            why = str(error).partition("\n")[0]
            raise UsageError(
                f"the model {name} with {given} cannot be built for samples of shape "
                f"{list(shape)} and {classes} classes: {why[:200]}; use smaller numbers"
            ) from error
    if empty := [path for path, t in model.named_parameters() if t.numel() == 0]:
        raise UsageError(f"the model {name} with {given} has no weights in {empty[0]}; use larger numbers")
    return model
