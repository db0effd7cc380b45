"""Jobs on any executor, on Slurm and on Dask: lost workers, held folders, the same numbers.

Slurm and Dask are started by the tests. Whole comparisons run where COPFL_SLOW=1 asks for them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from copfl.comparison.compare import compare, sweep
from copfl.comparison.jobs import executors, runner, submission
from copfl.comparison.jobs.executors import opened
from copfl.comparison.jobs.job import finished
from copfl.comparison.jobs.processes import Pool
from copfl.comparison.jobs.runner import all_done
from copfl.comparison.jobs.submission import ATTEMPTS
from copfl.errors import CopflError, RunError
from copfl.experiment.folder import claimed
from copfl.telling import OF_ONE_RUN, heard
from tests.commands import called, command, environment
from tests.comparison.jobs.test_runner import job
from tests.comparison.small import base, clouds, line, numbers
from tests.slow import slow

ROWS, SEEDS = "copfl,fedavg,fedper,local", "0,1,2"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return clouds(tmp_path / "clouds.npz")


# Any executor


class Unreliable(Executor):
    """Runs calls at once, and loses the first ones, as if their workers had ended."""

    def __init__(self, lost: int) -> None:
        self.lost, self.calls = lost, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        if self.calls <= self.lost:
            future.set_exception(ConnectionError("the node is gone\nmore"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_a_comparison_on_any_executor_has_the_same_numbers(tmp_path: Path, data: Path) -> None:
    """Two threads, which take turns: torch's settings are those of the process."""
    rows, said = ["fedavg", "local"], list[str]()
    here = compare(rows, seeds=[0, 1], base_tables=base(data), out=tmp_path / "here", tune={})
    with ThreadPoolExecutor(2) as executor:
        there = compare(
            rows,
            seeds=[0, 1],
            base_tables=base(data),
            out=tmp_path / "there",
            tune={},
            executor=executor,
            log=said.append,
        )
    assert numbers(there) == numbers(here)
    assert sum("done" in text for text in said) == 4


def test_a_lost_worker_s_job_is_submitted_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a relative folder, of which workers know nothing
    said, executor = list[str](), Unreliable(2)
    found = sweep(
        {"run.batch": [4, 8]},
        seeds=[0],
        base_tables=base(data),
        out="out",
        executor=executor,
        log=said.append,
    )
    assert executor.calls == 4
    assert sum("its worker was lost (the node is gone); submitted again" in text for text in said) == 2
    assert numbers(found) == numbers(
        sweep({"run.batch": [4, 8]}, seeds=[0], base_tables=base(data), out="elsewhere")
    )


def test_a_job_that_loses_every_worker_is_given_up(tmp_path: Path) -> None:
    executor = Unreliable(ATTEMPTS)
    with pytest.raises(RunError, match=f"1 of 1 runs failed.* its worker was lost {ATTEMPTS} times"):
        all_done([job(tmp_path)], Pool(1), executor=executor)
    assert executor.calls == ATTEMPTS


def test_an_error_of_copfl_itself_is_raised_with_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> Any:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(runner, "execute", broken)
    with pytest.raises(ZeroDivisionError, match="a fault") as error:
        all_done([job(tmp_path)], Pool(1), executor=Unreliable(0))
    assert "in broken" in error.value.__notes__[0]


@pytest.mark.parametrize("executor", [None, Unreliable(0)], ids=["here", "executor"])
def test_a_folder_that_another_process_has_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Executor | None
) -> None:
    monkeypatch.setattr("copfl.comparison.jobs.runner.POLL", 0.01)
    one, other, said = job(tmp_path, "local"), job(tmp_path, "fedavg"), list[str]()
    taken, free = threading.Event(), threading.Event()

    def hold() -> None:
        with claimed(one.path, new=True):
            taken.set()
            free.wait(60)

    def log(text: str) -> None:
        said.append(text)
        if "in the hands of another process" in text:
            free.set()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(60)
    with heard(log, but_of=OF_ONE_RUN):
        all_done([one, other], Pool(1), executor=executor)
    holder.join()
    assert finished(one)
    assert finished(other)
    assert [text.split(",")[0] for text in said] == [
        "[1/2 runs] fedavg", "1 runs are in the hands of another process; waiting for it: " + str(one.path),
        "[2/2 runs] local",
    ]  # fmt: skip


def test_progress_of_all_jobs_is_one_line(tmp_path: Path) -> None:
    one, other = job(tmp_path, "local"), job(tmp_path, "fedavg")
    all_done([one], Pool(1))
    assert submission._progress([one, other]) == "local, seed 0: round 3/3; 1 waiting"


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("sge", '--on "sge" must be slurm, slurm:PARTITION or dask:ADDRESS'),
        ("dask", '--on "dask" must be slurm'),
        ("dask:nowhere", "no Dask scheduler answers at nowhere"),
        ("dask:tcp://127.0.0.1:1", "no Dask scheduler answers at tcp://127.0.0.1:1"),
    ],
)
def test_a_cluster_that_is_not_there_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str, message: str
) -> None:
    monkeypatch.setattr(executors, "TIMEOUT", 0.3)
    with pytest.raises(CopflError, match=message), opened(on, tmp_path):
        pass


@pytest.mark.parametrize(("on", "library"), [("dask:tcp://here", "distributed"), ("slurm", "submitit")])
def test_a_missing_library_is_reported_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(CopflError, match=r"pip install 'copfl\[cluster\]'"), opened(on, tmp_path):
        pass
    assert not list(tmp_path.iterdir())


# Dask


def dask(name: str, *words: object) -> subprocess.Popen[bytes]:
    pytest.importorskip(
        "distributed", reason="dask.distributed is not installed: pip install 'copfl[cluster]'"
    )
    whole = [sys.executable, "-m", f"distributed.cli.dask_{name}", *map(str, words), "--no-dashboard"]
    return subprocess.Popen(whole, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class DaskCluster:
    """A scheduler and worker processes, ended at the end."""

    def __init__(self, folder: Path, workers: int) -> None:
        file = folder / "scheduler.json"
        self.processes = [dask("scheduler", "--host", "127.0.0.1", "--port", 0, "--scheduler-file", file)]
        until(lambda: file.exists() and bool(file.read_text()), self.processes)
        self.address = json.loads(file.read_text())["address"]
        words = "--nthreads", 1, "--no-nanny", "--local-directory", folder / "dask"
        self.processes += [dask("worker", self.address, *words) for _ in range(workers)]

    def __enter__(self) -> DaskCluster:
        return self

    def __exit__(self, *error: object) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


def until(ready: Callable[[], bool], processes: list[subprocess.Popen[bytes]], seconds: float = 600) -> None:
    """Returns when it is ready; an error if a process has ended, or in the end."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert all(process.poll() is None for process in processes), "a process has ended"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.1)


def begun(out: Path) -> int:
    """Run folders with a round."""
    return sum(path.stat().st_size > 0 for path in out.glob("runs/*/rounds.jsonl"))


def test_a_comparison_on_dask_has_the_same_numbers(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "-a", "fedavg,local", "--seeds", "0", "--no-tune", "--json"
    with DaskCluster(tmp_path, workers=1) as cluster:
        there = called(capsys, *line(data, tmp_path / "there", *words, "--on", f"dask:{cluster.address}"))
    assert there.code == 0, there.err
    here = called(capsys, *line(data, tmp_path / "here", *words, "--jobs", "1"))
    assert plain(there.out) == plain(here.out)


def plain(text: str) -> Any:
    """The numbers in a table.json but the time they took."""
    content = json.loads(text)
    for row in content["rows"]:
        for part in ("mean", "spread", "per_seed"):
            del row[part]["seconds"]
    return content


def whole(data: Path, out: Path, rounds: int, *more: str) -> list[str]:
    words = "-a", ROWS, "--seeds", SEEDS, "--no-tune", "--rounds", str(rounds), "--json"
    return command(*line(data, out, *words, *more))


def local_numbers(data: Path, out: Path, rounds: int) -> Any:
    done = subprocess.run(
        whole(data, out, rounds), env=environment(), capture_output=True, text=True, check=True
    )
    return plain(done.stdout)


@slow
def test_a_dask_worker_that_is_killed_loses_nothing(tmp_path: Path, data: Path) -> None:
    """4 algorithms, 3 seeds, 2 workers, one of which is killed while it trains."""
    out = tmp_path / "there"
    with DaskCluster(tmp_path, workers=2) as cluster:
        words = whole(data, out, 40, "--on", f"dask:{cluster.address}")
        with subprocess.Popen(
            words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            until(lambda: begun(out) >= 3, cluster.processes)
            cluster.processes[-1].send_signal(signal.SIGKILL)
            output, errors = process.communicate(timeout=1800)
    assert process.returncode == 0, errors
    assert plain(output) == local_numbers(data, tmp_path / "here", 40)


# Slurm

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of Slurm's own, with a controller, one node of two processors and the partition "main"."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        pytest.skip(
            f"Slurm cannot be started here, {', '.join(missing)} are missing: apt-get install slurm-wlm"
        )
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'copfl[cluster]'")
    folder = tmp_path_factory.mktemp("slurm")
    node, user = socket.gethostname().split(".")[0], subprocess.check_output(["id", "-un"], text=True).strip()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    conf = folder / "slurm.conf"
    conf.write_text(f"""
ClusterName=copfl
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={port()}
SlurmdPort={port()}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=1
MinJobAge=36000
NodeName={node} NodeAddr=127.0.0.1 CPUs=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    munge = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "pid-file", "log-file")
    ]
    munge += [f"--seed-file={folder}/munge.seed", f"--key-file={folder}/key"]
    daemons = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-c", "-f", str(conf)],
        ["slurmd", "-D", "-c", "-f", str(conf)],
    ]
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(conf)
    logs = [(folder / f"{words[0]}.log").open("wb") for words in daemons]
    processes = list[subprocess.Popen[bytes]]()
    try:
        for words, log in zip(daemons, logs, strict=True):
            processes.append(subprocess.Popen(words, stdout=log, stderr=log))
            time.sleep(0.5)
        idle = ["sinfo", "--noheader", "--format=%T"]
        try:
            until(lambda: b"idle" in subprocess.run(idle, capture_output=True).stdout, processes, 60)
        except AssertionError as error:
            said = "; ".join(Path(log.name).read_text()[-200:] for log in logs)
            pytest.skip(f"Slurm cannot be started here: {error}. {said}")
        yield folder
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(30)
        for log in logs:
            log.close()
        os.environ.pop("SLURM_CONF")
        os.environ.update({} if before is None else {"SLURM_CONF": before})


def states() -> dict[str, str]:
    words = ["squeue", "--noheader", "--states=all", "--format=%A %T"]
    lines = subprocess.check_output(words, text=True).splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


@slow
def test_a_job_of_slurm_that_is_cancelled_is_done_again(slurm: Path, tmp_path: Path, data: Path) -> None:
    """4 algorithms, 3 seeds, in a folder that the jobs share; one job is cancelled while it trains."""
    out = tmp_path / "there"
    words = whole(data, out, 150, "--on", "slurm:main")  # a job ignores SIGTERM, and has a second left
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: begun(out) >= 2, [])
        until(lambda: "RUNNING" in states().values(), [])
        cancelled = max((id for id, state in states().items() if state == "RUNNING"), key=int)  # the youngest
        subprocess.check_call(["scancel", cancelled])
        output, errors = process.communicate(timeout=1800)
    assert process.returncode == 0, errors
    assert f"its worker was lost (Slurm ended job {cancelled}" in errors
    assert states()[cancelled] == "CANCELLED"
    assert plain(output) == local_numbers(data, tmp_path / "here", 150)


@slow
def test_slurm_reports_a_partition_that_is_not_there(slurm: Path, tmp_path: Path, data: Path) -> None:
    with (
        pytest.raises(RunError, match=r"Slurm did not take a job: .*invalid partition"),
        opened("slurm:nowhere", tmp_path) as executor,
    ):
        compare(
            ["local"], seeds=[0], base_tables=base(data), out=tmp_path / "out", tune={}, executor=executor
        )
