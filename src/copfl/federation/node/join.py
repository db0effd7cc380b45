"""What a node answers as a new client of a trained federation: its metric before and after its updates.

`resident` calls it for messages of the kind JOIN. It trains as a client does, and sends no weights.
"""

import logging

import torch

from copfl import wire
from copfl.core.algorithm import next_message
from copfl.core.evaluation import primary_metrics
from copfl.errors import WireError
from copfl.federation.node import remembered_run
from copfl.federation.node.bundle import write_bundle
from copfl.federation.node.data import LoadData, moved, node_data
from copfl.federation.node.evaluation import MeasuredModels, scores_of
from copfl.federation.node.incoming import decode
from copfl.federation.node.known_data import KnownData
from copfl.federation.node.ledger import Ledger, Release
from copfl.federation.node.node import Node
from copfl.federation.node.records import ClientRecords
from copfl.federation.node.update import plan_of
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.settings import TrainingSettings
from copfl.wire import Packet


def personalise(
    settings: TrainingSettings, node: Node, packet: Packet, load_data: LoadData = node_data
) -> Packet:
    """A new client's primary metric before and after its local updates. It sends no weights.

    Args:
        settings: The federation's.
        node: The one that is asked; it has no number.
        packet: The server's message, with the trained model.
        load_data: Reads the node's data.
    """
    if node.config.client >= 0:
        raise WireError(
            f"this node is client {node.config.client}; only a new client, without a number, can join"
        )
    head, down, fields = decode(settings, node, packet)
    policy, updates = node.policy, settings.federation.session.join
    if not updates or fields.get(Field.UPDATES) != updates:
        raise WireError(f"the run has {updates} local updates of new clients, and the message others")
    node, records = node.numbered(head.client), ClientRecords(node.folder, head.run)
    records.ask(head.round, packet.body, -1, may_return=settings.federation.session.rollback)
    data = load_data(settings, node)
    algorithm, task = settings.algorithm, data.task
    record = algorithm.client_init(task)
    down = moved(down, task.device)
    with torch.no_grad():
        initial = trained = algorithm.personal_model(task, record, down)
        for n in range(updates):
            batches = plan_of(settings, algorithm, record, head._replace(round=head.round + n), data)
            output = algorithm.client_update(task, record, down, data.train, batches)
            record, trained = output.client, output.trained
            down = next_message(algorithm, task, down, output.upload)
        scores = [primary_metrics(task, w, [data.test])[0] for w in (initial, trained)]
        before, after = map(wire.plain, scores)
        record, trained = moved((record, trained), torch.device("cpu"))
    records.save(head._replace(kind="client"), record, keep=head.round)
    samples = KnownData(node.memory).name_of(data.samples)
    remembered_run.remember(records.folder, settings, node, samples)
    name = task.metrics[0].name
    if data.bundled is not None:
        after_join = MeasuredModels({name: torch.tensor(scores[1], dtype=torch.float64)}, {})
        measured = scores_of(task.metrics, after_join, data.test)
        write_bundle(records.folder, settings, data.bundled, head, trained, measured)
    metrics = {f"{name}_before": before, f"{name}_after": after, "samples": int(data.train.size)}
    line = "reports" if policy.reports != "all" else "privacy.lifetime_epsilon"
    if line == "reports" or policy.privacy.lifetime_epsilon:  # they are of this node alone, without noise
        logging.getLogger("flwr").info("copfl: %s, which the policy keeps here [%s]", metrics, line)
        metrics = {}
    else:
        Ledger(node.memory).enter(Release(samples, head.run, head.round, noise=0.0), policy.privacy)
    return wire.encode((), head._replace(kind=Field.NEW_CLIENT), about=metrics)
