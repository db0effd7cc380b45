"""Which proposals a node accepts: by its policy, which names coordinators, or by hand. Without torch.

What a node was asked for and has not accepted waits in `state-dir/.proposals`. There is also what the owner
approved, and the keys that each coordinator revoked: its proposals from before the revocation are refused.
What one coordinator revokes says nothing of another's members: a node may take part in two federations.
Members are people who were compared: a coordinator's members are remembered, and a further one
needs the owner.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.errors import UsageError, raised_as
from copfl.federation.node.node import Accepted, Node
from copfl.federation.policy.file import policy_of
from copfl.federation.policy.record import Policy
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.policy.request import admitted
from copfl.federation.protocol import invitation as invitations
from copfl.federation.protocol.app_folder import INVITATION
from copfl.federation.protocol.files import stored, write_json
from copfl.federation.protocol.invitation import SignedInvitation
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.proposal import (
    KEY,
    Member,
    Proposal,
    SignedProposal,
    differences,
    from_text,
    read,
)
from copfl.files import write_bytes

FOLDER, REVOKED = ".proposals", "revoked.json"
MEMBERS = "members.json"  # the members of each coordinator's proposals that were accepted: their first keys
LISTS = "lists.json"  # the lists of members in them: of each the first keys, with spaces between
APPROVED, PENDING = "approved-{}.json", "pending-{}.json"
MOST_CHANGES = 3  # that a refusal names
MOST_PENDING = (
    20  # proposals that wait, of known coordinators and of others; the oldest of each are forgotten
)


def accept(config: NodeConfig, run_config: Mapping[str, Any]) -> Accepted:
    """The node in the run that it is asked for; CopflError if the run config asks for what it did not accept.

    Args:
        config: What the node's owner set.
        run_config: The settings in the server's message.
    """
    policy = policy_of(config.policy, config.state_dir)
    plain = {key: value for key, value in run_config.items() if key != KEY}
    allowed = admitted(
        policy, plain
    )  # first, so that a policy refuses before anything else of the message is read
    text = run_config.get(KEY) or ""
    if not text and policy.proposals.unsigned:
        return Accepted(Node(config, policy), *allowed)
    if not text:
        why = "no coordinator signed it; start the run with `copfl federate run`"
        raise PolicyError((Refusal("proposals.unsigned", why),))
    signed = from_text(text)
    if differ := differences(signed.proposal, plain):
        more = f"; and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise UsageError(
            f"the run config is not that of the proposal {signed.proposal.digest[:16]}: "
            f"{'; '.join(differ[:5])}{more}; a change is a new proposal"
        )
    _require_consent(policy, config, signed)
    # What the coordinator signed is what the node trains on, not what the server sent beside it.
    admitted_settings = admitted(policy, signed.proposal.settings)
    node = Node(config, policy, signed.proposal)
    member = signed.proposal.by_key(node.key.public)
    if config.client != -1 and (member is None or member.number != config.client):
        is_what = "is no member" if member is None else f"is client {member.number}"
        raise UsageError(f"this node is configured as client {config.client}, and {is_what} in the proposal")
    # A node that is no member has no number: it can be a new client alone.
    return Accepted(node.numbered(-1 if member is None else member.number), *admitted_settings)


def _require_consent(policy: Policy, config: NodeConfig, signed: SignedProposal) -> None:
    """PolicyError unless the owner's policy or the owner accepts the proposal; its revoked keys are kept."""
    folder, proposal = config.state_dir / FOLDER, signed.proposal
    # Before what the owner approved: an approval may be older than the revocation of a key.
    revoked = _keys_by_coordinator(folder / REVOKED)
    revoked_keys = revoked.get(proposal.coordinator, [])
    if revoked_members := [member.name for member in proposal.members if member.key in revoked_keys]:
        raise UsageError(f"the proposal has {revoked_members[0]} as a member, whose key was revoked")
    is_approved = (folder / APPROVED.format(proposal.digest)).exists()
    if not is_approved and (refused := _needs_approval(policy, config, proposal)):
        _keep_pending(folder, signed, coordinators(policy, config))
        name = f"{proposal.digest[:16]} (copfl site approve shows it)"
        why = f"{refused.why}its owner has not approved the proposal {name}"
        raise PolicyError((Refusal(refused.line, why),))
    _remember_members(folder, proposal)
    if not set(revoked_keys).issuperset(proposal.revoked):
        revoked[proposal.coordinator] = sorted({*revoked_keys, *proposal.revoked})
        write_json(folder / REVOKED, revoked)


def _needs_approval(policy: Policy, config: NodeConfig, proposal: Proposal) -> Refusal | None:
    """Why the policy alone does not accept the proposal, as the beginning of a sentence; None: it does."""
    name, rule = fingerprint(proposal.coordinator), policy.proposals.members
    if name not in coordinators(policy, config):
        return Refusal(
            "proposals.coordinators", f"its coordinator {name} is not one that this node knows, and "
        )
    signed = invitation_of(config.state_dir)
    if signed is not None and (changed := invitations.changes(signed.invitation, proposal)):
        first_changes = "; ".join(changed[:MOST_CHANGES])
        return Refusal("proposals.by_hand", f"it is not what its owner consented to ({first_changes}), and ")
    if policy.proposals.by_hand:
        return Refusal("proposals.by_hand", "")
    own = Node(config, policy).key.public
    if new_members := [member for member in strangers(config.state_dir, proposal) if member.key != own]:
        is_first = proposal.coordinator not in _keys_by_coordinator(config.state_dir / FOLDER / MEMBERS)
        if rule == "approved" or (rule == "first" and not is_first):
            who = ", ".join(f"{member.name} {fingerprint(member.key)}" for member in new_members[:3])
            more = f" and {len(new_members) - 3} more" if len(new_members) > 3 else ""
            return Refusal(
                "proposals.members", f"it has members that this node does not know, {who}{more}, and "
            )
    if rule == "approved" and not _is_whole(config.state_dir, proposal):
        why = "it lacks members of every list that its owner approved, so that a sum is of fewer, and "
        return Refusal("proposals.members", why)
    return None


def strangers(state: Path, proposal: Proposal) -> list[Member]:
    """The members of a proposal that its coordinator's accepted ones did not have.

    One that has rotated its key is the same member.

    Args:
        state: The node's state-dir.
        proposal: What a coordinator proposes.
    """
    identities = _keys_by_coordinator(state / FOLDER / MEMBERS).get(proposal.coordinator, [])
    return [member for member in proposal.members if member.identity not in identities]


def _is_whole(state: Path, proposal: Proposal) -> bool:
    """Whether a proposal has all members of a list that was accepted; true before the first one.

    A coordinator that works with a few of many members could else propose a run of these few and one other.
    """
    lists = _keys_by_coordinator(state / FOLDER / LISTS).get(proposal.coordinator, [])
    members = {member.identity for member in proposal.members}
    return not lists or any(members.issuperset(accepted.split()) for accepted in lists)


def _remember_members(folder: Path, proposal: Proposal) -> None:
    """Writes down the members of an accepted proposal."""
    now = {member.identity for member in proposal.members}
    identities, lists = (_keys_by_coordinator(folder / name) for name in (MEMBERS, LISTS))
    before, accepted = (of.get(proposal.coordinator, []) for of in (identities, lists))
    if not now.issubset(before):
        write_json(folder / MEMBERS, identities | {proposal.coordinator: sorted(now.union(before))})
    if not any(now.issuperset(other.split()) for other in accepted):
        write_json(folder / LISTS, lists | {proposal.coordinator: [*accepted, " ".join(sorted(now))]})


def invitation_of(state: Path) -> SignedInvitation | None:
    """The invitation to which the owner of a node consented; None for a node that was started without one."""
    path = state / INVITATION
    if not path.exists():
        return None
    with raised_as(UsageError, f"{path}: {{}}; restore the folder, or join again", OSError, UsageError):
        return invitations.read(path.read_bytes())


def coordinators(policy: Policy, config: NodeConfig) -> frozenset[str]:
    """The fingerprints of the coordinators whose proposals this node accepts.

    Args:
        policy: The policy of the node's owner.
        config: What the owner set beside it.
    """
    configured = {config.coordinator} if config.coordinator else frozenset[str]()
    return frozenset(policy.proposals.coordinators) | configured


# -- what the owner did, and what waits ----------------------------------------------------------------------


def approve(state: Path, signed: SignedProposal) -> None:
    """Writes down that the owner of the node accepts the proposal.

    Args:
        state: The node's state-dir.
        signed: What the owner has read.
    """
    folder, digest = state / FOLDER, signed.proposal.digest
    _remember_members(folder, signed.proposal)
    write_bytes(folder / APPROVED.format(digest), signed.document, private=True)
    (folder / PENDING.format(digest)).unlink(missing_ok=True)


def pending(state: Path) -> list[SignedProposal]:
    """The proposals that wait for the owner, the newest last."""
    paths = sorted((state / FOLDER).glob(PENDING.format("*")), key=lambda path: path.stat().st_mtime)
    return [read(path.read_bytes()) for path in paths]


def _keep_pending(folder: Path, signed: SignedProposal, known: frozenset[str]) -> None:
    """Writes down a proposal that waits, in the place of the oldest one of its kind if there are too many.

    Whoever has a connection can sign proposals with keys of its own, and these must not take the place of one by a
    coordinator that the node knows.
    """
    path = folder / PENDING.format(signed.proposal.digest)
    if not path.exists():
        write_bytes(path, signed.document, private=True)
        logging.getLogger("flwr").warning(
            "copfl: a proposal waits for you: copfl site approve %s", folder.parent
        )
    waiting = sorted(folder.glob(PENDING.format("*")), key=lambda other: other.stat().st_mtime)
    if len(waiting) <= MOST_PENDING:
        return
    of_known = {
        other for other in waiting if fingerprint(read(other.read_bytes()).proposal.coordinator) in known
    }
    for kind in (of_known, {*waiting} - of_known):
        for oldest in [other for other in waiting if other in kind][:-MOST_PENDING]:
            oldest.unlink(missing_ok=True)


def _keys_by_coordinator(path: Path) -> dict[str, list[str]]:
    """The content of REVOKED, MEMBERS or LISTS: public keys by that of the coordinator who revoked or listed them."""
    return stored(
        path,
        lambda content: {str(coordinator): list(map(str, keys)) for coordinator, keys in content.items()},
        {},
        f"{FOLDER}/{path.name} cannot be used: {{}}; restore the node's state-dir",
    )
