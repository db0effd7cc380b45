"""What a run is, as a short hash: two runs with the same identity differ in rounding at most.

Comparisons find finished runs by it; a checkpoint is refused where it differs. Code of the user counts in the former:
an edited method is another one. A stopped run goes on with edited code, and says so.
"""

import hashlib
import json
from typing import Any

from copfl.data.clients.partition import Partition
from copfl.settings.record import declared
from copfl.settings.schema import KINDS, Run
from copfl.settings.toml import Tables

# By title and key: the values that do not count. Their fields in the schema say so: of where and how a run is
# computed, of what is kept of it, and of settings that older runs lack, what these had.
SAME_RUN = {
    title: {field.name: field.metadata["same_run"] for field in declared(record)}
    for title, record in KINDS.items()
}
PLAIN_MEAN = {"name": "mean", "lr": 1.0}


def essential(run: Run) -> Tables:
    """The settings of a run without those that do not count, as a JSON file would give them back."""
    result = {
        title: {key: value for key, value in table.items() if value not in SAME_RUN[title].get(key, ())}
        for title, table in run.tables().items()
    }
    model = result.get("model", {})
    if "sha256" in model:  # the content of a pretrained model counts, not its place
        model.pop("weights", None)
        model["name"] = "hf" if model["name"].startswith("hf:") else model["name"]
    if result.get("server") == PLAIN_MEAN:  # what a run without a step of the server has
        del result["server"]
    plain: Tables = json.loads(json.dumps(result, default=str))
    return plain


def identity(run: Run, *more: Any) -> str:
    """Twelve hexadecimal digits of a complete record, and of what else counts.

    Args:
        run: A complete record.
        more: What else counts.
    """
    own = codes(run)
    return identity_of(essential(run), *more, *([own] if own else []))


def codes(run: Run) -> dict[str, str]:
    """The hashes of the user's modules that a run is made of, by kind, as run.toml has them."""
    recorded = {kind: table.get("code") for kind, table in run.tables().items() if kind != "privacy"}
    return {kind: str(code) for kind, code in recorded.items() if code}


def identity_of(settings: Tables, *more: Any) -> str:
    """The identity of a run with these essential settings.

    Args:
        settings: As of `essential`.
        more: What else counts.
    """
    name = str(settings.get("partition", {}).get("name", ""))
    if name.endswith(".json"):  # its content counts, not its place
        settings = {**settings, "partition": {"sha256": Partition.load(name).fingerprint}}
    return digest([settings, *more])


def settings_digest(run: Run, contents: Tables) -> str:
    """Of the settings that a continued run and its checkpoint share, with the contents of the data.

    Args:
        run: A complete record.
        contents: Fingerprints of the data.
    """
    settings: Tables = json.loads(json.dumps({**essential(run), **contents}))
    del settings["run"]["rounds"]
    return digest(settings)


def digest(value: Any) -> str:
    """Twelve hexadecimal digits of a value that JSON can express."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
