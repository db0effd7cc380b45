"""The tables of a run: layers, names, defaults, and what suits a data set."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.algorithms import ALGORITHMS, COPFL, FedAvg
from copfl.core.optim import Adam, Optimizer, Sgd
from copfl.data.arrays import from_arrays, joined
from copfl.data.partition import Partition
from copfl.data.samples import Dataset
from copfl.errors import UsageError
from copfl.experiment import components, config
from copfl.experiment.components import (
    DEFAULTS,
    KINDS,
    WRAPPERS,
    build_algorithm,
    default_rate,
    resolve,
    resolve_algorithm,
)
from copfl.experiment.config import Tables, partition_text
from copfl.experiment.run_settings import RunSettings
from copfl.parts import Pwpm
from copfl.parts.mamo import Mamo
from copfl.wrappers.robust import Clipped


def resolved(*layers: Tables, **fixed: object) -> Tables:
    return resolve(layers, fixed)


def test_nothing_said_is_copfl_on_digits() -> None:
    tables = resolved()
    assert [tables[kind].get("name") for kind in KINDS] == ["copfl", "mamo", "digits", "classes", "cnn", None]
    assert tables["optimizer"]["lr"] == DEFAULTS["digits"]["mamo"]["lr"]
    assert tables["partition"]["per_client"] == 3
    assert tables["run"] == {**vars(RunSettings()), "rounds": 40, "batch": 8}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_resolving_what_was_resolved_changes_nothing(name: str) -> None:
    tables = resolved({"algorithm": {"name": name}})
    again = config.read_toml(config.as_toml(tables).encode(), "it")
    assert resolved(again) == tables


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_type_of_every_option_is_known(name: str) -> None:
    for option in config.keywords_of(ALGORITHMS[name], skip=("optimizer",)):
        with pytest.raises(UsageError, match="must be"):
            resolved({"algorithm": {"name": name, option: {"no": "option"}}})
        with pytest.raises(UsageError, match=rf"{name}\.{option}="):
            config.checked(name, ALGORITHMS[name], {option: object()})


def test_a_percentage_of_the_rounds_is_a_number_of_rounds() -> None:
    for rounds, warmup in ((200, 100), (61, 30), (3, 2)):
        tables = resolved({"copfl": {"warmup": "50%"}, "run": {"rounds": rounds}})
        assert tables["algorithm"]["warmup"] == warmup
    addons = {"lr_schedule": "cosine", "lr_rounds": "25%"}
    assert resolved({"addons": addons, "run": {"rounds": 40}})["addons"]["lr_rounds"] == 10
    assert (
        resolved({"copfl": {"warmup": "25%"}})["algorithm"]["warmup"] == 10
    )  # of the 40 that suit the digits
    for wrong in ("50 %", "%", "-5%", "1e2%"):
        with pytest.raises(UsageError, match="a whole number"):
            resolved({"copfl": {"warmup": wrong}})


def test_a_table_is_titled_by_its_kind_or_by_what_is_chosen() -> None:
    assert resolved({"copfl": {"rate": 0.1}}) == resolved({"algorithm": {"rate": 0.1}})
    assert resolved({"mamo": {"lr": 0.1}}) == resolved({"optimizer": {"lr": 0.1}})
    with pytest.raises(UsageError, match='no table "fedavg"'):
        resolved({"fedavg": {"epochs": 2}})


def test_later_layers_win() -> None:
    file: Tables = {"copfl": {"rate": 0.1, "budget": 0.3}, "run": {"rounds": 5}}
    tables = resolved(file, {"algorithm": {"rate": 0.2}, "run": {"seed": 7}})
    assert (tables["algorithm"]["rate"], tables["algorithm"]["budget"]) == (0.2, 0.3)
    assert (tables["run"]["rounds"], tables["run"]["seed"]) == (5, 7)


def test_another_algorithm_leaves_the_options_and_the_optimizer_of_the_one_before() -> None:
    before = resolved({"copfl": {"rate": 0.1}, "model": {"width": 4}})
    tables = resolved(before, {"algorithm": {"name": "fedavg"}})
    assert tables["algorithm"] == {"name": "fedavg", "weights": "samples", "epochs": 1}
    assert (tables["optimizer"]["name"], tables["optimizer"]["lr"]) == (
        "sgd",
        DEFAULTS["digits"]["sgd"]["lr"],
    )
    assert tables["model"]["width"] == 4
    assert (
        resolved({"copfl": {"rate": 0.1}}, {"algorithm": {"name": "fedavg"}})["algorithm"]["name"] == "fedavg"
    )
    assert resolved(before, {"algorithm": {"name": "copfl"}}) == before


def test_what_suits_a_data_set_gives_way_to_what_is_said() -> None:
    tables = resolved({"data": {"name": "digits"}, "model": {"name": "mlp"}, "partition": {"name": "iid"}})
    assert tables["model"] == {"name": "mlp", "width": 64}
    assert tables["partition"] == {"name": "iid"}
    assert resolved({"data": {"name": "cifar10c", "dir": "x"}})["algorithm"]["rate"] == 0.15
    assert resolved({"data": {"name": "mini_imagenet", "dir": "x"}})["model"]["name"] == "resnet18"


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.npz").touch()
    names = {"data": "mine.npz", "model": "mlp", "partition": "iid"}
    mine = {kind: {"name": name} for kind, name in names.items()}
    assert resolved(mine)["data"]["name"] == str(tmp_path / "mine.npz")
    assert resolved({"data": {"name": "cifar10", "dir": "sets"}})["data"]["dir"] == str(tmp_path / "sets")
    monkeypatch.setenv("COPFL_DATA", "elsewhere")
    assert resolved({"data": {"name": "cifar10"}})["data"]["dir"] == str(tmp_path / "elsewhere")
    assert resolved({"data": {"name": "cifar10", "dir": "sets"}})["data"]["dir"] == str(tmp_path / "sets")


def test_a_partition_that_is_there_says_how_many_clients(tmp_path: Path) -> None:
    parts = tuple(np.array([n]) for n in range(3))
    partition = Partition(parts, parts, "by hand")
    assert resolved(partition=partition)["run"]["clients"] == 3
    partition.save(tmp_path / "who.json")
    tables = resolved({"partition": {"name": str(tmp_path / "who.json")}})
    assert tables["partition"] == {"name": str(tmp_path / "who.json")}
    assert tables["run"]["clients"] == 3
    with pytest.raises(UsageError, match="clients=4, but the partition is of 3"):
        resolved({"run": {"clients": 4}}, partition=partition)


def test_a_value_stands_in_for_its_table() -> None:
    algorithm = FedAvg(epochs=2)
    tables = resolved(algorithm=algorithm)
    assert tables["algorithm"] == {"value": repr(algorithm)}
    assert "optimizer" not in tables
    with pytest.raises(UsageError, match="a value that a Python program passed"):
        resolved(tables)
    assert resolved(tables, algorithm=algorithm) == tables
    for table in ({"algorithm": {"epochs": 3}}, {"optimizer": {"lr": 0.1}}):
        with pytest.raises(UsageError, match="the algorithm is a value"):
            resolved(table, algorithm=algorithm)
    with pytest.raises(UsageError, match="the model is a value"):
        resolved({"model": {"width": 3}}, model=object())
    with pytest.raises(UsageError, match="the data is a value"):
        resolved({"data": {"severity": 3}}, data=object())
    assert resolved({"model": {"head": "last"}}, model=object())["model"] == {
        "head": "last",
        "value": "object",
    }


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"run": {"clients": 0}}, "clients=0 must be at least 1"),
        ({"run": {"clients": 2.5}}, r"run\.clients=2\.5 must be a whole number"),
        ({"run": {"rounds": 0}}, "rounds=0 must be at least 1"),
        ({"run": {"batch": 0}}, "batch=0 must be at least 1"),
        ({"run": {"chunk": -1}}, "chunk=-1 must be at least 0"),
        ({"run": {"seed": -1}}, "seed=-1 must be at least 0"),
        ({"run": {"seed": 2**63}}, r"below 2\^63"),
        ({"run": {"participation": 0.0}}, "participation=0.0 must be above 0"),
        ({"run": {"participation": 1.1}}, "participation=1.1 must be above 0 and at most 1"),
        ({"run": {"engine": "sequentiel"}}, 'no engine "sequentiel"; did you mean "sequential"'),
        ({"run": {"precision": "fp8"}}, 'no precision "fp8"'),
        ({"run": {"round": 3}}, 'no run option "round"; did you mean "rounds"'),
        ({"algorithm": {"name": "fedpack"}}, 'no algorithm "fedpack"; did you mean "fedpac"'),
        ({"algorithm": {"name": "fedavg", "rate": 0.1}}, 'no fedavg option "rate"'),
        ({"copfl": {"rate": 2}}, "rate=2.0 must lie between 0 and 1"),
        ({"optimizer": {"lr": float("nan")}}, "lr=nan must be a finite number"),
        ({"partition": {"name": "class"}}, 'no partition "class"; did you mean "classes"'),
        ({"classes": {"per_clint": 2}}, 'no classes option "per_clint"; did you mean "per_client"'),
        ({"model": {"name": "cnm"}}, 'no model "cnm"; did you mean "cnn"'),
        ({"cnn": {"wide": 3}}, 'no cnn option "wide"'),
        ({"modle": {"name": "cnn"}}, 'no table "modle"; did you mean "model"'),
    ],
)
def test_what_is_not_allowed_is_said_with_what_is(tables: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolved(tables)


def test_a_wrapper_has_a_table_only_if_it_was_given() -> None:
    assert not set(WRAPPERS) & resolved({"attack": {}, "robust": {}}).keys()
    tables = resolved(
        {"attack": {"name": "noise"}, "robust": {"name": "clip", "radius": 2}, "privacy": {"noise": 3}}
    )
    assert tables["attack"] == {"name": "noise", "fraction": 0.2, "strength": 0.0}
    assert tables["robust"] == {"name": "clip", "radius": 2.0, "norm_factor": 1.0, "weight_factor": 2.0}
    assert tables["privacy"] == {"clip": 1.0, "noise": 3.0, "delta": 1e-5}
    assert resolved(config.read_toml(config.as_toml(tables).encode(), "it")) == tables
    other = resolved(tables, {"robust": {"name": "median"}})
    assert other["robust"] == {"name": "median"}
    with pytest.raises(UsageError, match='no robust "medan"; did you mean "median"'):
        resolved({"robust": {"name": "medan"}})


def built(table: dict[str, Any], **optimizer: Any) -> Any:
    return build_algorithm(resolve_algorithm(table, optimizer))


def test_an_algorithm_is_built_with_its_keywords_and_an_optimizer() -> None:
    made = built({"name": "copfl", "rate": 0.1}, lr=0.01)
    assert isinstance(made, COPFL)
    assert made.growth.rate == 0.1
    assert made.optimizer == Mamo(lr=0.01)
    assert built({"name": "fedavg"}, name="adam") == FedAvg(Adam())
    assert built({"name": "fedavg"}) == FedAvg(Sgd())
    with pytest.raises(UsageError, match='no optimizer "adm"; did you mean "adam"'):
        built({"name": "fedavg"}, name="adm")


def test_text_that_cannot_be_written_to_a_file_is_refused() -> None:
    with pytest.raises(UsageError, match="not valid Unicode text"):
        resolved({"data": {"name": "\udc96"}})


def test_natural_clients_are_as_many_as_the_groups(tmp_path: Path) -> None:
    y = np.arange(120) % 2
    np.savez(tmp_path / "mine.npz", x=np.zeros((120, 3)), y=y, group=np.repeat(np.arange(12), 10))
    data, by_group = {"name": str(tmp_path / "mine.npz")}, {"name": "by_group"}
    assert resolve([{"data": data, "partition": by_group}], {})["run"]["clients"] == 12
    few: Tables = {"data": data, "partition": by_group, "run": {"clients": 4}}
    assert resolve([few], {})["run"]["clients"] == 4
    assert resolve([{"data": data}], {})["run"]["clients"] == 12
    classes: Tables = {"data": data, "partition": {"name": "classes"}}
    assert resolve([classes], {})["run"]["clients"] == 10


def test_the_partition_where_none_is_given() -> None:
    x = np.zeros((20, 3))
    parts = [from_arrays(x, np.arange(20) % 2), from_arrays(x, np.arange(20) % 2)]
    natural, values = joined(parts), from_arrays(x, np.linspace(0, 1, 20))
    for dataset, scheme in ((parts[0], "classes"), (natural, "by_group"), (values, "iid")):
        assert resolve([{}], {"data": dataset})["partition"]["name"] == scheme
    assert resolve([{}], {"data": natural})["run"]["clients"] == 2
    for name, scheme in (("diabetes", "iid"), ("wine", "dirichlet")):
        tables = resolve([{"data": {"name": name}}], {})
        assert (tables["partition"]["name"], tables["model"]["name"]) == (scheme, "mlp")
    assert resolve([{"data": {"name": "wine"}, "partition": {"name": "iid"}}], {})["partition"] == {
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
    assert resolved({"data": data})["model"]["name"] == model


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
    for optimizer, usual, published in (("adam", 1e-3, 1e-4), ("mamo", 1e-3, 1e-4), ("sgd", 0.1, 0.01)):
        chosen = {"algorithm": {"name": algorithm}, "optimizer": {"name": optimizer}}
        assert resolved(own, chosen)["optimizer"]["lr"] == usual == default_rate(optimizer, "visits.csv")
        assert resolved({"data": {"name": "cifar10"}}, chosen)["optimizer"]["lr"] == published
        assert resolved(own, chosen, {"optimizer": {"lr": 0.7}})["optimizer"]["lr"] == 0.7
        lora = resolved(own, chosen, {"adapter": {"name": "lora"}})
        head = resolved(own, chosen, {"model": {"name": "mlp", "train": "head"}})
        assert lora["optimizer"]["lr"] == head["optimizer"]["lr"] == (0.1 if optimizer == "sgd" else 1e-2)
        assert default_rate(optimizer, "visits.csv", "hf:base") == published
        assert default_rate(optimizer, "visits.csv", "hf:base", adapted=True) == usual  # of 1, 3 and 10 times
    data = from_arrays(np.zeros((10, 3, 8, 8), np.float32), np.arange(10) % 2, name="cifar10")
    found = resolved(data=data)
    assert (found["model"]["name"], found["optimizer"]["lr"]) == ("resnet18", 1e-4)


def test_the_options_of_a_model_that_was_chosen_may_be_set_by_its_name() -> None:
    own: Tables = {"data": {"name": "visits.csv", "target": "outcome"}, "mlp": {"width": 8}}
    assert resolved(own)["model"]["width"] == 8


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
    for tables in [resolve([{}], {"data": value}) for value in values] + [
        resolve([table], {}) for table in names
    ]:
        assert (tables["partition"]["name"], tables["run"]["clients"]) == ("by_group", 3)
        assert partition_text(tables) == "3 clients, partition by_group (natural clients)"
    for name, scheme in (("plain.npz", "classes"), ("values.npz", "iid")):
        tables = resolve([{"data": {"name": name}}], {})
        assert (tables["partition"]["name"], tables["run"]["clients"]) == (scheme, 10)
    assert resolve([{"data": {"name": "cinic10"}}], {})["partition"]["name"] == "classes"


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    for clients in (3, 4):
        np.savez(path, x=np.zeros((60, 3)), y=np.arange(60) % 2, group=np.arange(60) % clients)
        os.utime(path, ns=(clients, clients))
        assert resolve([{"data": {"name": str(path)}}], {})["run"]["clients"] == clients


@pytest.mark.parametrize("data", ["digits", "wine", "cifar10", "cifar10c"])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_as_a_value_has_the_numbers_that_it_has_by_name(name: str, data: str) -> None:
    layer: Tables = {"data": {"name": data}}
    by_name = components.resolved([{**layer, "algorithm": {"name": name}}], {}).algorithm
    for value in (ALGORITHMS[name], ALGORITHMS[name]()):
        assert components.resolved([layer], {"algorithm": value}).algorithm == by_name


def test_numbers_that_an_author_chose_stay() -> None:
    @dataclass(frozen=True)
    class Chosen(FedAvg):
        optimizer: Optimizer = field(default_factory=lambda: Sgd(lr=0.03))

    @dataclass(frozen=True)
    class Other(FedAvg):
        optimizer: Optimizer = field(default_factory=Adam)

    def on_digits(value: Any) -> Any:
        algorithm: Any = components.resolved([{"data": {"name": "digits"}}], {"algorithm": value}).algorithm
        return algorithm.optimizer

    assert on_digits(Chosen()) == Sgd(lr=0.03)
    assert on_digits(FedAvg(Sgd(lr=0.01))) == Sgd(lr=0.01)  # the default of Sgd, but chosen
    assert on_digits(FedAvg(Sgd(momentum=0.9))) == Sgd(lr=0.1, momentum=0.9)  # the rate is not
    assert on_digits(Other()) == Adam(lr=1e-3)
    assert on_digits(Clipped(FedAvg())) == Sgd(lr=0.1)
    chosen = COPFL(Mamo(lr=1e-3), growth=Pwpm(rate=0.25))
    assert components.resolved([{"data": {"name": "cifar10c"}}], {"algorithm": chosen}).algorithm == chosen
