"""The GPU is opened by its driver alone."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from copfl.engine import machine


class Driver(SimpleNamespace):
    """Writes down what it is asked for."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.calls = error, list[tuple[str, int]]()

    def cuInit(self, flags: int) -> int:
        self.calls.append(("cuInit", flags))
        return self.error

    def cuDevicePrimaryCtxRetain(self, context: object, index: int) -> int:
        self.calls.append(("context", index))
        return 0


def test_the_error_of_the_driver_is_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert machine.open_gpu(1) == 0
    driver.error = 100
    assert machine.open_gpu() == 100
    assert driver.calls == [("cuInit", 0), ("context", 1), ("cuInit", 0)]
