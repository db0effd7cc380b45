"""docs/architecture.md lists the functions that have a message at a node; here one is followed through a round."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import copfl
from copfl.federation.machines.app import init
from tests.federation.in_process import up

SOURCE = Path(copfl.__file__).parent / "federation"
PAGE = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## The way of a message at a node")[2].partition("\n## ")[0]
PLACES = re.findall(r"^\d+\. `([\w.]+)`", SECTION, re.MULTILINE)
ELSEWHERE = {"machines.flower_transport.as_message", "node.worker.call"}  # Flower's, and another process


@cache
def name_of(code: CodeType) -> str:
    """Such as "node.respond.respond"; "" outside the federation."""
    path = Path(code.co_filename)
    if not path.is_relative_to(SOURCE):
        return ""
    return ".".join([*path.relative_to(SOURCE).with_suffix("").parts, code.co_qualname])


def test_the_page_lists_the_functions_in_the_order_in_which_they_begin(tmp_path: Path) -> None:
    messages: list[dict[str, None]] = []  # of each message the functions that began, in this order

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := name_of(frame.f_code)):
            if name == "node.respond.respond":  # the door
                messages.append({})
            if messages:
                messages[-1].setdefault(name)
            if messages and {"node.update.train", "node.respond.logged"} <= messages[-1].keys():
                sys.setprofile(None)

    app = init(
        tmp_path / "app",
        {
            "algorithm": {"name": "fedavg"},
            "model": {"name": "mlp", "width": 4},
            "run": {"rounds": 1, "clients": 2},
        },
    )
    rounds = up(app)
    sys.setprofile(follow)
    try:
        assert len(list(rounds)) == 1
    finally:
        sys.setprofile(None)
    assert len(PLACES) == 17
    begun = next(names for names in messages if "node.update.train" in names)  # before it nodes are greeted
    assert [name for name in begun if name in PLACES] == [name for name in PLACES if name not in ELSEWHERE]
