"""Small files of a federation: written whole, readable by this user alone."""

import json
from pathlib import Path
from typing import Any

from copfl import wire
from copfl.files import write_bytes
from copfl.wire import Packet


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, json.dumps(content).encode(), private=True)


def write_packet(path: Path, packet: Packet) -> None:
    write_bytes(path, wire.to_bytes(packet), private=True)


def _read(path: Path) -> Packet:
    return wire.from_bytes(path.read_bytes())
