"""docs/architecture.md lists the functions that have a message at a node; here one is followed through a round."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import copfl
from copfl.federation.machines.app import init
from tests.federation.in_process import up

SOURCE = Path(copfl.__file__).parent / "federation"
PAGE = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## The way of a message at a node")[2].partition("\n## ")[0]
PLACES = re.findall(r"^\d+\. `([\w.]+)`", SECTION, re.MULTILINE)
ELSEWHERE = {"machines.flower_transport.as_message", "node.worker.call"}  # Flower's, and another process


def test_the_page_lists_the_functions_in_the_order_in_which_they_begin(tmp_path: Path) -> None:
    messages: list[dict[str, None]] = []  # of each message the functions that began, in this order

    def follow(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
            name = f"{module}.{frame.f_code.co_qualname}"
            if name == "node.respond.respond":  # the door
                messages.append({})
            if messages:
                messages[-1].setdefault(name)

    app = init(tmp_path / "app", {"algorithm": {"name": "fedavg"}, "run": {"rounds": 1, "clients": 2}})
    rounds = up(app)
    sys.setprofile(follow)
    try:
        assert len(list(rounds)) == 1
    finally:
        sys.setprofile(None)
    assert len(PLACES) == 17
    begun = next(names for names in messages if "node.update.train" in names)  # before it nodes are greeted
    assert [name for name in begun if name in PLACES] == [name for name in PLACES if name not in ELSEWHERE]
