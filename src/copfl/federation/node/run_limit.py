"""How many runs may begin on a node in a day: each costs it time and a folder, whatever its name."""

import json
import time
from pathlib import Path

from copfl.errors import RunError, raised_as
from copfl.federation.node.known_data import FOLDER
from copfl.federation.policy.record import Policy
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol.files import write_json

FILE = "runs.json"  # in the folder of known data: when each run of the last day began, by name
DAY = 24 * 3600.0


def admit_run(policy: Policy, state_dir: Path, run: str) -> None:
    """Writes down a run that begins on this node; PolicyError if too many did within a day."""
    path, now = state_dir / FOLDER / FILE, time.time()
    with raised_as(
        RunError, f"{FILE} cannot be used: {{}}; restore the node's state-dir", OSError, ValueError
    ):
        begun: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    if run in begun or (state_dir / run).is_dir():
        return
    today = {name: at for name, at in begun.items() if at > now - DAY}
    if len(today) >= policy.bounds.runs_per_day:
        why = f"{len(today)} runs have begun on this node within a day"
        raise PolicyError((Refusal("bounds.runs_per_day", why),), "request")
    write_json(path, today | {run: now})
