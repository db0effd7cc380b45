"""The tables of a run: layers, names, defaults, and what suits a data set."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms import ALGORITHMS, COPFL, FedAvg
from copfl.core.optim import Adam, Optimizer, Sgd
from copfl.data.arrays import from_arrays, joined
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset
from copfl.errors import UsageError
from copfl.parts import Pwpm
from copfl.parts.mamo import Mamo
from copfl.settings import named_code, schema, toml
from copfl.settings.checking import SettingError, checked, parameters_of
from copfl.settings.complete import complete
from copfl.settings.components import WRAPPERS, build, component
from copfl.settings.data import data_record, state_of
from copfl.settings.facts import Facts
from copfl.settings.merging import merge
from copfl.settings.schema import Run, RunSettings
from copfl.settings.suggestions import usual_rates
from copfl.settings.toml import Tables
from copfl.settings.validation import usual_options, validate
from copfl.wrappers.robust import Clipped


def resolved(*layers: Tables, **fixed: object) -> Tables:
    return complete(*layers, values=fixed).tables()


PAPERS: Tables = {"algorithm": {"name": "copfl"}}


def test_an_algorithm_alone_is_trained_on_digits() -> None:
    tables = resolved(PAPERS)
    names = {kind: table.get("name") for kind, table in tables.items()}
    chosen = {
        "algorithm": "copfl",
        "optimizer": "mamo",
        "data": "digits",
        "partition": "classes",
        "model": "cnn",
    }
    assert names == {**chosen, "run": None}
    assert tables["optimizer"]["lr"] == 3e-3  # fifteen samples a client
    assert tables["partition"]["per_client"] == 3
    assert tables["run"] == {**vars(RunSettings()), "rounds": 40, "batch": 8}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_resolving_what_was_resolved_changes_nothing(name: str) -> None:
    tables = resolved({"algorithm": {"name": name}})
    again = toml.read(toml.written(tables).encode(), "it")
    assert resolved(again) == tables


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_type_of_every_option_is_known(name: str) -> None:
    for option in parameters_of(ALGORITHMS[name], skip=("optimizer",)):
        with pytest.raises(UsageError, match="must be"):
            resolved({"algorithm": {"name": name, option: {"no": "option"}}})
        with pytest.raises(UsageError, match=rf"algorithm\.{option}="):
            checked("algorithm", ALGORITHMS[name], {option: object()})


def test_a_percentage_in_a_preset_is_of_the_runs_rounds() -> None:
    for rounds, warmup in ((200, 100), (61, 30), (3, 2)):
        assert complete({"run": {"rounds": rounds}}, preset="demo").algorithm.options["warmup"] == warmup
    assert complete(preset="plus").algorithm.options["warmup"] == 30  # of the 40 that suit the digits
    assert complete({"data": {"name": "cifar10"}}, preset="plus").algorithm.options["warmup"] == 75
    with pytest.raises(SettingError, match=r"algorithm\.warmup='50%' must be a whole number"):
        resolved({"algorithm": {"name": "copfl", "warmup": "50%"}})


def test_a_table_is_titled_by_its_kind_alone() -> None:
    for title in ("copfl", "mamo", "classes", "cnn"):
        with pytest.raises(
            SettingError, match=f"{title}={{.*}} is no setting; allowed are adapter, addons, algorithm"
        ):
            resolved({title: {"rate": 0.1}})


def test_later_layers_win() -> None:
    file: Tables = {"algorithm": {"name": "copfl", "rate": 0.1, "budget": 0.3}, "run": {"rounds": 5}}
    tables = resolved(file, {"algorithm": {"rate": 0.2}, "run": {"seed": 7}})
    assert (tables["algorithm"]["rate"], tables["algorithm"]["budget"]) == (0.2, 0.3)
    assert (tables["run"]["rounds"], tables["run"]["seed"]) == (5, 7)


def test_another_algorithm_leaves_the_options_and_the_optimizer_of_the_one_before() -> None:
    before = resolved({"algorithm": {"name": "copfl", "rate": 0.1}, "model": {"width": 4}})
    tables = resolved(before, {"algorithm": {"name": "fedavg"}})
    assert tables["algorithm"] == {"name": "fedavg", "weights": "samples", "epochs": 1}
    assert (tables["optimizer"]["name"], tables["optimizer"]["lr"]) == ("adam", 3e-3)
    assert tables["model"]["width"] == 4
    assert (
        resolved({"algorithm": {"name": "copfl", "rate": 0.1}}, {"algorithm": {"name": "fedavg"}})[
            "algorithm"
        ]["name"]
        == "fedavg"
    )
    assert resolved(before, {"algorithm": {"name": "copfl"}}) == before


def test_what_suits_a_data_set_gives_way_to_what_is_said() -> None:
    tables = resolved({"data": {"name": "digits"}, "model": {"name": "mlp"}, "partition": {"name": "iid"}})
    assert tables["model"] == {"name": "mlp", "width": 64}
    assert tables["partition"] == {"name": "iid"}
    assert resolved(PAPERS, {"data": {"name": "cifar10c", "dir": "x"}})["algorithm"]["rate"] == 0.15
    assert resolved(PAPERS, {"data": {"name": "mini_imagenet", "dir": "x"}})["model"]["name"] == "resnet18"


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "mine.npz", x=np.zeros((10, 3), np.float32), y=np.arange(10) % 2)
    names = {"data": "mine.npz", "model": "mlp", "partition": "iid"}
    mine = {kind: {"name": name} for kind, name in names.items()}
    assert resolved(mine, PAPERS)["data"]["name"] == str(tmp_path / "mine.npz")
    sets = {"data": {"name": "cifar10", "dir": "sets"}}
    assert resolved(sets, PAPERS)["data"]["dir"] == str(tmp_path / "sets")
    monkeypatch.setenv("COPFL_DATA", "elsewhere")
    assert resolved({"data": {"name": "cifar10"}}, PAPERS)["data"]["dir"] == str(tmp_path / "elsewhere")
    assert resolved(sets, PAPERS)["data"]["dir"] == str(tmp_path / "sets")


def test_a_partition_that_is_there_says_how_many_clients(tmp_path: Path) -> None:
    parts = tuple(np.array([n]) for n in range(3))
    partition = Partition(parts, parts, "by hand")
    assert resolved(partition=partition)["run"]["clients"] == 3
    partition.save(tmp_path / "who.json")
    tables = resolved({"partition": {"name": str(tmp_path / "who.json")}})
    assert tables["partition"] == {"name": str(tmp_path / "who.json")}
    assert tables["run"]["clients"] == 3
    with pytest.raises(UsageError, match=r"run\.clients=4 is not the number of clients of the partition, 3"):
        resolved({"run": {"clients": 4}}, partition=partition)


@dataclass(frozen=True)
class Mine(FedAvg):
    """An algorithm of a module that can be imported."""

    strength: float = 0.5


def test_an_algorithm_that_is_a_value_is_written_as_its_name_and_options() -> None:
    made = resolved(algorithm=FedAvg(Adam(lr=0.3), epochs=2))
    assert made == resolved(
        {"algorithm": {"name": "fedavg", "epochs": 2}, "optimizer": {"name": "adam", "lr": 0.3}}
    )
    made = resolved(algorithm=Mine(strength=0.7))
    assert made["algorithm"]["name"] == f"{__name__}:Mine"
    assert made["algorithm"]["strength"] == 0.7
    with named_code.scope():
        named_code.name(__name__)
        assert algorithm_of(complete(made)) == Mine(Adam(lr=3e-3), strength=0.7)
    assert complete(values={"optimizer": Sgd(lr=0.7)}).optimizer.lr == 0.7


def test_a_class_that_nobody_can_import_is_named_by_its_content() -> None:
    @dataclass(frozen=True)
    class Inner(FedAvg):
        """Of a function, so that nothing else can import it."""

        share: float = 0.5

    tables = resolved(algorithm=Inner(Sgd(lr=0.3), share=0.25))
    name = tables["algorithm"]["name"]
    assert re.fullmatch(r"Inner@[0-9a-f]{12}", name)
    assert (tables["algorithm"]["share"], tables["optimizer"]["lr"]) == (0.25, 0.3)
    assert resolved(tables) == tables  # this program has passed it
    with pytest.raises(
        UsageError, match=r"the algorithm is Inner of a Python program, .*pass it again, as it was: alg"
    ):
        resolved({"algorithm": {"name": f"Inner@{'0' * 12}"}})


def test_a_value_without_a_name_stands_in_for_its_table() -> None:
    @dataclass(frozen=True)
    class Inner(FedAvg):
        """With more than plain options."""

        shape: object = ((1, 2), 3)

    algorithm = Inner(Sgd(lr=0.3), epochs=2, shape={"a": 1})
    tables = resolved(algorithm=algorithm)
    assert re.fullmatch(rf"{re.escape(repr(algorithm))}@[0-9a-f]{{12}}", tables["algorithm"]["value"])
    assert "optimizer" not in tables
    with pytest.raises(UsageError, match="a value that a Python program passed"):
        resolved(tables)
    assert resolved(tables, algorithm=algorithm) == tables
    for path, table in (
        ("algorithm.epochs", {"algorithm": {"epochs": 3}}),
        ("algorithm.lr", {"optimizer": {"lr": 0.1}}),
    ):
        with pytest.raises(SettingError, match=f"{path}=.* cannot be set: the algorithm is a value"):
            resolved(table, algorithm=algorithm)
    with pytest.raises(SettingError, match="the model is a value"):
        resolved({"model": {"width": 3}}, model=object())
    with pytest.raises(SettingError, match="the data is a value"):
        resolved({"data": {"severity": 3}}, data=object())
    of_model = resolved({"model": {"head": "last"}}, model=object())["model"]
    assert of_model.keys() == {"head", "value"}
    assert str(of_model["value"]).startswith("object@")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"run": {"clients": 0}}, r"run.clients=0 must be a whole number, at least 1 and at most 10,000,000"),
        ({"run": {"clients": 2.5}}, r"run\.clients=2\.5 must be a whole number"),
        ({"run": {"clients": "ten"}}, r"run\.clients=.ten. must be a whole number"),
        ({"run": {"rounds": 0}}, "run.rounds=0 must be a whole number, at least 1"),
        ({"run": {"batch": 0}}, "run.batch=0 must be a whole number, at least 1"),
        ({"run": {"chunk": -1}}, "run.chunk=-1 must be a whole number, at least 0"),
        ({"run": {"seed": -1}}, "run.seed=-1 must be a whole number, at least 0"),
        ({"run": {"seed": 2**63}}, "run.seed=9223372036854775808 must be a whole number"),
        ({"run": {"participation": 0.0}}, "run.participation=0.0 must be a number, above 0 and at most 1"),
        ({"run": {"participation": 1.1}}, "run.participation=1.1 must be a number, above 0 and at most 1"),
        (
            {"run": {"engine": "sequentiel"}},
            "run.engine='sequentiel' is unknown.*did you mean \"sequential\"",
        ),
        ({"run": {"precision": "fp8"}}, "run.precision='fp8' is unknown; allowed are auto"),
        ({"run": {"round": 3}}, 'run.round=3 is no setting; did you mean "rounds"'),
        ({"run": {"lr": 3}}, 'run.lr=3 is no setting; did you mean "optimizer.lr"'),
        ({"algorithm": {"name": "fedpack"}}, "algorithm.name='fedpack' is unknown.*did you mean \"fedpac\""),
        (
            {"algorithm": {"name": "fedavg", "rate": 0.1}},
            "algorithm.rate=0.1 is no setting; allowed are epochs",
        ),
        ({"algorithm": {"name": "copfl", "rate": 2}}, "algorithm.rate=2.0 must lie between 0 and 1"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr=nan must be a finite number"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr=0.0 must be a number or left out, above 0"),
        ({"partition": {"name": "class"}}, "partition.name='class' is unknown.*did you mean \"classes\""),
        ({"partition": {"per_clint": 2}}, 'partition.per_clint=2 is no setting.*did you mean "per_client"'),
        ({"model": {"name": "cnm"}}, "model.name='cnm' is unknown.*did you mean \"cnn\""),
        ({"model": {"wide": 3}}, "model.wide=3 is no setting"),
        ({"modle": {"name": "cnn"}}, 'modle=.* is no setting.*did you mean "model"'),
    ],
)
def test_what_is_not_allowed_is_said_with_what_is(tables: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resolved(tables)


@pytest.mark.parametrize("preset", ["", "demo"])
@pytest.mark.parametrize("kind", ["algorithm", "data", "run"])
def test_what_is_no_table_is_refused(kind: str, preset: str) -> None:
    with pytest.raises(SettingError, match=f"{kind}=3 must be a table of settings"):
        complete({kind: 3}, preset=preset)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("optimizer", "set_to", "of_data", "counts"),
    [
        (Sgd(0.03), 0.5, 0.1, 0.5),  # what is set
        (Sgd(0.03), None, 0.1, 0.03),  # what the algorithm's authors chose
        (Sgd(), None, 0.1, 0.1),  # what suits the data
        (Adam(0.03), None, 0.1, 0.1),  # the algorithm's is another optimizer
        (Sgd(), None, None, 0.01),  # the default of the optimizer
        (Adam(0.03), None, None, 0.01),
    ],
)
def test_which_learning_rate_counts(
    optimizer: Any,
    set_to: float | None,
    of_data: float | None,
    counts: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("copfl.settings.validation.usual_optimizer", lambda *_, **__: optimizer)
    table = {"name": "sgd"} if set_to is None else {"name": "sgd", "lr": set_to}
    rates = {} if of_data is None else {"sgd": of_data}
    usual = usual_options(component("algorithm", {"name": "fedavg"}), table, rates)
    record = component("optimizer", {**usual, **table})
    assert (record.lr, type(record.lr)) == (counts, float)


def test_a_wrapper_has_a_table_only_if_it_was_given() -> None:
    assert not set(WRAPPERS) & resolved(PAPERS, {"attack": {}, "robust": {}}).keys()
    tables = resolved(
        {"attack": {"name": "noise"}, "robust": {"name": "clip", "radius": 2}, "privacy": {"noise": 3}}
    )
    assert tables["attack"] == {"name": "noise", "fraction": 0.2, "strength": 0.0}
    assert tables["robust"] == {"name": "clip", "radius": 2.0, "norm_factor": 1.0, "weight_factor": 2.0}
    assert tables["privacy"] == {"clip": 1.0, "noise": 3.0, "delta": 1e-5}
    assert resolved(toml.read(toml.written(tables).encode(), "it")) == tables
    other = resolved(tables, {"robust": {"name": "median"}})
    assert other["robust"] == {"name": "median"}
    with pytest.raises(UsageError, match=r'robust.name=.medan. is unknown.*did you mean "median"'):
        resolved({"robust": {"name": "medan"}})


def algorithm_of(run: Run) -> Any:
    return build("algorithm", run.algorithm, optimizer=run.optimizer)


def built(table: dict[str, Any], **options: Any) -> Any:
    chosen = component("algorithm", table)
    optimizer = component("optimizer", {**usual_options(chosen, options, {}), **options})
    return build("algorithm", chosen, optimizer=optimizer)


def test_an_algorithm_is_built_with_its_keywords_and_an_optimizer() -> None:
    made = built({"name": "copfl", "rate": 0.1}, lr=0.01)
    assert isinstance(made, COPFL)
    assert made.growth.rate == 0.1
    assert made.optimizer == Mamo(lr=0.01)
    assert built({"name": "fedavg"}, name="adam") == FedAvg(Adam())
    assert built({"name": "fedavg"}) == FedAvg(Sgd())
    with pytest.raises(UsageError, match=r'optimizer.name=.adm. is unknown.*did you mean "adam"'):
        built({"name": "fedavg"}, name="adm")


def test_text_that_cannot_be_written_to_a_file_is_refused() -> None:
    with pytest.raises(UsageError, match="not valid Unicode text"):
        resolved({"data": {"name": "\udc96"}})


def test_natural_clients_are_as_many_as_the_groups(tmp_path: Path) -> None:
    y = np.arange(120) % 2
    np.savez(tmp_path / "mine.npz", x=np.zeros((120, 3)), y=y, group=np.repeat(np.arange(12), 10))
    data, by_group = {"name": str(tmp_path / "mine.npz")}, {"name": "by_group"}
    assert complete({"data": data, "partition": by_group}).tables()["run"]["clients"] == 12
    few: Tables = {"data": data, "partition": by_group, "run": {"clients": 4}}
    assert complete(few).tables()["run"]["clients"] == 4
    assert complete({"data": data}).tables()["run"]["clients"] == 12
    classes: Tables = {"data": data, "partition": {"name": "classes"}}
    assert complete(classes).run.clients == 10


def test_the_partition_where_none_is_given() -> None:
    x = np.zeros((20, 3))
    parts = [from_arrays(x, np.arange(20) % 2), from_arrays(x, np.arange(20) % 2)]
    natural, values = joined(parts), from_arrays(x, np.linspace(0, 1, 20))
    for dataset, scheme in ((parts[0], "classes"), (natural, "by_group"), (values, "iid")):
        assert complete(values={"data": dataset}).tables()["partition"]["name"] == scheme
    assert complete(values={"data": natural}).tables()["run"]["clients"] == 2
    for name, scheme in (("diabetes", "iid"), ("wine", "dirichlet")):
        tables = complete({"data": {"name": name}}).tables()
        assert (tables["partition"]["name"], tables["model"]["name"]) == (scheme, "mlp")
    assert complete({"data": {"name": "wine"}, "partition": {"name": "iid"}}).tables()["partition"] == {
        "name": "iid"
    }


@pytest.mark.parametrize(
    ("data", "model"),
    [
        ({"name": "digits"}, "cnn"),
        ({"name": "visits.csv", "target": "outcome"}, "mlp"),
        ({"name": "notes.jsonl", "target": "topic", "text": "note"}, "embedding"),
        ({"name": "banking77"}, "embedding"),
        ({"name": "cifar10"}, "resnet18"),
    ],
)
def test_the_model_where_none_is_given_fits_the_samples(data: dict[str, str], model: str) -> None:
    assert resolved({"data": data}, PAPERS)["model"]["name"] == model


@pytest.mark.parametrize(
    ("shape", "model"),
    [((5,), "mlp"), ((2, 30), "cnn1d"), ((3, 8, 8), "cnn"), ((1, 2, 9), "mlp"), ((3, 65, 65), "resnet18")],
)
def test_the_model_for_own_data_follows_their_shape(
    shape: tuple[int, ...], model: str, tmp_path: Path
) -> None:
    x, y = np.zeros((10, *shape), np.float32), np.arange(10) % 2
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    for found in (
        resolved({"data": {"name": str(tmp_path / "mine.npz")}}),
        resolved(data=from_arrays(x, y)),
    ):
        assert found["model"]["name"] == model


@pytest.mark.parametrize("algorithm", ["copfl", "fedavg"])
def test_own_data_have_learning_rates_of_their_own_and_published_sets_the_papers(algorithm: str) -> None:
    own = {"data": {"name": "visits.csv", "target": "outcome"}}

    def tuned(tables: Tables) -> float | None:
        """The lowest rate that a tuning tries."""
        return usual_rates(Facts(merge([own, tables], {}), {}), by_rule=False).get(optimizer)

    for optimizer, usual, published in (("adam", 1e-3, 1e-4), ("mamo", 1e-3, 1e-4), ("sgd", 0.1, 0.01)):
        chosen = {"algorithm": {"name": algorithm}, "optimizer": {"name": optimizer}}
        assert resolved(own, chosen)["optimizer"]["lr"] == usual == tuned({})
        assert resolved({"data": {"name": "cifar10"}}, chosen)["optimizer"]["lr"] == published
        assert resolved(own, chosen, {"optimizer": {"lr": 0.7}})["optimizer"]["lr"] == 0.7
        lora = resolved(own, chosen, {"adapter": {"name": "lora"}})
        head = resolved(own, chosen, {"model": {"name": "mlp", "train": "head"}})
        assert lora["optimizer"]["lr"] == head["optimizer"]["lr"] == (0.1 if optimizer == "sgd" else 1e-2)
        assert tuned({"model": {"name": "hf:base"}}) is None  # the optimizer's own
        assert (
            tuned({"model": {"name": "hf:base"}, "adapter": {"name": "lora"}}) == usual
        )  # of 1, 3 and 10 times
    data = from_arrays(np.zeros((10, 3, 8, 8), np.float32), np.arange(10) % 2, name="cifar10")
    found = resolved(PAPERS, data=data)
    assert (found["model"]["name"], found["optimizer"]["lr"]) == ("resnet18", 1e-4)


def test_natural_clients_are_the_default_wherever_the_data_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, group = np.zeros((60, 3)), np.arange(60) % 2, np.repeat(["a", "b", "c"], 20)
    np.savez(tmp_path / "groups.npz", x=x, y=y, group=group)
    np.savez(tmp_path / "plain.npz", x=x, y=y)
    np.savez(tmp_path / "values.npz", x=x, y=np.linspace(0, 1, 60))
    users = {name: {"x": [[0.0, 1.0]] * 10, "y": [0, 1] * 5} for name in "abc"}
    (tmp_path / "leaf.json").write_text(json.dumps({"user_data": users}))
    code = "from copfl.data.arrays import from_arrays\nimport numpy as np\ndef data():\n"
    code += "    return from_arrays(np.zeros((60, 3)), np.arange(60) % 2, group=np.arange(60) % 3)\n"
    (tmp_path / "data_with_groups.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    dataset = from_arrays(x, y, group=group)
    values = (dataset, Dataset("mine", dataset.train, dataset.test, dataset.classes, dataset.groups))
    names: list[Tables] = [
        {"data": {"name": name}} for name in ("groups.npz", "leaf.json", "data_with_groups:data")
    ]
    for run in [complete(values={"data": value}) for value in values] + [
        complete(table, code="data_with_groups") for table in names
    ]:
        assert (run.partition.name, run.run.clients) == ("by_group", 3)
        assert run.partition_text == "3 clients, partition by_group (natural clients)"
    for name, scheme in (("plain.npz", "classes"), ("values.npz", "iid")):
        run = complete({"data": {"name": name}})
        assert (run.partition.name, run.run.clients) == (scheme, 10)
    assert complete({"data": {"name": "cinic10"}}, PAPERS).partition.name == "classes"


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    for clients in (3, 4):
        np.savez(path, x=np.zeros((60, 3)), y=np.arange(60) % 2, group=np.arange(60) % clients)
        os.utime(path, ns=(clients, clients))
        assert complete({"data": {"name": str(path)}}).run.clients == clients


def test_a_published_set_is_the_same_whatever_changes_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COPFL_DATA", raising=False)
    digits = data_record({"name": "digits"})
    before = state_of(digits)
    os.utime(tmp_path, ns=(1, 1))
    assert state_of(digits) == before


@pytest.mark.parametrize("data", ["digits", "wine", "cifar10", "cifar10c"])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_as_a_value_has_the_numbers_that_it_has_by_name(name: str, data: str) -> None:
    layer: Tables = {"data": {"name": data}}
    by_name = algorithm_of(complete({**layer, "algorithm": {"name": name}}))
    for value in (ALGORITHMS[name], ALGORITHMS[name]()):
        assert algorithm_of(complete(layer, values={"algorithm": value})) == by_name


@dataclass(frozen=True)
class ByAuthor(FedAvg):
    """Its author chose the learning rate."""

    optimizer: Optimizer = field(default_factory=lambda: Sgd(lr=0.03))


def test_numbers_that_an_author_chose_stay() -> None:
    @dataclass(frozen=True)
    class Chosen(FedAvg):
        optimizer: Optimizer = field(default_factory=lambda: Sgd(lr=0.03))

    @dataclass(frozen=True)
    class Other(FedAvg):
        optimizer: Optimizer = field(default_factory=Adam)

    def on_digits(value: Any) -> Any:
        algorithm: Any = algorithm_of(complete({"data": {"name": "digits"}}, values={"algorithm": value}))
        return algorithm.optimizer

    assert on_digits(Chosen()) == Sgd(lr=0.03)
    assert on_digits(FedAvg(Sgd(lr=0.01))) == Sgd(lr=0.01)  # the default of Sgd, but chosen
    assert on_digits(FedAvg(Sgd(momentum=0.9))) == Sgd(lr=0.1, momentum=0.9)  # the rate is not
    assert on_digits(Other()) == Adam(lr=3e-3)
    named = complete({"algorithm": {"name": f"{__name__}:ByAuthor"}}, code=__name__)
    assert named.optimizer.lr == 0.03
    assert on_digits(Clipped(FedAvg())) == Adam(lr=3e-3)
    assert on_digits(FedAvg(Sgd())) == on_digits(Clipped(FedAvg(Sgd()))) == Sgd(lr=0.1)  # SGD is chosen
    chosen = COPFL(Mamo(lr=1e-3), growth=Pwpm(rate=0.25))
    assert algorithm_of(complete({"data": {"name": "cifar10c"}}, values={"algorithm": chosen})) == chosen


def test_a_record_that_is_not_complete_is_completed() -> None:
    chosen = Run(algorithm=schema.Algorithm(name="fedavg"), run=RunSettings(rounds=3, clients=4))
    assert not chosen.is_complete
    completed = complete(chosen)
    assert completed == complete({"algorithm": {"name": "fedavg"}, "run": {"rounds": 3, "clients": 4}})
    assert complete(Run()) == complete()
    assert complete(chosen, {"run": {"rounds": 5}}).run.rounds == 5
    assert completed.is_complete
    assert complete(completed) == completed  # a batch that is the schema's default was chosen, too


def test_the_values_of_a_record_are_kept_when_it_is_completed() -> None:
    network = torch.nn.Linear(64, 10)
    completed = complete(Run(model=schema.Model(value=network, description="Linear")))
    assert completed.model.value is network


def test_a_federation_and_a_run_make_the_same_record_of_the_same_tables() -> None:
    tables = complete({"algorithm": {"name": "ditto"}, "adapter": {"name": "lora:r=4"}}).tables()
    chosen = {title: tables[title] for title in ("algorithm", "optimizer", "model", "adapter")}
    made = validate(chosen)
    assert {title: made.tables()[title] for title in chosen} == chosen
    assert not made.data
    assert not made.partition
