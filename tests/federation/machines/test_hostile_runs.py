"""Hostile runs against real processes: nothing executes on a node or on the server, and allowed code trains.

Without the processes: test_policy.py, and `test_an_app_gives_a_node_its_run_config_and_no_code`. `.ci/run`
has both.
"""

from __future__ import annotations

import shutil
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from copfl.federation import init
from copfl.federation.machines.deployed import superlink_options, write_connection
from copfl.federation.machines.local import up
from copfl.federation.machines.local_federation import HOST, LocalFederation
from copfl.federation.machines.superlink import COMPONENTS
from copfl.federation.operations.watched import answers
from copfl.federation.policy.record import Policy
from copfl.federation.protocol.app_folder import LOCAL_HOME
from copfl.settings.flat import nested
from copfl.settings.toml import written
from tests.federation.network import CONFIG, digits, write_nodes
from tests.slow import slow

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
pytestmark = slow

EVIL_SERVER = """
import time
from flwr.app import Message
from flwr.serverapp import ServerApp
from copfl.federation.protocol.messages import as_record

app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    for kind in ("query", "train", "evaluate"):
        messages = [Message(as_record(('{"run": "test"}', b"")), node, kind, ttl=120) for node in nodes]
        for reply in grid.send_and_receive(messages):
            print("ANSWER", kind, reply.content["head"]["copfl"] if reply.has_content() else reply.error, flush=True)
"""


def rewrite(app: Path, config: dict[str, Any], components: dict[str, str] | None = None) -> None:
    """Changes the run config in an app as an attacker may, who does not use copfl."""
    content = tomllib.loads((app / "pyproject.toml").read_text())
    flower = content["tool"]["flwr"]["app"]
    flower["config"] |= config
    flower["components"] = components or COMPONENTS
    (app / "pyproject.toml").write_text(written(content))


def submitted(local: LocalFederation, seconds: float = 150) -> str:
    """What the log of a run has when it ends."""
    process = local.start("run", ["flwr", "run", ".", "copfl", "--stream"])
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
    return " ".join((local.logs / "run.log").read_text().replace("│", " ").split())


def test_a_hostile_run_executes_nothing_on_the_server_or_on_a_node(tmp_path: Path) -> None:
    """First against the server of copfl, then with a server that Flower or the attacker runs."""
    app, owned = tmp_path / "app", tmp_path / "owned"
    init(app, nested(CONFIG | {"run.clients": 1, "network.min_replies": 1}))
    attack = {"model": {"name": "os:system", "command": f"touch {owned}"}}
    node = write_nodes(digits(), tmp_path / "nodes")[0]
    with LocalFederation(app) as local:
        local.start_superlink()
        rewrite(app, attack)
        assert "model.name='os:system' is not allowed, nor is any other [code]" in submitted(local)
        (app / "evil.py").write_text(EVIL_SERVER)
        other = tmp_path / "other"
        shutil.copytree(app, other, ignore=shutil.ignore_patterns("logs", "runs"))
        (app / "evil.py").unlink()
        local.options["cwd"] = other  # the attacker's own folder
        rewrite(other, {"model": {"name": "mlp", "width": 16}}, COMPONENTS | {"serverapp": "evil:app"})
        assert "evil.py" in submitted(local)
        local.options["cwd"] = app
        assert local.runs() == []

    with LocalFederation(app) as local:
        write_connection(app, HOST, local.port, False, LOCAL_HOME)
        options = superlink_options(HOST, local.port, f"{LOCAL_HOME}/{local.port}.db", secure=False)
        local.start("superlink", ["flower-superlink", *options])  # Flower's own: it checks nothing
        while not answers(HOST, local.port):
            time.sleep(0.2)
        local.add_node("node-0", node)
        log = submitted(local)
        assert "refuses the run config: model.name='os:system'" in log
        assert not (app / "runs").exists()
        (app / "evil.py").write_text(EVIL_SERVER)
        rewrite(app, attack, COMPONENTS | {"serverapp": "evil:app"})
        log = submitted(local)
        for kind in ("query", "train", "evaluate"):
            assert (
                "refuses the run config: model.name='os:system'" in log.rpartition(f"ANSWER {kind}")[2][:300]
            )
        assert str(tmp_path / "nodes") not in log
    assert not owned.exists()
    assert not list(Path(node["state-dir"]).rglob("*.copfl"))


def test_a_model_that_the_owner_allowed_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init` and `up` enter it, for the user is the owner of every machine; an empty policy would refuse it."""
    (tmp_path / "trial_net.py").write_text(
        "import math\nfrom torch import nn\n\ndef net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = {"run.rounds": 1, "run.clients": 2, "network.deadline": 240}
    config |= {"algorithm.name": "fedavg", "model.name": "trial_net:net"}
    app = init(tmp_path / "app", nested(config), code="trial_net")
    (record,) = up(app, code="trial_net")
    assert record["clients"] == [0, 1]
    policy = Path(app, LOCAL_HOME, "policy.toml").read_text()
    assert 'reference = "trial_net:net"' in policy
    assert Policy().code == ()
