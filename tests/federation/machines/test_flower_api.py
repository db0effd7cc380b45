"""What copfl takes from Flower's private modules is there, with the arguments and the shape that copfl relies on.

When a release of Flower changes one of them, this file fails first and says which.
"""

from __future__ import annotations

import inspect
import logging
import re
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.federation.machines import flower_api, superlink
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


@pytest.mark.parametrize("name", sorted(flower_api.PRIVATE))
def test_every_private_name_is_there(name: str) -> None:
    value = getattr(flower_api, name)
    if name in PARAMETERS:
        parameters = inspect.signature(value).parameters
        assert [p for p in PARAMETERS[name] if p not in parameters] == [], f"of {name}: {list(parameters)}"


def test_what_is_replaced_in_the_superlink_is_called_by_it() -> None:
    assert callable(flower_api.control_handlers.start_run)
    assert callable(flower_api.extensions.get_middleware)


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
