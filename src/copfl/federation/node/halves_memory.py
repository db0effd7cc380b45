"""What a node notes of the halves of each round: its losses with both models. It never leaves the node."""

import math
from pathlib import Path
from typing import NamedTuple

from copfl import wire
from copfl.errors import WireError
from copfl.federation.node.known_data import KnownData
from copfl.federation.protocol.files import alone, stored, write_json

FILE, QUESTION = "halves.json", "question.json"  # in the run's folder in the state-dir
CONCLUDED = "concluded.json"  # in the folder of known data


class Losses(NamedTuple):
    """What a node found in one round; nan where it has no samples, or a loss that it sends is not finite."""

    message: str  # the SHA-256 of both models
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Positive: the first half's model is better."""
        return self.second - self.first


def read(folder: Path) -> dict[int, Losses]:
    """What this node found, by round, from 0."""
    return stored(
        folder / FILE,
        lambda rounds: {
            int(round): Losses(str(message), *map(_number, pair))
            for round, (message, *pair) in rounds.items()
        },
        {},
    )


def answered(folder: Path) -> str:
    """The SHA-256 of the question that this node has answered; empty: none."""
    return stored(folder / QUESTION, lambda question: str(question["sha256"]), {"sha256": ""})


def answer(folder: Path, digest: str) -> None:
    """Notes the question, before its answer leaves."""
    write_json(folder / QUESTION, {"sha256": digest})


class Concluded(KnownData):
    """A node's memory of the sums of the benefit with its conclusions, whatever the server calls the runs.

    The server chooses the models that are compared, so each sum answers another question about the same data.
    """

    def expect(self, samples: str, run: str, allowed: int) -> None:
        """WireError if so many other runs have had a sum about these data that a further one is refused."""
        others = {known for name, known, _ in self._read() if known != run and self.overlap(samples, name)}
        if len(others) >= allowed:
            raise WireError(
                "this node has concluded what the others are worth from the same data in another run, and "
                "another run is another question about them; leave out run.benefit, or ask the node's owner "
                f"to raise statistics.questions above {allowed}"
            )

    def enter(self, samples: str, run: str, digest: str, allowed: int) -> None:
        """Writes down a question before it is answered; WireError as of `expect`."""
        with alone(self.folder / CONCLUDED):
            self.expect(samples, run, allowed)
            if (asked := (samples, run, digest)) not in (known := self._read()):
                write_json(self.folder / CONCLUDED, [*known, asked])

    def _read(self) -> list[tuple[str, str, str]]:
        return stored(
            self.folder / CONCLUDED,
            lambda questions: [(str(samples), str(run), str(digest)) for samples, run, digest in questions],
            [],
        )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def write(folder: Path, found: dict[int, Losses]) -> None:
    """Writes all of it."""
    content = {
        str(round): [losses.message, wire.plain(losses.first), wire.plain(losses.second)]
        for round, losses in found.items()
    }
    write_json(folder / FILE, content)


def forget(folder: Path, round: int) -> None:
    """Removes a round and those after it: the node trains in it again."""
    found = read(folder)
    if max(found, default=-1) >= round:
        write(folder, {known: losses for known, losses in found.items() if known < round})
