"""Names by content: the same for the same, another for another, whatever the process."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from copfl.algorithms import FedAvg
from copfl.data.arrays import from_arrays
from copfl.settings.components import factory_of
from copfl.settings.content import digest_of, keep, keep_algorithm
from copfl.settings.record import without_digest


def defined(number: int, code: str = "x + 1") -> Any:
    scope: dict[str, Any] = {"number": number}
    exec(f"class Mine:\n    field = {number}\n    def step(self, x):\n        return {code}\n", scope)
    scope["Mine"].__module__ = "__main__"
    return scope["Mine"]


def test_a_class_is_its_code_and_its_fields() -> None:
    assert digest_of(defined(1)) == digest_of(defined(1))
    assert (
        len({digest_of(one) for one in (defined(1), defined(2), defined(1, "x + 2"), defined(1, "-x"))}) == 4
    )


def of_program(more: str, helper: str = "x") -> Any:
    """A class of a notebook, which uses a number and a function of another cell."""
    code = f"def helper(x):\n    return {helper}\nSIGN, seen = 1, 0\n{more}\n"
    code += "class Mine:\n    def step(self, x):\n        global seen\n        seen += 1\n"
    code += "        return [SIGN * helper(one) for one in x]\n"
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(code, scope)
    return scope["Mine"]


def test_what_a_class_uses_of_its_program_counts() -> None:
    usual = digest_of(of_program(""))
    assert usual == digest_of(of_program("other = 3"))
    assert usual == digest_of(of_program("seen = 7"))  # it changes that itself
    assert usual != digest_of(of_program("SIGN = -1"))
    assert usual != digest_of(of_program("", helper="-x"))


def test_a_function_is_its_code_and_what_it_closes_over() -> None:
    def scaled(factor: float) -> Any:
        return lambda x: factor * x

    assert digest_of(scaled(2.0)) == digest_of(scaled(2.0))
    assert digest_of(scaled(2.0)) != digest_of(scaled(3.0))
    assert digest_of(functools.partial(max, 1)) != digest_of(functools.partial(max, 2))


def test_a_network_is_its_weights_and_data_its_samples() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 2), np.eye(10, dtype=np.float32), np.arange(10) % 2
    before = digest_of(net)
    assert digest_of(net) == before
    with torch.no_grad():
        net.weight += 1
    assert digest_of(net) != before
    named = from_arrays(x, y, name="other")
    assert digest_of(from_arrays(x, y)) == digest_of(named)  # a name is no content
    assert digest_of(from_arrays(x, 1 - y)) != digest_of(named)
    values: list[Any] = [{"a": 1}, {"a": 2}, (1, 2), [2, 1], {1, 2}, None, "a", 1.5]
    assert len(set(map(digest_of, values))) == len(values)
    values.append(values)  # one that contains itself ends, too
    assert digest_of(values)


def test_what_is_kept_is_found_by_its_name() -> None:
    @dataclass(frozen=True)
    class Local(FedAvg):
        shape: Any = None

    name = keep(Local)
    assert without_digest(name) == "Local"
    assert factory_of("algorithm", name) is Local
    whole = Local(epochs=3, shape={"a": np.ones(2)})
    made = factory_of("algorithm", keep_algorithm(whole))
    assert made().shape is whole.shape
    assert made(optimizer=whole.optimizer).epochs == 3
