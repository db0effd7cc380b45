"""The ClientApp: passes requests of the server to the node's worker. Without torch: a process per message."""

import os
import sys

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from copfl.flower import worker
from copfl.flower.transport import HELLO, JOIN, TRAIN, as_record
from copfl.flower.worker import Request

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    """The number of this node's client."""
    return _reply(HELLO, message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """The upload of one round."""
    return _reply(TRAIN, message, context)


@app.evaluate()
def join(message: Message, context: Context) -> Message:
    """A new client's primary metric before and after its local updates."""
    return _reply(JOIN, message, context)


def _reply(kind: str, message: Message, context: Context) -> Message:
    request = Request("", context.run_config, context.node_config, path=tuple(sys.path))
    # The worker ends with the executor, which ends with its SuperNode.
    return Message(as_record(worker.respond(kind, message, request, os.getppid())), reply_to=message)
