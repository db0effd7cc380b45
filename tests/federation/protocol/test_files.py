"""Small files of JSON: one error for a damaged one, private, and one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from copfl.errors import RunError
from copfl.federation.protocol.files import alone, stored, write_json


def numbers(content: dict[str, int]) -> dict[str, int]:
    return {name: int(number) for name, number in content.items()}


def test_a_file_is_read_as_it_was_written_and_private(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "runs.json"
    assert stored(path, numbers, {}) == {}
    write_json(path, {"first": 1})
    assert stored(path, numbers, {}) == {"first": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", ["", "no json", "[1]", '{"first": "x"}', '{"first": null}', "[" * 10**5])
def test_a_damaged_file_is_one_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text(content)
    with pytest.raises(RunError, match=r"^runs.json cannot be used: .*; restore the node's state-dir$"):
        stored(tmp_path / "runs.json", numbers, {})


def test_a_file_that_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="settings are gone: No such file"):
        stored(tmp_path / "settings.json", numbers, damaged="settings are gone: {}")


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("copfl.federation.protocol.files.WAIT", 0.0)
    with (
        alone(tmp_path / "ledger.jsonl"),
        pytest.raises(RunError, match="another process"),
        alone(tmp_path / "ledger.jsonl"),
    ):
        pass
    with alone(tmp_path / "ledger.jsonl"):
        pass
