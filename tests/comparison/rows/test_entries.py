from __future__ import annotations

from pathlib import Path

import pytest

from copfl.algorithms import ALGORITHMS
from copfl.comparison.rows.entries import Entry, at_commas, described, entries_of, entry_of, seeds_of
from copfl.comparison.rows.entry_file import read_file
from copfl.comparison.rows.entry_settings import RowSettings, row_settings
from copfl.comparison.rows.spaces import cells, grid_of, tried_values
from copfl.errors import UsageError
from copfl.settings.complete import complete
from copfl.settings.toml import Tables


def test_an_entry_with_its_options() -> None:
    first, second, third = entries_of(
        ["copfl,copfl:score=none", "fedavg:optimizer=adam:lr=0.001:run.batch=4"]
    )
    assert first == Entry("copfl", "copfl", {})
    assert second == Entry("copfl", "copfl score=none", {"algorithm": {"score": "none"}})
    expected: Tables = {"optimizer": {"name": "adam", "lr": 0.001}, "run": {"batch": 4}}
    assert third == Entry("fedavg", "fedavg optimizer=adam lr=0.001 run.batch=4", expected)


def test_commas_and_colons_inside_a_value_are_no_borders() -> None:
    one, two = entries_of(['fedper:keeps=["head", "norms"],local:model.name=mine:Net:lr=1'])
    assert one.settings == {"algorithm": {"keeps": ["head", "norms"]}}
    assert two.settings == {"model": {"name": "mine:Net"}, "optimizer": {"lr": 1}}
    assert at_commas('a,"b,c",[d,e], ,f') == ["a", '"b,c"', "[d,e]", "f"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedavgg", 'did you mean "fedavg"?'),
        ("copfl:score", "must have the form NAME or NAME:KEY=VALUE"),
        ("copfl:partition.per_client=3", "partition.per_client is the same for every row"),
        ("copfl:run.seed=3", "run.seed is the same for every row"),
        ("copfl:data.name=cifar10", "data.name is the same for every row"),
    ],
)
def test_entries_that_are_not_allowed(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        entry_of(text)
    assert message in str(error.value)


def test_a_grid_is_every_combination_in_order() -> None:
    grid = grid_of(tried_values(["lr=1,2", "copfl.rate=0.1,0.2"], "--tune"), "--tune")
    assert grid == {("optimizer", "lr"): [1, 2], ("copfl", "rate"): [0.1, 0.2]}
    assert [described(cell, "optimizer", "copfl") for cell in cells(grid)] == [
        "lr=1 rate=0.1", "lr=1 rate=0.2", "lr=2 rate=0.1", "lr=2 rate=0.2",
    ]  # fmt: skip
    assert cells({}) == [{}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "must have the form KEY=VALUE,VALUE"),
        ("=1,2", "must have the form KEY=VALUE,VALUE"),
        ("rate=1,2", 'the key "rate" must be a setting such as lr, optimizer or rounds, or TABLE.KEY'),
        ("lr=", "must have several values"),
        ("lr=1,1", "none of them twice"),
    ],
)
def test_grids_that_are_not_allowed(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grid_of(tried_values([text], "--tune"), "--tune")


def test_a_key_is_named_once() -> None:
    with pytest.raises(UsageError, match="names lr twice"):
        tried_values(["lr=1", "lr=2"], "--tune")


def test_seeds() -> None:
    assert seeds_of("0,1,2") == [0, 1, 2]
    assert seeds_of("0-3, 7") == [0, 1, 2, 3, 7]
    wrong = {"": "names no seed", "0,x": '"x" is no seed', "1,0-2": "a seed twice", "-1": "no seed"}
    for text, message in wrong.items():
        with pytest.raises(UsageError, match=message):
            seeds_of(text)


def test_what_is_set_for_all_reaches_those_it_concerns() -> None:
    base: Tables = {"run": {"rounds": 7}, "copfl": {"rate": 0.1}, "adam": {"lr": 0.5}}
    copfl, plain, adam = entries_of(["copfl:budget=0.4,fedavg,fedavg:optimizer=adam"])
    found = complete(*row_settings(copfl, base, keeps_state=True).layers).tables()
    assert (found["algorithm"]["rate"], found["algorithm"]["budget"], found["run"]["rounds"]) == (0.1, 0.4, 7)
    assert found["optimizer"]["name"] == "mamo"
    assert (
        complete(*row_settings(plain, base, keeps_state=True).layers).tables()["optimizer"]["name"] == "sgd"
    )
    found = complete(*row_settings(adam, base, keeps_state=True).layers).tables()
    assert (found["optimizer"]["name"], found["optimizer"]["lr"]) == ("adam", 0.5)
    assert row_settings(copfl, base).concerns("copfl")
    assert not row_settings(plain, base).concerns("copfl")
    assert row_settings(plain, base).concerns("run")


def test_a_class_of_a_program_has_its_own_options_under_its_name() -> None:
    entry = Entry("Mine@0123456789ab", "Mine", {"algorithm": {"weights": "equal"}})
    row = RowSettings(entry, "sgd", [])
    assert row.concerns("Mine")
    tables: Tables = {"Mine": {"strength": 0.3}, "fedprox": {"mu": 1.0}, "sgd": {"lr": 0.1}}
    assert row.concerning(tables) == {"algorithm": {"strength": 0.3}, "optimizer": {"lr": 0.1}}


def test_an_optimizer_for_all_gives_way_to_an_entrys_own() -> None:
    base = {"optimizer": {"name": "adam", "lr": 0.25}}
    copfl, own = entries_of(["copfl,fedavg:optimizer=sgd"])
    assert complete(*row_settings(copfl, base, keeps_state=True).layers).tables()["optimizer"]["lr"] == 0.25
    found = complete(*row_settings(own, base, keeps_state=True).layers).tables()["optimizer"]
    assert found["name"] == "sgd"
    assert found["lr"] != 0.25  # a number for another optimizer


def test_a_file_of_entries(tmp_path: Path) -> None:
    path = tmp_path / "compare.toml"
    path.write_text("""
[compare]
seeds = [3, 4]
tune = { lr = [0.1, 0.01] }
[run]
rounds = 9
[[entry]]
name = "copfl"
label = "without COWA"
settings = { score = "none", optimizer = "adam" }
[[entry]]
name = "local"
[entry.settings.optimizer]
lr = 0.5
""")
    file = read_file(path)
    assert file.entries == [
        Entry("copfl", "without COWA", {"algorithm": {"score": "none"}, "optimizer": {"name": "adam"}}),
        Entry("local", "local lr=0.5", {"optimizer": {"lr": 0.5}}),
    ]
    assert file.base == {"run": {"rounds": 9}}
    assert file.options == {"seeds": [3, 4], "tune": {"lr": [0.1, 0.01]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = [", "not valid TOML"),
        ("seeds = [1]", '"seeds" is outside any table'),
        ("[compare]\nseds = [1]", 'did you mean "seeds"'),
        ("[compare]\nseeds = 1", "seeds must be a list"),
        ('[entry]\nname = "copfl"', r"write the rows as \[\[entry\]\]"),
        ('[[entry]]\nname = "copfel"', 'did you mean "copfl"'),
        ('[[entry]]\nnam = "copfl"', 'did you mean "name"'),
        ('[[entry]]\nname = "copfl"\nsettings = 3', "must be a table"),
    ],
)
def test_files_that_are_not_allowed(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "compare.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_file(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_file(tmp_path / "nothing.toml")


def test_all_algorithms_by_one_word() -> None:
    rows = entries_of(["all,fedavg:epochs=2"])
    assert [row.name for row in rows] == [*ALGORITHMS, "fedavg"]
    assert [row.optional for row in rows] == [True] * len(ALGORITHMS) + [False]
