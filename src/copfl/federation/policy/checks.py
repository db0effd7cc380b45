"""Checks of single values: each says what is wrong with a value, and "" if nothing is.

`fields` chooses the check of a setting. A value is another machine's: it may be of any type, so each check asks for
the type first, and a bool is no number.
"""

import math
from typing import Any

from copfl.settings.federation import is_plain_name

MOST_TEXT, MOST_KEYS, MOST_LIST = 100_000, 300, 1000  # characters, keys, entries


def whole(value: Any, low: int, high: float) -> str:
    """A whole number from `low` to `high`.

    Args:
        value: Another machine's.
        low: The smallest that is allowed.
        high: The largest.
    """
    is_within = type(value) is int and low <= value <= high
    return "" if is_within else f"must be a whole number of {low} to {high:.15g}"


def number(value: Any, low: float, high: float) -> str:
    """A number from `low` to `high`; no nan.

    Args:
        value: Another machine's.
        low: The smallest that is allowed.
        high: The largest.
    """
    is_within = type(value) in (int, float) and low <= value <= high
    return "" if is_within else f"must be a number of {low:g} to {high:g}"


def one_of(value: Any, *allowed: str) -> str:
    """One of the allowed texts.

    Args:
        value: Another machine's; None: what is said of a value that is known not to be allowed.
        allowed: The texts.
    """
    if isinstance(value, str) and value in allowed:
        return ""
    listed = ", ".join(filter(None, allowed))
    return f"must be one of: {listed}" if listed else "is not allowed, nor is any other"


def flag(value: Any) -> str:
    return "" if type(value) is bool else "must be true or false"


def text(value: Any) -> str:
    is_text = isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()
    return "" if is_text else f"must be a text of at most {MOST_TEXT:,} characters"


def run_name(value: Any) -> str:
    """A name of a run, which becomes the name of a folder; empty for none."""
    is_name = isinstance(value, str) and (not value or is_plain_name(value))
    return "" if is_name else 'must be letters, digits, "-" and "_", at most 100'


def entries_of(value: Any) -> list[Any]:
    """The entries of a list; a list of one may be written as its entry."""
    return list(value) if isinstance(value, list | tuple) else [value]


def numbers(value: Any, most: int = MOST_LIST) -> str:
    """A list of finite numbers.

    Args:
        value: Another machine's.
        most: How many there may be.
    """
    entries = entries_of(value)
    is_list = len(entries) <= most and all(
        type(entry) in (int, float) and abs(entry) < math.inf for entry in entries
    )
    return "" if is_list else f"must be at most {most} numbers"


def shape(value: Any, most: int) -> str:
    """The shape of a sample.

    Args:
        value: Another machine's.
        most: The largest product of its numbers.
    """
    sizes = entries_of(value)
    is_shape = len(sizes) <= 5 and all(type(size) is int and 0 <= size < 10**9 for size in sizes)
    is_small = is_shape and math.prod(sizes) <= most
    return "" if is_small else f"must be at most 5 whole numbers, whose product is at most {most}"


def classes(value: Any, most: int) -> str:
    """The number of classes, or their names.

    Args:
        value: Another machine's.
        most: How many there may be.
    """
    if type(value) is int:
        return "" if value <= most else f"must be at most {most}"
    are_names = all(isinstance(name, str) and name.isprintable() for name in entries_of(value))
    is_short = are_names and len(entries_of(value)) <= most
    return "" if is_short else f"must be a whole number of at most {most}, or as many names"
