"""What a node's owner set, and where the node keeps its state. Without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.errors import UsageError
from copfl.federation.protocol.messages import read_json

NodeConfig = Mapping[str, Any]  # what a node's owner set, by key


WORKER = ".worker"  # the worker's folder in the state-dir; the name of a run begins with no dot


def known_client(node_config: Mapping[str, Any], run: str) -> int:
    """The client's number, configured or assigned by the server in this run; -1 if neither."""
    configured = node_config.get("client", -1)
    if type(configured) is not int:
        raise UsageError(f"client={configured!r} must be a whole number, such as client=3")
    if configured >= 0:
        return configured
    assigned = read_json(state_dir(node_config) / run / "client.json").get("client")
    return assigned if type(assigned) is int else -1


def state_dir(node_config: Mapping[str, Any]) -> Path:
    """The folder that the node's configuration names for its state."""
    path = node_config.get("state-dir")
    if not isinstance(path, str) or not path:
        raise UsageError("""the node has no folder for its state; set --node-config 'state-dir="..." ...'""")
    return Path(path).expanduser()


def key_path(node_config: Mapping[str, Any]) -> Path:
    """The file of the node's own key: as configured, or one in its state-dir."""
    path = node_config.get("key")
    if path is not None and (not isinstance(path, str) or not path):
        raise UsageError("key must be the path of the node's private key")
    return Path(path).expanduser() if path else state_dir(node_config) / ".secure" / "member.key"
