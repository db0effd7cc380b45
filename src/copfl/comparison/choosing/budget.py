"""What a choice may cost: rounds of all its training together, or a time."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from copfl.errors import UsageError


class Budget(NamedTuple):
    rounds: float = math.inf
    seconds: float = math.inf  # from the beginning to the end


def limit_of(budget: str | int) -> Budget | None:
    """A number of rounds, or a time such as 90s, 10m or 2h; None if the text is empty."""
    if not str(budget).strip():
        return None
    amount_and_unit = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smh]?)\s*", str(budget))
    if amount_and_unit is None or not float(amount_and_unit[1]):
        raise UsageError(
            f'the budget "{budget}" is neither a number of rounds, such as 300, nor a time, such as 10m'
        )
    amount, unit = float(amount_and_unit[1]), {"": 0, "s": 1, "m": 60, "h": 3600}[amount_and_unit[2]]
    return Budget(seconds=amount * unit) if unit else Budget(rounds=amount)
