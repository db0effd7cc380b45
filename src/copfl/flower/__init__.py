"""Federations of real machines with Flower: `pip install "copfl[flower]"`.

    init(folder)      write a Flower app           up(folder)      run it on this machine
    resume(folder)    continue after a crash       join(folder)    personalise the model for a new client

`settings` checks the run config, `server` runs the rounds over a `transport`, and `node` answers for a
client, in the resident process of `worker`; `node_data` reads its data, `node_bundle` writes its model.
`supernode` is the process that stays connected to the server. `secure_sum` is the protocol of secure
aggregation, `secure_graph` its smallest numbers of neighbours, `secure_total` what it adds up,
`secure_phases` and `secure_exchange` its messages, `secure_node` what a client adds, `secure_members` their
signatures, and `secure_memory` what a node was added up with. `statistics_node` and `statistics_server` add
up what the encoders of tables need, and `agreement` has the data contract of an app. `keys` are those of
members and of the coordinator, `membership` the coordinator's list of members, `proposal` the document that
it signs, `acceptance` what a node accepts, and `audit_log` what left it. `private_node` is the noise of a
node, `ledger` the epsilon that its data have spent, and `known_data` which data are the same. For operators:
`events` has the audit log, log lines and metrics, `history` folds a run's events, `status` and `watched` read
them, `federation_page` is the coordinator's page, `deployed` runs the server, `backup` has archives. Only
`transport`, `client_app`, `server_app`, `supernode` and `deployed` import Flower; `secure_sum` has its
cryptography.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from copfl.flower.app import init
    from copfl.flower.local import join, resume, up

__all__ = ["init", "join", "resume", "up"]


def __getattr__(name: str) -> Any:
    # Imported on use: a node starts a process per message, and the answer to a greeting needs no torch.
    if name in __all__:
        return getattr(importlib.import_module(f"copfl.flower.{'app' if name == 'init' else 'local'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
