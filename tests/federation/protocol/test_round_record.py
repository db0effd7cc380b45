"""A line of the server's rounds.jsonl: what is written is read, and what somebody changed is refused or read whole."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from copfl.errors import RunError
from copfl.federation.operations.page import document_of
from copfl.federation.operations.watched import read
from copfl.federation.protocol.round_record import RoundRecord, read_rounds
from copfl.report import document
from tests.federation.folders import ServerState
from tests.hostile import COUNT, json_versions

RECORD = RoundRecord(
    number=2,
    seconds=1.5,
    clients=[0, 2],
    left_out={1: "no reply within 60 s"},
    metric="accuracy",
    mean={"accuracy": 0.5, "loss": None},
    per_client={"accuracy": {0: 0.4, 2: 0.6}, "loss": {0: None, 2: None}},
    federation={"epsilon": 1.0},
    bytes_up=2000,
    bytes_down=6000,
    notes={2: "slow"},
)


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        RECORD._replace(secure_aggregation={"step": 0.001, "change": 0.1}, per_client={}),
        RECORD._replace(halves={"sha256": ["0" * 64], "failed": {}}),
        RECORD._replace(
            clients=[], left_out=dict.fromkeys(range(3), "late"), mean={}, per_client={}, notes={}
        ),
    ],
)
def test_what_is_written_is_read(record: RoundRecord) -> None:
    line = json.loads(json.dumps(record.as_json()))
    assert RoundRecord.of(line) == record
    assert RoundRecord.of(line).as_json() == line


def test_a_line_has_the_keys_of_a_simulated_round_and_those_of_a_federation() -> None:
    simulated = ["round", "clients", "federation", "mean", "left_out", "per_client"]
    keys = list(RECORD.as_json())
    assert [key for key in keys if key in simulated] == simulated
    assert [key for key in keys if key not in simulated] == ["why", "notes", "bytes", "seconds", "metric"]
    assert RECORD.as_json()["left_out"] == [1]
    assert not RECORD.is_summed
    assert RECORD._replace(secure_aggregation={"failed": "too few"}).is_summed


def test_the_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    file, line = tmp_path / "rounds.jsonl", json.dumps(RECORD.as_json())
    file.write_text(f"{line}\n{line[:40]}")
    assert read_rounds(file) == [RECORD]
    with pytest.raises(RunError, match="cannot read"):
        read_rounds(tmp_path / "nothing")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that no round has
def test_random_lines(tmp_path: Path) -> None:
    """A changed line is refused with its number, or it is a record, which the coordinator's page shows."""
    state = ServerState(tmp_path / "clinic", rounds=1, benefit=True)
    state.start()
    state.begin_round(1)
    state.end_round(1)
    file = state.path / "rounds.jsonl"
    refused = 0
    for n, content in enumerate(json_versions(file.read_bytes().rstrip(b"\n"), COUNT)):
        file.write_bytes(content + b"\n")
        try:
            records = read_rounds(file)
        except RunError as error:
            refused += 1
            assert f"of {file} is damaged" in str(error)  # noqa: PT017
            continue
        for record in records:
            assert RoundRecord.of(record.as_json()) == record
        if n % 8 == 0:  # a page takes some ten milliseconds
            with contextlib.suppress(RunError):
                document.render(document_of(read(state.app)))
    assert 0.3 * COUNT < refused < COUNT
