"""Tests that take long run where COPFL_SLOW=1 asks for them: the others must end within minutes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

SLOW = os.environ.get("COPFL_SLOW") == "1"
slow = pytest.mark.skipif(not SLOW, reason="takes long: set COPFL_SLOW=1")


def some(cases: Iterable[tuple[Any, ...]], usual: Collection[tuple[Any, ...]]) -> list[Any]:
    """The parameters of a test of all these combinations, of which the quick suite runs some.

    Args:
        cases: All of them.
        usual: Those that always run: each value in one of them at least.
    """
    return [pytest.param(*case, marks=[] if case in usual else slow) for case in cases]
