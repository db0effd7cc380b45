"""What a policy refuses, and the line of it that says so: every refusal names the line that its owner would change."""

import re
from typing import NamedTuple

from copfl.errors import UsageError

OPTION = re.compile(r"[a-z][a-z0-9_]{0,39}")


class Refusal(NamedTuple):
    """One thing that a run config asks for and the policy does not allow."""

    line: str  # of the policy, such as bounds.rounds
    why: str

    def __str__(self) -> str:
        return f"{self.why} [{self.line}]"


class PolicyError(UsageError):
    """A run config, or another request, that this machine's policy refuses."""

    def __init__(self, refusals: tuple[Refusal, ...], what: str = "run config") -> None:
        shown = "; ".join(map(str, refusals[:5]))
        more = f"; and {len(refusals) - 5} more" if len(refusals) > 5 else ""
        super().__init__(f"the policy of this machine's owner refuses the {what}: {shown}{more}")
        self.refusals = refusals


def shown(value: object) -> str:
    """Another machine's value in a sentence: short, and in one line."""
    text = repr(value)[:60] if isinstance(value, str | int | float) else type(value).__name__
    return "".join(c if c.isprintable() else "?" for c in text)


def plain_option(option: object) -> str:
    """The name of an option as a refusal shows it: ? if it is none."""
    return str(option) if OPTION.fullmatch(str(option)) else "?"
