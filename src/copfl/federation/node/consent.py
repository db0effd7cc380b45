"""The invitation to which a site's owner consented: proposals that differ from it wait for the owner. Without torch."""

from pathlib import Path

from copfl.errors import UsageError, raised_as
from copfl.federation.protocol import invitation as invitations
from copfl.federation.protocol.invitation import SignedInvitation
from copfl.federation.protocol.proposal import Proposal

FILE = "invitation.json"  # in the state-dir


def invitation_of(state: Path) -> SignedInvitation | None:
    """The invitation to which the owner of a node consented; None for a node that was started without one."""
    path = state / FILE
    if not path.exists():
        return None
    with raised_as(UsageError, f"{path}: {{}}; restore the folder, or join again", OSError, UsageError):
        return invitations.read(path.read_bytes())


def unexpected(state: Path, proposal: Proposal) -> list[str]:
    """In which a proposal is not what the owner consented to, a sentence each; none without an invitation."""
    signed = invitation_of(state)
    return [] if signed is None else invitations.changes(signed.invitation, proposal)
