"""Which proposals a node accepts: by its policy, which names coordinators, or by hand. Without torch.

What a node was asked for and has not accepted waits in `state-dir/.proposals`. There is also what the owner
approved, and the keys that each coordinator revoked: its proposals from before the revocation are refused.
What one coordinator revokes says nothing of another's members: a node may take part in two federations.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.errors import UsageError
from copfl.federation.node.consent import unexpected
from copfl.federation.node.node import Node
from copfl.federation.node.request import Accepted
from copfl.federation.policy.admission import admitted
from copfl.federation.policy.file import policy_of
from copfl.federation.policy.record import Policy
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol.files import stored, write_json
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.proposal import KEY, Proposal, Signed, differences, from_text, read
from copfl.files import write_bytes

FOLDER, REVOKED = ".proposals", "revoked.json"
APPROVED, PENDING = "approved-{}.json", "pending-{}.json"
MOST_CHANGES = 3  # that a refusal names
MOST_PENDING = 20  # proposals that wait; the oldest are forgotten


def accept(config: NodeConfig, run_config: Mapping[str, Any]) -> Accepted:
    """The node in the run that it is asked for; CopflError if the run config asks for what it did not accept.

    Args:
        config: What the node's owner set.
        run_config: The settings in the server's message.
    """
    policy = policy_of(config.policy, config.state_dir)
    plain = {key: value for key, value in run_config.items() if key != KEY}
    allowed = admitted(policy, plain)
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
    admitted_settings = admitted(policy, signed.proposal.settings)
    return Accepted(_as_member(config, policy, signed.proposal), *admitted_settings)


def _require_consent(policy: Policy, config: NodeConfig, signed: Signed) -> None:
    """PolicyError unless the owner's policy or the owner accepts the proposal; its revoked keys are kept."""
    folder, proposal = config.state_dir / FOLDER, signed.proposal
    damaged = f"{FOLDER}/{REVOKED} cannot be used: {{}}; restore the node's state-dir"
    revoked = stored(folder / REVOKED, _revoked_keys, {}, damaged)
    known = revoked.get(proposal.coordinator, [])
    if gone := [member.name for member in proposal.members if member.key in known]:
        raise UsageError(f"the proposal has {gone[0]} as a member, whose key was revoked")
    if not (folder / APPROVED.format(proposal.digest)).exists():
        name = fingerprint(proposal.coordinator)
        is_known = name in coordinators(policy, config)
        changed = unexpected(config.state_dir, proposal)
        if not is_known or policy.proposals.by_hand or changed:
            _keep_pending(folder, signed)
            why = f"its owner has not approved the proposal {proposal.digest[:16]}"
            if changed:
                shown = "; ".join(changed[:MOST_CHANGES])
                why = f"it is not what its owner consented to ({shown}), and {why}"
            if not is_known:
                why = f"its coordinator {name} is not one that this node knows, and {why}"
            line = "proposals.by_hand" if is_known else "proposals.coordinators"
            raise PolicyError((Refusal(line, why),))
    if not set(known).issuperset(proposal.revoked):
        revoked[proposal.coordinator] = sorted({*known, *proposal.revoked})
        write_json(folder / REVOKED, revoked)


def coordinators(policy: Policy, config: NodeConfig) -> frozenset[str]:
    """The fingerprints of the coordinators whose proposals this node accepts."""
    configured = {config.coordinator} if config.coordinator else frozenset[str]()
    return frozenset(policy.proposals.coordinators) | configured


def _as_member(config: NodeConfig, policy: Policy, proposal: Proposal) -> Node:
    """The node with the number that the proposal gives to its key.

    A node that is no member has no number: it can be a new client alone.
    """
    node, configured = Node(config, policy, proposal), config.client
    member = proposal.by_key(node.key.public)
    if configured != -1 and (member is None or member.number != configured):
        shown = "is no member" if member is None else f"is client {member.number}"
        raise UsageError(f"this node is configured as client {configured}, and {shown} in the proposal")
    return node.numbered(-1 if member is None else member.number)


# -- what the owner did, and what waits ----------------------------------------------------------------------


def approve(state: Path, signed: Signed) -> None:
    """Writes down that the owner of the node accepts the proposal."""
    folder, digest = state / FOLDER, signed.proposal.digest
    write_bytes(folder / APPROVED.format(digest), signed.document, private=True)
    (folder / PENDING.format(digest)).unlink(missing_ok=True)


def pending(state: Path) -> list[Signed]:
    """The proposals that wait for the owner, the newest last."""
    paths = sorted((state / FOLDER).glob(PENDING.format("*")), key=lambda path: path.stat().st_mtime)
    return [read(path.read_bytes()) for path in paths]


def _keep_pending(folder: Path, signed: Signed) -> None:
    path = folder / PENDING.format(signed.proposal.digest)
    if not path.exists():
        write_bytes(path, signed.document, private=True)
    waiting = sorted(folder.glob(PENDING.format("*")), key=lambda other: other.stat().st_mtime)
    for oldest in waiting[:-MOST_PENDING]:
        oldest.unlink(missing_ok=True)


def _revoked_keys(content: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The keys that are revoked, by the key of the coordinator who did it."""
    return {str(coordinator): [str(key) for key in keys] for coordinator, keys in content.items()}
