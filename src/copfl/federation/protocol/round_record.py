"""A round that has ended: a line of rounds.jsonl in the folder of a server's run. Without torch.

`server.rounds` writes it; `operations.watched` reads it for status and the coordinator's page. It has the keys of a
simulated round (`copfl.experiment.records`) and those that only several machines have. A new key is a field here.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from copfl import foreign
from copfl.errors import RunError, raised_as

ROUNDS = "rounds.jsonl"  # in the folder of a server's run


class RoundRecord(NamedTuple):
    """A round that has ended. Its texts come from other machines."""

    number: int  # from 1
    seconds: float
    clients: Sequence[int]  # whose uploads counted
    left_out: Mapping[int, str]  # client -> why
    metric: str  # the primary one
    mean: Mapping[str, float | None]
    per_client: Mapping[str, Mapping[int, float | None]]  # of a metric that leaves the nodes
    federation: Mapping[str, float | None]
    bytes_up: int
    bytes_down: int
    notes: Mapping[int, str] = {}  # client -> what its node says beside the upload
    secure_aggregation: Mapping[str, Any] | None = None  # of the sum; None: the server saw each upload
    halves: Mapping[str, Any] | None = None  # the SHA-256 of the messages with both models, and who failed

    @property
    def is_summed(self) -> bool:
        """Whether only sums leave the nodes."""
        return self.secure_aggregation is not None

    def as_json(self) -> dict[str, Any]:
        """The content of the line; `of` reads it."""
        further = {"secure_aggregation": self.secure_aggregation, "halves": self.halves}
        return {
            "round": self.number,
            "clients": list(self.clients),
            "federation": dict(self.federation),
            "mean": dict(self.mean),
            "left_out": sorted(self.left_out),
            "why": {str(client): self.left_out[client] for client in sorted(self.left_out)},
            "notes": {str(client): note for client, note in self.notes.items()},
            "per_client": {
                name: [values[client] for client in self.clients]
                for name, values in sorted(self.per_client.items())
            },
            "bytes": {"up": self.bytes_up, "down": self.bytes_down},
            "seconds": self.seconds,
            **{key: content for key, content in further.items() if content is not None},
            "metric": self.metric,
        }

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """The record of a line; one of `foreign.DAMAGE` if it is none."""
        clients = [int(client) for client in line["clients"]]
        further = {key: dict(line[key]) for key in ("secure_aggregation", "halves") if key in line}
        return cls(
            number=int(line["round"]),
            seconds=_finite(line["seconds"]),
            clients=clients,
            left_out={int(client): str(why) for client, why in line["why"].items()},
            metric=str(line["metric"]),
            mean=_values(line["mean"]),
            per_client={
                name: dict(zip(clients, _values(dict(enumerate(column))).values(), strict=True))
                for name, column in line["per_client"].items()
            },
            federation=_values(line["federation"]),
            bytes_up=int(line["bytes"]["up"]),
            bytes_down=int(line["bytes"]["down"]),
            notes={int(client): str(note) for client, note in line["notes"].items()},
            **further,
        )


def _values(numbers: Mapping[Any, Any]) -> dict[Any, float | None]:
    return {name: None if value is None else _finite(value) for name, value in numbers.items()}


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{number} is no number of a round")
    return number


def read_rounds(path: Path) -> list[RoundRecord]:
    """The rounds of a run; a last line that is being written is left out. RunError if the file is damaged."""
    with raised_as(RunError, f"cannot read {path}: {{}}", OSError):
        *lines, _ = path.read_bytes().split(b"\n")
    rounds = []
    for number, line in enumerate(lines, 1):
        damaged = f"line {number} of {path} is damaged: {{}}; restore the file"
        with raised_as(RunError, damaged, *foreign.DAMAGE):
            rounds.append(RoundRecord.of(foreign.json_of(line)))
    return rounds
