"""Two planes at one port: members reach the fleet interface alone, and control is for this machine.

Flower serves its fleet, control and runtime interfaces at the same port, and asks for a login at the fleet
interface alone. Whoever reaches control can start and stop runs, and register and unregister nodes; whoever
reaches runtime can take the place of the ServerApp. Here a request from another machine is answered by the
fleet interface or not at all. Of control, only what copfl uses is served, to anybody.
"""

import ipaddress
from typing import Any

FLEET, CONTROL = "/v1/fleet/", "/v1/control/"
# What `copfl federate` and `flwr run`, `log`, `list`, `stop` and `supernode` need.
USED = {
    f"{CONTROL}{name}"
    for name in (
        "start-run",
        "stop-run",
        "list-runs",
        "stream-logs",
        "stream-run-events",
        "list-nodes",
        "register-node",
        "unregister-node",
    )
}


def is_served(path: str, client: str) -> bool:
    """Whether a request for this path from this address is answered.

    Args:
        path: Of the request.
        client: The address from which it came.
    """
    if path.startswith(FLEET):
        return True
    return is_this_machine(client) and (not path.startswith(CONTROL) or path in USED)


def is_this_machine(client: str) -> bool:
    """Whether an address is one by which no other machine can be the sender."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class Planes:
    """Middleware of Flower's server: other requests are as if their interfaces did not exist."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        client = (scope.get("client") or ("",))[0]  # behind a proxy of this machine: the proxy's own client
        if scope["type"] in ("http", "websocket") and not is_served(str(scope["path"]), str(client)):
            await PlainTextResponse("Not Found", 404)(scope, receive, send)
        else:
            await self.app(scope, receive, send)
