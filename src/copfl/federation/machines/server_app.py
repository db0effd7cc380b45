"""The ServerApp: the server's rounds over Flower. Flower calls `main` in a process of its own, for each run."""

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from copfl.errors import CopflError, RunError
from copfl.federation.machines.flower_transport import FlowerTransport
from copfl.federation.machines.processes import end_with_parent
from copfl.federation.operations.run_log import operations
from copfl.federation.policy import own_code
from copfl.federation.policy.file import server_policy
from copfl.federation.policy.request import admitted, check_tables
from copfl.federation.protocol.app_folder import AGREEMENTS
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.log_lines import configure_logging, logger
from copfl.federation.protocol.messages import without_paths
from copfl.federation.protocol.proposal import KEY, SignedProposal
from copfl.federation.protocol.settings import settings_of
from copfl.federation.protocol.statistics import terms_of
from copfl.federation.server.agreement import AGREED
from copfl.federation.server.folder import NEW_CLIENTS, ServerFolder, started_before
from copfl.federation.server.membership import SIGNED, revoked_keys, server_proposal
from copfl.federation.server.rounds import new_server
from copfl.federation.server.secure_exchange import exchange_of
from copfl.federation.server.statistics import StatisticsServer
from copfl.files import write_bytes
from copfl.settings.flat import nested

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the rounds, or personalises the model of a finished run for new clients.

    Args:
        grid: Flower's network.
        context: Flower's: the run config, and the number of its run.
    """
    configure_logging()
    end_with_parent(os.getppid())  # Flower's own end may take minutes if the SuperLink was killed
    try:
        _main(grid, context)
    except CopflError as error:
        # Flower streams this log, and the text of the error, to whoever follows the run.
        logger.error("copfl: %s", text := without_paths(str(error), [os.getcwd()]))
        raise RunError(text) from None


def _main(grid: Grid, context: Context) -> None:
    policy, home = server_policy(), Path.cwd()  # the folder of the SuperLink
    plain = {key: value for key, value in context.run_config.items() if key != KEY}
    run_config, code = admitted(policy, plain)  # before anything that it names is loaded
    signed = server_proposal(policy, context.run_config)
    if nested(run_config).get("session", {}).get("agree"):
        return _agree(grid, context, run_config, signed)
    own_code.load(code)
    settings = settings_of(run_config, policy.bounds)
    check_tables(policy, settings.federation.tables())
    session, runs = settings.federation.session, str(home / "runs")
    run = session.run or f"run-{context.run_id}"
    resume = session.resume or started_before(runs, run, context.run_id)
    settings = dataclasses.replace(settings, federation=settings.federation.replaced(resume=resume))
    folder = ServerFolder(runs, run, resume=resume or session.join > 0)
    with folder.claimed(), operations(folder.path, run) as log:
        log(f"run {run} in runs/{run} of the server's folder")
        server = new_server(
            settings,
            FlowerTransport(grid),
            folder,
            log,
            proposal=None if signed is None else signed.proposal,
            revoked=partial(revoked_keys, home),
        )
        if session.join:
            return write_json(folder.path / NEW_CLIENTS, server.personalise_new_clients())
        if signed is not None:
            write_bytes(folder.path / SIGNED, signed.document)
        recorded = {**plain, "session.run": run, "flower-run": context.run_id}
        write_json(folder.path / "config.json", recorded)
        for _ in server.rounds():
            pass


def _agree(grid: Grid, context: Context, run_config: dict[str, Any], signed: SignedProposal | None) -> None:
    """Adds up the nodes' statistics, and writes the frozen contract into the folder of the run."""
    terms, home = terms_of(run_config), Path.cwd()
    run = terms.federation.session.run or f"run-{context.run_id}"
    folder = ServerFolder(str(home / AGREEMENTS), run, resume=False)
    with folder.claimed(), operations(folder.path, run) as log:
        if signed is not None:
            write_bytes(folder.path / SIGNED, signed.document)
        exchange = exchange_of(
            terms,
            FlowerTransport(grid),
            folder,
            log,
            proposal=None if signed is None else signed.proposal,
            revoked=partial(revoked_keys, home),
        )
        server = StatisticsServer(terms, exchange)
        write_bytes(folder.path / AGREED, server.agreed().as_json().encode())
        log("the data contract is frozen")
