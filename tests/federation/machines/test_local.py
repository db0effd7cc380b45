"""Following a run: its log may end while the run continues, or with the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.cli.federate import trial as trial_commands
from copfl.errors import RunError
from copfl.federation import init
from copfl.federation.machines import local
from copfl.federation.machines.local import MAX_RECONNECTS, follow
from copfl.federation.machines.local_federation import LAST_TAG, LocalFederation
from copfl.federation.machines.processes import TAG, tagged
from copfl.federation.protocol.app_folder import LOCAL_HOME
from copfl.federation.server.folder import ServerFolder
from copfl.files import Busy
from copfl.settings.complete import complete
from copfl.settings.flat import nested
from tests.commands import called
from tests.federation.network import CONFIG


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode

    def wait(self, seconds: float) -> int:
        return self.returncode


class Fake(LocalFederation):
    """Answers to `flwr list`, one after the other; a log that is opened again appends `rounds` and ends."""

    def __init__(self, answers: list[Any], rounds: int, code: int) -> None:
        self.answers, self.new_rounds, self.code = answers, rounds, code
        self.records, self.commands = list[dict[str, Any]](), list[list[str]]()

    def call(self, command: Any, seconds: float = 0) -> str:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return json.dumps({"runs": [{"run-id": "7", "status": answer}]})

    def start(self, name: str, command: Any) -> Any:
        self.commands.append(command)
        self.records += [{"round": n} for n in range(self.new_rounds)]
        return Ended(self.code)

    def reason(self) -> str:
        return "its log"

    def rounds(self) -> list[dict[str, Any]]:
        return self.records


def followed(
    answers: list[Any], rounds_then: int, code: int = 1, code_then: int = 0
) -> tuple[list[Any], Fake]:
    fake = Fake(answers, rounds_then, code_then)
    ended: Any = Ended(code)
    folder: Any = fake
    return list(follow(fake, ended, folder, 2, pause=0)), fake


def test_no_file_of_the_folder_takes_the_place_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be somebody else's, and the programs begin in it."""
    app = init(tmp_path / "app", nested(CONFIG))
    (app / "json.py").write_text("from pathlib import Path; Path('executed').touch()\n")
    federation = LocalFederation(app)
    commands: list[list[str]] = []

    def noted(name: str, command: Any) -> Any:
        commands.append([*map(str, command)])
        return Ended(1)

    monkeypatch.setattr(federation, "start", noted)
    with pytest.raises(RunError):
        federation.start_superlink()
    federation.start_node("north", {})
    for command in commands:
        begin = command[: command.index("-m")]
        subprocess.run([*begin, "-c", "import json"], **federation.options, check=True)
    assert len(commands) == 2
    assert not (app / "executed").exists()


def test_the_reason_is_the_last_error_of_this_start(tmp_path: Path) -> None:
    """One sentence, without Flower's traceback and without what an earlier run had."""
    trial = LocalFederation(tmp_path)
    for text, expected in (
        (
            "WARNING: copfl: round 1\nERROR : copfl: client 2: it declined\nTraceback (most ...\n",
            "client 2: it declined",
        ),
        ("ERROR : Exit Code: 201\n", "ERROR : Exit Code: 201"),
    ):
        trial.start("run", ["printf", "%s", text]).wait(10)
        assert trial.reason().partition("; the logs are in")[0].endswith(expected)
    assert "Traceback" in trial.reason()  # the end of the log, where copfl says nothing


LATE = subprocess.TimeoutExpired("flwr", 120)


@pytest.mark.parametrize(
    "answers", [["running"], [RunError("away"), LATE, ValueError("no json"), "starting"]]
)
def test_a_lost_log_is_opened_again(answers: list[Any]) -> None:
    records, fake = followed(answers, rounds_then=2)
    assert [r["round"] for r in records] == [0, 1]
    assert fake.commands == [["flwr", "log", "7", "copfl", "--stream"]]


@pytest.mark.parametrize("answers", [["finished:failed"], [RunError("gone")]])
def test_a_run_that_has_ended_is_reported(answers: list[Any]) -> None:
    with pytest.raises(RunError, match="the run ended after round 0 of 2: its log"):
        followed(answers, rounds_then=2)


def test_a_log_is_not_opened_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the run ended after round 0 of 2"):
        followed(["running"], rounds_then=0, code_then=1)
    assert MAX_RECONNECTS < 100


def test_a_run_that_ends_too_early_without_an_error_is_reported() -> None:
    with pytest.raises(RunError, match="the run ended"):
        followed(["running"], rounds_then=2, code=0)


SLEEP = "import time; time.sleep(60)"
CHILD = (  # its own child does not end with it
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
    "import time; time.sleep(60)"
)
TRIAL = (
    "import sys, time; from pathlib import Path\n"
    "from copfl.federation.machines.local_federation import LocalFederation\n"
    "with LocalFederation(Path(sys.argv[1])) as trial:\n"
    f"    trial.start('one', [sys.executable, '-c', {CHILD!r}])\n"
    "    print(trial.tag, flush=True); time.sleep(60)"
)


def wait_until_ended(tag: str) -> None:
    until = time.monotonic() + 10
    while tagged(tag):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.02)


@pytest.mark.job
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a child with its parent on Linux only")
def test_the_processes_end_with_a_trial_that_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TRIAL, tmp_path], stdout=subprocess.PIPE, text=True
    ) as trial:
        assert trial.stdout is not None
        tag = trial.stdout.readline().strip()
        while len(tagged(tag)) < 2:
            time.sleep(0.02)
        with pytest.raises(Busy, match="a federation is running in"), LocalFederation(tmp_path):
            pass
        trial.kill()
    wait_until_ended(tag)
    with LocalFederation(tmp_path) as again:  # the lock ended with the process
        assert (tmp_path / LOCAL_HOME / LAST_TAG).read_text() == again.tag
    assert not (tmp_path / LOCAL_HOME / "lock").exists()


@pytest.mark.job
def test_a_trial_ends_what_an_earlier_one_left(tmp_path: Path) -> None:
    (tmp_path / LOCAL_HOME).mkdir(parents=True)
    (tmp_path / LOCAL_HOME / LAST_TAG).write_text("earlier")
    with subprocess.Popen([sys.executable, "-c", SLEEP], env=os.environ | {TAG: "earlier"}) as left:
        while not tagged("earlier"):
            time.sleep(0.01)
        with LocalFederation(tmp_path):
            assert left.wait(1) == -signal.SIGTERM


def test_a_finished_run_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(local, "read_app", lambda folder: {"config": {"run": {"rounds": 2}}})
    monkeypatch.setattr(trial_commands, "_local", lambda: local)

    def resume(*given: Any, **_: Any) -> list[Any]:
        started.append(given)
        return []

    monkeypatch.setattr(local, "resume", resume)
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "server.copfl").touch()
    monkeypatch.setattr(ServerFolder, "rounds", lambda folder: [{"round": n} for n in range(2)])
    (tmp_path / "pyproject.toml").write_text(
        "[tool.flwr.app.config]\n[tool.copfl]\nhost='localhost'\nport=1\n"
    )
    answer = called(capsys, "federate", "resume", tmp_path)
    assert (answer.code, answer.err, started) == (0, "", [])
    assert answer.out.startswith("the run first is finished: it has 2 rounds; --rounds N continues it")
    monkeypatch.setattr(trial_commands, "_show", lambda folder, rounds: list(rounds))
    assert called(capsys, "federate", "resume", tmp_path, "--rounds", 3).code == 0
    assert len(started) == 1


def test_natural_clients_are_the_nodes(tmp_path: Path) -> None:
    x, group = np.arange(60, dtype=np.float32)[:, None], np.repeat(["north", "south", "west"], 20)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(60) % 2, group=group)
    configs = local.partition_nodes(tmp_path, complete({"data": {"name": str(tmp_path / "mine.npz")}}))
    for client, config in enumerate(configs):
        with np.load(config["data"]) as arrays:
            samples = np.concatenate([arrays["x"], arrays["x_test"]])[:, 0]
        assert sorted(samples.tolist()) == list(range(20 * client, 20 * client + 20))
