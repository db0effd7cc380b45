"""`copfl federate up` with every node in this process: whole messages, policies, proposals and logs, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from copfl.data.contract.contract import Contract
from copfl.federation.machines.app import RUN_FILE
from copfl.federation.machines.local import partition_nodes, site_nodes
from copfl.federation.node import acceptance
from copfl.federation.operations import joining
from copfl.federation.protocol.app_folder import AGREEMENTS, read_app
from copfl.federation.protocol.proposal import KEY, SignedProposal
from copfl.federation.protocol.settings import settings_of
from copfl.federation.protocol.statistics import terms_of
from copfl.federation.server import invitations, membership
from copfl.federation.server.agreement import AGREE, freeze
from copfl.federation.server.choosing import CHOOSE, TAKEN, candidates_in, chosen_by
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from copfl.federation.server.secure_exchange import exchange_of
from copfl.federation.server.statistics import StatisticsServer
from copfl.settings import toml
from copfl.settings.complete import complete
from copfl.settings.flat import flattened, nested
from tests.federation.signing import MessageTransport, knowing, proposed

RUN = "first"


Signing = Callable[[dict[str, Any]], SignedProposal]


def up(
    folder: Path, *, sites: Sequence[Path] = (), config: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The record of each round of the app in the folder; the arguments are those of `machines.local.up`."""
    run = toml.read_file(folder / RUN_FILE)
    node_configs = site_nodes(folder, sites) if sites else partition_nodes(folder, complete(run))
    nodes = [knowing(node_config) for node_config in node_configs]
    given = {**(config or {}), "network.min_replies": len(nodes)}
    yield from _rounds(folder, nodes, lambda more: proposed(_settings(folder) | given | more, nodes))


def up_by_invitations(folder: Path, sites: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The same on machines: each site joins with its file beside the app's folder, and the coordinator admits it.

    Args:
        folder: Of the app.
        sites: The file of each.
    """
    joined = [_joined(folder, f"site-{n}", file) for n, file in enumerate(sites)]
    key, roster = membership.coordinator_key(folder), membership.read_roster(folder)
    nodes = [site.node_options | {"worker": False} for site in joined]
    members = membership.propose(folder, {"session.run": "compared"}, key, roster)
    for site in joined:  # their owners have telephoned
        acceptance.approve(site.folder, members)
    yield from _rounds(folder, nodes, lambda more: membership.propose(folder, more, key, roster))


def _joined(app: Path, name: str, file: Path) -> joining.JoinedSite:
    invitations.invite(app, name, membership.coordinator_key(app))
    signed = joining.open_invitation(invitations.file_of(app, name).read_bytes(), name)
    policy = joining.policy_of(signed.invitation)
    assert not joining.refused(signed.invitation, policy)
    site = joining.make(app.parent / name, signed, {"data": str(file)}, policy)
    answered, document = joining.answer(site, joining.checked(signed.invitation, str(file)))
    invitations.receive(app, document)
    invitations.admit_answer(app, name, answered.words)
    return site


def _rounds(folder: Path, nodes: list[dict[str, Any]], signing: Signing) -> Iterator[dict[str, Any]]:
    """Trains, after the nodes have agreed on what the contract leaves open."""
    contract = _settings(folder).get("samples.contract")
    if contract and not Contract.read(contract).is_frozen:
        freeze(folder, _agreed(folder, signing({AGREE: True, "session.run": f"{RUN}-agree"}), nodes))
    taken: dict[str, Any] = {}
    if candidates_in(folder, {}):
        choice = {CHOOSE: True, "session.run": f"{RUN}-choice"}
        list(_played(folder, nodes, signing(choice)))
        taken = {TAKEN: chosen_by(folder, f"{RUN}-choice", choice).required()}
    yield from _played(folder, nodes, signing({"session.run": RUN, **taken}))


def _played(folder: Path, nodes: list[dict[str, Any]], signed: SignedProposal) -> Iterator[dict[str, Any]]:
    """The rounds of a proposal."""
    settings = dict(signed.proposal.settings)
    yield from new_server(
        settings_of(settings),
        MessageTransport({**settings, KEY: signed.text}, nodes),
        ServerFolder(str(folder / "runs"), signed.proposal.run, resume=False),
        pause=0,
        retry=0,
        proposal=signed.proposal,
    ).rounds()


def _agreed(folder: Path, signed: SignedProposal, nodes: list[dict[str, Any]]) -> Contract:
    """The contract with the encoders that the nodes agree on."""
    settings = dict(signed.proposal.settings)
    terms = terms_of(settings)
    runs = ServerFolder(str(folder / AGREEMENTS), settings["session.run"], resume=False)
    runs.path.mkdir(parents=True)
    transport = MessageTransport({**settings, KEY: signed.text}, nodes)
    exchange = exchange_of(terms, transport, runs, pause=0, retry=0, proposal=signed.proposal)
    return StatisticsServer(terms, exchange).agreed()


def _settings(folder: Path) -> dict[str, Any]:
    return flattened(nested(read_app(folder)["config"]))
