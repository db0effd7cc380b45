"""Federations of real machines with Flower: `pip install "copfl[flower]"`.

    init(folder)      write a Flower app           up(folder)      run it on this machine
    resume(folder)    continue after a crash       join(folder)    personalise the model for a new client

Six rooms, from the ground up. A room imports only rooms below it.

    policy       what a node's owner lets others ask
    protocol     what both sides must agree on: messages, keys, proposals, secure sums, noise, the chained log
    node         one client: a message in, an answer out
    server       rounds, exchanges, agreement on the data contract, members, certificates
    operations   what a person looks at and keeps: status, the coordinator's page, backup, retention
    machines     Flower and processes; the only room that imports `flwr`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from copfl.federation.machines.app import init
    from copfl.federation.machines.local import join, resume, up

__all__ = ["init", "join", "resume", "up"]


def __getattr__(name: str) -> Any:
    # Imported on use: a node starts a process per message, and the answer to a greeting needs no torch.
    if name in __all__:
        module = "app" if name == "init" else "local"
        return getattr(importlib.import_module(f"copfl.federation.machines.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
