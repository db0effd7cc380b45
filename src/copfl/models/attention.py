"""The attention masks of text models, in a form that vmap and CUDA graphs allow."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn


def additive_mask(seen: Tensor, dtype: torch.dtype, causal: bool) -> Tensor:
    """[b, 1, 1 or length, length]: 0 where a token may be attended to, the lowest number elsewhere."""
    allowed = seen[:, None, None, :] > 0
    if causal:
        length = seen.shape[1]
        allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


@torch.no_grad()
def mask_of(model: Any) -> str:
    """The mask that gives the outputs of the library's own; "plain" where none does."""
    embeddings = getattr(model.net, "get_input_embeddings", lambda: None)()
    if not isinstance(embeddings, nn.Embedding):
        return "plain"
    ids = torch.arange(3, 11).view(2, 4) % embeddings.num_embeddings
    seen = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    sample = {
        "input_ids": ids.to(embeddings.weight.device),
        "attention_mask": seen.to(embeddings.weight.device),
    }
    training = model.training
    model.eval()
    try:
        expected = _valid(model(sample), seen)
        for model.mask in ("all", "causal"):
            with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError):
                if torch.allclose(_valid(model(sample), seen), expected, rtol=1e-4, atol=1e-5):
                    return str(model.mask)
        return "plain"
    finally:
        model.mask = "plain"
        model.train(training)


def _valid(logits: Tensor, seen: Tensor) -> Tensor:
    """The logits of tokens that are no padding; those of whole sequences unchanged."""
    return logits[seen.to(logits.device) > 0] if logits.dim() == 3 else logits
