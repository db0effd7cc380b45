"""The server's rounds over any transport: send, add up the uploads, checkpoint, and record every failure.

A round ends when every selected client has answered or failed, or at its deadline. With fewer uploads than
its minimum it waits for nodes to return. The server keeps sums, a checkpoint, and each client's mask on disk:
a mask is sent again only when it changes.
"""

import hashlib
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, blank_samples, example_output, message_to_new_client, received
from copfl.core.batches import choose
from copfl.core.evaluation import is_evaluated
from copfl.core.halves import DIFFERENCE, HALF
from copfl.core.payload import innermost, nbytes
from copfl.errors import CopflError, WireError, raised_as
from copfl.experiment.analysis import evidence
from copfl.experiment.final import FINAL, in_words
from copfl.experiment.records import FinalEvaluation, latest
from copfl.federation.protocol import secure_total
from copfl.federation.protocol.events import Event, Log, silent
from copfl.federation.protocol.halves import HALVES, LOSSES, SAMPLES, first_clients
from copfl.federation.protocol.messages import JOIN, Field, Reply, Transport, printable
from copfl.federation.protocol.noise import epsilons, upload_noise
from copfl.federation.protocol.round_record import RoundRecord
from copfl.federation.protocol.secure_sum import SMALLEST_COHORT, Floats
from copfl.federation.protocol.settings import TrainingSettings
from copfl.federation.server.exchange import Exchange, ServerRound
from copfl.federation.server.folder import ServerFolder, as_text
from copfl.federation.server.registry import ANSWER_TIMEOUT
from copfl.federation.server.secure_exchange import exchange_of
from copfl.measures.metrics import Metric
from copfl.wire import Head, Packet
from copfl.wrappers.privacy import Private

SUFFIXES = ("", "_before", "_global", "_after")  # of a metric's name: the model that it is of
ROUNDING = 1e-6  # of a metric that was computed in single precision
LARGEST_VALUE = 1e12  # of a metric, or an entry of an upload
MOST_SAMPLES = 1e9  # of one client
MAX_METRICS = 100  # metrics of a node that the server records
OWN = (HALF, DIFFERENCE, SAMPLES)  # names that are the server's, and no node's to report
# What a server's step raises on numbers that no training gives, such as a system of equations without a solution.
UNSOLVABLE = (RuntimeError, ValueError, ArithmeticError, IndexError)
LARGEST = sys.float_info.max  # an integer in JSON may have hundreds of digits


@dataclass
class TrainingServer:
    """The server of one run; it starts from the last checkpoint if the settings ask for it."""

    settings: TrainingSettings
    exchange: Exchange  # how the clients' uploads reach it: each, or only their sum

    def __post_init__(self) -> None:
        self.federation = self.settings.federation
        self.folder, self.log = self.exchange.folder, self.exchange.log
        self.round = 0  # the next one
        self.algorithm = self.settings.algorithm
        self.task = self.settings.task
        clients = self.federation.clients
        blank = blank_samples(self.task, self.settings.shape)
        example = example_output(self.algorithm, self.task, blank, self.federation.augment, clients)
        self.upload = example.upload  # the structure of every upload
        self._likes: dict[bool, secure_total.UploadSums] = {}  # by whether a round is evaluated
        self.decides = evidence.weighs(self.algorithm)  # whether clients that do harm lose their weight
        self.counted: dict[int, int] = {}  # client -> the last round that counted its upload
        self.state = self.algorithm.server_init(self.task, self.federation.clients)
        if self.federation.session.resume or self.federation.session.join:
            opened, self.round = self.folder.load(
                self.state, lambda round: self.exchange.head("server", round)
            )
            self.state = opened.record
            self.counted = {int(client): int(n) for client, n in opened.about[Field.COUNTED].items()}

    def rounds(self) -> Iterator[dict[str, Any]]:
        """The record of each round when it ends, after its checkpoint is on disk."""
        torch.set_num_threads(1)
        names = {"algorithm": self.settings.run.algorithm.name, "clients": self.federation.clients}
        secure = self.federation.secure.aggregation
        self.log(
            "", Event.STARTED, round=self.round + 1, rounds=self.federation.rounds, **names, secure=secure
        )
        while self.round < self.federation.rounds:
            started = time.time()
            chosen = choose(
                self.settings.run.run.seed, self.round, self.federation.clients, self.federation.selected
            )
            selected = [int(client) for client in chosen]
            self.log("", Event.ROUND_STARTED, round=self.round + 1, clients=selected)
            now = self.exchange.collect(self.round, selected, self)
            before, metrics = self.state, dict[str, torch.Tensor]()
            if now.total is not None:
                total = tree.narrow(now.total, now.dtypes)
                try:
                    self.state, metrics = self._stepped(before, total)
                except WireError as error:  # numbers of one member may give no model, one by one unremarkable
                    self._leave_without_result(now, str(error))
                else:
                    if now.half is not None:
                        self._compare_halves(now, before, total)
            if isinstance(self.algorithm, Private):
                metrics |= self._epsilons(self.algorithm, len(now.reports))
            self.counted |= dict.fromkeys(now.reports, now.number)
            self.round += 1
            record = _record(now, self.task.metrics[0].name, metrics, time.time() - started).as_json()
            if self.decides and evidence.looks(self.round, self.federation.clients):
                self._reweight([*self.folder.rounds()[: self.round - 1], record])
            counted = {str(client): n for client, n in self.counted.items()}
            fields = {Field.COUNTED: counted, "record": record}
            self.log(
                f"{as_text(record)}  of {self.federation.rounds} rounds",
                Event.ROUND_ENDED,  # before the record: each recorded round has one
                round=record["round"],
                accepted=record["clients"],
                left_out=record["why"],
                seconds=record["seconds"],
                bytes=record["bytes"],
                metric=record["metric"],
                value=record["mean"].get(record["metric"]),
            )
            self.folder.save(
                wire.encode(self.state, self.exchange.head("server", self.round), about=fields), record
            )
            yield record
        self._evaluate_the_others()

    def _stepped(self, before: Any, total: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """The server's record after its step by a total, and metrics; WireError if the total gives no model.

        Args:
            before: Its record.
            total: Of the uploads.
        """
        none = (
            "the numbers that were added up give no model ({}); a member may have sent others than its update"
        )
        with torch.no_grad(), raised_as(WireError, none, *UNSOLVABLE):
            after, metrics = self.algorithm.server_update(self.task, before, total)
        if not all(bool(torch.isfinite(t).all()) for t in tree.leaves(after) if t.is_floating_point()):
            raise WireError("the model would not be finite after this sum")
        return after, metrics

    def _leave_without_result(self, now: ServerRound, why: str) -> None:
        """Leaves all out of a round, so that they go on from the model before it."""
        text = f"round {now.number + 1} has no result: {why}"
        self.log(text, Event.NO_RESULT, round=now.number + 1, reason=printable(why))
        now.failures |= dict.fromkeys(now.reports, why)
        now.reports, now.total, now.per_client = {}, None, {}

    def _evaluate_the_others(self) -> None:
        """Asks the members that no round evaluated for the metrics of the model that each gets.

        With secure sums nobody is asked alone, and the log says how many the last evaluation has.
        """
        federation, every = self.federation, self.settings.run.run.eval_every
        clients, lines, primary = federation.clients, self.folder.rounds(), self.task.metrics[0]
        if federation.selected == clients:
            return
        if federation.secure.aggregation:
            count = len(lines[-1]["clients"])
            text = f"the last evaluation is the mean of {count} of {clients} clients, those of the last round"
            self.log(text, Event.EVALUATED, metric=primary.name, clients=count, of=clients)
            return
        evaluated = [line for line in lines if is_evaluated(line["round"] - 1, federation.rounds, every)]
        known, trained = ({n for line in some for n in line["clients"]} for some in (evaluated, lines))
        packets = {}
        for client in sorted({*range(clients)} - known):
            if client in trained or nbytes(self._received(client), of=self.task.initial.dtype):
                packets[client] = self.down(client, kind=Field.FINAL)
        answers = self.exchange.ask(ServerRound(self.round), Field.FINAL, packets, self._final_metrics)
        by_client = {client: values for client, values in sorted(answers.items()) if values}
        columns = sorted({name for values in by_client.values() for name in values})
        values = {name: np.array([of.get(name) for of in by_client.values()], np.float64) for name in columns}
        last = FinalEvaluation(self.round, [*by_client], values, sorted({*range(clients)} - trained))
        FINAL.write(last, self.folder.path)
        whole = last.completed(latest(lines, primary.name, clients), primary.name)
        present = whole[~np.isnan(whole)]
        mean = float(present.mean()) if len(present) else None
        text = f"after the last round {primary.title} is {primary.text(mean)}{primary.unit} in the mean of "
        text += f"{len(present)} of {clients} clients. {in_words(last, [*map(str, range(clients))])}"
        fields = {"metric": primary.name, "value": mean, "clients": len(present), "of": clients}
        self.log(text, Event.EVALUATED, **fields)

    def _final_metrics(self, client: int, packet: Packet) -> dict[str, float | None]:
        """The metrics that a member reports after the last round; none where its policy keeps them."""
        reported = wire.decode(packet, (), self.exchange.head(Field.EVALUATED, self.round, client)).about
        check_metrics(reported, self.task.metrics)
        return numbers(reported)

    def _received(self, client: int) -> Any:
        """What this client receives at the beginning of the next round."""
        return received(self.algorithm, self.state, torch.tensor(client))

    def _reweight(self, lines: list[dict[str, Any]]) -> None:
        """Takes their weight from the clients that these rounds show to do harm."""
        before = evidence.without_weight(self.algorithm, self.state)
        self.state = evidence.reweighted(self.algorithm, self.state, lines, self.federation.clients)
        for client in sorted(evidence.without_weight(self.algorithm, self.state) - before):
            self.log(f"client {client} has no weight from now on: it helps neither the others nor itself")

    def _compare_halves(self, now: ServerRound, before: Any, whole: Any) -> None:
        """Asks each client of the round for its losses with the models of both halves.

        Args:
            now: The round, with the total of the first half.
            before: The server's record before it.
            whole: The total of all clients.
        """
        first = now.reports.keys() & first_clients(self.federation, now.number)
        left_out = evidence.without_weight(self.algorithm, before)
        smaller = min(len(half - left_out) for half in (first, now.reports.keys() - first))
        if smaller < SMALLEST_COHORT:  # too few uploads of a half counted
            return
        half = tree.narrow(now.half, now.dtypes)
        totals = half, tree.each(torch.sub, whole, half)
        packets = {}
        try:
            after = [self._stepped(before, total)[0] for total in totals]  # of a half there may be no model
            for client in now.reports:
                models = tuple(received(self.algorithm, server, torch.tensor(client)) for server in after)
                head = self.exchange.head(HALVES, now.number, client)
                packets[client] = wire.encode(models, head, self.federation.network.wire)
        except WireError as error:  # a value does not fit into a shorter one of network.wire
            self.log(f"round {now.number + 1}: halves are not compared: {error}")
            return
        comparison = ServerRound(now.number)
        answers = self.exchange.ask(comparison, HALVES, packets, self._losses)
        for sizes, more in ((now.bytes_up, comparison.bytes_up), (now.bytes_down, comparison.bytes_down)):
            for client, size in more.items():
                sizes[client] += size
        sides: dict[int, float | None] = {client: 1.0 if client in first else -1.0 for client in now.reports}
        now.per_client[HALF] = sides | dict.fromkeys(now.reports.keys() & left_out, 0.0)
        now.per_client[DIFFERENCE] = {client: answers.get(client) for client in now.reports}
        messages = {hashlib.sha256(packet.body).hexdigest() for packet in packets.values()}
        failed = {str(client): why for client, why in sorted(comparison.failures.items())}
        now.halves = {"sha256": sorted(messages), "failed": failed}

    def _losses(self, client: int, packet: Packet) -> float | None:
        """The difference of the losses that a client reports; None if it has none."""
        fields = wire.decode(packet, (), self.exchange.head(LOSSES, self.round, client)).about
        losses = fields.get(Field.LOSSES)
        if not isinstance(losses, list) or len(losses) != 2:
            raise WireError("it does not report two losses")
        if None in losses:
            return None
        if not all(type(loss) in (int, float) and abs(loss) <= LARGEST_VALUE for loss in losses):
            raise WireError(f"it reports a loss that is no number of at most {LARGEST_VALUE:g}")
        return float(losses[1] - losses[0])

    def _epsilons(self, algorithm: Private, answers: int) -> dict[str, torch.Tensor]:
        """The epsilons after this round, from the number of answers in each."""
        earlier = [len(record["clients"]) for record in self.folder.rounds()[: self.round]]
        epsilons_now = epsilons(algorithm, [*earlier, answers], secure=self.federation.secure.aggregation)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in epsilons_now.items()}

    def down(self, client: int, *, kind: str = "down", **further: Any) -> Packet:
        """The message to one client: the global model, the last counted round, and the known masks.

        Args:
            client: The receiver.
            kind: Of the message.
            further: Fields that the message has as well.
        """
        masks = self.folder.masks(client, self.upload)
        fields = {
            Field.COUNTED: self.counted.get(client, -1),
            Field.KNOWN_MASKS: {path: wire.fingerprint(mask) for path, mask in masks.items()},
            **further,
        }
        head = self.exchange.head(kind, self.round, client)
        return wire.encode(self._received(client), head, self.federation.network.wire, about=fields)

    def add(self, now: ServerRound, client: int, packet: Packet) -> None:
        """Adds an upload to the round's total; WireError if it is invalid.

        Args:
            now: The round.
            client: The sender.
            packet: Its message.
        """
        if client in now.reports:
            raise WireError("its upload was counted in this round already")
        masks = self.folder.masks(client, self.upload)
        opened = wire.decode(
            packet, self.upload, self.exchange.head("upload", now.number, client), masks=masks
        )
        check_values(opened.record)
        check_metrics(opened.about.get(Field.METRICS), self.task.metrics)
        with torch.no_grad():
            summand = self.algorithm.summand(self.task, self.state, torch.tensor(client), opened.record)
        if not all(bool(torch.isfinite(t).all()) for t in tree.leaves(summand) if t.is_floating_point()):
            raise WireError("its contribution to the total is not finite")
        is_known = [path in masks and torch.equal(mask, masks[path]) for path, mask in opened.masks.items()]
        if not all(is_known):
            self.folder.save_masks(client, opened.masks)
        now.dtypes = [t.dtype for t in tree.leaves(summand)]
        now.total = tree.wide(summand) if now.total is None else tree.add(now.total, summand)
        if self.settings.run.run.benefit:
            is_first = client in first_clients(self.federation, now.number)
            in_first_half = tree.wide(summand if is_first else tree.each(torch.zeros_like, summand))
            now.half = in_first_half if now.half is None else tree.add(now.half, in_first_half)
            if (samples := _samples(self.algorithm, opened.record)) is not None:
                now.per_client.setdefault(SAMPLES, {})[client] = samples
        now.reports[client], now.bytes_up[client] = opened.about, packet.nbytes
        now.failures.pop(client, None)
        self.log("", Event.ACCEPTED, round=now.number + 1, client=client, bytes=packet.nbytes)

    @property
    def like(self) -> secure_total.UploadSums:
        """The structure of the sums of this round; the server sees no summand."""
        evaluated = is_evaluated(self.round, self.federation.rounds, self.settings.run.run.eval_every)
        if evaluated not in self._likes:
            shape, rules, augment = self.settings.shape, self.settings.rules, self.federation.augment
            example = secure_total.example(self.algorithm, self.task, shape, rules, augment, evaluated)
            self._likes[evaluated] = example
        return self._likes[evaluated]

    @property
    def size(self) -> int:
        """The entries of a vector that is added up unseen."""
        return sum(t.numel() for t in tree.leaves(self.like))

    def summed(self, now: ServerRound, values: Floats) -> None:
        """Enters the sum of all clients' vectors into the round; WireError if honest clients do not give it.

        Args:
            now: The round.
            values: The sum of the vectors of all its clients.
        """
        sums, clients = secure_total.sums_from(values, self.like), len(now.reports)
        secure_total.check_weights(
            sums, clients, self.settings.rules, noised=self.settings.noised is not None
        )
        means = secure_total.means(sums)
        # A mean is rounded as its summands are.
        check_metrics(means, self.task.metrics, max(ROUNDING, self.settings.rules.step))
        dtypes = [t.dtype for t in tree.leaves(self.like.total)]
        change = self._change_by(tree.narrow(sums.total, dtypes))
        now.secure_sum["change"] = change
        now.total, now.dtypes, now.means = sums.total, dtypes, means

    def _change_by(self, total: Any) -> float:
        """The norm of the global model's change by a sum; WireError if it is out of proportion.

        Of a model that begins at zero each entry may change by 1 at first.
        """
        after, _ = self._stepped(self.state, total)
        with torch.no_grad():
            clients = torch.tensor(0)
            before, later = (_model_of(received(self.algorithm, s, clients)) for s in (self.state, after))
        changes = [line["secure_aggregation"].get("change", 0.0) for line in self.folder.rounds()]
        norm, change = float(before.norm()), float((later - before).norm())
        usual = max([norm or math.sqrt(before.numel()), *changes])
        noise, most = self.settings.noised, self.federation.secure.change * usual
        if noise is not None:  # a mean has less noise than one upload
            most = max(most, noise.clip * (1 + 4 * upload_noise(noise) * math.sqrt(before.numel())))
        if self.federation.secure.change and change > most:
            raise WireError(
                f"the sum would change the model by {change:.3g}, and {most:.3g} is the most: a member may have "
                "added other numbers than its update; if all are honest, raise secure.change; "
                f"{secure_total.WHO_KNOWS}"
            )
        return change

    def personalise_new_clients(self) -> list[dict[str, Any]]:
        """The primary metric of every new client before and after its local updates of the trained model."""
        clients = self.federation.clients
        record = message_to_new_client(self.algorithm, self.state, torch.arange(clients))
        head = self.exchange.head("down", self.round, clients)  # no client's number: its own batches
        packet = wire.encode(
            record, head, self.federation.network.wire, about={Field.UPDATES: self.federation.session.join}
        )
        pending: dict[str, int] = {}
        results: dict[int, dict[str, Any]] = {}  # by node
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while time.monotonic() < deadline and (not results or pending):
            for node in self.exchange.transport.nodes():
                if node not in results:
                    results[node] = {"node": node, "why": f"no reply within {ANSWER_TIMEOUT:g} s"}
                    pending[self.exchange.transport.send(node, JOIN, packet, ANSWER_TIMEOUT)] = node
            for reply in self.exchange.transport.replies(list(pending)):
                node = pending.pop(reply.message_id)
                results[node] = {"node": node, **self._gain(reply, head._replace(kind=Field.NEW_CLIENT))}
                text = f"new client: {results[node]}"
                self.log(text, Event.NEW_CLIENT, **results[node] | {"node": str(node)})
            time.sleep(self.exchange.pause)
        return list(results.values())

    def _gain(self, reply: Reply, head: Head) -> dict[str, Any]:
        """The metrics that a new client reports, or why there are none."""
        try:
            metrics = numbers(wire.decode(Packet(*reply.checked()), (), head).about)
            check_metrics(metrics, self.task.metrics)
            name = self.task.metrics[0].name
            if None in (metrics.get(f"{name}_before"), metrics.get(f"{name}_after")):
                raise WireError(f"it does not report its {self.task.metrics[0].title} before and after")
            return {"metric": name, **metrics}
        except CopflError as error:
            return {"why": printable(error)}


def new_server(
    settings: TrainingSettings, transport: Transport, folder: ServerFolder, log: Log = silent, **options: Any
) -> TrainingServer:
    """The server of a run, with the exchange that its settings ask for.

    Args:
        settings: What the machines agreed on.
        transport: The network.
        folder: The server's, of this run.
        log: What is told to people, and to the audit log.
        options: The other fields of `Exchange`.
    """
    return TrainingServer(settings, exchange_of(settings, transport, folder, log, **options))


def _record(now: ServerRound, metric: str, metrics: dict[str, torch.Tensor], seconds: float) -> RoundRecord:
    """The round as a line of rounds.jsonl.

    Args:
        now: The round, which has ended.
        metric: The primary one.
        metrics: Of the server's step.
        seconds: That it took.
    """
    ids = sorted(now.reports)
    reported = {client: numbers(now.reports[client].get(Field.METRICS)) for client in ids}
    names = sorted({name for client in ids for name in reported[client]} - set(OWN))
    per_client: dict[str, dict[int, float | None]] = {n: {c: reported[c].get(n) for c in ids} for n in names}
    per_client["bytes_up"] = {client: float(now.bytes_up[client]) for client in ids}
    per_client["bytes_down"] = {client: float(now.bytes_down.get(client, 0)) for client in ids}
    per_client |= {name: {c: values.get(c) for c in ids} for name, values in now.per_client.items()}
    present = {name: [v for v in of.values() if v is not None] for name, of in per_client.items()}
    notes = {client: now.reports[client].get(Field.NOTE) for client in ids}
    return RoundRecord(
        number=now.number + 1,
        seconds=round(seconds, 3),
        clients=ids,
        left_out=now.failures,
        metric=metric,
        # Nodes may report 1e308, and JSON has no infinite mean.
        mean={n: wire.plain(sum(v) / len(v)) for n, v in sorted(present.items()) if v} | now.means,
        per_client=per_client,
        federation={name: wire.plain(float(value)) for name, value in sorted(metrics.items())},
        bytes_up=sum(now.bytes_up.values()),
        bytes_down=sum(now.bytes_down.values()),
        notes={client: printable(note) for client, note in notes.items() if note},
        secure_aggregation=now.secure_sum or None,
        halves=now.halves or None,
    )


def _model_of(message: Any) -> torch.Tensor:
    """The numbers of a server's message to a client as one vector: the model, or what it has in its place."""
    inner = innermost(message)
    tensors = [inner.w] if hasattr(inner, "w") else [t for t in tree.leaves(inner) if t.is_floating_point()]
    return torch.cat([t.double().reshape(-1) for t in tensors])


def _samples(algorithm: AnyAlgorithm, upload: Any) -> float | None:
    """The number of training samples in an upload; None where it has another weight."""
    while hasattr(algorithm, "algorithm"):  # of a wrapper
        algorithm = algorithm.algorithm
    is_weighted = getattr(algorithm, "weights", "") == "samples" and hasattr(upload, "size")
    return float(upload.size) if is_weighted else None


def check_values(upload: object) -> None:
    """WireError if an upload has a value that no training gives: one alone would decide the average."""
    for path, tensor in tree.named(upload):
        largest = float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
        if not largest <= LARGEST_VALUE:
            raise WireError(f"its {path} has a value of {largest:g}; at most {LARGEST_VALUE:g} is accepted")
        if (
            path.rpartition(".")[2] == "size"
            and not 0 <= float(tensor.min()) <= float(tensor.max()) <= MOST_SAMPLES
        ):
            raise WireError(f"it reports {float(tensor.max()):g} samples; 0 to {MOST_SAMPLES:g} are accepted")


def check_metrics(reported: object, metrics: Sequence[Metric], rounding: float = ROUNDING) -> None:
    """WireError if a metric has a value that it cannot have, such as an accuracy of 99.

    Args:
        reported: By name; another machine's.
        metrics: The federation's.
        rounding: By how much a value may be outside of its limits.
    """
    for name, value in (reported if isinstance(reported, dict) else {}).items():
        if not isinstance(value, int | float) or value != value:  # it is not defined for these samples
            continue
        low, high = -LARGEST_VALUE, LARGEST_VALUE
        for metric in metrics:
            if any(name == f"{metric.name}{suffix}" for suffix in SUFFIXES):
                # Of copfl's metrics that are no fractions, errors are positive, and r2 is at most 1.
                low = 0.0 if metric.fraction or (metric.kinds and not metric.higher_is_better) else low
                high = 1.0 if metric.fraction or (metric.kinds and metric.higher_is_better) else high
        if not low - rounding <= value <= high + rounding:
            report = f"{printable(name, 40)}={printable(value, 40)}"
            raise WireError(f"it reports {report}, which must be {low:g} to {high:g}")


def numbers(metrics: object) -> dict[str, float | None]:
    """The numbers among the metrics that a node reports, at most `MAX_METRICS`; None where not finite."""
    first_metrics = itertools.islice(metrics.items(), MAX_METRICS) if isinstance(metrics, dict) else ()
    values = {printable(k): v for k, v in first_metrics if v is None or isinstance(v, int | float)}
    return {k: float(v) if v is not None and abs(v) <= LARGEST else None for k, v in values.items()}
