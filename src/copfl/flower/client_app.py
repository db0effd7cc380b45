"""The ClientApp: passes requests of the server to the node's worker. Without torch: a process per message."""

import os
import sys
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from copfl.errors import CopflError
from copfl.flower import worker
from copfl.flower.registry import greeting
from copfl.flower.transport import Content, as_record, content_of, refusal
from copfl.flower.worker import Request

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    """The number of this node's client."""
    return _reply(message, lambda content: greeting(context.node_config, content))


@app.train()
def train(message: Message, context: Context) -> Message:
    """The upload of one round."""
    return _reply(message, lambda content: _call("local_update", context, content))


@app.evaluate()
def join(message: Message, context: Context) -> Message:
    """A new client's primary metric before and after its local updates."""
    return _reply(message, lambda content: _call("personalise", context, content))


def _call(function: str, context: Context, content: Content) -> Content:
    request = Request(function, context.run_config, context.node_config, content, tuple(sys.path))
    return worker.answer(request, node=os.getppid())  # the executor, which ends with its SuperNode


def _reply(message: Message, answer: Callable[[Content], Content]) -> Message:
    try:
        content = answer(content_of(message))
    except CopflError as error:
        content = refusal(error)
    return Message(as_record(content), reply_to=message)
