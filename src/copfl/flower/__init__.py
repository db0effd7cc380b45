"""Federations of real machines, by Flower: `pip install "copfl[flower]"`.

    init(folder)      writes a Flower app          up(folder)      tries it on this machine
    resume(folder)    goes on after a crash        join(folder)    personalises a newcomer

What runs: `settings` (the run config, checked) -> `server` (the rounds, over any `post`) <-> `node` (a client's turn).
`flower_post`, `client_app` and `server_app` put Flower in between; nothing else here knows it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from copfl.flower.app import init
    from copfl.flower.trial import join, resume, up

__all__ = ["init", "join", "resume", "up"]

_HOMES = {"init": "app", "join": "trial", "resume": "trial", "up": "trial"}


def __getattr__(name: str) -> Any:
    # Not imported above: a node starts a process per message, and one that only says who it is needs no torch.
    if name in _HOMES:
        return getattr(importlib.import_module(f"copfl.flower.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
