"""One machine of a federation, as its owner set it up. Without torch.

`acceptance.accept` makes the record, and everything behind the door gets it as an argument.
"""

from pathlib import Path
from typing import NamedTuple

from copfl.federation.policy.record import Policy
from copfl.federation.protocol.keys import SigningKey, own_key
from copfl.federation.protocol.messages import read_json
from copfl.federation.protocol.node_config import MEMORY, NodeConfig
from copfl.federation.protocol.proposal import Proposal

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
        return self._replace(config=self.config.numbered(client))

    def identity(self, key: str) -> str:
        """The member whose key this is: its first key. One that has rotated its key is the same member."""
        member = None if self.proposal is None else self.proposal.by_key(key)
        return key if member is None else member.identity
