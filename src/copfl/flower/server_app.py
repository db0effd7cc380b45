"""The ServerApp: the server's rounds over Flower."""

from __future__ import annotations

import dataclasses
import json
import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from copfl.errors import CopflError
from copfl.files import write_bytes
from copfl.flower.server import Server
from copfl.flower.settings import settings_of
from copfl.flower.state import NEW_CLIENTS, ServerFolder, started_before
from copfl.flower.transport import FlowerTransport

logger = logging.getLogger("flwr")


def log(text: str) -> None:
    logger.info("copfl: %s", text)


def main(grid: Grid, context: Context) -> None:
    """Runs the rounds, or personalises the model of a finished run for new clients."""
    try:
        _main(grid, context)
    except CopflError as error:
        logger.error("copfl: %s", error)
        raise


def _main(grid: Grid, context: Context) -> None:
    settings = settings_of(context.run_config)
    config = settings.config
    run = config.run or f"run-{context.run_id}"
    resume = config.resume or started_before(config.runs, run, context.run_id)
    settings = dataclasses.replace(settings, config=dataclasses.replace(config, resume=resume))
    folder = ServerFolder(config.runs, run, resume=resume or config.join > 0)
    log(f"run {run} in {folder.path.resolve()}")
    server = Server(settings, FlowerTransport(grid), folder, log)
    if config.join:
        results = server.personalise_new_clients()
        write_bytes(folder.path / NEW_CLIENTS, json.dumps(results).encode(), private=True)
        return
    about = {**context.run_config, "run": run, "flower-run": context.run_id}
    write_bytes(folder.path / "config.json", json.dumps(about).encode(), private=True)
    for record in server.rounds():
        accuracy = record["mean"].get("accuracy")
        parts = [f"round {record['round']} of {config.rounds}: {len(record['clients'])} clients"]
        parts += [f"accuracy {accuracy:.4f}"] if accuracy is not None else []
        parts += [f"left out {record['left_out']}"] if record["left_out"] else []
        log(", ".join(parts))


app = ServerApp()
app.main()(main)
