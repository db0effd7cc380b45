"""`copfl federate up` with every node in this process: whole messages, policies, proposals and logs, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from copfl.data.contract import Contract
from copfl.flower.agreement import AGREE, RUNS, freeze
from copfl.flower.app import RUN_FILE
from copfl.flower.local import partition_nodes, site_nodes
from copfl.flower.proposal import KEY
from copfl.flower.secure_server import server_class
from copfl.flower.settings import settings_of
from copfl.flower.state import ServerFolder
from copfl.flower.statistics_server import statistics_server_class
from copfl.flower.statistics_terms import terms_of
from copfl.flower.status import read_app
from copfl.settings import toml
from copfl.settings.complete import complete
from copfl.settings.flat import flattened, nested
from tests.flower.network import DirectTransport
from tests.flower.signing import MessageTransport, knowing, proposed

RUN = "first"


class QuestionTransport(MessageTransport):
    """The same before the encoders are agreed on, when there are no settings of a training yet."""

    def __init__(self, run_config: dict[str, Any], nodes: dict[int, dict[str, Any]]) -> None:
        DirectTransport.__init__(self, None, nodes)  # type: ignore[arg-type]
        self.run_config = run_config


def up(
    folder: Path, *, sites: Sequence[Path] = (), config: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The record of each round of the app in the folder; the arguments are those of `copfl.flower.local.up`."""
    if sites:
        nodes = site_nodes(folder, sites)
    else:
        nodes = partition_nodes(folder, complete(toml.read_file(folder / RUN_FILE)))
    nodes = [knowing(node) for node in nodes]
    online, given = dict(enumerate(nodes, 100)), {**(config or {}), "network.min_replies": len(nodes)}

    settings = _settings(folder) | given
    contract = settings.get("samples.contract")
    if contract and not Contract.read(contract).is_frozen:
        settings |= {AGREE: True, "session.run": f"{RUN}-agree"}
        signed, terms = proposed(settings, nodes), terms_of(settings)
        transport = QuestionTransport({**settings, KEY: signed.text}, online)
        runs = ServerFolder(str(folder / RUNS), settings["session.run"], resume=False)
        runs.path.mkdir(parents=True)
        questioner = statistics_server_class(terms.federation.secure.aggregation)
        freeze(folder, questioner(terms, transport, runs, pause=0, retry=0, proposal=signed.proposal).agreed())
        settings = _settings(folder) | given

    settings |= {"session.run": RUN}
    signed = proposed(settings, nodes)
    trainer = server_class(bool(settings.get("secure.aggregation")))
    yield from trainer(
        settings_of(settings),
        MessageTransport({**settings, KEY: signed.text}, online),
        ServerFolder(str(folder / "runs"), RUN, resume=False),
        pause=0,
        retry=0,
        proposal=signed.proposal,
    ).rounds()


def _settings(folder: Path) -> dict[str, Any]:
    return flattened(nested(read_app(folder)["config"]))
