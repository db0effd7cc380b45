"""What the door of a node passes to the process that answers (`worker`), and gets back. Without torch."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from copfl.federation.node.node import Node
from copfl.federation.policy.file import policy_from, policy_table
from copfl.federation.policy.record import AllowedCode
from copfl.federation.protocol.messages import Content
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.proposal import from_fields


class Accepted(NamedTuple):
    """What a node trains on."""

    node: Node
    run_config: dict[str, Any]  # with the owner's paths in place of names
    code: tuple[AllowedCode, ...]  # of the owner, which the run config names

    def to_json(self) -> bytes:
        """All of it as text, for the node's worker."""
        config, policy, proposal = self.node
        return json.dumps(
            {
                "options": config.options,
                "policy": policy_table(policy),
                "proposal": None if proposal is None else json.loads(proposal.content),
                "run_config": self.run_config,
                "code": [[str(value) for value in entry] for entry in self.code],
            }
        ).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "Accepted":
        """What `to_json` wrote: the door has checked it."""
        fields = json.loads(content)
        proposal = None if fields["proposal"] is None else from_fields(fields["proposal"])
        return cls(
            Node(NodeConfig.parse(fields["options"]), policy_from(fields["policy"]), proposal),
            fields["run_config"],
            tuple(
                AllowedCode(reference, Path(folder), sha256) for reference, folder, sha256 in fields["code"]
            ),
        )


class NodeAnswer(NamedTuple):
    """What the node sends, and what its audit log says of it."""

    content: Content
    epsilon: float | None = None  # of a noised upload
