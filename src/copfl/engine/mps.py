"""NVIDIA's MPS: programs of several processes run on a GPU at the same time. Without it they take turns.

Its daemon is started for as long as it is needed, with a folder of its own, so that it concerns no other
process.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)
CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
USUAL = Path("/tmp/nvidia-mps")  # where a daemon is that an administrator started
SECONDS = 30.0  # that the daemon may take for an answer
TRIAL = "import sys; from copfl.engine.machine import open_gpu; sys.exit(open_gpu())"


@contextlib.contextmanager
def shared() -> Iterator[dict[str, str]]:
    """Inside, the environment in which new processes share the GPU; empty where nothing has to be set."""
    if (Path(os.environ.get(PIPES, USUAL)) / "control").exists():
        logger.info("the runs share the GPU through the MPS that is on")
        yield {}
        return
    if shutil.which(CONTROL) is None:
        logger.info(f"the runs take turns on the GPU: {CONTROL} is not installed")
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="copfl-mps-", ignore_cleanup_errors=True) as folder:
        environment = {PIPES: folder, LOGS: folder}
        problem = _answer(environment, [CONTROL, "-d"])  # starts the daemon
        try:
            # Whether another process can use the GPU through it.
            problem = problem or _answer(environment, [sys.executable, "-c", TRIAL])
            if problem:
                logger.info(f"the runs take turns on the GPU: MPS does not work here ({problem})")
            else:
                logger.info("the runs share the GPU through MPS")
            yield {} if problem else environment
        finally:
            _answer(environment, [CONTROL], "quit\n")


def _answer(environment: dict[str, str], command: list[str], text: str = "") -> str:
    """What is wrong with the command's end, or nothing."""
    try:
        # Not to a pipe, which the daemon would keep open.
        with tempfile.TemporaryFile("w+") as said:
            done = subprocess.run(
                command,
                input=text,
                env=os.environ | environment,
                stdout=said,
                stderr=said,
                text=True,
                timeout=SECONDS,
            )
            said.seek(0)
            return "" if done.returncode == 0 else said.read().strip()[-200:] or f"exit {done.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
