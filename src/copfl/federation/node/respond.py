"""The node's door: a message in, an answer out, which the audit log has before it leaves. Without torch.

`docs/architecture.md` lists the way of a message from here.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from copfl.errors import CopflError, UsageError, WireError
from copfl.federation.node import audit_log
from copfl.federation.node.acceptance import accept
from copfl.federation.node.node import Node, NodeAnswer
from copfl.federation.node.worker import call
from copfl.federation.protocol.messages import (
    HELLO,
    NO_PACKET,
    REQUESTS,
    Content,
    Field,
    Message,
    parsed,
    refusal,
)
from copfl.federation.protocol.node_config import NodeConfig, state_dir
from copfl.federation.protocol.proposal import CHALLENGE, KEY, from_text, hello_statement
from copfl.settings.federation import is_plain_name


def respond(
    message: Message, run_config: Mapping[str, Any], options: Mapping[str, Any], process: int
) -> Content:
    """The answer to a message, which the audit log has before it leaves; an error is a refusal.

    Args:
        message: The server's.
        run_config: What the server says that the run is; the signed proposal is in it.
        options: What the node's owner set.
        process: The id of the process with which the node's worker ends.
    """
    try:
        config = NodeConfig.parse(options)
        accepted = accept(config, run_config)
        if message.content is None:
            raise WireError(NO_PACKET)
        if message.kind == HELLO:
            answer = NodeAnswer(greeting(accepted.node, message.content))
        elif message.kind not in REQUESTS:
            raise UsageError(f"a node of copfl does not answer {message.kind[:40]!r}")
        elif config.worker:
            answer = call(accepted, message.kind, message.content, process)
        else:
            from copfl.federation.node.resident import Resident

            answer = Resident().answer(accepted, message.kind, message.content)
    except CopflError as error:
        answer = NodeAnswer(refusal(error, map(str, options.values())))
    return logged(answer, message, run_config, options)


def greeting(node: Node, content: Content) -> Content:
    """A node's answer to the server's greeting: the number of its client, signed with its key.

    Args:
        node: The one that accepted the proposal.
        content: The server's greeting, with a challenge to sign.
    """
    run, challenge = (parsed(content[0]).get(name) for name in ("run", CHALLENGE))
    if not isinstance(run, str) or not is_plain_name(run):  # the name of a folder on this node
        raise WireError("the server's greeting names no run")
    client, proposal = node.client_in(run), node.proposal
    if proposal is None:
        return json.dumps({"client": client}), b""
    if run != proposal.run or not isinstance(challenge, str):
        raise WireError(f"the server's greeting is not of run {proposal.run}, or asks for no signature")
    key = node.key
    signature = key.sign(hello_statement(proposal, challenge, client))
    return json.dumps({"client": client, Field.MEMBER: key.public, Field.SIGNATURE: signature}), b""


def logged(
    answer: NodeAnswer, message: Message, run_config: Mapping[str, Any], options: Mapping[str, Any]
) -> Content:
    """The content of an answer, once the audit log has it; a refusal if that cannot be written.

    Args:
        answer: What would leave.
        message: The server's.
        run_config: What the server says that the run is; the signed proposal is in it.
        options: What the node's owner set.
    """
    stated = None
    with contextlib.suppress(UsageError):  # also one that was not accepted, if its coordinator signed it
        stated = from_text(run_config.get(KEY)).proposal
    try:
        question = message.content or ("", b"")
        entry = audit_log.entry_of(message.kind, question, answer.content, stated, answer.epsilon)
        audit_log.append(state_dir(options), entry)
    except CopflError as error:
        return refusal(error, map(str, options.values()))
    return answer.content
