"""The ClientApp: Flower's messages in, `node`'s answers out. A person's mistake becomes a reply that says so."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from copfl.errors import CopflError, DataError
from copfl.flower.flower_transport import content_of, packet_of

log = logging.getLogger("flwr")


def hello(message: Message, context: Context) -> Message:
    """Which client this node is. Flower starts a process per message, so torch is not imported for it."""
    from copfl.flower.identity import known_client

    def say(head: str) -> str:
        return json.dumps({"client": known_client(context.node_config, str(json.loads(head).get("run", "")))})

    return _reply(message, lambda head, body: (say(head), b""))


def train(message: Message, context: Context) -> Message:
    """One turn of this node's client."""
    return _reply(message, lambda head, body: _answer("answer", context, head, body))


def join(message: Message, context: Context) -> Message:
    """A newcomer's turns."""
    return _reply(message, lambda head, body: _answer("personalise", context, head, body))


def _answer(what: str, context: Context, head: str, body: bytes) -> tuple[str, bytes]:
    import torch

    from copfl.flower import node
    from copfl.flower.settings import settings_of
    from copfl.wire import Packet

    torch.set_num_threads(int(context.node_config.get("threads", 1)))
    answer = {"answer": node.answer, "personalise": node.personalise}[what]
    return answer(settings_of(context.run_config), context.node_config, Packet(head, body))


def _reply(message: Message, answer: Callable[[str, bytes], tuple[str, bytes]]) -> Message:
    try:
        head, body = answer(*packet_of(message))
    except CopflError as error:
        log.error("copfl: %s", error)
        # What is wrong with the data is the node's own business: the server only hears that something is.
        why = (
            "its data cannot be used; the node's log says why" if isinstance(error, DataError) else str(error)
        )
        head, body = json.dumps({"refused": why}), b""
    return Message(content_of(head, body), reply_to=message)


app = ClientApp()
app.query()(hello)
app.train()(train)
app.evaluate()(join)
