"""The ServerApp: the server's rounds over Flower."""

from __future__ import annotations

import dataclasses
import json
import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from copfl.errors import CopflError
from copfl.flower.files import write
from copfl.flower.flower_transport import FlowerTransport
from copfl.flower.folder import Folder, started_before
from copfl.flower.new_client import welcome
from copfl.flower.server import federate
from copfl.flower.settings import settings_of

log = logging.getLogger("flwr")


def main(grid: Grid, context: Context) -> None:
    """Plays the rounds, or welcomes newcomers to a run that has been played."""
    try:
        _main(grid, context)
    except CopflError as error:
        log.error("copfl: %s", error)
        raise


def _main(grid: Grid, context: Context) -> None:
    settings = settings_of(context.run_config)
    name = settings.run or f"run-{context.run_id}"
    if started_before(settings.runs, name, context.run_id):  # Flower starts it again after a crash
        settings = dataclasses.replace(settings, resume=True)
    folder = Folder(settings.runs, name, goes_on=settings.resume or settings.join > 0)
    transport = FlowerTransport(grid)
    log.info("copfl: run %s in %s", folder.run, folder.path.resolve())
    if settings.join:
        results = welcome(settings, transport, folder, log.info)
        write(folder.path / "newcomers.json", json.dumps(results).encode())
        return
    about = {**context.run_config, "run": folder.run, "flower-run": context.run_id}
    write(folder.path / "config.json", json.dumps(about).encode())
    for record in federate(settings, transport, folder, lambda text: log.info("copfl: %s", text)):
        accuracy = record["mean"].get("accuracy")
        seen = f", accuracy {accuracy:.4f}" if accuracy is not None else ""
        out = f", left out {record['left_out']}" if record["left_out"] else ""
        log.info(
            "copfl: round %s of %s: %s clients%s%s",
            record["round"],
            settings.rounds,
            len(record["clients"]),
            seen,
            out,
        )


app = ServerApp()
app.main()(main)
