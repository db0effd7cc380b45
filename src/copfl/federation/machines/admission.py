"""The answer of a site to its invitation, over the port that nodes reach: the server's side and the site's.

It is no service of its own: the request is one more path of the fleet interface. Whoever knows no invitation learns
nothing from it, and it admits nobody: an answer waits until the coordinator has compared its words.
"""

import asyncio
import ssl
from pathlib import Path
from typing import Any

from copfl import foreign
from copfl.errors import CopflError, RunError, UsageError, raised_as
from copfl.federation.machines.planes import FLEET
from copfl.federation.protocol.invitation import MOST_ANSWER
from copfl.federation.protocol.log_lines import logger
from copfl.federation.protocol.messages import printable
from copfl.federation.server import invitations

PATH = f"{FLEET}copfl-answer"
TIMEOUT = 15.0  # seconds
PLAIN = {"Accept-Encoding": "identity"}  # what is compressed may grow a thousandfold


class NotThere(RunError):
    """No server answers, yet."""


class Admission:
    """Middleware of Flower's server: answers to the invitations of the app in a folder."""

    def __init__(self, app: Any, folder: Path) -> None:
        self.app, self.folder = app, folder
        self.one_at_a_time = asyncio.Semaphore(1)  # so that many posts occupy one processor at most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import JSONResponse

        content = b""
        try:
            async with asyncio.timeout(TIMEOUT):
                async for chunk in Request(scope, receive).stream():
                    content += chunk
                    if len(content) > MOST_ANSWER:
                        break
        except (TimeoutError, ClientDisconnect):
            return  # nothing is kept of whom does not finish
        try:
            async with self.one_at_a_time:
                state = await run_in_threadpool(self._received, content)
            response = JSONResponse({"state": state})
        except CopflError as error:
            logger.warning("copfl: an answer to an invitation was refused: %s", printable(error))
            response = JSONResponse({"refused": printable(error)}, status_code=403)
        await response(scope, receive, send)

    def _received(self, content: bytes) -> str:
        """The state of the site that answers; the coordinator reads in the log what to do."""
        state = invitations.receive(self.folder, content)
        site = invitations.answering(self.folder, content)
        if what_to_do := site.what_to_do(self.folder):
            logger.info("copfl: %s %s: %s", site.invitation.site, site.state, what_to_do)
        return state


def send(address: str, authority: str, document: bytes) -> str:
    """The state of a site after its answer has arrived; a CopflError says who must do what.

    Args:
        address: HOST:PORT of the server.
        authority: The certificate by which the server is known, as PEM.
        document: The answer.
    """
    import httpx

    with raised_as(
        UsageError, "the certificate of the authority cannot be used: {}", ValueError, ssl.SSLError
    ):
        context = ssl.create_default_context(cadata=authority)
    try:
        with (
            httpx.Client(verify=context, timeout=TIMEOUT, trust_env=False) as client,
            client.stream("POST", f"https://{address}{PATH}", content=document, headers=PLAIN) as reply,
        ):
            content = b""
            for chunk in reply.iter_raw():
                content += chunk
                if len(content) > MOST_ANSWER:  # of no server of copfl: it may have no end
                    break
    except httpx.TransportError as error:
        if "certificate has expired" in str(error):
            raise RunError(
                f"a certificate of the server at {address} has expired by this machine's clock, and nothing was sent: "
                "look at the clock, then telephone the coordinator, who renews it (copfl federate rotate)"
            ) from error
        if "certificate" in str(error).lower():
            raise RunError(
                f"another server than that of the invitation answers at {address}, and was told nothing; ask the "
                f"coordinator by telephone ({printable(error, 200)})"
            ) from error
        raise NotThere(
            f"the server does not answer at {address} ({printable(error, 200)}): ask the coordinator whether it "
            "runs (copfl federate server), and your network whether this machine may reach that port; nothing is "
            "lost"
        ) from error
    try:
        fields = foreign.json_of(content)
        answer = str(fields["state"] if reply.status_code == httpx.codes.OK else fields["refused"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"what answers at {address} is not a server of copfl (HTTP {reply.status_code}); ask the coordinator"
        ) from error
    if reply.status_code != httpx.codes.OK:
        raise UsageError(f"the server refuses: {printable(answer)}")
    return printable(answer)
