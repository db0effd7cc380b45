"""What the first call of a program does about kernels that are on disk, and about those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

knobs: Any = pytest.importorskip("triton.knobs", reason="Triton is not installed (Linux only)")


class Kernel:
    """A kernel that writes down what is done with it, and tells Triton's listener where it comes from."""

    def __init__(self, name: str, log: list[str], on_disk: bool) -> None:
        self.name, self.log, self.on_disk, self.in_memory = name, log, on_disk, False

    def __getitem__(self, grid: object) -> Any:
        def call(*arguments: object) -> None:
            if not self.in_memory and knobs.compilation.listener is not None:
                knobs.compilation.listener(src=self, metadata={}, cache_hit=self.on_disk)
            self.in_memory = True
            self.log.append(f"{self.name} called")

        return call

    def warmup(self, *arguments: object, grid: object) -> None:
        self.in_memory = True
        self.log.append(f"{self.name} compiled")


@pytest.mark.parametrize(
    ("first_on_disk", "second_on_disk", "expected"),
    [
        (True, True, ["a called", "b called"]),
        (False, False, ["a called", "a compiled", "b compiled", "a called", "b called"]),
        (True, False, ["a called", "b called", "a compiled", "b compiled", "a called", "b called"]),
    ],
)
def test_a_program_begins_again_if_a_kernel_was_not_on_disk(
    monkeypatch: pytest.MonkeyPatch, first_on_disk: bool, second_on_disk: bool, expected: list[str]
) -> None:
    from copfl.kernels.triton import compiling

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    heard: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda cache_hit, **others: heard.append(cache_hit))
    usual, log = knobs.compilation.listener, list[str]()
    kernels = [Kernel("a", log, first_on_disk), Kernel("b", log, second_on_disk)]

    def program() -> str:
        try:
            for kernel in kernels:
                compiling.launch(kernel, (1,), 3)
        except Exception:  # as programs have them, for failures of their own
            return "failed"
        return "result"

    assert compiling.first_call(program) == "result"
    assert log == expected
    assert knobs.compilation.listener is usual  # and it was told, too
    assert heard[0] is first_on_disk
    log.clear()
    kernels[0].in_memory = kernels[0].on_disk = False
    assert program() == "result"  # outside of a first call a kernel is compiled where it is called
    assert log == ["a called", "b called"]
