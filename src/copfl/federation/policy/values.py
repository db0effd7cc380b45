"""What is refused of the tables that name no component, and of settings together: sums, noise, halves."""

import math
from collections.abc import Iterator
from typing import Any

from copfl.federation.policy.fields import refusals_of
from copfl.federation.policy.names import COMPONENTS
from copfl.federation.policy.record import SMALLEST_SUM, Policy, Privacy
from copfl.federation.policy.refusal import Refusal, shown
from copfl.settings.federation import TITLES
from copfl.settings.toml import Tables


def value_refusals(policy: Policy, tables: Tables) -> Iterator[Refusal]:
    """What is refused of the tables that have no component."""
    for title in (title for title in TITLES if title not in COMPONENTS):
        yield from refusals_of(policy, title, tables[title])
    if tables["session"].get("rollback") is True and not policy.rollback:
        yield Refusal("rollback", "session.rollback=true is not allowed")
    is_secure = tables["secure"].get("aggregation", False) is True
    if tables["session"].get("agree") is True:
        yield from _statistics_refusals(policy, is_secure)
    if policy.secure_aggregation.required and not is_secure:
        yield Refusal("secure_aggregation.required", "secure.aggregation must be true")
    clients, fraction = tables["run"]["clients"], tables["run"]["participation"]
    is_counted = _are_numbers(clients, fraction) and 0 <= fraction <= 1
    # As `core.batches.participants`, which needs torch: of a part of a client, a whole one takes part.
    selected = max(1, math.ceil(clients * fraction - 1e-9)) if is_counted else 0
    if is_secure and selected < (cohort := policy.secure_aggregation.cohort):
        yield Refusal("secure_aggregation.cohort", f"a round must select at least {cohort} clients")
    if is_secure and not policy.secure_aggregation.parts:
        yield from _parts_refusals(tables)
    if tables["run"].get("benefit") is True:
        yield from _benefit_refusals(policy, is_secure, selected)
    # A table without the noise has that of the wrapper, which the node does not count on.
    yield from _noise_refusals(policy.privacy, tables["privacy"].get("noise", 0.0), is_secure, selected)


def _noise_refusals(privacy: Privacy, noise: Any, is_secure: bool, selected: int) -> Iterator[Refusal]:
    """What is refused of the noise on the uploads of a round of so many clients."""
    # The noise of a sum is divided among the clients of a round, however many there really are.
    shared = 1.0 if is_secure else max(selected, 1) ** 0.5
    if privacy.noise and not (_are_numbers(noise) and noise >= privacy.noise * shared):
        least = f"privacy.noise must be at least {privacy.noise * shared:g}"
        each = (
            ""
            if is_secure
            else f": {privacy.noise:g} for each of {selected:g} uploads, which the server receives"
        )
        yield Refusal("privacy.noise", least + each)
    if privacy.lifetime_epsilon and not (_are_numbers(noise) and noise > 0):
        yield Refusal(
            "privacy.lifetime_epsilon", "privacy must be above 0: uploads without noise have no epsilon"
        )


def _parts_refusals(tables: Tables) -> Iterator[Refusal]:
    """What is refused of settings by which a round's sum is of some of a node's rows alone.

    Other nodes may send all of theirs, the same in two rounds with the same model: then both sums differ by rows of
    this node, down to one.
    """
    for path, value, whole in (
        ("run.steps", tables["run"].get("steps", 0), 0),
        ("algorithm.rows", tables["algorithm"].get("rows", 1), 1),
    ):
        if value != whole:
            why = f"{path}={shown(value)} is of some of a node's rows in each sum; leave it out"
            yield Refusal("secure_aggregation.parts", why)


def _benefit_refusals(policy: Policy, is_secure: bool, selected: int) -> Iterator[Refusal]:
    """What is refused of the comparison of two halves of the clients."""
    if is_secure or not policy.benefit:
        why = "is not possible with secure.aggregation=true" if is_secure else "is not allowed"
        yield Refusal("benefit", f"run.benefit=true {why}; leave it out")
    least = max(policy.secure_aggregation.cohort, SMALLEST_SUM)
    if selected // 2 < least:
        yield Refusal(
            "secure_aggregation.cohort",
            f"run.benefit=true shows all members the means of halves of {selected // 2} clients, and {least} "
            f"are the least: a round must select at least {2 * least} clients",
        )


def _statistics_refusals(policy: Policy, is_secure: bool) -> Iterator[Refusal]:
    """What is refused of sums for encoders."""
    remedy, allowed = "give the means and categories in the contract", policy.statistics.allowed
    if allowed == "none" or (allowed == "sums" and not is_secure):
        how = "only in secure sums" if allowed == "sums" else "never"
        yield Refusal("statistics.allowed", f"statistics leave this node {how}; {remedy}")
    for line in ("noise", "lifetime_epsilon"):
        if getattr(policy.privacy, line):
            yield Refusal(f"privacy.{line}", f"sums for encoders have no noise; {remedy}")


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)
