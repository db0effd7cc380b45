"""The chained log: every change of it is found, and a kill is not taken for one."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from copfl.errors import RunError
from copfl.federation.protocol.chained_log import AUDIT, WINDOW, append, verified

ENTRY = {"event": "sent", "run": "test", "round": 1, "left": ["update"], "bytes": 10, "reason": ""}


def written(folder: Path, lines: int = 6) -> Path:
    for n in range(lines):
        append(folder / AUDIT, ENTRY | {"round": n + 1})
    return folder / AUDIT


def test_lines_are_chained_and_private(tmp_path: Path) -> None:
    found = verified(written(tmp_path))
    assert (found.problem, found.is_cut) == ("", False)
    assert [line["n"] for line in found.lines] == [1, 2, 3, 4, 5, 6]
    for before, after in itertools.pairwise(found.lines):
        assert after["previous"] == before["hash"]
    assert (tmp_path / AUDIT).stat().st_mode & 0o777 == 0o600


def test_any_changed_line_is_found(tmp_path: Path) -> None:
    """Every line, the last one too, and every field of it."""
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        for field in json.loads(line):
            fields = json.loads(line)
            fields[field] = 99
            changed = json.dumps(fields).encode() + b"\n"
            path.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
            assert verified(path).problem.startswith(f"line {number + 1}"), field
        for changed in (line.replace(b": ", b":", 1), b"no json\n", b"\n", b"{}\n", b"[]\n"):
            path.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
            assert verified(path).problem


def test_any_removed_repeated_or_moved_line_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    for order in itertools.permutations(range(5)):
        path.write_bytes(b"".join(lines[n] for n in order))
        assert bool(verified(path).problem) == (list(order) != [0, 1, 2, 3, 4])
    for number in range(4):
        path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        assert verified(path).problem.startswith(f"line {number + 1}")
        path.write_bytes(b"".join(lines[: number + 1] + lines[number:]))
        assert verified(path).problem.startswith(f"line {number + 2}")


def test_lines_removed_at_the_end_are_found_by_who_noted_a_hash(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines, noted = path.read_bytes().splitlines(keepends=True), verified(path).last_hash
    path.write_bytes(b"".join(lines[:4]))
    assert verified(path).problem == ""  # nobody can see it from the file alone
    assert "no line has the noted hash" in verified(path, [noted]).problem
    path.unlink()
    written(tmp_path, 9)  # a whole new log
    assert verified(path).problem == ""
    assert "no line has the noted hash" in verified(path, [noted]).problem
    noted = verified(path).last_hash
    append(tmp_path / AUDIT, ENTRY)
    assert verified(path, [noted]).problem == ""


@pytest.mark.parametrize("kept", [1, 5, 100, -2])
def test_a_line_that_a_kill_cut_off_is_recognised_and_the_log_continues(kept: int, tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole[: len(whole) - len(last)] + last[:kept])
    found = verified(path)
    assert (found.problem, found.is_cut, len(found.lines)) == ("", True, 2)
    append(tmp_path / AUDIT, ENTRY)
    found = verified(path)
    assert (found.problem, found.is_cut) == ("", False)
    assert [line["event"] for line in found.lines] == ["sent", "sent", "recovered", "sent"]
    content = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(content[:2] + content[3:]))  # the cut line is in the chain, too
    assert verified(path).problem


def test_a_line_whose_line_break_was_cut_off_is_whole(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-1])
    append(tmp_path / AUDIT, ENTRY)
    assert verified(path).problem == ""
    assert [line["event"] for line in verified(path).lines] == ["sent"] * 4


def test_a_first_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    (tmp_path / AUDIT).write_bytes(b'{"n": 1, "at"')
    append(tmp_path / AUDIT, ENTRY)
    assert verified(tmp_path / AUDIT).problem == ""
    assert [line["n"] for line in verified(tmp_path / AUDIT).lines] == [2, 3]


def _append(folder: Path) -> None:
    written(folder, 30)


def test_processes_that_write_at_once_write_one_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=[tmp_path]) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = verified(tmp_path / AUDIT)
    assert (found.problem, len(found.lines)) == ("", 120)


def test_kills_leave_an_intact_chain(tmp_path: Path) -> None:
    """Eight processes, each killed while it writes."""
    program = (
        "import sys; from pathlib import Path; from copfl.federation.protocol.chained_log import append\n"
        "print('ready', flush=True)\n"
        "while True: append(Path(sys.argv[1]), {'event': 'sent', 'reason': 'x' * 400})\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / AUDIT)]
    count = 0
    for _ in range(2):
        writers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            with writer:
                writer.wait()
        append(tmp_path / AUDIT, ENTRY)
        found = verified(tmp_path / AUDIT)
        assert found.problem == ""
        assert len(found.lines) > count
        count = len(found.lines)


def test_a_line_may_be_longer_than_what_is_read_of_the_end(tmp_path: Path) -> None:
    path = tmp_path / AUDIT
    for size in (10, WINDOW, 5 * WINDOW, 10):
        append(path, {"event": "round_ended", "left_out": "x" * size}, durable=False)
    found = verified(path)
    assert (found.problem, [line["n"] for line in found.lines]) == ("", [1, 2, 3, 4])


def test_a_log_whose_last_line_is_damaged_takes_no_further_one(tmp_path: Path) -> None:
    (tmp_path / AUDIT).write_bytes(b"no line\n")
    with pytest.raises(RunError, match="free some space, then resume"):
        append(tmp_path / AUDIT, ENTRY)
