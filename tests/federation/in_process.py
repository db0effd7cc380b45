"""`copfl federate up` with every node in this process: whole messages, policies, proposals and logs, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from copfl.data.contract.contract import Contract
from copfl.federation.machines.app import RUN_FILE
from copfl.federation.machines.local import partition_nodes, site_nodes
from copfl.federation.protocol.app_folder import AGREEMENTS, read_app
from copfl.federation.protocol.proposal import KEY
from copfl.federation.protocol.settings import settings_of
from copfl.federation.protocol.statistics import terms_of
from copfl.federation.server.agreement import AGREE, freeze
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from copfl.federation.server.secure_exchange import exchange_of
from copfl.federation.server.statistics import StatisticsServer
from copfl.settings import toml
from copfl.settings.complete import complete
from copfl.settings.flat import flattened, nested
from tests.federation.signing import MessageTransport, knowing, proposed

RUN = "first"


def up(
    folder: Path, *, sites: Sequence[Path] = (), config: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The record of each round of the app in the folder; the arguments are those of `machines.local.up`."""
    run = toml.read_file(folder / RUN_FILE)
    node_configs = site_nodes(folder, sites) if sites else partition_nodes(folder, complete(run))
    nodes = [knowing(node_config) for node_config in node_configs]
    given = {**(config or {}), "network.min_replies": len(nodes)}
    contract = _settings(folder).get("samples.contract")
    if contract and not Contract.read(contract).is_frozen:
        freeze(folder, _agreed(folder, _settings(folder) | given, nodes))
    settings = _settings(folder) | given | {"session.run": RUN}
    signed = proposed(settings, nodes)
    yield from new_server(
        settings_of(settings),
        MessageTransport({**settings, KEY: signed.text}, nodes),
        ServerFolder(str(folder / "runs"), RUN, resume=False),
        pause=0,
        retry=0,
        proposal=signed.proposal,
    ).rounds()


def _agreed(folder: Path, settings: dict[str, Any], nodes: list[dict[str, Any]]) -> Contract:
    """The contract with the encoders that the nodes agree on."""
    settings = {**settings, AGREE: True, "session.run": f"{RUN}-agree"}
    signed, terms = proposed(settings, nodes), terms_of(settings)
    runs = ServerFolder(str(folder / AGREEMENTS), settings["session.run"], resume=False)
    runs.path.mkdir(parents=True)
    transport = MessageTransport({**settings, KEY: signed.text}, nodes)
    exchange = exchange_of(terms, transport, runs, pause=0, retry=0, proposal=signed.proposal)
    return StatisticsServer(terms, exchange).agreed()


def _settings(folder: Path) -> dict[str, Any]:
    return flattened(nested(read_app(folder)["config"]))
