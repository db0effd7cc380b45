"""Small models of sequences: texts, signals and tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from copfl.errors import UsageError, at_least


class Embedding(nn.Module):
    """The mean of the words' embeddings and a hidden layer; its tokens are hashed words, 0 is padding."""

    def __init__(self, shape: object, classes: int, words: int = 5000, width: int = 64) -> None:
        super().__init__()
        at_least(1, words=words, width=width)
        self.embedding = nn.Embedding(words + 1, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = (input_ids > 0) if attention_mask is None else attention_mask
        embedded = self.embedding(input_ids)  # [b, t, width]
        weight = mask[..., None].to(embedded.dtype)
        mean = (embedded * weight).sum(-2) / weight.sum(-2).clamp(min=1)
        logits: Tensor = self.head(self.body(mean))
        return logits


class SignalCNN(nn.Module):
    """Two convolutions over time and their mean, for signals [channels, steps]."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 32, kernel: int = 5) -> None:
        super().__init__()
        if len(shape) != 2:
            raise UsageError(
                f"cnn1d needs signals [channels, steps], not samples of shape {list(shape)}; try mlp"
            )
        at_least(1, width=width, kernel=kernel)
        channels, _ = shape
        self.body = nn.Sequential(
            nn.Conv1d(channels, width, kernel, stride=2, padding=kernel // 2),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, kernel, stride=2, padding=kernel // 2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


class CausalCNN(nn.Module):
    """Dilated convolutions that see only earlier tokens: logits of the next token at every place."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        at_least(1, width=width, layers=layers)
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
