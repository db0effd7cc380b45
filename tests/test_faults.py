"""Runs under kills, full disks and other faults; more: `python benchmarks/kills.py --kills 500`.

Quick tests of the same: cli/test_main.py (kills before every disk operation, and two processes in one
folder), experiment/test_records.py and experiment/test_folder.py (full disks, read-only folders, clocks).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import environment
from tests.slow import slow

HARNESS = Path(__file__).parent.parent / "benchmarks" / "kills.py"


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads processor times from /proc")
def test_kills_and_the_other_faults(tmp_path: Path) -> None:
    kills = 20
    options = ["--kills", str(kills), "--full", "2", "--seed", "1", "--json", str(tmp_path / "counts.json")]
    command = [sys.executable, str(HARNESS), *options]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=1800, env=environment()
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["kills"] >= kills
    assert counts["recorded rounds to repeat, at most"] <= 1
    assert not any(
        counts[name] for name in ("different", "stuck", "not resumed", "other files", "cases failed")
    )
