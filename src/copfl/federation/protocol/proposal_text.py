"""Proposals for people: what `copfl federate propose` and `copfl site approve` print and choose. Without torch."""

from collections.abc import Sequence
from pathlib import Path

from copfl.data.contract.contract import Contract
from copfl.errors import UsageError, raised_as
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.messages import printable
from copfl.federation.protocol.proposal import Proposal, SignedProposal, members_fingerprint, read


def described(proposal: Proposal) -> list[str]:
    """The document in lines."""
    lines = [
        f"proposal     {proposal.digest}",
        f"issued       {proposal.issued}",
        f"coordinator  {fingerprint(proposal.coordinator)}",
        *(f"client {m.number:<5} {fingerprint(m.key)}  {m.name}" for m in proposal.members),
        *(f"revoked      {fingerprint(key)}" for key in proposal.revoked),
        f"all members  {members_fingerprint(proposal.members)}",
    ]
    if text := proposal.settings.get("samples.contract"):
        contract = Contract.read(str(text))
        names = ", ".join(column.name for column in contract.open)
        state = f"open, to be agreed: {printable(names)}" if names else "frozen"
        lines.append(f"contract     {contract.digest}, {state}; compare your data: copfl site check")
    return lines + [
        f"setting      {key} = {printable(value, 200)}" for key, value in proposal.settings.items()
    ]


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
