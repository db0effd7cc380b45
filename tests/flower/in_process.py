"""`copfl federate up` with every node in this process: whole messages, policies, proposals and logs, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from copfl.data.contract import Contract
from copfl.flower.agreement import AGREE, freeze
from copfl.flower.app import RUN_FILE
from copfl.flower.local import partition_nodes, site_nodes
from copfl.flower.proposal import KEY
from copfl.flower.secure_server import server_class
from copfl.flower.settings import settings_of
from copfl.flower.state import ServerFolder
from copfl.flower.statistics_server import statistics_server_class
from copfl.flower.statistics_terms import terms_of
from copfl.flower.status import AGREEMENTS, read_app
from copfl.settings import toml
from copfl.settings.complete import complete
from copfl.settings.flat import flattened, nested
from tests.flower.signing import MessageTransport, knowing, proposed

RUN = "first"


def up(
    folder: Path, *, sites: Sequence[Path] = (), config: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The record of each round of the app in the folder; the arguments are those of `copfl.flower.local.up`."""
    run = toml.read_file(folder / RUN_FILE)
    node_configs = site_nodes(folder, sites) if sites else partition_nodes(folder, complete(run))
    nodes = [knowing(node_config) for node_config in node_configs]
    given = {**(config or {}), "network.min_replies": len(nodes)}
    contract = _settings(folder).get("samples.contract")
    if contract and not Contract.read(contract).is_frozen:
        freeze(folder, _agreed(folder, _settings(folder) | given, nodes))
    settings = _settings(folder) | given | {"session.run": RUN}
    signed = proposed(settings, nodes)
    yield from server_class(bool(settings.get("secure.aggregation")))(
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
    return statistics_server_class(terms.federation.secure.aggregation)(
        terms,
        MessageTransport({**settings, KEY: signed.text}, nodes),
        runs,
        pause=0,
        retry=0,
        proposal=signed.proposal,
    ).agreed()


def _settings(folder: Path) -> dict[str, Any]:
    return flattened(nested(read_app(folder)["config"]))
