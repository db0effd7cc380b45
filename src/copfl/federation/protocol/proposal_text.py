"""Proposals for people: what `copfl federate propose` and `copfl site approve` print and choose. Without torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from copfl.data.contract.contract import Contract
from copfl.errors import UsageError, raised_as
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.messages import printable
from copfl.federation.protocol.proposal import Proposal, SignedProposal, members_fingerprint, read
from copfl.settings.federation import SampleDescription
from copfl.settings.flat import nested
from copfl.tables import listed

SHOWN = 8  # outputs, or cuts
OUTPUTS = {
    "classification": "classes",
    "multilabel": "labels",
    "regression": "values",
    "survival": "risk",
    "next_token": "tokens",
}


def described(proposal: Proposal) -> list[str]:
    """The document in lines."""
    lines = [
        f"proposal     {proposal.digest}",
        f"issued       {proposal.issued}",
        f"coordinator  {fingerprint(proposal.coordinator)}",
        *(f"client {m.number:<5} {fingerprint(m.key)}  {m.name}" for m in proposal.members),
        *(f"revoked      {fingerprint(key)}" for key in proposal.revoked),
        f"all members  {members_fingerprint(proposal.members)}",
        f"outputs      {outputs_of(proposal.settings)}",
    ]
    if text := proposal.settings.get("samples.contract"):
        contract = Contract.read(str(text))
        names = ", ".join(column.name for column in contract.open)
        state = f"open, to be agreed: {printable(names)}" if names else "frozen"
        lines.append(f"contract     {contract.digest}, {state}; compare your data: copfl site check")
    return lines + [
        f"setting      {key} = {printable(value, 200)}" for key, value in proposal.settings.items()
    ]


def outputs_of(settings: Mapping[str, Any]) -> str:
    """What a model predicts of a row, such as "3 classes: a, b, c": each has a vector of its own in every sum.

    Args:
        settings: Of a run, as somebody proposes them.
    """
    tables = nested(settings)
    samples, cuts = tables.get("samples", {}), tables.get("task", {}).get("cuts", ())
    if cuts:
        entries = cuts if isinstance(cuts, list | tuple) else [cuts]
        return f"{len(entries):,} intervals, until {printable(listed([*map(str, entries)], SHOWN), 200)}"
    classes = samples.get("classes", SampleDescription.classes)
    names = [printable(name, 40) for name in classes] if isinstance(classes, list | tuple) else []
    number = f"{len(names):,}" if names else printable(classes, 20)
    what = OUTPUTS.get(str(samples.get("kind", SampleDescription.kind)), "numbers")
    return f"{number} {what}{f': {listed(names, SHOWN)}' if names else ''}"


def chosen(waiting: Sequence[SignedProposal], named: str | None) -> SignedProposal:
    """The proposal in a file, or the one that waits and has this name; UsageError if it is not one alone.

    Args:
        waiting: The proposals that wait for the owner.
        named: A file, or the first digits of a proposal; None: the only one that waits.
    """
    if named is not None and Path(named).is_file():
        with raised_as(UsageError, f"{named}: {{}}", OSError, UsageError):
            return read(Path(named).read_bytes())
    fitting = [signed for signed in waiting if signed.proposal.digest.startswith(named or "")]
    if not waiting:
        raise UsageError("no proposal waits for its owner; one that was sent as a file is named by its FILE")
    if len(fitting) != 1:
        names = ", ".join(signed.proposal.digest[:16] for signed in waiting)
        raise UsageError(f"{len(fitting)} proposals fit; there wait: {names}; name a file, or one of these")
    return fitting[0]
