"""A node's answer to the server's greeting: which client it is, signed with its key. Without torch."""

import json
from collections.abc import Mapping
from typing import Any

from copfl.errors import WireError
from copfl.federation.protocol.keys import own_key, statement
from copfl.federation.protocol.messages import (
    Content,
    Field,
    parsed,
)
from copfl.federation.protocol.node_config import key_path, known_client
from copfl.federation.protocol.proposal import Proposal
from copfl.settings.federation import is_plain_name

CHALLENGE = "challenge"  # in a greeting: what the node signs


def hello_statement(proposal: Proposal, challenge: str, client: int) -> bytes:
    """What a node signs when it is greeted: that it is this client of the proposal."""
    return statement("hello", proposal.digest, challenge, client)


def greeting(node_config: Mapping[str, Any], content: Content, proposal: Proposal | None = None) -> Content:
    """A node's answer to the server's greeting: the number of its client, signed with its key.

    Args:
        node_config: the node's configuration.
        content: the server's greeting.
        proposal: the accepted one; None if the policy allows run configs that nobody signed.
    """
    run, challenge = (parsed(content[0]).get(name) for name in ("run", CHALLENGE))
    if not isinstance(run, str) or not is_plain_name(run):  # the name of a folder on this node
        raise WireError("the server's greeting names no run")
    client = known_client(node_config, run)
    if proposal is None:
        return json.dumps({"client": client}), b""
    if run != proposal.run or not isinstance(challenge, str):
        raise WireError(f"the server's greeting is not of run {proposal.run}, or asks for no signature")
    key = own_key(key_path(node_config))
    signature = key.sign(hello_statement(proposal, challenge, client))
    return json.dumps({"client": client, Field.MEMBER: key.public, Field.SIGNATURE: signature}), b""
