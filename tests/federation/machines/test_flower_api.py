"""What copfl takes from Flower's private modules is there, with the arguments and the shape that copfl relies on.

When a release of Flower changes one of them, this file fails first and says which.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import re
import textwrap
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

import uvicorn

from copfl.federation.machines import connections, flower_api, superlink
from copfl.federation.machines.bodies import MOST_OF_AN_OBJECT, OBJECTS, Bodies
from copfl.federation.machines.deployed import superlink_options
from copfl.federation.machines.planes import FLEET, Planes
from copfl.federation.machines.supernode import Connection
from copfl.federation.protocol import secret_sharing

# The parameters by which copfl calls a function of Flower; positional ones in their order.
PARAMETERS = {
    "get_fab_config": ["fab_file"],
    "get_fused_config_from_fab": ["fab_file", "run"],
    "http_request_response": ["server_address", "insecure", "root_certificates", "authentication_keys"],
    "message_from_proto": ["message_proto"],
    "message_to_proto": ["message"],
    "pull_objects": ["initial_backoff"],
    "push_objects": ["objects", "push_object_fn", "object_ids_to_push"],
    "pull_and_inflate_object_from_tree": ["return_type", "initial_backoff", "max_time"],
}


def calls_of(place: Any, name: str) -> list[ast.Call]:
    """The calls of this name in the source of a function or a module."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(place)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == name]


@pytest.mark.parametrize("name", sorted(flower_api.PRIVATE))
def test_every_private_name_is_there(name: str) -> None:
    value = getattr(flower_api, name)
    if name in PARAMETERS:
        parameters = inspect.signature(value).parameters
        assert [p for p in PARAMETERS[name] if p not in parameters] == [], f"of {name}: {list(parameters)}"


def test_the_limits_of_connections_are_those_of_flowers_server() -> None:
    """`limit_connections` replaces `uvicorn.run` of the module; what Flower passes itself would replace the limits."""
    module = flower_api.superlink_module
    (call,) = calls_of(module, "uvicorn.run")
    assert module.uvicorn.run is uvicorn.run
    module = SimpleNamespace(uvicorn=SimpleNamespace(run=uvicorn.run))
    connections.limit_connections(module)
    assert not {*module.uvicorn.run.keywords} & {keyword.arg for keyword in call.keywords}


def test_what_stands_before_flowers_server_is_outermost(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.superlink.main import create_app
    from starlette.middleware import Middleware

    monkeypatch.setattr(
        flower_api.extensions, "get_middleware", lambda: (Middleware(Planes), Middleware(Bodies))
    )
    names = [one.cls for one in create_app().user_middleware]
    assert names[:2] == [Planes, Bodies]
    assert len(names) > 2  # Flower's own are behind: they ask who it is, after they have read the body


def test_a_run_starts_by_the_function_that_is_checked() -> None:
    """It is looked up in its module for each request, where copfl has put its own."""
    router = importlib.import_module("flwr.superlink.routers.control.router")
    assert len(calls_of(router.start_run, "control_handlers.start_run")) == 1
    assert router.control_handlers is flower_api.control_handlers


def test_the_options_of_the_server_are_flowers() -> None:
    """A release that serves HTTP alone drops options: copfl names none that Flower calls deprecated."""
    parser = flower_api.superlink_module._parse_args_run_superlink()
    for secure in (True, False):
        given = superlink_options("127.0.0.1", 8800, "superlink.db", secure=secure)
        parser.parse_args(given)
        for action in parser._actions:
            if {*action.option_strings} & {*given}:
                assert "deprecated" not in str(action.help).lower(), action.option_strings


def test_nothing_of_grpc_is_used() -> None:
    assert not [name for name, place in flower_api.PRIVATE.items() if "grpc" in place.lower()]
    machines = Path(inspect.getfile(flower_api)).parent
    assert not [path.name for path in machines.glob("*.py") if "grpc" in path.read_text().lower()]


def test_parts_of_messages_are_sent_where_large_bodies_are_allowed() -> None:
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    with_bytes = {
        path
        for (_, path), kind in PROTOBUF_REQUEST_TYPES.items()
        if path.startswith(FLEET) and any(field.type == field.TYPE_BYTES for field in kind.DESCRIPTOR.fields)
    }
    keys = {f"{FLEET}register-node", f"{FLEET}activate-node"}
    assert with_bytes - keys == {OBJECTS}
    assert 2 * FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE < MOST_OF_AN_OBJECT


def test_the_supported_versions_are_those_that_are_tried() -> None:
    """The range of pyproject.toml is the one of the page, and what constraints.txt has not, a job has."""
    root = Path(__file__).parents[3]
    (low, high) = re.findall(r'"flwr>=1\.(\d+),<1\.(\d+)"', (root / "pyproject.toml").read_text())[0]
    supported = [f"1.{minor}" for minor in range(int(low), int(high))]
    assert f"- Flower: {' and '.join(supported)}.\n" in (root / "docs" / "compatibility.md").read_text()
    pinned = re.findall(r"^flwr==(1\.\d+)", (root / "constraints.txt").read_text(), re.MULTILINE)
    workflow = (root / ".github" / "workflows" / "tests.yml").read_text()
    tried = re.findall(r'"(1\.\d+)\.\d+"', re.findall(r"^ +flower: (\[.*\])$", workflow, re.MULTILINE)[0])
    assert sorted([*pinned, *tried]) == supported
    assert version("flwr").rpartition(".")[0] in supported


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower's
def test_a_serverapp_may_take_minutes_to_start_and_is_lost_after_one_of_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's 30 seconds are less than the imports take on a busy machine, and it starts it again and again."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.supercore.constant import TaskType
    from flwr.supercore.object_store import ObjectStoreFactory

    corestate = flower_api.sql_corestate
    for name in ("HEARTBEAT_DEFAULT_INTERVAL", "HEARTBEAT_PATIENCE", "now"):
        monkeypatch.setattr(corestate, name, getattr(corestate, name))
    superlink.give_time_to_start(corestate)
    began, database = corestate.now(), str(tmp_path / "superlink.db")
    state = SqlLinkState(database, mock.Mock(), ObjectStoreFactory(database).store())
    state.initialize()
    task = state.create_task(TaskType.SERVER_APP, 1)
    assert task is not None
    for second, happens, is_right in (
        (0, state.claim_task, True),
        (200, state.claim_task, False),  # no second one is started
        (200, state.activate_task, True),
        (259, state.acknowledge_task_heartbeat, True),
        (320, state.acknowledge_task_heartbeat, False),
    ):
        monkeypatch.setattr(corestate, "now", lambda at=second: began + timedelta(seconds=at))
        assert bool(happens(task)) is is_right, (second, happens)


def test_a_refusal_interrupts_the_process_by_what_the_node_replaces() -> None:
    source = inspect.getsource(flower_api.fleet_http_connection)
    assert (
        source.count("os.kill(os.getpid(), signal.SIGINT)")
        == len(re.findall(r"\bos\.(?!getpid)", source))
        == 1
    )
    assert source.count("= make_simple_http_retry_invoker()") == 1
    retries = inspect.getsource(flower_api.fleet_http_connection.make_simple_http_retry_invoker)
    assert retries.count("os.kill(") == retries.count("def _should_giveup(exc: Exception)") == 1


def test_a_key_that_waits_for_its_admission_is_no_error_of_the_server() -> None:
    from flwr.superlink.servicer.fleet import fleet_handlers

    source = inspect.getsource(fleet_handlers)
    assert source.count(f'ValueError("{superlink.NOT_ADMITTED}') == 1
    error = f"[/v1/fleet/activate-node][ApiError:2004] Attempted: {superlink.NOT_ADMITTED}."
    lines = [logging.makeLogRecord({"msg": text}) for text in (error, "copfl: registered north.pub")]
    assert list(map(superlink.is_shown, lines)) == [False, True]


def test_a_name_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        flower_api.other  # noqa: B018


def test_a_connection_has_the_functions_that_flower_yields() -> None:
    source = inspect.getsource(flower_api.http_request_response)
    yielded = source[source.rindex("yield") :]
    assert yielded.count(",") + 1 >= len(Connection._fields) - 1


def test_keys_and_shares_are_those_of_flowers_own_secure_aggregation() -> None:
    """Two independent programs agree: ours over the same libraries, and Flower's."""
    from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
    from flwr.supercore.primitives import asymmetric

    secret = bytes(range(48))
    assert shamir.combine_shares(secret_sharing.split_secret(secret, 3, 5)[1:4]) == secret
    assert secret_sharing.combine_shares(shamir.create_shares(secret, 3, 5)[2:]) == secret
    ours, theirs = secret_sharing.new_key(), asymmetric.generate_key_pairs()
    public = asymmetric.public_key_to_bytes(theirs[1])
    agreed = secret_sharing.agreed_key(ours, public)
    other = asymmetric.bytes_to_public_key(secret_sharing.public_key(ours))
    key = symmetric_encryption.generate_shared_key(theirs[0], other)
    assert symmetric_encryption.decrypt(key, secret_sharing.seal(agreed, b"text")) == b"text"
    assert secret_sharing.unseal(agreed, symmetric_encryption.encrypt(key, b"text")) == b"text"
    assert secret_sharing.unseal(bytes(32), symmetric_encryption.encrypt(key, b"text")) is None
