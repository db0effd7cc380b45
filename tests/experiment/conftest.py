"""What makes exports quicker."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest


@functools.cache
def _made_once(make: Callable[[], Any]) -> Callable[[], Any]:
    return functools.cache(make)


@pytest.fixture
def one_onnx_table() -> Iterator[None]:
    """Torch's table of what each operation is in ONNX is made once, which takes seconds, and not for each export."""
    if importlib.util.find_spec("onnxscript") is None:
        yield
        return
    with warnings.catch_warnings(action="ignore"):  # of the exporter as it loads
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    once = staticmethod(_made_once(ONNXRegistry.from_torchlib))
    with mock.patch.object(ONNXRegistry, "from_torchlib", once):
        yield
