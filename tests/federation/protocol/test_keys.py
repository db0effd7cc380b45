"""Private keys are files of their owner alone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.errors import UsageError
from copfl.federation import init
from copfl.federation.machines.deployed import serve
from copfl.federation.protocol.keys import make_key, read_key
from copfl.federation.server.certificates import issue_server, make_certificates
from copfl.settings.flat import nested
from tests.federation.network import CONFIG


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_private_key_that_others_can_use_is_refused_as_by_ssh(mode: int, tmp_path: Path) -> None:
    make_key(tmp_path / "north key")
    (tmp_path / "north key").chmod(mode)
    with pytest.raises(UsageError, match=rf"mode is {mode:04o}: `chmod 600 '.*north key'`"):
        read_key(tmp_path / "north key")
    (tmp_path / "north key").chmod(0o400)
    read_key(tmp_path / "north key")


def test_a_server_does_not_begin_with_a_key_that_others_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_server", lambda address: pytest.fail("it begins to listen"))
    app = init(tmp_path / "app", nested(CONFIG), host="localhost", port=8899, secure=True)
    (app / "keys" / "server.key").chmod(0o644)
    with pytest.raises(UsageError, match=r"chmod 600 .*server\.key"):
        serve(app)


def test_the_authoritys_key_is_a_private_key_too(tmp_path: Path) -> None:
    make_certificates(tmp_path / "keys", "localhost", tmp_path / "authority")
    (tmp_path / "authority" / "ca.key").chmod(0o644)
    with pytest.raises(UsageError, match=r"chmod 600 .*ca\.key"):
        issue_server(tmp_path / "keys", "localhost", tmp_path / "authority" / "ca.key")
