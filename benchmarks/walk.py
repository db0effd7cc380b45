"""The secured federation of docs/deploy.md on one machine: processor time of each program. Prints JSON.

    python benchmarks/walk.py [--rounds 5]

The commands are those of the page: a server and three nodes with certificates and keys, and a run with secure sums.
Elapsed time depends on what else the machine does; processor time hardly does. It is read from /proc until the
programs end, with all the processes that they start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

from copfl.flower.local import _free_port, partition_nodes
from copfl.flower.processes import TAG, tagged

COPFL = [sys.executable, "-m", "copfl", "federate"]
NAMES = {  # a word of a program's command line, and what it is; the first that fits
    "copfl.flower.worker": "workers of the nodes",
    "federate node": "nodes",
    "flwr-serverapp": "ServerApp",
    "superexec": "SuperExec",
    "federate server": "SuperLink",
    "federate run": "the command run",
    "flwr run": "the command run",
    "federate init": "the command init",
}


def watch(tag: str, seconds: dict[str, dict[int, float]], ended: threading.Event) -> None:
    """Notes the processor time of each process of the federation until the end."""
    ticks = os.sysconf("SC_CLK_TCK")
    while not ended.wait(0.1):
        for pid in tagged(tag):
            with contextlib.suppress(OSError, IndexError, StopIteration):
                words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                name = next(name for word, name in NAMES.items() if word in words)
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                seconds[name][pid] = sum(map(int, fields[11:13])) / ticks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    tag, ended = f"walk-{os.getpid()}", threading.Event()
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    threading.Thread(target=watch, args=(tag, seconds, ended), daemon=True).start()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, port = Path(name), _free_port()
        nodes = partition_nodes(folder, "digits", 3, None, 0)
        environment = os.environ | {TAG: tag, "OMP_NUM_THREADS": "1"}

        def start(*words: str) -> subprocess.Popen[bytes]:
            output = stack.enter_context(open(folder / f"{words[0]}.log", "ab"))
            command = [*COPFL, *words]
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.send_signal, signal.SIGTERM)
            return process

        started = time.monotonic()
        secure = ["--secure", "--secure-aggregation", "--port", str(port), "--rounds", str(args.rounds)]
        start("init", "ward", "--data", "digits", "--model", "mlp", "--clients", "3", *secure).wait()
        start("server", "ward")
        for n, node in enumerate(nodes):
            keys = ["--root-certificates", "ward/keys/ca.pem", "--key", f"ward/keys/node-{n}"]
            own = ["--client", str(n), "--data", node["data"], "--state-dir", f"state-{n}"]
            start("node", "--superlink", f"127.0.0.1:{port}", *keys, *own)
        code = start("run", "ward").wait()
        elapsed = time.monotonic() - started
        if code:
            raise SystemExit((folder / "run.log").read_text()[-3000:])
        time.sleep(0.5)
        ended.set()
    totals = {name: round(sum(of_pid.values()), 1) for name, of_pid in sorted(seconds.items())}
    result = {"rounds": args.rounds, "processor seconds": totals, "all": round(sum(totals.values()), 1)}
    print(json.dumps(result | {"elapsed seconds": round(elapsed)}, indent=1))


if __name__ == "__main__":
    main()
