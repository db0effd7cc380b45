"""Modules that stand in for torch's own inside a Task: batch norm over valid samples alone, faster convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl.errors import UsageError
from copfl.kernels.conv import Convolution, MaxPool


class BatchNorm(nn.Module):
    """Batch norm over the real samples of a batch alone; stands in for torch's own inside a Task.

    Clients of unequal size are trained side by side in batches filled up with samples that do not count. They must not
    count in the statistics either. `real` is set by the Task around each call; None means that all samples are real.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, like: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        if like.running_mean is None or like.running_var is None:
            raise UsageError(
                "a batch norm without running statistics cannot be evaluated; leave track_running_stats on"
            )
        self.weight, self.bias, self.eps = like.weight, like.bias, like.eps
        self.momentum = 0.1 if like.momentum is None else like.momentum
        self.register_buffer("running_mean", like.running_mean)
        self.register_buffer("running_var", like.running_var)
        self.valid: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        values = x.numel() // x.shape[1]
        if not self.training or (self.valid is None and values > 1):
            return F.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                self.momentum,
                self.eps,
            )
        others = [0, *range(2, x.dim())]
        valid = x.new_ones(x.shape[0]) if self.valid is None else self.valid.to(x.dtype)
        share = valid.view(-1, *[1] * (x.dim() - 1))
        count = valid.sum() * (values // x.shape[0])
        shape = [1, -1, *[1] * (x.dim() - 2)]
        mean = (x * share).sum(others) / count.clamp(min=1)
        centred = x - mean.view(shape)
        variance = (centred * centred * share).sum(others) / count.clamp(min=1)
        with torch.no_grad():
            some = (count > 0).to(x.dtype) * self.momentum  # a batch of nobody teaches nothing
            unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
            self.running_mean.add_(some * (mean.detach() - self.running_mean))
            self.running_var.add_(some * (unbiased - self.running_var))
        scaled = centred * torch.rsqrt(variance + self.eps).view(shape)
        return scaled if self.weight is None else scaled * self.weight.view(shape) + self.bias.view(shape)


def for_tasks(model: nn.Module) -> nn.Module:
    """The model with our batch norms, convolutions and max-pools in the place of torch's; names and values stay."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(model, name, BatchNorm(child))
        elif type(child) is nn.Conv2d:
            plain = child.groups == 1 and child.dilation == (1, 1) and child.padding_mode == "zeros"
            if plain and not isinstance(child.padding, str):
                child.__class__ = Convolution  # the same parameters, settings and hooks
        elif type(child) is nn.MaxPool2d and not child.return_indices:
            child.__class__ = MaxPool
        else:
            for_tasks(child)
    return model
