"""Advice in messages is followed as a user would: the options that it names exist, and what it says works."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import typer
from torch import nn

import copfl
from copfl.cli.main import app
from copfl.errors import NAMED, CopflError, how_to_set, on_command_line, to_repeat, to_resume
from copfl.settings import arguments
from copfl.settings.schema import paths
from tests.commands import TINY, called
from tests.sources import SOURCE, parsed

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
FEW: dict[str, Any] = {"clients": 2, "rounds": 1, "rivals": False}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
COMMAND = re.compile(r"`copfl ([a-z]+)(?: ([a-z]+))?([^`]*)`")
# Options of other programs: Flower's, Slurm's, torchrun's, dask's, systemctl's, and of a study's script.
OF_OTHERS = {
    *("--auth-supernode-private-key", "--database", "--disable-runtime-dependency-installation"),
    *("--enable-supernode-auth", "--node-config", "--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"),
    *("--stream", "--noheader", "--states", "--user", "--nproc-per-node", "--nthreads", "--now", "--encoder"),
    "--help",
}
NO_SETTINGS = {"kind", "missing", "data_dir"}  # keys of `how_to_set` that are arguments of functions, too


@cache
def options() -> dict[tuple[str, ...], set[str]]:
    """The options of every command, by its words."""

    def walked(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], set[str]]]:
        yield words, {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        if hasattr(command, "list_commands"):
            context = click.Context(command)
            for name in command.list_commands(context):
                yield from walked(command.get_command(context, name), (*words, name))

    return dict(walked(typer.main.get_command(app), ()))


def messages() -> Iterator[tuple[str, str]]:
    """Every text of the library that is no docstring, with its place; of an f-string {} for what is filled in."""
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = list(ast.walk(parsed(path)))
        first = [body[0] for node in nodes if isinstance(body := getattr(node, "body", None), list) and body]
        skipped = {id(node.value) for node in first if isinstance(node, ast.Expr)}
        skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                text = "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                text = node.value
            else:
                continue
            yield f"{path.relative_to(SOURCE)}:{node.lineno}", text


def test_options_and_commands_that_messages_name_exist() -> None:
    known, wrong = set().union(*options().values()) | OF_OTHERS, list[str]()
    for place, text in messages():
        wrong += [f"{place}: {option}" for option in OPTION.findall(text) if option not in known]
        for first, second, rest in COMMAND.findall(text):
            words = (first, second) if (first, second) in options() else (first,)
            named = {*OPTION.findall(rest)} - OF_OTHERS
            if not named <= options().get(words, set()) or words not in options():
                wrong.append(f"{place}: copfl {' '.join(words)} {' '.join(sorted(named))}")
    assert not wrong


def advised() -> Iterator[tuple[str, str]]:
    """The keys and flags of all calls of `how_to_set` in the library."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "how_to_set":
                key, flag = node.args[0], node.args[2] if node.args[2:] else ast.Constant("")
                assert isinstance(key, ast.Constant)
                assert isinstance(flag, ast.Constant)
                yield str(key.value), str(flag.value)


def test_a_setting_that_is_advised_is_set_by_following_the_advice() -> None:
    found = {*advised()}
    assert len(found) > 20
    for key, flag in sorted(found):
        table, _, name = key.rpartition(".")
        if key in NO_SETTINGS - {"kind"}:
            continue
        keywords = eval(f"dict({how_to_set(key, 'VALUE', flag)})")  # as a user writes it into a call
        table, name = ("data", "kind") if key == "kind" else (table, name)
        assert arguments.tables("digits", keywords)[table][name] == "VALUE", key
        with on_command_line():
            typed = how_to_set(key, "VALUE", flag).split()
        assert typed[0] in options()["run",], key
        if not flag:
            assert typed == ["--set", f"{key}=VALUE"]
            assert key in paths() or table in ("data", "partition", "server"), key


def test_true_and_false_are_typed_as_a_file_has_them() -> None:
    with on_command_line():
        assert how_to_set("partition.distinct", False) == "--set partition.distinct=false"


class TwoHeads(nn.Module):
    """Its last Linear is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.used(x)


def pair(dataset: Any, clients: int, seed: int) -> Any:
    """An own partition."""
    parts = np.array_split(np.arange(len(dataset.train)), clients)
    return [part.tolist() for part in parts], np.array_split(np.arange(len(dataset.test)), clients)


def half(dataset: Any, clients: int, seed: int) -> Any:
    """One that returns training samples alone."""
    return pair(dataset, clients, seed)[0]


def test_an_own_partition_returns_indices() -> None:
    result = copfl.run("fedavg", (X, Y), partition="tests.test_advice:pair", **FEW)
    made = result.experiment.federation.partition
    assert [*map(len, made.train)] == [25, 24]
    again = copfl.run("fedavg", (X, Y), partition=(made.train, [*made.test]), **FEW)  # type: ignore[arg-type]
    assert again.records == result.records


# What a user writes first, what the error says, and what the user then writes.
ADVICE: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "a schedule": (
        {"scheduler": "cosine"},
        "addons={'lr_schedule': 'cosine'}",
        {"addons": {"lr_schedule": "cosine"}},
    ),
    "a schedule of torch": (
        {"scheduler": "StepLR"},
        "addons={'lr_schedule': 'steps'}",
        {"addons": {"lr_schedule": "steps"}},
    ),
    "a head that is not used": (
        {"model": TwoHeads()},
        "model_options={'head': 'classifier'}",
        {"model": TwoHeads(), "model_options": {"head": "used"}},
    ),
    "a head by its keyword": (
        {"model": TwoHeads(), "head": "used"},
        "model_options={'head': 'used'}",
        {"model": TwoHeads(), "model_options": {"head": "used"}},
    ),
    "the kind of task": ({"kind": "regression"}, "task='regression'", {"task": "regression"}),
    "a bound of gradients": (
        {"clip": 2.0},
        "none clips gradients.*privacy={'noise': 1.0, 'clip': 2.0} clips the uploads",
        {"privacy": {"noise": 1.0, "clip": 2.0}},
    ),
    "a function that divides": (
        {"partition": pair},
        "A function is named: 'mymodule:myfunction'",
        {"partition": "tests.test_advice:pair"},
    ),
    "training samples alone": (
        {"partition": "tests.test_advice:half"},
        "what tests.test_advice:half returned is list, which says not who has which samples; it must be a pair",
        {"partition": "tests.test_advice:pair"},
    ),
}


@pytest.mark.parametrize("what", ADVICE)
def test_advice_works_when_it_is_followed(what: str) -> None:
    first, message, then = ADVICE[what]
    with pytest.raises(CopflError, match=re.sub(r"([{}\[\]])", r"\\\1", message)):
        copfl.run("fedavg", (X, Y), **{**FEW, **first})
    assert len(copfl.run("fedavg", (X, Y), **{**FEW, **then}).records) == 1


def test_the_kind_of_arrays_is_asked_for_again(tmp_path: Path) -> None:
    result = copfl.run("fedavg", (X, Y), task="regression", out=tmp_path / "run", **FEW)
    assert result.experiment.federation.dataset.kind == "regression"
    again = copfl.resume(tmp_path / "run", rounds=2, dataset=(X, Y), task="regression")
    assert again.records[:1] == result.records
    data = result.experiment.federation.dataset
    with pytest.raises(CopflError, match="cannot be made classification"):
        copfl.run("fedavg", data, task="classification", **FEW)


def test_a_choice_says_where_settings_of_its_addons_go(tmp_path: Path) -> None:
    with pytest.raises(CopflError, match=r"pass their settings as base_tables=\{'addons': \{'ema': 0.9\}\}"):
        copfl.choose(["fedavg"], (X, Y), addons={"ema": 0.9}, out=tmp_path, **FEW)  # type: ignore[arg-type]


def test_a_federation_with_own_code_prints_a_command_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "from dataclasses import dataclass\nfrom copfl.algorithms import FedAvg\n"
    (tmp_path / "of_advice.py").write_text(f"{head}@dataclass(frozen=True)\nclass Mine(FedAvg):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        done = called(capsys, "federate", "init", "fed", "--algorithm", "of_advice:Mine", *TINY)
    finally:
        sys.modules.pop("of_advice", None)
    assert "Run it on this machine: copfl federate up fed --code of_advice\n" in done.out


def test_commands_that_need_code_name_it() -> None:
    token = NAMED.set(frozenset({"mine", "copfl.algorithms.ditto", "__main__"}))
    try:
        assert to_resume("a") == "`copfl.resume('a', code=['mine'])`"
        with on_command_line():
            assert to_resume("a") == "`copfl resume a --code mine`"
            assert to_repeat("a", save_models=True).endswith(" --set run.save_models=true --code mine`")
    finally:
        NAMED.reset(token)
