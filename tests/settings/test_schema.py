"""The records, the JSON Schema that is derived from them, and files with mistakes."""

from __future__ import annotations

import json
import pickle
import random
import tomllib
from typing import Any

import jsonschema
import pytest

import copfl
from copfl.algorithms import ALGORITHMS
from copfl.errors import CopflError
from copfl.settings import presets, toml
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.json_schema import json_schema, options_of, reference
from copfl.settings.record import declared
from copfl.settings.schema import KINDS, Run, RunSettings, paths

SCHEMA = json.loads(json.dumps(json_schema()))  # as `copfl schema` prints it
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def plain(tables: Any) -> Any:
    return json.loads(json.dumps(tables))


def test_it_is_a_schema_of_its_draft() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert jsonschema.validators.validator_for(SCHEMA) is jsonschema.Draft7Validator


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_complete_run_fits_the_json_schema(name: str) -> None:
    tables = plain(complete({"algorithm": {"name": name}}).tables())
    assert VALIDATOR.is_valid(tables)
    for kind, table in tables.items():
        assert not VALIDATOR.is_valid({**tables, kind: {**table, "nmae": 1}})


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_with_its_percentages_resolved_fits_it(name: str) -> None:
    assert VALIDATOR.is_valid(plain(presets.preset(name)))
    assert VALIDATOR.is_valid(plain(complete(preset=name).tables()))


@pytest.mark.parametrize(
    "tables",
    [
        {"copfl": {"rate": 0.1}},
        {"run": {"rounds": 0}},
        {"run": {"rounds": "many"}},
        {"run": {"participation": 0}},
        {"run": {"engine": "warp"}},
        {"algorithm": {"name": "fedavg", "rate": 0.1}},
        {"algorithm": {"name": "fedavgg"}},
        {"model": {"name": "mpl"}},
        {"optimizer": {"name": "sgd", "beta1": 0.9}},
        {"task": {"metric": "auc"}},
    ],
)
def test_what_the_json_schema_refuses_is_refused(tables: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(tables)
    with pytest.raises(SettingError):
        complete(tables)


def test_code_of_ones_own_may_have_any_options() -> None:
    assert VALIDATOR.is_valid({"algorithm": {"name": "mymodule:FedMine", "strength": 2}})
    assert VALIDATOR.is_valid({"data": {"name": "shop.csv", "target": "y", "missing": "fill"}})


def test_an_editor_completes_keys_and_names() -> None:
    """It proposes what `properties` names, and the words of an `enum`."""
    for path in paths():
        kind, key = path.split(".")
        assert SCHEMA["properties"][kind]["properties"][key]["description"]
    for kind in ("algorithm", "data", "model", "partition", "server"):
        words, _ = SCHEMA["properties"][kind]["properties"]["name"]["anyOf"]
        assert words["enum"] == list(options_of(kind))
    rules = SCHEMA["properties"]["algorithm"]["allOf"]
    (copfl_options,) = (
        rule["then"]["properties"]
        for rule in rules
        if rule["if"].get("properties") == {"name": {"const": "copfl"}}
    )
    assert {"rate", "budget", "merge"} <= copfl_options.keys()


def test_every_setting_is_described() -> None:
    page = reference()
    for kind, record in KINDS.items():
        assert f"## [{kind}]" in page
        for field in declared(record):
            assert field.metadata["help"].endswith(".")
            assert f"| `{field.name}` |" in page
    for name, options in options_of("algorithm").items():
        for option in options:
            assert f"`{option}`" in page, name


def test_a_record_is_written_and_read_back() -> None:
    run = complete({"algorithm": {"name": "fedper", "personal": "head"}, "addons": {"ema": 0.5}})
    again = Run.of(tomllib.loads(toml.written(run.tables())))
    assert complete(again.tables()) == run == pickle.loads(pickle.dumps(run))
    assert plain(again.tables()) == plain(run.tables())


def test_a_record_is_checked_when_it_is_made() -> None:
    with pytest.raises(SettingError, match=r"run\.rounds=0 must be a whole number, at least 1"):
        RunSettings(rounds=0)
    with pytest.raises(SettingError, match=r"run\.workers='all' must be a whole number"):
        RunSettings(workers="all")  # type: ignore[arg-type]


def test_a_complete_record_runs() -> None:
    run = complete(
        {"algorithm": {"name": "fedavg"}, "model": {"name": "mlp"}, "run": {"rounds": 1, "clients": 2}}
    )
    assert copfl.run(run).records == copfl.run("fedavg", model="mlp", rounds=1, clients=2).records


# -- mistakes ------------------------------------------------------------------------------------------------


def misspelt(key: str, draw: random.Random) -> str:
    at = draw.randrange(len(key))
    return draw.choice([key[:at] + key[at + 1 :], key[:at] + "q" + key[at:], key[:at] + "q" + key[at + 1 :]])


@pytest.mark.parametrize("path", paths())
def test_a_typo_in_a_key_has_one_kind_of_error(path: str) -> None:
    kind, key = path.split(".")
    wrong = misspelt(key, random.Random(path))
    with pytest.raises(SettingError) as error:
        complete({kind: {"name": "lora"} if kind == "adapter" else {}, **{kind: {wrong: 1}}})
    if error.value.path.endswith(f".{wrong}"):  # a wrapper without a name lacks that first
        assert error.value.path == f"{kind}.{wrong}"
        assert error.value.value == 1
        assert "llowed are " in error.value.allowed


@pytest.mark.parametrize("keyword", ["roundz", "clint", "learning_rate", "algorithm_option", "tasks"])
def test_a_typo_in_a_keyword_of_run_has_the_same_error(keyword: str) -> None:
    with pytest.raises(SettingError, match=rf"{keyword}.* is no setting; .*llowed are"):
        copfl.run("fedavg", **{keyword: 3})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"is no setting; .*llowed are"):
        copfl.run("fedavg", **{keyword: {"a": 3}})  # type: ignore[arg-type]


def test_a_near_name_is_proposed() -> None:
    for tables, nearest in (
        ({"run": {"roundz": 3}}, "rounds"),
        ({"run": {"lr": 3}}, "optimizer.lr"),
        ({"algorithm": {"name": "fedpr"}}, "fedper"),
        ({"algorithm": {"name": "copfl", "rte": 3}}, "rate"),
        ({"modle": {"name": "mlp"}}, "model"),
    ):
        with pytest.raises(SettingError) as error:
            complete(tables)
        assert f'; did you mean "{nearest}"? Allowed are ' in str(error.value)


def test_corrupted_files_are_refused_or_read() -> None:
    """300 valid files, each with a few changed characters, lines or values: no other error than copfl's."""
    draw = random.Random(0)
    valid = [toml.written(complete({"algorithm": {"name": name}}).tables()) for name in sorted(ALGORITHMS)]
    refused = 0
    for number in range(300):
        lines = valid[number % len(valid)].splitlines()
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(lines))
            line = lines[at]
            left, equals, right = line.partition(" = ")
            wrong = [
                "[]",
                "-1",
                "nan",
                "1e400",
                '"x"',
                "{a = 1}",
                "[[1]]",
                "1979-05-27",
                '""',
                "true",
                "10" * 40,
            ]
            lines[at] = draw.choice(
                [
                    "",
                    line + line,
                    "".join(draw.sample(line, len(line))),
                    f"{misspelt(left, draw)}{equals}{right}" if left else line,
                    f"{left} = {draw.choice(wrong)}",
                    line.replace('"', "", 1),
                    f"[{draw.choice([*KINDS, 'copfl', 'a.b', ''])}]",
                ]
            )
        try:
            complete(toml.read("\n".join(lines).encode(), "run.toml"))
        except CopflError:
            refused += 1
    assert refused > 150
