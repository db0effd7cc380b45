"""Random crops and mirror images of a batch, drawn beforehand."""

import torch
from torch import Tensor


def crop_and_flip(images: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Images [b, c, h, w] shifted by shift - 4 pixels with zero padding, then mirrored where flip is True."""
    height, width = images.shape[-2:]
    down = torch.arange(height, device=images.device) + shift[:, :1] - 4  # [b, h]
    across = torch.arange(width, device=images.device)
    across = torch.where(flip[:, None], width - 1 - across, across) + shift[:, 1:] - 4  # [b, w]
    inside_rows, inside_columns = (down >= 0) & (down < height), (across >= 0) & (across < width)
    inside = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
    rows = down.clamp(0, height - 1)[:, None, :, None].expand(-1, images.shape[1], -1, width)
    columns = across.clamp(0, width - 1)[:, None, None, :].expand(-1, images.shape[1], height, -1)
    return torch.where(inside, images.gather(2, rows).gather(3, columns), 0)
