"""Every registered algorithm obeys the laws, and each law catches an algorithm that breaks it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from copfl.algorithms import ALGORITHMS
from copfl.algorithms.copfl import COPFL
from copfl.algorithms.fedavg import FedAvg
from copfl.algorithms.fedper import FedPer
from copfl.core import Adam, AnyAlgorithm, ClientOutput, tree
from copfl.errors import UsageError
from copfl.parts import Cowa, Pwpm
from copfl.parts.averaging import Server, Total
from copfl.settings import presets
from copfl.settings.checking import with_options
from copfl.testing import LAWS, algorithm_checks, check_algorithm
from tests.kinds import quick
from tests.options import shown, variants
from tests.slow import slow

# To do it twice is to repeat it; as often as by default: engine/test_seed_batching.py and
# flower/test_rounds.py.
FEWER = {"fedrep": {"head_epochs": 2}, "fedbabu": {"tune_epochs": 2}, "pfedme": {"inner_steps": 2}}


@pytest.mark.parametrize("name", quick(ALGORITHMS, others=pytest.mark.job))
def test_every_algorithm_obeys_the_contract(name: str) -> None:
    """In two rounds: the first, and one that begins where a round ended; with clients of one batch and of two."""
    check_algorithm(ALGORITHMS[name](**FEWER.get(name, {})), rounds=2, batch=6)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name.endswith("_lora")])
def test_the_engines_agree_on_adapters_without_norms(name: str) -> None:
    """Of the others, "samples of two arrays" has networks without norms."""
    dict(algorithm_checks(ALGORITHMS[name](), norm="none", rounds=1))["engines agree"]()


def test_what_everybody_begins_with_is_no_leak() -> None:
    """Of a norm that is frozen the running variance stays 1, as is the weight of each client in a plain mean."""
    checks = dict(algorithm_checks(FedAvg(weights="equal"), norm="frozen", rounds=1))
    checks["personal entries stay"]()


class OwnRecord(NamedTuple):
    w: Tensor
    count: Tensor  # type: ignore[assignment]


@dataclass(frozen=True)
class HasARecordOfItsOwn(FedAvg):
    """A client that keeps its whole last model, and how often it trained."""

    def client_init(self, task: Any) -> Any:
        return OwnRecord(task.initial, torch.zeros(()))

    def global_model(self, task: Any, client: Any, down: Any) -> Any:
        return torch.cat([down.w, client.w[task.d :]])

    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        trained = self.fit(task, self.global_model(task, client, down), (), data, plan)
        return self.output(task, trained, data)._replace(client=OwnRecord(trained.w, client.count + 1))


def test_an_own_record_of_a_client_needs_its_statistics() -> None:
    with pytest.raises(
        UsageError, match=r"without `personal`.*method global_statistics\(self, task, client\)"
    ):
        check_algorithm(HasARecordOfItsOwn(), rounds=1)
    says = type(
        "Says",
        (HasARecordOfItsOwn,),
        {"global_statistics": lambda self, task, client: client.w[task.d :]},
    )
    dict(algorithm_checks(says(), rounds=1))["engines agree"]()


@slow  # that the engines agree with both: engine/test_mapping.py
def test_variants_obey_the_contract_too() -> None:
    check_algorithm(FedPer(Adam(keep=True), epochs=2, personal=("norms",)), rounds=2, batch=6)
    as_published = COPFL(
        growth=Pwpm(candidates="tensor"), contribution=Cowa(leave_one_out="paper"), merge="union"
    )
    check_algorithm(as_published, rounds=2, batch=6)


PRESETS = [presets.content(name)["algorithm"] for name in presets.names()]
OPTIONS = [*variants("copfl"), *({k: v for k, v in table.items() if k != "name"} for table in PRESETS)]


@pytest.mark.job
@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_copfl_has_no_side_effects_with_any_option_or_preset(options: dict[str, Any]) -> None:
    """That a run can be repeated and the engines agree, with them all: experiment/test_repeatable.py."""
    counted = {key: 1 if str(value).endswith("%") else value for key, value in options.items()}
    dict(algorithm_checks(with_options(COPFL(), counted), rounds=1))["no side effects"]()


# -- algorithms that break one law each ----------------------------------------------------------------------


@dataclass(frozen=True)
class EditsItsClient(FedAvg):
    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        client.personal.zero_()
        return super().client_update(task, client, down, data, plan)


@dataclass(frozen=True)
class EditsItsServer(FedAvg):
    def server_update(self, task: Any, server: Any, total: Any) -> Any:
        after, metrics = FedAvg().server_update(task, server, total)
        server.w.copy_(after.w)
        return server, metrics


@dataclass(frozen=True)
class Shakes(FedAvg):
    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        w = output.upload.w
        return output._replace(upload=output.upload._replace(w=w + torch.rand_like(w)))


@dataclass(frozen=True)
class Branches(FedAvg):
    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        return output if output.metrics["loss"] > 1e9 else output._replace(upload=output.upload)


class Remembering(NamedTuple):
    personal: Tensor
    moments: Any
    history: Any


@dataclass(frozen=True)
class Grows(FedAvg):
    """Its client's record grows with every round, as a list, a tuple or a tensor."""

    kind: str = "list"

    def client_init(self, task: Any) -> Any:
        start = {"list": [], "tuple": (), "tensor": torch.zeros(0, dtype=torch.float64)}[self.kind]
        personal, moments = super().client_init(task)
        return Remembering(personal, moments, start)

    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        loss = output.metrics["loss"]
        more: Any = (*client.history, loss)
        if self.kind == "list":
            more = list(more)
        elif self.kind == "tensor":
            more = torch.cat([client.history, loss[None]])
        return output._replace(client=Remembering(output.client.personal, output.client.moments, more))


@dataclass(frozen=True)
class ChangesItsType(FedAvg):
    def client_init(self, task: Any) -> Any:
        personal, moments = super().client_init(task)
        return Remembering(personal, moments, torch.zeros((), dtype=torch.int64))

    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        personal, moments = output.client
        return output._replace(client=Remembering(personal, moments, client.history + 0.5))


class Table(NamedTuple):
    w: Tensor
    rows: Tensor  # [N], what the server last heard of each client


class TableTotal(NamedTuple):
    w: Tensor
    size: Tensor
    rows: Tensor


class Addressed(NamedTuple):
    w: Tensor
    own: Tensor


def heard(number: int = 0) -> list[int]:
    return [number]


@dataclass(frozen=True)
class ByPosition(FedAvg):
    """The server keeps a number of each client and sends it back: matched by id, or in the order they come."""

    where: str = "nowhere"
    calls: list[int] = field(default_factory=heard)  # a state that nobody sees

    def server_init(self, task: Any, clients: int) -> Any:
        return Table(FedAvg().server_init(task, clients).w, torch.arange(clients, dtype=torch.float64))

    def downlink(self, server: Any, ids: Tensor) -> Any:
        rows = server.rows[: len(ids)] if self.where == "downlink" else server.rows[ids]
        return Addressed(server.w.expand(len(ids), -1), rows)

    def summand(self, task: Any, server: Any, id: Tensor, upload: Any) -> Any:
        clients = len(server.rows)
        if self.where == "summand":
            self.calls[0] += 1
            id = torch.tensor(self.calls[0] % clients)
        total = FedAvg().summand(task, server, id, upload)
        return TableTotal(total.w, total.size, tree.placed(upload.w[0], id, clients))

    def server_update(self, task: Any, server: Any, total: Any) -> Any:
        after, metrics = FedAvg().server_update(task, Server(server.w), Total(total.w, total.size))
        return Table(after.w, total.rows), metrics

    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        return output._replace(upload=output.upload._replace(w=output.upload.w + 0.01 * down.own))


@dataclass(frozen=True)
class LeaksPersonal(COPFL):
    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        shared = output.upload.shared._replace(values=output.client.w)
        return output._replace(upload=output.upload._replace(shared=shared))


class Talkative(NamedTuple):
    w: Tensor
    size: Tensor
    gossip: Tensor


@dataclass(frozen=True)
class LeaksStatistics(FedAvg):
    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        trained: Any = output.trained
        upload = Talkative(output.upload.w, output.upload.size, trained[task.d :])
        return output._replace(upload=upload)


@dataclass(frozen=True)
class DividesByNobody(FedAvg):
    def server_update(self, task: Any, server: Any, total: Any) -> Any:
        return Server(total.w / total.size), {}


@dataclass(frozen=True)
class ForgetsWhenNobodyAnswers(FedAvg):
    def server_update(self, task: Any, server: Any, total: Any) -> Any:
        return Server(total.w / total.size.clamp(min=1)), {}


class Crowd(NamedTuple):
    w: Tensor
    size: Tensor
    clients: Tensor


@dataclass(frozen=True)
class NeedsTwo(FedAvg):
    """Its weights are divided by one less than the clients, like a leave-one-out mean without a guard."""

    def summand(self, task: Any, server: Any, id: Tensor, upload: Any) -> Any:
        return Crowd(upload.w, upload.size, torch.ones_like(upload.size))

    def server_update(self, task: Any, server: Any, total: Any) -> Any:
        answered = total.clients > 0
        w = torch.where(answered, total.w / (total.clients - 1), server.w)
        return Server(w), {}


@dataclass(frozen=True)
class SaysNothing(FedAvg):
    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        return output._replace(metrics={"loss": output.metrics["loss"]})


@dataclass(frozen=True)
class Breaks(FedAvg):
    def client_update(self, task: Any, client: Any, down: Any, data: Any, plan: Any) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        return output._replace(upload=output.upload._replace(size=0 * output.upload.size / 0))


@dataclass(frozen=True)
class HidesItsNumbers(FedAvg):
    secret: float = field(default=0.5, repr=False)


class NoDataclass:
    """Not an algorithm at all."""


@dataclass
class Thawed:
    """A dataclass that can be changed while it runs."""

    epochs: int = 1


BROKEN: dict[str, tuple[Any, str]] = {
    "edits its client": (
        EditsItsClient(),
        "no side effects: client_update changed its arguments: 0.personal",
    ),
    "edits its server": (EditsItsServer(), "server_update changed its arguments"),
    "uses torch.rand": (Shakes(), "differs by|two results"),
    "branches on a value": (Branches(), "the rounds fail vmap: .*Python branch on a tensor"),
    "a growing list": (Grows(kind="list"), "the rounds fail .* not list"),
    "a growing tuple": (Grows(kind="tuple"), "the rounds fail"),
    "a growing tensor": (Grows(kind="tensor"), "the rounds fail|changed its shape"),
    "a count that becomes a fraction": (ChangesItsType(), "the rounds fail|changed its shape"),
    "a downlink by position": (ByPosition(where="downlink"), "against sequential|by position"),
    "a summand by position": (
        ByPosition(where="summand"),
        "two results|against sequential|order in which uploads arrive",
    ),
    "a leak in a masked vector": (LeaksPersonal(), "an upload carries values at personal coordinates"),
    "a leak of statistics": (LeaksStatistics(), "an upload carries local batch-norm statistics: gossip"),
    "0 / 0 when nobody answers": (DividesByNobody(), "not finite after a round without uploads"),
    "zeros when nobody answers": (ForgetsWhenNobodyAnswers(), "global model changed without uploads"),
    "1 / (N - 1)": (NeedsTwo(), "not finite"),
    "no weight among the metrics": (SaysNothing(), "its weight in the mean|'weight'"),
    "an upload that is not finite": (Breaks(), "not finite although its data are"),
    "a number that repr hides": (HidesItsNumbers(), "repr hides secret"),
    "no dataclass": (NoDataclass(), "an algorithm is a frozen dataclass"),
    "a dataclass that is not frozen": (Thawed(), "an algorithm is a frozen dataclass"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_contract_catches(what: str) -> None:
    algorithm, message = BROKEN[what]
    with pytest.raises(AssertionError, match=message):
        check_algorithm(algorithm, rounds=2, batch=6)


def test_each_law_is_a_check_with_a_name() -> None:
    assert [law for law, _ in algorithm_checks(FedAvg())] == list(LAWS)


def test_the_toys_break_nothing_else() -> None:
    check_algorithm(ByPosition(where="nowhere"), rounds=2, batch=6)  # the table by id is a good algorithm


def test_a_plain_algorithm_is_not_accused() -> None:
    algorithm: AnyAlgorithm = replace(FedAvg(), epochs=2)
    check_algorithm(algorithm, rounds=2, batch=5, norm="group")
