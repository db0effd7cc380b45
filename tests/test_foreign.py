"""Opening what somebody else wrote runs nothing: every command and reader, against hostile folders.

Python's audit hook sees imports, executed code, programs, connections and files, see tests/hostile.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import tomli_w
import typer.main
from PIL import Image

import copfl
from copfl import foreign
from copfl.audit.audit import run_audit
from copfl.audit.tables import as_json as audit_json
from copfl.audit.tables import write as write_audit
from copfl.bench import bench, protocol, rows
from copfl.bench.protocol import BenchMachine
from copfl.cli.main import app
from copfl.comparison.rows import entry_file
from copfl.data.clients.partition import FORMAT, Partition
from copfl.errors import CopflError, RunError
from copfl.experiment import reading, records
from copfl.experiment.bundle import description
from copfl.experiment.choice import CHOICE, Choice, Validated
from copfl.experiment.export.mlflow_folder import _load_pyfunc
from copfl.experiment.final import FINAL
from copfl.experiment.finished import cross_site
from copfl.experiment.models.new_clients import NEW_CLIENTS, NewClients
from copfl.experiment.records import FinalEvaluation
from copfl.experiment.survival import SURVIVAL, AtHorizon, Observed, RiskGroup, Survival
from copfl.experiment.tree_views import TREES, Box, Dependence, Importance, TreeViews
from copfl.experiment.verdict import CHECK, VERDICT
from copfl.federation.node import remembered_run
from copfl.federation.node.report import site_of
from copfl.report import comparison_page, document, page
from copfl.report.page import RunsPage
from copfl.settings import named_code, toml
from copfl.settings.complete import complete
from copfl.stats import Interval
from copfl.verdict.headline import Check
from copfl.verdict.verdict import BETTER, Estimate, SiteGain, Verdict
from tests.commands import called
from tests.federation.network import CONFIG, digits, play, write_nodes
from tests.hostile import COUNT, WATCH, bait, forbidden, json_versions, places, versions

Capture = pytest.CaptureFixture[str]
Change = Callable[[Path], None]
BASE: dict[str, dict[str, Any]] = {"run": {"rounds": 1, "clients": 2}, "model": {"name": "mlp", "width": 4}}
SMALL: dict[str, Any] = {"clients": 2, "rounds": 1, "engine": "sequential", "batch_size": 256}


class World(NamedTuple):
    """One folder of each kind, and samples for their models."""

    run: Path
    bundle: Path
    table: Path  # the bundle of a model of tables
    node: Path
    comparison: Path
    record: Path  # a file of `copfl bench`
    x: Path
    csv: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    place = tmp_path_factory.mktemp("world")
    model: dict[str, Any] = {"model": "mlp", "model_options": {"width": 4}}
    copfl.run("fedavg", "digits", **SMALL, **model, local_baseline=True, out=place / "run")
    audit = run_audit(place / "run", retrain=False, baselines=[])
    write_audit(place / "run", audit, audit_json(audit))
    copfl.load(place / "run", 0).save(place / "bundle")
    rng = np.random.default_rng(0)
    lines = [f"{rng.normal():.3f},{'red' if n % 3 else 'blue'},{'yes' if n % 2 else 'no'}" for n in range(80)]
    (place / "t.csv").write_text("\n".join(["size,colour,bought", *lines]) + "\n")
    copfl.run(
        "fedavg", place / "t.csv", data_options={"target": "bought"}, **SMALL, **model, out=place / "of-table"
    )
    copfl.load(place / "of-table", 0).save(place / "table")
    nodes = write_nodes(digits(), place / "nodes")
    play(CONFIG | {"algorithm.name": "fedavg", "run.rounds": 1}, nodes, place / "server")
    copfl.compare(["fedavg", "local"], seeds=[0], base_tables=BASE, out=place / "comparison", tune={})
    rows.write(rows.stored(protocol.SUITES["quick"])[0], place / "record.json")
    np.savez(place / "x.npz", x=np.zeros((4, 1, 8, 8), np.uint8), y=np.arange(4))
    state = Path(nodes[0]["state-dir"])
    return World(
        place / "run",
        place / "bundle",
        place / "table",
        state,
        place / "comparison",
        place / "record.json",
        place / "x.npz",
        place / "t.csv",
    )


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The attacker's modules are in the current folder, where Python would find them; the file that they write."""
    mark = bait(tmp_path / "here")
    (tmp_path / "secret.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    yield mark
    assert not mark.exists()


# -- by hand ---------------------------------------------------------------------------------------------------


def edited(file: str, *path: Any, value: Any) -> Change:
    """Sets a value in a JSON or TOML file of the folder."""

    def change(folder: Path) -> None:
        target = folder / file
        is_toml = target.suffix == ".toml"
        content: Any = (tomllib.loads if is_toml else json.loads)(target.read_text())
        holder = content
        for key in path[:-1]:
            holder = holder.setdefault(key, {}) if isinstance(holder, dict) else holder[key]
        holder[path[-1]] = value
        target.write_text(tomli_w.dumps(content) if is_toml else json.dumps(content))

    return change


def written(file: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / file).write_bytes(content)

    return change


def linked(file: str, target: str) -> Change:
    """Replaces a file by a link to one outside of the folder."""

    def change(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if (folder / file).exists():
            shutil.move(folder / file, folder.parent.parent / "outside")
            target_path: Path = folder.parent.parent / "outside"
        else:
            target_path = folder.parent.parent / target
        (folder / file).symlink_to(target_path)

    return change


def all_of(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def in_bundle(*path: Any, value: Any) -> Change:
    return edited("bundle.json", *path, value=value)


def in_run(*path: Any, value: Any) -> Change:
    return edited("run.toml", *path, value=value)


CALL = {"name": "subprocess:run", "args": "touch was-run", "shell": True}
BUNDLES: dict[str, Change] = {
    "a program": in_bundle("model", value=CALL),
    "os.system": in_bundle("model", value={"name": "os:system", "command": "true"}),
    "a module here": in_bundle("model", value={"name": "evilmod:Net"}),
    "a module in a package": in_bundle("model", value={"name": "evilpkg.sub:Net"}),
    "a module without attribute": in_bundle("model", value={"name": "evilmod"}),
    "a file": in_bundle("model", value={"name": "evilmod.py:Net"}),
    "a folder of code": in_bundle("model", value={"name": "evilmod:Net", "code": "."}),
    "a module of Python": in_bundle("model", value={"name": "antigravity:fly"}),
    "an installed package": in_bundle("model", value={"name": "pip:main"}),
    "a module of copfl": in_bundle("model", value={"name": "copfl.errors:library"}),
    "a metric": in_bundle("task", "metrics", value=["evilmod:f"]),
    "a loss": in_bundle("task", "loss", value="evilmod:f"),
    "an adapter": in_bundle("adapter", value={"name": "evilmod:f"}),
    "an option that is a reference": in_bundle("model", "width", value="evilmod:f"),
    "the base is far up": in_bundle("base", value="../../../../etc"),
    "the base is absolute": in_bundle("base", value="/etc"),
    "the base goes up by way of itself": in_bundle("base", value="base/../../secret"),
    "the base is a link": all_of(linked("base", "here"), in_bundle("base", value="base")),
    "a file of the base is a link": all_of(
        linked("base/frozen.safetensors", "secret.json"), in_bundle("base", value="base")
    ),
    "the weights are a link": linked("weights.safetensors", ""),
    "the description is a link": linked("bundle.json", ""),
    "a model of the hub": in_bundle("model", value={"name": "hf:evil/model"}),
    "a model elsewhere": in_bundle("model", value={"name": "hf:../../here"}),
    "timm's hub": in_bundle("model", value={"name": "timm:hf-hub:evil/model"}),
    "timm's folder": in_bundle("model", value={"name": "timm:local-dir:/etc"}),
    "torchvision and a path": in_bundle("model", value={"name": "torchvision:../../x"}),
    "a tokenizer elsewhere": all_of(
        in_bundle("model", "tokenizer", value="/etc"), in_bundle("input", "text", value="text")
    ),
    "weights elsewhere": in_bundle("model", "weights", value="/etc/passwd"),
    "escapes in names": in_bundle(
        "output", "names", value=[f"\x1b]0;evil\x07\x1b[2J{n}\r\n" for n in range(10)]
    ),
    "directions in names": in_bundle("output", "names", value=[f"\u202e{n}\u2066" for n in range(10)]),
    "escapes in the origin": in_bundle("origin", "name", value="\x1b[31mnorth\x9b1m"),
    "brackets": written("bundle.json", b"[" * 100_000),
    "objects": written("bundle.json", b'{"a":' * 100_000),
    "a long number": written("bundle.json", b'{"format": ' + b"9" * 10_000 + b"}"),
    "a dtype that is a function": in_bundle("dtype", value="load"),
    "a dtype that is a class": in_bundle("dtype", value="Tensor"),
    "a dtype of the input": in_bundle("input", "arrays", "x", "dtype", value="O"),
    "a shape of terabytes": in_bundle("input", "arrays", "x", "shape", value=[1, 10**6, 10**6]),
    "a negative shape": in_bundle("input", "arrays", "x", "shape", value=[1, -8, 8]),
    "outputs without end": in_bundle("output", "count", value=10**15),
    "a width of terabytes": in_bundle("model", "width", value=10**10),
    "a list": written("bundle.json", b"[]"),
    "nothing": written("bundle.json", b""),
    "bytes": written("bundle.json", bytes(range(256))),
    "damaged weights": written("weights.safetensors", b"\xff" * 4000),
}
RUNS: dict[str, Change] = {
    "an algorithm": in_run("algorithm", value={"name": "evilmod:Net"}),
    "an optimizer": in_run("optimizer", "name", value="evilmod:f"),
    "data": in_run("data", value={"name": "evilmod:f"}),
    "a partition": in_run("partition", value={"name": "evilpkg.sub:f"}),
    "a model": in_run("model", value={"name": "subprocess:run", "args": "true"}),
    "a model's folder": in_run("model", value={"name": "evilmod:Net", "code": "/tmp"}),
    "a robust rule": in_run("robust", value={"name": "evilmod:Net"}),
    "a step of the server": in_run("server", value={"name": "evilmod:Net"}),
    "an adapter of a run": in_run("adapter", value={"name": "evilmod:Net"}),
    "a loss of a run": in_run("task", "loss", value="evilmod:f"),
    "metrics of a run": in_run("task", "metrics", value=["auc,evilmod:f"]),
    "a module of this folder": in_run("algorithm", "name", value="evilmod"),
    "TOML brackets": written("run.toml", b"a = " + b"[" * 10_000),
    "no TOML": written("run.toml", b"\xff\x00"),
    "a round of brackets": written("rounds.jsonl", b"[" * 10_000 + b"\n"),
    "escapes in the environment": edited("environment.json", "command", value="\x1b[2J"),
    "gains of brackets": written("gains.json", b"[" * 10_000),
    "an audit of brackets": written("audit.json", b"[" * 10_000),
}
NODES: dict[str, Change] = {
    "a node's model": edited("test/settings.json", "settings", "model.name", value="evilmod:Net"),
    "a node's algorithm": edited("test/settings.json", "settings", "algorithm.name", value="evilmod:Net"),
    "a node's data": edited("test/settings.json", "node", "data", value="evilmod:f"),
    "a node's metric": edited("test/settings.json", "settings", "task.metrics", value='["evilmod:f"]'),
    "a node's bundle": edited("test/model/bundle.json", "model", value=CALL),
    "settings of brackets": written("test/settings.json", b"[" * 10_000),
    "threads without end": edited("test/settings.json", "node", "threads", value=10**9),
}


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def harmless(answer: Any) -> None:
    """A command ended with a result or one error, and printed nothing that a terminal obeys."""
    assert answer.code in (0, 2), answer.err
    assert "Traceback" not in answer.err
    for text in (answer.out, answer.err):
        assert text == "".join(c for c in text if c in "\n\t" or c == foreign.printable(c))


def ends(call: Callable[[], object]) -> None:
    """A call in Python ends with a result or one of copfl's errors."""
    with contextlib.suppress(CopflError):
        call()


def command_ends(capsys: Capture, *words: object) -> None:
    harmless(called(capsys, *words))


def predicted(folder: Path, data: Any) -> object:
    return copfl.load(folder).predict(data)


def completed(content: bytes) -> object:
    return complete(toml.read(content, "a file"))


def run_watched(mark: Path, world: World, calls: list[Callable[[], object]]) -> None:
    # In "here" are the attacker's modules, which an error hashes and nothing executes.
    outside = (mark.parent / "bundles", mark.parent / "out", mark.parent / "here", world.run.parent)
    for call in calls:
        with WATCH.on() as seen:
            call()
        assert forbidden(seen, *outside) == []
        assert not mark.exists()


@pytest.mark.job
def test_the_watch_sees_what_it_is_for(
    world: World, tmp_path: Path, capsys: Capture, monkeypatch: Any
) -> None:
    """The same bundle with the same command, but for the one word that names its module."""
    mark = bait(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = copied(world.bundle, tmp_path / "bundles" / "sent")
    BUNDLES["a module here"](folder)
    with WATCH.on() as seen:
        answer = called(capsys, "predict", folder, "--data", world.x, "--code", "evilmod")
    del sys.modules["evilmod"]
    assert answer.code == 2  # it is no model
    assert mark.exists()
    found = forbidden(seen, folder, world.run.parent)
    assert ("import", "evilmod") in found
    assert ("exec", str(tmp_path / "here" / "evilmod.py")) in found


@pytest.mark.parametrize("attack", BUNDLES)
def test_a_hostile_bundle(attack: str, world: World, mark: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = copied(world.bundle, tmp_path / "bundles" / "sent")
    BUNDLES[attack](folder)
    out = tmp_path / "out"

    def command(*words: object) -> Callable[[], object]:
        return lambda: harmless(called(capsys, *words))

    run_watched(
        mark,
        world,
        [
            command("predict", folder, "--data", world.x),
            command("evaluate", folder, "--data", world.x),
            command("export", folder, "--out", out / "b"),
            command("export", folder, "--out", out / "w.safetensors", "--format", "safetensors"),
            command("export", folder, "--out", out / "m", "--format", "mlflow"),
            command("report", folder),
            lambda: ends(lambda: copfl.load(folder).predict(np.zeros((2, 1, 8, 8), np.uint8))),
            lambda: ends(lambda: _load_pyfunc(str(folder))),
        ],
    )


@pytest.mark.parametrize("attack", RUNS)
def test_a_hostile_run_folder(attack: str, world: World, mark: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = copied(world.run, tmp_path / "bundles" / "run")
    RUNS[attack](folder)
    file = folder / "run.toml"

    def command(*words: object) -> Callable[[], object]:
        return lambda: harmless(called(capsys, *words))

    small = ("--jobs", 1, "--no-plots")
    run_watched(
        mark,
        world,
        [
            command("report", folder, "--out", tmp_path / "out" / "r.html"),
            command("resume", folder, "--rounds", 1),
            command("predict", folder, "--client", 0, "--data", world.x),
            command("predict", folder, "--client", 0, "--data", world.x, "--before-training"),
            command("evaluate", folder, "--global", "--data", world.x),
            command("personalize", folder, "--data", world.x, "--epochs", 1, "--lr", 0.1),
            command("audit", folder, "--no-retrain", "--orders", 1, "--baselines", "none"),
            *(
                [command("run", "-c", file, "--rounds", 1, "-o", tmp_path / "out" / "again")]
                if attack in CODE
                else []
            ),
            *(
                [command("sweep", "-c", file, "--over", "run.batch=256", "--seeds", 0, *small)]
                if attack in CODE
                else []
            ),
            *([command("federate", "init", tmp_path / "out" / "app", "-c", file)] if attack in CODE else []),
            lambda: ends(lambda: RunsPage([folder]).html()),
            lambda: ends(lambda: copfl.resume(folder)),
            lambda: ends(lambda: cross_site(folder)),
            lambda: ends(
                lambda: copfl.run(complete(toml.read_file(file)), rounds=1) if attack in CODE else None
            ),
        ],
    )


CODE = list(RUNS)[:12]  # those that name code


@pytest.mark.parametrize(
    "content",
    ["3", "[]", "{}", '{"players": [99], "value": [0], "error": [0], "orders": 0}', '{"scores": 3}'],
)
def test_hostile_results_in_the_folder_of_an_audit(
    content: str, world: World, mark: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Which an interrupted audit continues from."""
    folder = copied(world.run, tmp_path / "bundles" / "run")
    stored = list((folder / "audit").glob("*/*.json"))
    for file in stored:
        file.write_text(content)
    assert stored
    words = ("audit", folder, "--no-retrain", "--baselines", "none")
    run_watched(mark, world, [partial(command_ends, capsys, *words)])


@pytest.mark.parametrize("attack", NODES)
def test_a_hostile_node_folder(
    attack: str, world: World, mark: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = copied(world.node, tmp_path / "bundles" / "state")
    (folder / "policy.toml").write_text(
        "[[code]]\n"
        f'reference = "evilmod:Net"\nfolder = "{tmp_path / "here"}"\n'
        f'sha256 = "{named_code.digest_of("evilmod")}"\n'
    )
    (folder / "policy.toml").chmod(0o600)
    NODES[attack](folder)
    run_watched(
        mark,
        world,
        [
            lambda: harmless(called(capsys, "report", folder, "--out", tmp_path / "out" / "r.html")),
            lambda: harmless(called(capsys, "predict", folder, "--data", world.x)),
            lambda: ends(lambda: copfl.load(folder)),
        ],
    )


@pytest.mark.parametrize(
    "text",
    [
        '[[entry]]\nname = "evilmod:Net"\n[[entry]]\nname = "local"',
        '[[entry]]\nname = "local"\n[model]\nname = "evilmod:Net"',
        '[[entry]]\nname = "local"\nsettings = {optimizer = "evilmod:f"}',
        '[[entry]]\nname = "fedavg"\n[data]\nname = "evilpkg.sub:f"',
        '[[entry]]\nname = "local"\n[compare]\ntune = {optimizer = ["evilmod:f"]}',
        "a = " + "[" * 5000,
    ],
)
def test_a_hostile_comparison_file(
    text: str, world: World, mark: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "c.toml").write_text(text)
    words = ("compare", "-c", tmp_path / "out" / "c.toml", "-r", 1, "--seeds", 0, "--jobs", 1, "--no-plots")
    run_watched(mark, world, [lambda: harmless(called(capsys, *words, "-o", tmp_path / "out" / "t"))])


def test_hostile_records_of_a_bench(world: World, mark: Path, tmp_path: Path, capsys: Capture) -> None:
    content = world.record.read_text()
    name = json.loads(content)["algorithm"]
    (tmp_path / "out").mkdir()
    for other in ("evilmod:Net", "subprocess:run", "evilmod", "evilmod:Net:lr=3"):
        file = tmp_path / "out" / "record.json"
        file.write_text(content.replace(f'"{name}"', f'"{other}"'))
        run_watched(mark, world, [partial(command_ends, capsys, "bench", "--check", file)])


def test_a_hostile_table_of_a_comparison(world: World, mark: Path, tmp_path: Path, capsys: Capture) -> None:
    for change in (
        edited("table.json", "title", value="\x1b[2J<script>"),
        edited("table.json", "rows", value=[{"label": "evilmod:f"}]),
        written("table.json", b"[" * 10_000),
    ):
        folder = copied(world.comparison, tmp_path / "bundles" / os.urandom(4).hex())
        change(folder)
        run_watched(mark, world, [partial(command_ends, capsys, "report", folder)])


@pytest.mark.job
@pytest.mark.parametrize(
    "file", ["run.toml", "rounds.jsonl", "timing.jsonl", "partition.json", "environment.json"]
)
def test_hostile_runs_of_a_comparison(file: str, world: World, mark: Path, tmp_path: Path) -> None:
    """Which a comparison in the same folder would use again."""
    for number, content in enumerate((b"[" * 10_000, b"[]", b'{"start": {}}', b"\xff\x00", b"")):
        folder = copied(world.comparison, tmp_path / "bundles" / str(number))
        for run in (folder / "runs").iterdir():
            (run / file).write_bytes(content)

        def compared(folder: Path = folder) -> None:
            copfl.compare(["fedavg", "local"], seeds=[0], base_tables=BASE, out=folder, tune={})

        run_watched(mark, world, [lambda: ends(compared)])


@pytest.mark.parametrize(
    "name", ["run.toml", "rounds.jsonl", "lock", "partition.json", "checkpoint/state.safetensors"]
)
def test_no_file_elsewhere_is_written_by_way_of_a_link(
    name: str, world: World, mark: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = copied(world.run, tmp_path / "bundles" / "run")
    own = folder / name
    victim = tmp_path / "victim"
    victim.write_bytes(own.read_bytes() if own.exists() else b"precious")
    os.utime(victim, (0, 0))
    own.unlink(missing_ok=True)
    own.symlink_to(victim)
    before = victim.read_bytes()
    for words in (("resume", folder, "--rounds", 2), ("report", folder), ("audit", folder, "--no-retrain")):
        answer = called(capsys, *words)
        harmless(answer)
        assert answer.code == 2
    assert (victim.read_bytes(), victim.stat().st_mtime) == (before, 0)


def test_at_least_forty_attacks_are_by_hand() -> None:
    assert len(BUNDLES) + len(RUNS) + len(NODES) >= 40


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bundle.json")
    with pytest.raises(RunError, match="is no file"):
        description.read(tmp_path)


# -- at random -------------------------------------------------------------------------------------------------


def page_of(folder: Path) -> str:
    return document.render(page.document_of(reading.read_all([folder])))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_bundles(world: World, mark: Path, tmp_path: Path) -> None:
    x, table = np.zeros((1, 1, 8, 8), np.uint8), {"size": [1.0], "colour": ["red"]}
    for original, data in ((world.bundle, x), (world.table, table)):
        folder = copied(original, tmp_path / "bundles" / original.name)
        file = folder / "bundle.json"
        for content in json_versions(file.read_bytes(), COUNT):
            file.write_bytes(content)
            with WATCH.on() as seen:
                ends(partial(predicted, folder, data))
            assert forbidden(seen, folder, tmp_path / "here") == []


@pytest.fixture
def one_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a run.toml is parsed once, and not for each version of a file beside it."""
    parse = functools.cache(foreign.toml_of)
    monkeypatch.setattr(foreign, "toml_of", lambda text: copy.deepcopy(parse(text)))


@pytest.mark.job
@pytest.mark.usefixtures("one_toml")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that no run has
@pytest.mark.parametrize(
    "file",
    [
        "environment.json",
        "audit.json",
        "gains.json",
        "rivals.json",
        "choice.json",
        "probabilities.json",
        "final.json",
        "survival.json",
        "trees.json",
        "new_clients.json",
        "verdict.json",
        "verdict-check.json",
    ],
)
def test_random_files_of_a_run(file: str, world: World, mark: Path, tmp_path: Path) -> None:
    of_table = world.run.parent / "of-table"  # what is trained on a table has more files
    has_it = file in ("environment.json", "audit.json", "gains.json")
    folder = copied(world.run if has_it else of_table, tmp_path / "bundles" / "run")
    if file == "choice.json":
        by_site = {name: np.array([0.5, 0.7]) for name in ("levels", "trees", "forest")}
        validated = Validated(by_site, {"network": "it takes too long"}, False, 5)
        CHOICE.write(Choice("levels", ("levels", "forest"), validated), folder)
    if file == "trees.json":
        root, leaf = Box("size ≤ 1", -1, 0, 0.5), Box("+0.1", 0, 1, 0.2)
        answers = (("yes", (0.1, 0.2)),)
        size = Dependence("size", ("1", "2"), True, answers)
        colour = Dependence("colour", ("blue", "red"), False, answers)
        TREES.write(TreeViews((Importance("size", 0.7, 0.1),), (size, colour), (root, leaf, leaf)), folder)
    if file.startswith("verdict"):
        gain = Estimate(0.1, -0.1, 0.3)
        site = SiteGain(0.1, -0.1, 0.3, 0.2, 40, "levels", "forest alone", BETTER)
        sites = (site,) * len(reading.read(folder, "run").sizes[0])
        of_run = Verdict(
            False, gain, 0.05, Interval(-0.1, 0.3), gain, Interval(-0.2, 0.4), 0.5, 0.6, sites, {"auc": gain}
        )
        VERDICT.write(of_run, folder)
        CHECK.write(Check(gain, True), folder)
    if file == "new_clients.json":
        by_count = {"4": np.array([0.5]), "all": np.array([0.6])}
        NEW_CLIENTS.write(NewClients([7], by_count, by_count, np.array([0.5])), folder)
    if file == "final.json":
        rounds = len(reading.read(folder, "run").records)
        FINAL.write(FinalEvaluation(rounds, [1], {"accuracy": np.array([0.5])}, [1]), folder)
    if file == "survival.json":
        curve = Observed("low risk", 3, (1.0, 2.0), (0.8, 0.5), (0.6, 0.3), (0.9, 0.7))
        scores = np.full(len(reading.read(folder, "run").sizes[0]), 0.2)
        calibration = AtHorizon(2.0, (RiskGroup(3, 0.4, 0.5, 0.2, 0.8),))
        SURVIVAL.write(Survival(scores, scores, (curve,), (curve,), calibration, ()), folder)
    original = (folder / file).read_bytes()
    for n, content in enumerate(json_versions(original, COUNT)):
        (folder / file).write_bytes(content)
        with WATCH.on() as seen:
            ends(lambda: reading.read(folder, "run"))
            if n % 8 == 0:  # a page takes some ten milliseconds
                ends(lambda: page_of(folder))
        assert forbidden(seen, folder) == []


HOSTILE_TEXT = "\x1b]0;evil\x07\x1b[2J\r\u202e"


def test_texts_in_the_files_of_a_first_run(world: World, mark: Path, tmp_path: Path, capsys: Capture) -> None:
    """Which `resume` reads too."""
    folder = copied(world.run.parent / "of-table", tmp_path / "bundles" / "run")
    validated = {"by_site": {"levels": [0.5, 0.7]}, "left_out": {HOSTILE_TEXT: HOSTILE_TEXT}}
    choice = {"federation": "levels", "sites": ["levels", HOSTILE_TEXT]}
    content = choice | {"validated": validated | {"is_rmse": False, "folds": 5}}
    for text in (json.dumps(content), "[" * 10_000, "[]", json.dumps({**content, HOSTILE_TEXT: []})):
        (folder / "choice.json").write_text(text)
        for words in (("resume", folder), ("report", folder)):
            run_watched(mark, world, [partial(command_ends, capsys, *words)])
    (folder / "choice.json").unlink()
    edited("rivals.json", "chosen", value=HOSTILE_TEXT)(folder)
    edited("rivals.json", "metrics", value=[{HOSTILE_TEXT: 1}])(folder)
    edited("probabilities.json", "calibration", value=[{"low": "x"}])(folder)
    run_watched(mark, world, [partial(command_ends, capsys, "report", folder)])


@pytest.mark.parametrize("case", ["rivals", "brackets", "a link", "the log"])
def test_what_a_report_of_a_node_prints(
    case: str, world: World, mark: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Its rivals and its audit log are data of whoever wrote the folder."""
    folder = copied(world.node, tmp_path / "bundles" / "state")
    digest = hashlib.sha256((folder / "test/model/weights.safetensors").read_bytes()).hexdigest()
    metric, numbers = {"name": "accuracy", "higher_is_better": True, "fraction": True}, {"accuracy": [0.5]}
    rivals: dict[str, Any] = {"metrics": [metric], "chosen": "constant", "by_site": ["constant"]}
    rivals |= {"values": {"constant": {"validated": [0.5], "tested": numbers}}, "personal": numbers}
    rivals |= {"interval": [[0, 1]], "left_out": {"forest": HOSTILE_TEXT}, "inputs": HOSTILE_TEXT}
    file = folder / "test" / "rivals.json"
    file.write_text(json.dumps({"of": digest, "rivals": rivals}))
    if case == "brackets":
        file.write_text("[" * 10_000)
    elif case == "a link":
        linked("test/rivals.json", "")(folder)
    elif case == "the log":
        line = {"n": 1, "previous": "", "event": "sent", "run": "test", "left": [HOSTILE_TEXT], "hash": "x"}
        (folder / "audit.jsonl").write_text(
            json.dumps(line) + "\n" + json.dumps(line | {"epsilon": "x"}) + "\n"
        )
    words = ("report", folder, "--no-baseline", "--no-rivals", "--out", tmp_path / "out" / "r.html")
    run_watched(mark, world, [partial(command_ends, capsys, *words)])
    if case == "a link":
        assert "leads out of" in called(capsys, *words).err
    if case == "the log":
        shown = called(capsys, "site", "log", folder)
        assert shown.code == 1  # its chain is broken
        harmless(shown._replace(code=0))


def test_the_name_of_an_image_is_printed(world: World, tmp_path: Path, capsys: Capture) -> None:
    name = HOSTILE_TEXT + ".png"
    (tmp_path / "images").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "images" / name)
    answer = called(capsys, "predict", world.bundle, "--data", tmp_path / "images")
    assert "evil" in answer.out
    harmless(answer)


def test_random_partitions(world: World, mark: Path, tmp_path: Path) -> None:
    content = {
        "format": FORMAT,
        "sha256": "",
        "partition": {"scheme": "x", "train": [[0, 1], [2]]},
    }
    content["partition"] |= {"test": [[0], [1]], "keywords": {}, "test_from": "test", "notes": ["a"]}  # type: ignore[operator]
    for version in json_versions(json.dumps(content).encode(), COUNT):
        (tmp_path / "partition.json").write_bytes(version)
        with WATCH.on() as seen:
            ends(lambda: Partition.load(tmp_path / "partition.json"))
        assert forbidden(seen, tmp_path) == []


def test_random_settings(world: World, mark: Path, tmp_path: Path) -> None:
    original = (world.run / "run.toml").read_bytes()
    for content in versions(original, tomli_w.dumps, tomllib.loads, COUNT):
        with WATCH.on() as seen:
            ends(partial(completed, content))
        # Data are what the file names, and nothing else is opened.
        named = {os.path.realpath(text) for text in texts_in([toml_or_nothing(content).get("data")])}
        wrong = forbidden(seen, world.run, tmp_path / "here")  # modules there are hashed for an error
        assert [one for one in wrong if one[0] != "open" or os.path.realpath(one[1]) not in named] == []


def toml_or_nothing(content: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        return tomllib.loads(content.decode())
    return {}


def texts_in(content: Any) -> Iterator[str]:
    """All texts of a table, however deep."""
    for path in places(content):
        value = at(content, path)
        if isinstance(value, str) and value and "\0" not in value:
            yield value


def at(content: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        content = content[step]
    return content


def test_random_rounds(world: World, mark: Path, tmp_path: Path) -> None:
    line = (world.run / "rounds.jsonl").read_bytes().rstrip(b"\n")
    for content in json_versions(line, COUNT):
        (tmp_path / "rounds.jsonl").write_bytes(content + b"\n")
        with WATCH.on() as seen:
            ends(lambda: records.read(tmp_path / "rounds.jsonl"))
        assert forbidden(seen, tmp_path) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_tables_of_a_comparison(world: World, mark: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundles"
    folder.mkdir()
    for content in json_versions((world.comparison / "table.json").read_bytes(), COUNT):
        (folder / "table.json").write_bytes(content)
        with WATCH.on() as seen:
            ends(lambda: comparison_page.document_of(folder))
        assert forbidden(seen, folder) == []


def test_random_comparison_files(mark: Path, tmp_path: Path) -> None:
    text = b'[[entry]]\nname = "fedavg"\nlabel = "a"\nsettings = {lr = 0.1, "model.name" = "mlp"}\n'
    text += b'[compare]\nseeds = [0, 1]\ntrials = 3\nreference = "a"\n[run]\nrounds = 3\n'
    for content in versions(text, tomli_w.dumps, tomllib.loads, COUNT):
        (tmp_path / "c.toml").write_bytes(content)
        with WATCH.on() as seen:
            ends(lambda: entry_file.read_file(tmp_path / "c.toml"))
        assert forbidden(seen, tmp_path) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_records_of_a_bench(world: World, mark: Path, tmp_path: Path) -> None:
    content = json.loads(world.record.read_text())
    short = content | {"tuning": content["tuning"][:2], "runs": content["runs"][:2]}
    for version in json_versions(json.dumps(short).encode(), COUNT):
        (tmp_path / "record.json").write_bytes(version)

        def checked() -> None:
            row = rows.read(tmp_path / "record.json")
            bench.check(row, BenchMachine(), runs=1, log=lambda line: None)

        with WATCH.on() as seen:
            ends(checked)
        assert forbidden(seen, tmp_path) == []


def test_random_settings_of_a_node(world: World, mark: Path, tmp_path: Path) -> None:
    folder = copied(world.node, tmp_path / "bundles" / "state")
    file = folder / "test" / "settings.json"
    original = file.read_bytes()
    for n, content in enumerate(json_versions(original, COUNT)):
        file.write_bytes(content)
        with WATCH.on() as seen:
            ends(lambda: remembered_run.recall(folder / "test"))
            if n % 4 == 0:
                ends(lambda: site_of(folder, None, baseline=False, tell=lambda round: None, rivals=False))
        assert forbidden(seen, folder) == []


# -- text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("north", "north"),
        ("Größe\u00a0in €", "Größe\u00a0in €"),
        ("می\u200cخواهم", "می\u200cخواهم"),  # a joiner is spelling
        ("\x1b[31m", "\\x1b[31m"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("\x9b1m\x7f", "\\x9b1m\\x7f"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("\u2028\ufeff", "\\u2028\\ufeff"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_a_terminal_obeys_is_shown_as_its_code(text: str, shown: str) -> None:
    assert foreign.printable(text) == shown
    assert foreign.printable(shown) == shown
    assert foreign.cleaned({text: [text, 1, None]}) == {shown: [shown, 1, None]}


def test_what_is_deeper_than_any_file_of_copfl_is_refused() -> None:
    for depth in (foreign.MOST_DEPTH + 1, 10**5):
        with pytest.raises(ValueError, match=r"deeper than|nested too deeply"):
            foreign.json_of("[" * depth + "]" * depth)
    assert foreign.json_of("[" * 60 + "]" * 60)
    with pytest.raises(ValueError, match="1024 bits"):
        foreign.json_of(str(2**1025))


def test_a_path_stays_inside(tmp_path: Path) -> None:
    (tmp_path / "sent" / "base").mkdir(parents=True)
    (tmp_path / "sent" / "base" / "a").write_text("")
    (tmp_path / "outside").write_text("")
    assert foreign.inside(tmp_path / "sent", tmp_path / "sent" / "base") == tmp_path / "sent" / "base"
    (tmp_path / "here").symlink_to(tmp_path / "sent")  # the folder itself may be a link
    foreign.inside(tmp_path / "here", tmp_path / "here" / "base")
    (tmp_path / "sent" / "base" / "b").symlink_to(tmp_path / "sent" / "base" / "a")
    foreign.inside(tmp_path / "sent", tmp_path / "sent" / "base")
    for deep in ("c", "of/it/c"):
        link = tmp_path / "sent" / "base" / deep
        link.parent.mkdir(parents=True, exist_ok=True)
        for target in (tmp_path / "outside", tmp_path, tmp_path / "nothing", "../" * 9 + "etc"):
            link.symlink_to(target)
            with pytest.raises(RunError, match="leads out of"):
                foreign.inside(tmp_path / "sent", tmp_path / "sent" / "base")
            link.unlink()
        os.mkfifo(link)
        with pytest.raises(RunError, match="a pipe or a device"):
            foreign.inside(tmp_path / "sent", tmp_path / "sent" / "base")
        link.unlink()


# -- every command ---------------------------------------------------------------------------------------------

FEDERATION = "federation/test_hostile_folders.py::test_a_damaged_file_is_one_error"
# The test that opens what somebody else wrote with it; without "::" why there is nothing to open.
COMMANDS = {
    "run": "test_foreign.py::test_a_hostile_run_folder",
    "resume": "test_foreign.py::test_a_hostile_run_folder",
    "list": "it opens nothing",
    "compare": "test_foreign.py::test_a_hostile_comparison_file",
    "sweep": "test_foreign.py::test_a_hostile_run_folder",
    "choose": "test_foreign.py::test_hostile_runs_of_a_comparison",  # it reads the same runs
    "bench": "test_foreign.py::test_hostile_records_of_a_bench",
    "report": "test_foreign.py::test_a_hostile_run_folder",
    "predict": "test_foreign.py::test_a_hostile_bundle",
    "evaluate": "test_foreign.py::test_a_hostile_bundle",
    "export": "test_foreign.py::test_a_hostile_bundle",
    "personalize": "test_foreign.py::test_a_hostile_run_folder",
    "audit": "test_foreign.py::test_a_hostile_run_folder",
    "watch": "test_foreign.py::test_a_hostile_run_folder",  # RunsPage is what it serves
    "doctor": "it opens nothing",
    "schema": "it opens nothing",
    "reproduce": "it trains, and opens its own runs",
    "data check": "test_supply_chain.py::test_the_payload_is_refused_in_every_file",
    "data describe": "test_supply_chain.py::test_the_payload_is_refused_in_every_file",
    "data get": "it opens what has the checksum of the table alone",
    "site join": FEDERATION,
    "site report": FEDERATION,
    "site predict": FEDERATION,
    "site status": FEDERATION,
    "site leave": FEDERATION,
    "site start": FEDERATION,
    "site approve": FEDERATION,
    "site log": FEDERATION,
    "site check": FEDERATION,
    "site policy": FEDERATION,
    "site key": "it writes a new file",
    "site rotate": "it reads the owner's key, and the folder as site start does",
    "site node": "it opens what its owner names on the line",
    "site backup": FEDERATION,
    "site restore": "federation/operations/test_backup.py::test_any_damage_is_one_error",
    "site clean": FEDERATION,
    "federate contract": "it opens a table, as run does",
    "federate init": FEDERATION,
    "federate invite": FEDERATION,
    "federate server": "it runs an app, and only that of its folder",
    "federate admit": FEDERATION,
    "federate watch": FEDERATION,
    "federate run": "it runs an app, and only that of its folder",
    "federate up": "it runs an app, and only that of its folder",
    "federate resume": "it runs an app, and only that of its folder",
    "federate personalize": "it runs an app, and only that of its folder",
    "federate status": FEDERATION,
    "federate stop": FEDERATION,
    "federate members": FEDERATION,
    "federate agree": "it runs an app, and only that of its folder",
    "federate propose": FEDERATION,
    "federate revoke": FEDERATION,
    "federate rotate": "it reads the coordinator's keys alone",
    "federate backup": FEDERATION,
    "federate restore": "federation/operations/test_backup.py::test_any_damage_is_one_error",
    "federate clean": FEDERATION,
}


def leaves(command: click.Command, name: str = "") -> Iterator[str]:
    """The words of every command below one."""
    if isinstance(command, click.Group):
        for word, below in command.commands.items():
            yield from leaves(below, f"{name} {word}".strip())
    else:
        yield name


def test_every_command_has_a_hostile_folder_or_opens_none() -> None:
    assert set(COMMANDS) == {*leaves(typer.main.get_command(app))}
    for command, test in COMMANDS.items():
        file, has_test, name = test.partition("::")
        if has_test:
            text = (Path(__file__).parent / file).read_text()
            assert f"def {name}(" in text, command


def test_every_public_function_has_a_hostile_folder_or_opens_none() -> None:
    """`load`, `resume`, `complete` and `run` are among the calls above; a comparison in its old folder, too."""
    opened = {"load", "resume", "complete", "run", "compare", "sweep", "choose"}
    others = {
        "ALGORITHMS",
        "Bundle",
        "Comparison",
        "Result",
        "Run",
        "check_algorithm",
    }  # what these return, or no file
    assert {*copfl.__all__} - {"__version__"} == opened | others
