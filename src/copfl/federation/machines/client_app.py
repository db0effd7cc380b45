"""The ClientApp: passes requests of the server to the node's worker. Without torch: a process per message.

Flower's own SuperNode starts it. copfl's (`supernode`) does the same in one process, without the app.
"""

import os

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from copfl.federation.machines.flower_transport import as_message, as_record
from copfl.federation.node.respond import respond

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def reply(message: Message, context: Context) -> Message:
    """The client's number, its upload of a round, or a new client's metrics, as the server asks.

    Args:
        message: Flower's.
        context: Flower's: the run config, and what the node's owner set.
    """
    # The worker ends with the executor, which ends with its SuperNode.
    content = respond(as_message(message), context.run_config, context.node_config, os.getppid())
    return Message(as_record(content), reply_to=message)
