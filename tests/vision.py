"""Makes torchvision importable, which transformers and peft import where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch


def operator_names() -> Any:
    """The names of torchvision's operators that its import needs, where its own library does not load.

    The library loads only beside the torch that it was built for. Classifiers use none of its operators.
    None where torchvision is not installed, or where its library loads. The names last as long as the result.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    library: Any = torch.library.Library
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))  # type: ignore[no-untyped-call]
    except OSError:
        names = library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            names.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return names
    return None


OPERATORS = operator_names()
