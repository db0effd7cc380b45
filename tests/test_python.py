"""What a researcher types on the first day works, or is one clear error."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import copfl
from copfl.algorithms import FedAvg
from copfl.data.sets import datasets
from copfl.errors import CopflError
from copfl.settings import arguments
from copfl.settings.record import declared
from copfl.settings.schema import Run, RunSettings

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
FRAME = pd.DataFrame({**{f"x{n}": X[:, n] for n in range(4)}, "y": Y, "site": np.arange(60) % 3})
HEART = Path(datasets.__file__).parent / "embedded" / "heart.csv"
ONE: dict[str, Any] = {"rounds": 1, "rivals": False}
OF_NUMPY: dict[str, Any] = {**ONE, "rounds": np.int32(1), "clients": np.int64(2), "lr": np.float32(0.01)}
COLUMNS: dict[str, Any] = {"target": "y", "client": "site"}


@dataclass(frozen=True)
class Here(FedAvg):
    """An algorithm of this module."""


def of_a_notebook() -> Any:
    """An algorithm of a cell, which nobody can import."""

    @dataclass(frozen=True)
    class Mine(FedAvg):
        strength: float = 1.0

    return Mine


def pairs(data: Any) -> list[Any]:
    return [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data]


SITES = {name: rows.drop(columns="site") for name, rows in FRAME.groupby("site")}
WORKS: dict[str, Callable[[], copfl.Result]] = {
    "a data frame": lambda: copfl.run("fedavg", FRAME, **COLUMNS, **ONE),
    "a frame per site": lambda: copfl.run("fedavg", SITES, target="y", **ONE),
    "a list of frames": lambda: copfl.run("fedavg", [*SITES.values()], target="y", **ONE),
    "train and test": lambda: copfl.run("fedavg", (FRAME[:40], FRAME[40:]), **COLUMNS, **ONE),
    "x and y apart": lambda: copfl.run("fedavg", (FRAME[["x0", "x1"]], FRAME["y"]), clients=2, **ONE),
    "arrays": lambda: copfl.run("fedavg", (X, Y), clients=2, **ONE),
    "arrays of sites": lambda: copfl.run("fedavg", {"north": (X, Y), "south": (X, 1 - Y)}, **ONE),
    "torch": lambda: copfl.run("fedavg", pairs([(X, Y), (X, Y)]), **ONE),
    "a loader per client": lambda: copfl.run(
        "fedavg", [DataLoader(one, batch_size=7) for one in pairs([(X, Y), (X, Y)])], **ONE
    ),
    "data as of resume": lambda: copfl.run("fedavg", data=FRAME, **COLUMNS, **ONE),  # type: ignore[call-arg]
    "data of sites as of resume": lambda: copfl.run("fedavg", data=SITES, target="y", **ONE),  # type: ignore[call-arg]
    "arrays as of resume": lambda: copfl.run("fedavg", data=(X, Y), clients=2, **ONE),  # type: ignore[call-arg]
    "a task by name": lambda: copfl.run("fedavg", FRAME, task="classification", **COLUMNS, **ONE),
    "a file": lambda: copfl.run(
        "fedavg", HEART, target="disease", client="hospital", data_options={"missing": "fill"}, **ONE
    ),
    "the class of an optimizer": lambda: copfl.run(
        "fedavg", (X, Y), clients=2, optimizer=torch.optim.SGD, lr=0.1, **ONE
    ),
    "a partial of an optimizer": lambda: copfl.run(
        "fedavg", (X, Y), clients=2, optimizer=functools.partial(torch.optim.Adam, lr=0.01), **ONE
    ),
    "a network": lambda: copfl.run("fedavg", (X, Y), clients=2, model=nn.Linear(4, 2), **ONE),
    "a function that makes one": lambda: copfl.run(
        "fedavg", (X, Y), clients=2, model=lambda: nn.Linear(4, 2), **ONE
    ),
    "a class of this module": lambda: copfl.run(Here, (X, Y), clients=2, **ONE),
    "a class of a cell": lambda: copfl.run(of_a_notebook(), (X, Y), clients=2, **ONE),
    "a name in place of a record": lambda: copfl.run(Run(algorithm="fedper"), (X, Y), clients=2, **ONE),  # type: ignore[arg-type]
    "options in the name": lambda: copfl.run("fedprox:mu=0.1:lr=0.05", (X, Y), clients=2, **ONE),
    "options in every name": lambda: copfl.run(
        "fedavg",
        (X, Y),
        clients=2,
        optimizer="sgd:momentum=0.9",
        partition="dirichlet:alpha=0.5",
        model="mlp:width=8",
        server="momentum:lr=0.5",
        **ONE,
    ),
    "numbers of numpy": lambda: copfl.run("fedavg", (X, Y), **OF_NUMPY),
    "a device of torch": lambda: copfl.run(
        "fedavg",
        (X, Y),
        clients=2,
        device=torch.device("cpu"),  # type: ignore[arg-type]
        **ONE,
    ),
    "lists": lambda: copfl.run("fedavg", (X.tolist(), Y.tolist()), clients=2, **ONE),
    "a series": lambda: copfl.run("fedavg", (X, pd.Series(Y)), clients=2, **ONE),
    "columns without names": lambda: copfl.run(
        "fedavg",
        pd.DataFrame(np.column_stack([X, Y])),
        target=4,  # type: ignore[arg-type]
        clients=2,
        **ONE,
    ),
    "columns called own and site": lambda: copfl.run(
        "fedavg", FRAME.rename(columns={"site": "own", "x0": "site"}), target="y", client="own", **ONE
    ),
    "a server's step by name": lambda: copfl.run("fedavg", (X, Y), clients=2, server="momentum", **ONE),
}


@pytest.mark.parametrize("what", WORKS)
def test_it_works(what: str) -> None:
    result = WORKS[what]()
    assert np.isfinite(result.accuracy[-1]).all()
    assert len(str(result)) < 200


class ReturnsAPair(FedAvg):
    def client_update(self, *records: Any) -> Any:
        output = super().client_update(*records)
        return output.client, output.upload


COMPLETE = copfl.complete({"algorithm": {"name": "fedavg"}, "run": {"rounds": 1}})
FAILS: dict[str, tuple[Callable[[], Any], str]] = {
    "dataset and data": (
        lambda: copfl.run("fedavg", "digits", data=(X, Y)),  # type: ignore[call-arg]
        "dataset and data are both set; leave out data",
    ),
    "a task that is none": (lambda: copfl.run("fedavg", FRAME, task="wishing", target="y"), "wishing"),
    "keywords beside a complete record": (
        lambda: copfl.run(COMPLETE, rounds=1, lr=0.5),
        r"^(optimizer.lr=0.5|run.rounds=1) cannot be set beside a complete copfl.Run",
    ),
    "a data set in place of methods": (
        lambda: copfl.choose("digits"),
        '"digits" is a data set and no method; pass it as dataset="digits"',
    ),
    "a frame in place of methods": (lambda: copfl.compare(FRAME), r"pass it as dataset=\.\.\."),
    "a frame in place of the method": (lambda: copfl.run(FRAME, target="y"), r"name the argument: dataset="),
    "a network in place of the method": (lambda: copfl.run(nn.Linear(4, 2)), r"name the argument: model="),  # type: ignore[arg-type]
    "a class that is no algorithm": (lambda: copfl.run(dict), "dict, which has no method client_update"),  # type: ignore[arg-type]
    "a frame without target": (
        lambda: copfl.run("fedavg", FRAME),
        "name the column to predict with target='COLUMN'; the columns are x0",
    ),
    "a target of arrays": (lambda: copfl.run("fedavg", (X, Y), target="y"), "target names a column"),
    "an unknown column": (lambda: copfl.run("fedavg", FRAME, target="z"), '"z"'),
    "a client of sites": (lambda: copfl.run("fedavg", SITES, **COLUMNS), "leave out client"),
    "sites with other columns": (
        lambda: copfl.run("fedavg", {"a": FRAME, "b": FRAME[["x0", "y"]]}, target="y"),
        'client b lacks the column "x1", which client a has',
    ),
    "two columns of one name": (
        lambda: copfl.run("fedavg", pd.concat([FRAME, FRAME], axis=1), target="y"),
        'several columns called "x0"',
    ),
    "another optimizer": (
        lambda: copfl.run("fedavg", optimizer=torch.optim.RMSprop),
        "no optimizer with the steps of torch.optim.RMSprop",
    ),
    "Nesterov's": (
        lambda: copfl.run(
            "fedavg", optimizer=functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True)
        ),
        r"copfl's sgd has no nesterov as torch.optim.SGD\(nesterov=True\)",
    ),
    "a typo": (lambda: copfl.run("fedavg", rouns=1), 'rouns=1 is no setting; did you mean "rounds"'),  # type: ignore[call-arg]
    "a library's other name": (
        lambda: copfl.run("fedavg", learning_rate=0.1),  # type: ignore[call-arg]
        'did you mean "lr"',
    ),
    "an option of the method": (
        lambda: copfl.run("fedprox", mu=0.1),  # type: ignore[call-arg]
        r"mu=0.1 is an option of fedprox: algorithm_options=\{'mu': 0.1\}",
    ),
    "an option of a method among several": (
        lambda: copfl.compare(["fedprox", "fedavg"], mu=0.1),  # type: ignore[call-arg]
        'mu=0.1 is an option of fedprox: write it behind the name, "fedprox:mu=0.1"',
    ),
    "PFLlib's share of participants": (
        lambda: copfl.compare(["fedavg"], join_ratio=0.5),  # type: ignore[call-arg]
        'join_ratio=0.5 is no setting; did you mean "participation"',
    ),
    "PFLlib's learning rate": (
        lambda: copfl.run("fedavg", local_learning_rate=0.1),  # type: ignore[call-arg]
        'did you mean "lr"',
    ),
    "a method as its paper writes it": (
        lambda: copfl.run("FedAvg-FT"),
        "'FedAvg-FT' is unknown; did you mean \"fedavg_ft\"",
    ),
    "seeds as a number": (lambda: copfl.compare("fedavg", seeds=3), r"name the seeds, as seeds=range\(3\)"),  # type: ignore[arg-type]
    "the seed of a comparison": (lambda: copfl.compare("fedavg", seed=3), "named apart"),
    "no field of a record": (lambda: Run(algorithm=3), "algorithm=3 must be a name, a mapping or"),  # type: ignore[arg-type]
    "several methods": (
        lambda: copfl.run("fedprox,fedavg"),
        "a run has one algorithm, and 'fedprox,fedavg' names several; use copfl.compare",
    ),
    "an option of the data's division": (
        lambda: copfl.run("fedavg", alpha=0.5),  # type: ignore[call-arg]
        r"is an option of dirichlet, as partition=\{'name': 'dirichlet', 'alpha': 0.5\}",
    ),
    "a loss": (
        lambda: copfl.run("fedavg", loss=lambda outputs, y: 0),  # type: ignore[call-arg]
        r"is a setting of the table task: task=\{'loss': 'mymodule:myfunction'\}",
    ),
    "a loss without a name": (
        lambda: copfl.run("fedavg", task={"loss": lambda outputs, y: 0}),
        "task.loss is a function; name it: 'mymodule:myfunction'",
    ),
    "the metrics": (
        lambda: copfl.run("fedavg", metrics=["auc"]),  # type: ignore[call-arg]
        r"task=\{'metrics': \['auc'\]\}",
    ),
    "a function that divides": (
        lambda: copfl.run("fedavg", partition=lambda data: [data]),  # type: ignore[arg-type]
        r"must be a name, a mapping of settings, or a pair \(train, test\)",
    ),
    "the column of an index": (
        lambda: copfl.run("fedavg", FRAME.set_index("site"), **COLUMNS),
        '"site" is the index of the data frame; pass it with .reset_index()',
    ),
    "an algorithm whose __init__ forgets": (
        lambda: copfl.run(type("Mine", (FedAvg,), {"__init__": lambda self: None})),
        "the algorithm Mine has no optimizer, as its __init__ leaves it out; make it a dataclass",
    ),
    "a local update that returns something else": (
        lambda: copfl.run(ReturnsAPair(), "digits", clients=2, rounds=1),
        r"client_update of ReturnsAPair returned a tuple; it must return a ClientOutput\(client, upload",
    ),
    "arrays in place of methods": (lambda: copfl.compare((X, Y)), r"pass it as dataset=\.\.\."),  # type: ignore[arg-type]
    "a sweep of a name": (
        lambda: copfl.sweep("fedprox", {"mu": [1]}),  # type: ignore[arg-type]
        "over is str; pass values by setting",
    ),
    "a sweep over one value": (lambda: copfl.sweep({"lr": 0.1}), "over lr=0.1 is one value; pass several"),  # type: ignore[dict-item]
    "no data": (lambda: copfl.run("fedavg", None), "dataset is None; pass the name of a data set"),
}


@pytest.mark.parametrize("what", FAILS)
def test_it_is_one_clear_error(what: str) -> None:
    fails, message = FAILS[what]
    with pytest.raises(CopflError, match=message) as raised:
        fails()
    assert "\n" not in str(raised.value)
    assert not re.search(r"(?<!`)--\w", str(raised.value))  # Python's words, and none of the command line


def test_rows_of_a_comparison_may_be_defined_anywhere(tmp_path: Path) -> None:
    lines: list[str] = []
    how: dict[str, Any] = {"clients": 2, "tune": {}, "seeds": range(1), "out": tmp_path, **ONE}
    net, mine = nn.Linear(4, 2), of_a_notebook()
    table = copfl.compare(
        [mine(strength=0.5), Here, "fedavg"], (X, Y), model=net, jobs=2, log=lines.append, **how
    )
    assert [row.label for row in table.rows] == ["Mine strength=0.5", "Here", "fedavg"]
    assert any("the algorithm Mine is of this program, and no other process has it" in line for line in lines)
    before = sorted((tmp_path / "runs").iterdir())
    again = copfl.compare([mine(strength=0.5), Here, "fedavg"], (X, Y), model=net, **how)
    assert sorted((tmp_path / "runs").iterdir()) == before  # nothing is run again
    assert str(again) == str(table)
    other = copfl.compare("fedavg", (X, 1 - Y), model=net, **how)  # other samples are other runs
    assert len(list((tmp_path / "runs").iterdir())) == len(before) + 1
    assert [row.label for row in other.rows] == ["fedavg"]


def test_every_function_has_the_same_keywords_and_data() -> None:
    functions = (copfl.run, copfl.compare, copfl.choose, copfl.sweep)
    shared = [name for name in inspect.signature(copfl.run).parameters if name not in ("algorithm", "out")]
    shared = shared[: shared.index("base_tables") + 1]
    assert shared[0] == "dataset"
    for function in functions:
        parameters = inspect.signature(function).parameters
        assert [name for name in parameters if name in shared] == shared
        assert list(parameters)[1] == "dataset"
        for name in shared:
            assert re.search(rf"^        {name}: ", str(function.__doc__), re.MULTILINE), name


def test_public_names_only() -> None:
    assert dir(copfl) == sorted(copfl.__all__)
    assert not {"Any", "TYPE_CHECKING", "annotations"} & set(dir(copfl))


def test_a_run_asks_again_for_what_a_program_passed(tmp_path: Path) -> None:
    mine, net = of_a_notebook(), nn.Linear(4, 2)
    how: dict[str, Any] = {"clients": 2, "model": net, "rounds": 1}
    whole = copfl.run(mine, (X, Y), **{**how, "rounds": 2})
    copfl.run(mine, (X, Y), **how, out=tmp_path / "run")
    passed: dict[str, Any] = {"dataset": (X, Y), "model": net, "algorithm": mine}
    for left_out in ("dataset", "model"):
        some = {name: value for name, value in passed.items() if name != left_out}
        kind = "data" if left_out == "dataset" else left_out
        with pytest.raises(
            CopflError, match=f"the {kind} of this run is .*pass it again from there: {left_out}="
        ):
            copfl.resume(tmp_path / "run", rounds=2, **some)
    for kind, other in (("model", nn.Linear(4, 2)), ("data", (X, 1 - Y))):
        name = "dataset" if kind == "data" else kind
        with pytest.raises(CopflError, match=f"the {kind} that is passed is not that of this run"):
            copfl.resume(tmp_path / "run", rounds=2, **{**passed, name: other})
    assert copfl.resume(tmp_path / "run", rounds=2, **passed).records == whole.records


def test_every_setting_of_a_run_is_a_keyword() -> None:
    keywords, types = get_type_hints(arguments.OfRun), get_type_hints(RunSettings)
    for field in declared(RunSettings):
        kind = types[field.name]
        line = f"{field.name}: {kind.__name__}"
        assert keywords.get(field.name) is kind, (
            f"write `{line}` into Settings of settings/arguments.py, for type checkers; copfl reads the schema"
        )
    assert not keywords.keys() & {"algorithm", "dataset", "out", "seeds"}


def test_a_setting_may_be_swept_by_its_keyword(tmp_path: Path) -> None:
    how: dict[str, Any] = {"seeds": range(1), "out": tmp_path, **ONE}
    over: dict[str, Any] = {"mu": np.array([0.1, 1.0]), "clients": [2, 3]}
    table = copfl.sweep(over, (X, Y), algorithm="fedprox", **how)
    assert [row.label for row in table.rows] == [
        f"mu={mu} run.clients={clients}" for mu in ("0.1", "1") for clients in (2, 3)
    ]
    assert repr(table.rows[0]).startswith("mu=0.1 run.clients=2 (sgd 0.1): accuracy ")


def test_methods_may_be_a_generator_and_values_an_array(tmp_path: Path) -> None:
    names = (name for name in ["fedavg", "local"])
    how: dict[str, Any] = {"clients": 2, "seeds": np.arange(1), "out": tmp_path, **ONE}
    how["tune"] = {"lr": np.logspace(-3, -1, 2)}
    table = copfl.compare(names, (X, Y), **how)  # type: ignore[arg-type]
    assert [row.label for row in table.rows] == ["fedavg", "local"]


@pytest.mark.job
def test_a_choice_on_data_of_a_program_is_made_again(tmp_path: Path) -> None:
    how: dict[str, Any] = {"clients": 2, "rounds": 2, "budget": 8, "out": tmp_path, "rivals": False}
    first, again = (copfl.choose(["fedavg", "local"], (X, Y), **how) for _ in range(2))
    assert str(again) == str(first)


def test_a_record_is_shown_in_a_line() -> None:
    assert repr(Run(algorithm="fedper")) == "Run.of({'algorithm': {'name': 'fedper'}, 'run': {}})"  # type: ignore[arg-type]
    assert repr(COMPLETE).startswith("Run of fedavg (adam 0.003, batches of 8) on digits: 10 clients")


def test_a_warning_points_at_the_line_that_called(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match='the column "x0" alone predicts') as warned:
        result = copfl.run("fedavg", FRAME, **COLUMNS, **ONE)
    assert {one.filename for one in warned} == {__file__}
    with pytest.warns(RuntimeWarning) as warned:
        result.predict(FRAME.assign(x0=np.nan), client=0, missing="fill")
    assert {one.filename for one in warned} == {__file__}


def test_what_to_do_with_a_folder_is_said_in_python(tmp_path: Path) -> None:
    result = copfl.run("fedavg", (X, Y), clients=2, **ONE)
    run = result.save(tmp_path / "run")
    for call, message in (
        (lambda: result.save(run), rf"use `copfl.resume\('{run}'\)`"),
        (lambda: copfl.load(run), 'name the model: client=3, client="its name", or client="global"'),
        (lambda: copfl.resume(tmp_path / "none"), "as a run with out= writes it"),
    ):
        with pytest.raises(CopflError, match=message):
            call()


@pytest.mark.filterwarnings("ignore:the column .x0. alone predicts")
def test_the_draw_of_the_test_rows_is_a_keyword() -> None:
    usual, same, other = (
        copfl.run("fedavg", FRAME, **COLUMNS, **how, **ONE)
        for how in ({}, {"split": 0}, {"split": np.int64(1)})
    )
    assert usual.records == same.records
    assert usual.records != other.records
