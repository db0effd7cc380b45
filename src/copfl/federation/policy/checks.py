"""Checks of single values: each says what is wrong with a value, and "" if nothing is."""

import math
from collections.abc import Callable
from typing import Any

from copfl.settings.federation import is_plain_name

MOST_TEXT, MOST_KEYS, MOST_LIST = 100_000, 300, 1000  # characters, keys, entries
Check = Callable[[Any], str]  # what is wrong with a value; "" if nothing is


def whole(low: int, high: float) -> Check:
    def check(value: Any) -> str:
        is_within = type(value) is int and low <= value <= high
        return "" if is_within else f"must be a whole number of {low} to {high:.15g}"

    return check


def number(low: float, high: float) -> Check:
    def check(value: Any) -> str:
        is_within = type(value) in (int, float) and low <= value <= high
        return "" if is_within else f"must be a number of {low:g} to {high:g}"

    return check


def one_of(*allowed: str) -> Check:
    shown = ", ".join(filter(None, allowed))
    wrong = f"must be one of: {shown}" if shown else "is not allowed, nor is any other"

    def check(value: Any) -> str:
        return "" if isinstance(value, str) and value in allowed else wrong

    return check


def flag(value: Any) -> str:
    return "" if type(value) is bool else "must be true or false"


def text(value: Any) -> str:
    is_text = isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()
    return "" if is_text else f"must be a text of at most {MOST_TEXT:,} characters"


def run_name(value: Any) -> str:
    is_name = isinstance(value, str) and (not value or is_plain_name(value))
    return "" if is_name else 'must be letters, digits, "-" and "_", at most 100'


def parts_of(value: Any) -> list[Any]:
    """The entries of a list; a list of one may be written as its entry."""
    return list(value) if isinstance(value, list | tuple) else [value]


def numbers(value: Any) -> str:
    parts = parts_of(value)
    is_list = len(parts) <= MOST_LIST and all(type(v) in (int, float) and abs(v) < math.inf for v in parts)
    return "" if is_list else f"must be at most {MOST_LIST} numbers"


def shape(most: int) -> Check:
    def check(value: Any) -> str:
        parts = parts_of(value)
        is_shape = len(parts) <= 5 and all(type(part) is int and 0 <= part < 10**9 for part in parts)
        is_small = is_shape and math.prod(parts) <= most
        return "" if is_small else f"must be at most 5 whole numbers, whose product is at most {most}"

    return check


def classes(most: int) -> Check:
    def check(value: Any) -> str:
        if type(value) is int:
            return "" if value <= most else f"must be at most {most}"
        are_names = all(isinstance(name, str) and name.isprintable() for name in parts_of(value))
        is_short = are_names and len(parts_of(value)) <= most
        return "" if is_short else f"must be a whole number of at most {most}, or as many names"

    return check
