"""The records of a node: the machine as its owner set it up, what it accepted, and what it answers. Without torch.

`acceptance.accept` makes a `Node` and what it trains on; everything behind the door gets them as arguments, also in the
process that answers (`worker`).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from copfl.federation.policy.file import policy_from, policy_table
from copfl.federation.policy.record import AllowedCode, Policy
from copfl.federation.protocol.keys import SigningKey, own_key
from copfl.federation.protocol.messages import Content, read_json
from copfl.federation.protocol.node_config import MEMORY, NodeConfig
from copfl.federation.protocol.proposal import Proposal, from_fields

CLIENT = "client.json"  # in the folder of a run: the number that the server assigned


class Node(NamedTuple):
    """This machine in one federation; made once per message, at the door (`node.respond`), and passed on."""

    config: NodeConfig  # with the number that the proposal gives to its key
    policy: Policy
    proposal: Proposal | None = None  # None: the policy allows run configs that nobody signed

    @property
    def folder(self) -> Path:
        """All that the node keeps; a run has a folder of its name in it."""
        return self.config.state_dir

    @property
    def memory(self) -> Path:
        """What the node remembers of its data over all runs."""
        return self.folder / MEMORY

    @property
    def key(self) -> SigningKey:
        """The node's own key, made on first use."""
        return own_key(self.config.key)

    def client_in(self, run: str) -> int:
        """The client's number, configured or assigned by the server in this run; -1 if neither."""
        if self.config.client >= 0:
            return self.config.client
        assigned = read_json(self.folder / run / CLIENT).get("client")
        return assigned if type(assigned) is int else -1

    def numbered(self, client: int) -> "Node":
        """The node with the number that its client has in a run."""
        options = {**self.config.options, "client": client}
        return self._replace(config=replace(self.config, client=client, options=options))

    def identity(self, key: str) -> str:
        """The member whose key this is: its first key. One that has rotated its key is the same member."""
        member = None if self.proposal is None else self.proposal.by_key(key)
        return key if member is None else member.identity


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
