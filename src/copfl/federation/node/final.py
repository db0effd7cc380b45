"""What a member answers after the last round: the metrics of the model that it gets, if no round evaluated it.

With partial participation, an evaluated round has the clients of that round only. Not with secure sums, whose
metrics are known by their mean alone.
"""

import dataclasses

import torch

from copfl import wire
from copfl.errors import WireError
from copfl.experiment.models.client_models import RECEIVED
from copfl.federation.node import remembered_run
from copfl.federation.node.bundle import write_bundle
from copfl.federation.node.data import LoadData, moved
from copfl.federation.node.evaluation import measure, scores_of
from copfl.federation.node.incoming import head_of, message_like
from copfl.federation.node.known_data import KnownData
from copfl.federation.node.ledger import Ledger, Release
from copfl.federation.node.node import CLIENT, Node
from copfl.federation.node.records import ClientRecords
from copfl.federation.node.update import reports_metrics, start_of
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.settings import TrainingSettings
from copfl.wire import Packet


def evaluate_after_rounds(
    settings: TrainingSettings, node: Node, packet: Packet, load_data: LoadData
) -> Packet:
    """The metrics of the model that this member would begin a further round with; it becomes the node's bundle.

    Args:
        settings: The federation's.
        node: The one that is asked.
        packet: The server's message, as it would begin a further round.
        load_data: Reads the node's data.
    """
    head, federation = head_of(settings, node, packet)._replace(kind=Field.FINAL), settings.federation
    if head.round != federation.rounds:
        raise WireError(f"it is of round {head.round}, and the run ends after {federation.rounds}")
    opened = wire.decode(packet, message_like(settings, head.client), head)
    counted = opened.about.get(Field.COUNTED, -1)
    if type(counted) is not int:
        raise WireError("its fields are not those that a copfl server sends")
    records = ClientRecords(node.folder, head.run)
    client, _ = start_of(settings, records, head, counted)
    # As of a round: one model. With several of the server's choice each answer would tell something else.
    records.ask(head.round, packet.body, counted, may_return=federation.session.rollback)
    numbered = node.numbered(head.client)
    data = load_data(settings, numbered)
    with torch.no_grad():
        client, down = moved((client, opened.record), data.task.device)
        model = settings.algorithm.personal_model(data.task, client, down)
        models = client, down, client, model
        measured = measure(settings.algorithm, data.task, *models, data.test, data.validation)
        model, measured = moved((model, measured), torch.device("cpu"))
    samples = KnownData(node.memory).name_of(data.samples)
    write_json(records.folder / CLIENT, {"client": head.client})
    remembered_run.remember(records.folder, settings, numbered, samples)
    if node.config.bundle and data.bundled:
        origin = dataclasses.replace(data.bundled.origin, stage=RECEIVED)
        facts = dataclasses.replace(data.bundled, origin=origin)
        scores = scores_of(data.task.metrics, measured, data.test, data.validation)
        write_bundle(records.folder, settings, facts, head, model, scores)
    reported = {}
    if reports_metrics(settings, node):
        Ledger(node.memory).enter(Release(samples, head.run, head.round, noise=0.0), node.policy.privacy)
        reported = {name: wire.plain(float(value)) for name, value in measured.tested.items()}
    return wire.encode((), head._replace(kind=Field.EVALUATED), about=reported)
