"""The ClientApp: requests of the server to the functions of `node`; a CopflError becomes a refusal."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from copfl.errors import CopflError, DataError
from copfl.flower.registry import known_client
from copfl.flower.transport import Content, Field, as_record, content_of, parsed

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    """The number of this node's client. Flower starts a process per message, and this one needs no torch."""

    def client(content: Content) -> int:
        return known_client(context.node_config, str(parsed(content[0]).get("run", "")))

    return _reply(message, lambda content: (json.dumps({"client": client(content)}), b""))


@app.train()
def train(message: Message, context: Context) -> Message:
    """The upload of one round."""
    return _reply(message, lambda content: _call("local_update", context, content))


@app.evaluate()
def join(message: Message, context: Context) -> Message:
    """A new client's accuracy before and after its local updates."""
    return _reply(message, lambda content: _call("personalise", context, content))


def _call(function: str, context: Context, content: Content) -> Content:
    import torch

    from copfl.flower import node
    from copfl.flower.settings import settings_of
    from copfl.wire import Packet

    torch.set_num_threads(int(context.node_config.get("threads", 1)))
    answer: Callable[..., Packet] = getattr(node, function)
    return answer(settings_of(context.run_config), context.node_config, Packet(*content))


def _reply(message: Message, answer: Callable[[Content], Content]) -> Message:
    try:
        content = answer(content_of(message))
    except CopflError as error:
        logging.getLogger("flwr").error("copfl: %s", error)
        # Such errors may describe samples or contain paths: the server receives only that there is one.
        is_file = isinstance(error.__cause__, OSError)
        private = "data" if isinstance(error, DataError) else "state-dir" if is_file else ""
        reason = f"its {private} cannot be used; see the node's log" if private else str(error)
        content = json.dumps({Field.REFUSED: reason}), b""
    return Message(as_record(content), reply_to=message)
