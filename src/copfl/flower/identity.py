"""Which client a node is. Without torch: this is all that a greeting needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.errors import UsageError


def known_client(node_config: Mapping[str, Any], run: str) -> int:
    """The client's number, as the node's configuration says or as the server told it in this run; -1 if neither."""
    given = node_config.get("client", -1)
    if type(given) is not int:
        raise UsageError(f"client={given!r} must be a whole number, such as client=3")
    if given >= 0:
        return given
    try:
        return int(json.loads((state_dir(node_config) / run / "client.json").read_text())["client"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def state_dir(node_config: Mapping[str, Any]) -> Path:
    """The folder that the node's configuration names for its state."""
    given = node_config.get("state-dir")
    if not isinstance(given, str) or not given:
        raise UsageError(
            """the node names no folder for its state; start it with --node-config 'state-dir="..." ...'"""
        )
    return Path(given).expanduser()
