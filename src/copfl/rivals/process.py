"""Rivals that are trained in processes of their own, beside the process that trains the federation.

A first run on a table trains both, one beside the other. The rivals have the bits of one process: every site has a
seed of its own, and every process one thread. `python -m copfl.rivals.process` is such a process: it reads the tasks
of some sites from its standard input and writes their rivals to its output. It imports no torch.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from copfl.errors import RunError, how_to_set
from copfl.measures.metrics import Metric
from copfl.rivals import estimators
from copfl.rivals.effort import Effort
from copfl.rivals.records import Rival, SiteRows
from copfl.rivals.site import site_rivals

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Not -m alone: a file of the folder in which the command runs must not take the place of a module.
COMMAND = (sys.executable, "-P", "-m", "copfl.rivals.process")


class SiteTask(NamedTuple):
    """The arguments of `site_rivals` for one site."""

    rows: SiteRows
    kind: str
    classes: int
    metric: Metric
    effort: Effort
    seed: int


OfSites = dict[int, dict[str, Rival]]


@contextlib.contextmanager
def beside(tasks: Mapping[int, SiteTask], processes: int) -> Iterator[Callable[[], OfSites]]:
    """Processes that train until the `with` block ends, and a function that waits for what they trained.

    Args:
        tasks: Of each site.
        processes: How many share the sites; at least one.
    """
    largest_first = sorted(tasks, key=lambda site: len(tasks[site].rows.y), reverse=True)
    parts = [sites for n in range(processes) if (sites := largest_first[n::processes])]
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(ThreadPoolExecutor(len(parts)))
        started = []
        for sites in parts:
            child = _started()
            stack.callback(child.kill)  # before the thread that waits for it is waited for
            started.append(
                (child, waiting.submit(child.communicate, pickle.dumps([tasks[n] for n in sites])))
            )

        def trained() -> OfSites:
            estimators.load()  # what the answers are made of, which takes a second or two, while they train
            of_sites: OfSites = {}
            for sites, (child, reply) in zip(parts, started, strict=True):
                of_sites |= zip(sites, _received(reply.result()[0], child.returncode), strict=True)
            return {site: of_sites[site] for site in tasks}

        yield trained


def _started() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ONE_THREAD}
        )
    except OSError as error:
        raise RunError(
            f"the process that trains what each client has alone cannot be started ({error}); with "
            f"{how_to_set('run.workers', 1)} no process is"
        ) from error


def _received(answer: bytes, exit_code: int) -> list[dict[str, Rival]]:
    """The rivals of some sites; an error of theirs is raised as in this process."""
    if exit_code:
        raise RunError(
            f"the process that trains what each client has alone ended (exit code {exit_code}), perhaps out of "
            f"memory; with {how_to_set('run.workers', 1)} they are trained one after the other"
        )
    of_sites = pickle.loads(answer)  # of our own process
    if isinstance(of_sites, Exception):
        raise of_sites
    assert isinstance(of_sites, list)
    return of_sites


def main() -> None:
    """Trains the rivals of the sites that the standard input describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    tasks: list[SiteTask] = pickle.load(sys.stdin.buffer)
    try:
        answer: object = [site_rivals(*task) for task in tasks]
    except Exception as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
