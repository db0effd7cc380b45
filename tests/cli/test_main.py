"""The command line, as a person meets it."""

from __future__ import annotations

import functools
import hashlib
import http.server
import importlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copfl import __version__
from copfl.algorithms import ALGORITHMS
from copfl.cli import options
from copfl.cli.main import app, main
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets import datasets, download
from copfl.experiment import records
from copfl.models import MODELS, SOURCES
from copfl.settings.complete import complete
from copfl.settings.components import OPTIMIZERS
from copfl.settings.record import declared
from copfl.settings.schema import KINDS
from tests.commands import TINY, Answer, called, command, environment, files, found
from tests.slow import SLOW

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, and modules imported from it are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COPFL_DATA", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("copfl.telling.FIRST", 3600)  # no line of progress on a slow machine
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "mypackage"]:
        del sys.modules[name]


# -- running -----------------------------------------------------------------------------------------------------------


@pytest.mark.job
def test_run_without_options_is_copfl_on_digits(here: Path, capsys: Capture) -> None:
    answer = called(capsys, "run", "--rounds", 2)
    assert (answer.code, answer.err) == (0, "")
    assert "copfl on digits: accuracy in % on each site's own test rows" in answer.out
    folder = Path(re.findall(r"Folder: (.*)", answer.out)[0])
    assert re.fullmatch(r"runs/\d{8}-\d{6}-copfl-digits", str(folder))
    assert {"run.toml", "rounds.jsonl", "partition.json", "environment.json", "timing.jsonl"} <= files(
        folder
    ).keys()
    assert len([name for name in files(folder) if name.endswith("/bundle.json")]) == 21  # and the global one
    assert "\x1b" not in answer.out
    assert re.match(r"(Training|No gain|Too few).*\.\n\n", answer.out)  # the answer first
    assert "better" in answer.out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "clients"), [("", 20), ("-a copfl", 10), ("-d digits", 10), ("--preset plus", 10)]
)
def test_the_demo_is_what_runs_where_nothing_is_named(
    here: Path, capsys: Capture, words: str, clients: int
) -> None:
    assert called(capsys, "run", *words.split(), "-m", "mlp", "-r", 1, "-o", "out", "-q").code == 0
    assert f"\nclients = {clients}\n" in (here / "out" / "run.toml").read_text()


def test_the_options_and_set_reach_the_run(here: Path, capsys: Capture) -> None:
    words = "-a copfl -m mlp -n 3 -r 2 --seed 5 --batch-size 60 --participation 0.5 --engine sequential"
    more = "--precision fp64 --partition iid --optimizer adam --lr 0.01 -s algorithm.rate=0.1 -s run.eval_every=2"
    more += " -s model.width=4 -o there"
    assert called(capsys, "run", *words.split(), *more.split()).code == 0
    text = (here / "there" / "run.toml").read_text()
    for line in (
        "rate = 0.1", "width = 4", 'name = "adam"', "lr = 0.01", 'name = "iid"', "clients = 3", "rounds = 2",
        "seed = 5", "batch = 60", "participation = 0.5", "eval_every = 2",
        'engine = "sequential"', 'precision = "fp64"',
    ):  # fmt: skip
        assert f"\n{line}\n" in text, line


# Their updates are no descent.
@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"levels", "trees", "wide_levels"}))
def test_the_epochs_of_every_algorithm(name: str) -> None:
    tables = complete({"algorithm": {"name": name}}, {"algorithm": {"epochs": 3}}).tables()
    assert tables["algorithm"]["epochs"] == 3


def test_everyday_options(here: Path, capsys: Capture) -> None:
    words = "--epochs 2 --batch-size 60 --lr 0.01 -r 1 -q"
    assert called(capsys, "run", *TINY, *words.split(), "-o", "there") == Answer(0, "", "")
    text = (here / "there" / "run.toml").read_text()
    assert all(f"\n{line}\n" in text for line in ("epochs = 2", "batch = 60", "lr = 0.01"))


def test_the_partition_in_use_is_printed(here: Path, capsys: Capture) -> None:
    x, group = np.random.default_rng(0).normal(size=(60, 3)), np.repeat(["north", "south", "west"], 20)
    np.savez(here / "mine.npz", x=x, y=np.arange(60) % 2, group=group)
    small = ("-d", "mine.npz", "-a", "fedavg", "-r", 1, "--model", "mlp", "--set", "model.width=4")
    natural = "3 clients, partition by_group (natural clients)"
    answer = called(capsys, "run", *small, "--verbose", "-o", "natural")
    assert f"Sites: {natural}." in answer.out
    assert "2 (west)" in answer.out
    assert natural in json.loads(called(capsys, "run", *small, "--json").out)["partition"]
    answer = called(capsys, "run", *small, "--verbose", "--partition", "iid", "-n", 2)
    assert "Sites: 2 clients, partition iid." in answer.out


def test_quiet_says_nothing_and_json_says_one_object(here: Path, capsys: Capture) -> None:
    assert called(capsys, "run", "-r", 1, *TINY, "--quiet", "-o", "a") == Answer(0, "", "")
    answer = called(capsys, "run", "-r", 1, *TINY, "--json", "-o", "b")
    said = json.loads(answer.out)
    assert (answer.code, answer.err) == (0, "")
    assert (said["folder"], said["rounds"], len(said["clients"]["accuracy"])) == ("b", 1, 2)
    assert said["mean"]["accuracy"] == pytest.approx(np.mean(said["clients"]["accuracy"]))
    again = json.loads(called(capsys, "resume", "b", "--json").out)
    assert again["clients"] == said["clients"]


@pytest.mark.parametrize("how", ["--quiet", "--json"])
def test_neither_shows_a_bar_on_a_terminal(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    from copfl.experiment import progress

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "bar", None)
    assert called(capsys, "run", "-r", 1, *TINY, how).code == 0


def test_ctrl_c_says_how_to_go_on(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    append, rounds = records.append, 0

    def pressed(path: Path, record: dict[str, Any]) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 5:
            raise KeyboardInterrupt
        append(path, record)

    with monkeypatch.context() as patched:
        patched.setattr(records, "append", pressed)
        answer = called(capsys, "run", "-r", 4, *TINY, "-o", "run")
    assert answer == Answer(
        130, "", "copfl: stopped; `copfl resume run` continues from its last checkpoint\n"
    )
    assert called(capsys, "resume", "run", "-q") == Answer(0, "", "")
    assert called(capsys, "run", "-r", 4, *TINY, "-o", "whole", "-q").code == 0
    assert found(here / "run") == found(here / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_run_says_how_to_go_on(
    number: signal.Signals, here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup")
    append = records.append

    def ended(path: Path, record: dict[str, Any]) -> None:
        append(path, record)
        os.kill(os.getpid(), number)

    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(records, "append", ended)
    answer = called(capsys, "run", "-r", 4, *TINY, "-o", "run")
    for other, handler in handlers.items():
        signal.signal(other, handler)
    assert answer == Answer(
        128 + number, "", "copfl: stopped; `copfl resume run` continues from its last checkpoint\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_work_begins_ends_with_its_own_code_too(
    number: signal.Signals, here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr("copfl.cli.main.one_of", lambda *given, **named: os.kill(os.getpid(), number))
    answer = called(capsys, "list", "algorithms")
    for other, handler in handlers.items():
        signal.signal(other, handler)
    assert answer == Answer(128 + number, "", "copfl: stopped\n")


def test_a_layer_without_weights_is_refused(here: Path, capsys: Capture) -> None:
    answer = called(capsys, "run", "-r", 1, *TINY, "-s", "model.width=0")
    assert (answer.code, answer.out) == (2, "")
    assert "the model mlp with width=0 has no weights in body.1.weight; use larger numbers" in answer.err


def test_one_client_is_a_federation(here: Path, capsys: Capture) -> None:
    assert called(capsys, "run", "-r", 1, *TINY, "-q", "-s", "run.clients=1").code == 0


@pytest.mark.parametrize("algorithm", ["copfl", "fedper", "apfl"])
def test_a_run_file_does_it_again(here: Path, capsys: Capture, algorithm: str) -> None:
    words = ["run", "-a", algorithm, "-r", 3, *TINY, "--seed", 3, "--participation", 0.5]
    assert called(capsys, *words, "-o", "first").code == 0
    assert called(capsys, "run", "-c", "first/run.toml", "-o", "second").code == 0
    assert found(here / "second") == found(here / "first")
    assert (here / "second" / "run.toml").read_bytes() == (here / "first" / "run.toml").read_bytes()
    assert (here / "second" / "partition.json").read_bytes() == (
        here / "first" / "partition.json"
    ).read_bytes()


def test_options_on_the_line_win_over_the_run_file(here: Path, capsys: Capture) -> None:
    assert called(capsys, "run", "-r", 1, *TINY, "-s", "algorithm.rate=0.1", "-o", "first").code == 0
    words = ["run", "-c", "first/run.toml", "-a", "fedavg", "--seed", 4, "-o", "second"]
    assert called(capsys, *words).code == 0
    text = (here / "second" / "run.toml").read_text()
    assert 'name = "fedavg"' in text
    assert 'name = "adam"' in text
    assert "seed = 4\n" in text
    assert "rate" not in text
    assert "clients = 2\n" in text


def test_a_saved_partition_is_used_again(here: Path, capsys: Capture) -> None:
    assert called(capsys, "run", "-r", 1, *TINY, "--seed", 9, "-o", "a").code == 0
    assert (
        called(
            capsys, "run", "-r", 1, "-m", "mlp", "-a", "local", "--partition", "a/partition.json", "-o", "b"
        ).code
        == 0
    )
    assert (here / "a" / "partition.json").read_bytes() == (here / "b" / "partition.json").read_bytes()


MODULE = """
import numpy as np
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(shape[0], width), nn.ReLU())
        self.classifier = nn.Linear(width, classes)

    def forward(self, x):
        return self.classifier(self.body(x))

def load(data_dir=None, count=60):
    rng = np.random.default_rng(0)
    y = np.arange(count) % 3
    x = rng.normal(size=(count, 5)) + y[:, None]
    return x.astype("float32"), y

wrong = 3
"""


@pytest.fixture
def mypackage(here: Path) -> Path:
    (here / "mypackage").mkdir()
    (here / "mypackage" / "things.py").write_text(MODULE)
    return here


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process, this one has not imported the package, and does not know its folder."""
    paths = [path for path in sys.path if not (Path(path) / "mypackage").is_dir()]
    monkeypatch.setattr(sys, "path", paths)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypackage"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()


def test_a_model_and_data_of_one_s_own(
    mypackage: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten(monkeypatch)
    words = ["--dataset", "mypackage.things:load", "--model", "mypackage.things:Net", "-n", 2, "-r", 2]
    assert called(capsys, "run", *words, "-s", "model.width=6", "-s", "data.count=90", "-o", "a").code == 0
    text = (mypackage / "a" / "run.toml").read_text()
    assert 'name = "mypackage.things:Net"\nwidth = 6\n' in text
    forgotten(monkeypatch)
    refused = called(capsys, "run", "-c", "a/run.toml", "-o", "b")  # a file names no code
    assert refused.code == 2
    assert "add --code mypackage.things (in Python" in refused.err
    assert "(the same)" in refused.err
    assert "mypackage.things" not in sys.modules
    again = called(capsys, "run", "-c", "a/run.toml", "-o", "b", "--code", "mypackage.things")
    assert again.code == 0, again.err
    assert found(mypackage / "b") == found(mypackage / "a")
    assert called(capsys, "resume", "a", "-r", 3).code == 2
    assert called(capsys, "resume", "a", "-r", 3, "--code", "mypackage.things").code == 0


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "run --roundz 3",
            r'--roundz is no setting; did you mean "--rounds"\? Allowed are .*\. `copfl run --help` describes',
        ),
        ("run --learning-rate 5", '--learning-rate is no setting.*; did you mean "--lr"?'),
        ("run --data t.csv", '--data is no setting.*; did you mean "--dataset"?'),
        ("run --set optimizer.learning_rate=5", 'learning_rate=5 is no setting.*; did you mean "lr"?'),
        ("compare --local-epochs 5", '--local-epochs is no setting.*; did you mean "--'),
        ("run --set epochs=5", "'epochs=5' must be TABLE.KEY=VALUE, .*; did you mean \"algorithm.epochs\"?"),
        ("run --set run.epochs=5", 'run.epochs=5 is no setting.*; did you mean "algorithm.epochs"?'),
        ("run --set run.batch_size=5", 'run.batch_size=5 is no setting.*; did you mean "batch"?'),
        ("run --set iid.alpha=5 --partition iid", "iid={'alpha': 5} is no setting; allowed are adapter"),
        ("run --set partition.alpha=5 --partition iid", "partition.alpha=5 is no setting; allowed are none"),
        ("rum", r"No such command '?rum'?.*`copfl --help` describes"),
        ("run --rounds many", "Invalid value for '--rounds' / '-r': 'many' is not a valid integer"),
        ("run --dataset digitz", "data.name='digitz' is unknown; did you mean \"digits\"?"),
        ("run --dataset cifar10", "no data folder was given; name one with --data-dir DIR or in COPFL_DATA"),
        (
            "run --dataset cifar10 --data-dir gone",
            "the data folder .*gone does not exist. Get it with: copfl data get",
        ),
        ("run --dataset cifar10 --data-dir .", "copfl data get cifar10"),
        ("run --dataset photos.npz", r"photos\.npz does not exist; give a table \(.*\), an \.npz file"),
        ("run --dataset empty", r"no images; expected <class>/\*\.png"),
        ("run --dataset some/photos", "some/photos does not exist; give a"),
        ("run --dataset mypackage.things:lod", 'no data in mypackage.things "lod"; did you mean "load"?'),
        ("run --dataset mypackage.gone:load", r"there is no module mypackage\.gone; copfl searches"),
        ("run --dataset mypackage.things:wrong", "data of your own is a pandas DataFrame, .*, not int"),
        ("run --dataset mypackage.things:load -s data.cont=3", "loading it raised TypeError: .*'cont'"),
        (
            "run --dataset mypackage.things:load --model resnet18",
            r"resnet18 needs images .* not samples of shape \[5\]; try mlp",
        ),
        ("run --model mypackage.things:Net", "making it for samples|does not fit samples of shape"),
        (
            "run --model mypackage.things:Net -s model.wide=3",
            'model.wide=3 is no setting; did you mean "wid',
        ),
        ("run --model mypackage.things:wrong", '"mypackage.things:wrong" is int; a model is an nn.Module'),
        ("run --model resnet19", "model.name='resnet19' is unknown; did you mean \"resnet18\"?"),
        ("run --clients 0", "run.clients=0 must be a whole number, at least 1"),
        ("run --clients 2000", "client"),
        ("run --rounds 0", "run.rounds=0 must be a whole number, at least 1"),
        (
            "run --set algorithm.rate=2",
            "algorithm.rate=2.0 must lie between 0 and 1: it is a fraction of the parameters",
        ),
        ("run --set algorithm.rte=0.2", 'algorithm.rte=0.2 is no setting; did you mean "rate"?'),
        ("run --set rate=0.2", r"must be TABLE\.KEY=VALUE"),
        (
            "run --set fedavg.epochs=2",
            "fedavg={'epochs': 2} is no setting; allowed are adapter, addons, algorithm",
        ),
        ("run --lr nan", "lr=nan must be a finite number"),
        ("run --lr -1", "optimizer.lr=-1.0 must be a number or left out, above 0"),
        ("run --seed -3", "run.seed=-3 must be a whole number, at least 0"),
        ("run --seed 99999999999999999999999", "must be a whole number, at least 0 and at most"),
        ("run --participation 0", "participation=0.0 must be a number, above 0"),
        ("run --partition classez", "partition.name='classez' is unknown; did you mean \"classes\"?"),
        ("run --partition gone.json", r"cannot read the partition gone\.json"),
        ("run --partition by_group", '"digits" has no groups'),
        ("run --algorithm copfl2", "algorithm.name='copfl2' is unknown; did you mean \"copfl\"?"),
        ("run --optimizer sdg", "optimizer.name='sdg' is unknown; did you mean \"sgd\"?"),
        ("run --engine warp", "run.engine='warp' is unknown; allowed are auto, cuda_graph"),
        ("run --device tpu", "run.device='tpu' is unknown; use cpu, cuda"),
        ("run --precision fp12", "run.precision='fp12' is unknown"),
        (
            "run -c gone.toml",
            r"cannot read gone\.toml: No such file or directory; give the run\.toml of a run",
        ),
        ("run -c notes.txt", r"notes\.txt is damaged or no run file"),
        (
            "run --out notes.txt",
            r"cannot write into notes\.txt: Not a directory; name another folder with --out",
        ),
        ("run --out mypackage", r"not empty \(it contains .*things\.py.*\); name a new folder with --out"),
        ("resume gone", "there is no folder gone"),
        ("resume mypackage", r"mypackage is not a run folder: it has no run\.toml"),
        ("resume notes.txt", r"there is no folder notes\.txt"),
        ("list planets", 'no list "planets". Known: algorithms, datasets, models'),
        ("list", "Missing argument"),
        ("data check", ""),
        ("data check digitz", 'no data set "digitz"'),
        ("data check cifar10", "no data folder was given"),
        ("data get cifar10", "name the folder to put it in: --data-dir DIR"),
        ("data get mini_imagenet --data-dir .", "has no open address"),
        ("data get cifar10 --data-dir . --url ftp://x/y", "must begin with https://"),
        (
            "data get cifar10 --data-dir . --url http://127.0.0.1:9/y",
            "cannot be reached: .*Run the same command again",
        ),
    ],
)
def test_an_error_is_one_paragraph_with_the_remedy(
    mypackage: Path, capsys: Capture, words: str, message: str
) -> None:
    (mypackage / "empty").mkdir()
    (mypackage / "notes.txt").write_text("not = [a run file")
    before = {name for name in files(mypackage) if "__pycache__" not in name}
    answer = called(capsys, *words.split())
    if message:
        assert answer.code == 2
        assert answer.out == ""
        assert answer.err.startswith("copfl: ")
        assert answer.err.count("\n") == 1
        assert re.search(message, answer.err), answer.err
    assert "Traceback" not in answer.err
    assert {name for name in files(mypackage) if "__pycache__" not in name} == before
    assert not (mypackage / "runs").exists()


def test_data_that_is_cut_short_or_damaged_is_named(here: Path, capsys: Capture) -> None:
    folder = here / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "test_batch"):
        (folder / name).write_bytes(b"\x80\x02 cut short")
    answer = called(capsys, "run", "--dataset", "cifar10", "--data-dir", here)
    assert answer.code == 2
    assert re.search(
        r"data_batch_1 \(12 bytes\) has md5 \w+ instead of c99cafc1.* delete it.*copfl data get", answer.err
    )


def test_bare_copfl_shows_what_there_is(capsys: Capture) -> None:
    for words, inside in (([], "run"), (["data"], "check")):
        answer = called(capsys, *words)
        assert answer.code == 2
        assert answer.out.startswith("Usage: copfl")
        assert inside in answer.out
    version = called(capsys, "--version")
    assert (
        version.out
        == f"copfl {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}\n"
    )


@pytest.mark.parametrize("command", ["run", "compare", "sweep"])
def test_help_lists_the_options_in_groups(capsys: Capture, command: str) -> None:
    text = called(capsys, command, "--help").out
    titles = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert titles == ["Data", "Model", "Training", "Federation", "Robustness", "Output", "Options"]
    assert "Robust aggregation: clip" in text


def test_the_options_are_those_of_the_records() -> None:
    derived = {f"{one.kind}.{one.key}": one.parameter for one in options.settings("run")}
    panels = {
        f"{kind}.{f.name}" for kind, record in KINDS.items() for f in declared(record) if f.metadata["panel"]
    }
    assert derived.keys() == panels
    command = next(c.callback for c in app.registered_commands if c.callback and c.callback.__name__ == "run")
    known = inspect.signature(command).parameters
    assert {parameter.name for parameter in derived.values()} < known.keys()
    assert "line" not in known
    names = [name for p in known.values() for name in p.annotation.__metadata__[0].param_decls]
    assert len(names) == len(set(names))


@pytest.mark.job
def test_output_that_cannot_be_written(here: Path) -> None:
    line = " ".join(command("data", "check", "digits"))
    piped = subprocess.run(f"{line} | true", shell=True, capture_output=True, text=True, env=environment())
    assert piped.stderr == ""
    for unbuffered in ("1", ""):  # it fails at the first line, or at the end
        variables = environment() | {"PYTHONUNBUFFERED": unbuffered}
        full = subprocess.run(
            f"{line} > /dev/full", shell=True, capture_output=True, text=True, env=variables
        )
        assert full.returncode == 2
        assert full.stderr == "copfl: the output: No space left on device\n"


def test_names_that_the_output_cannot_show_are_no_reason_to_fail(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = np.arange(60) % 2
    np.savez(here / "größe.npz", x=np.zeros((60, 3), np.float32), y=y)
    written = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, content in written.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(content, encoding="ascii", write_through=True))
    words = ["run", "-a", "fedavg", "-d", "größe.npz", "-m", "mlp", "-n", "2", "-r", "1", "-o", "out"]
    monkeypatch.setattr(sys, "argv", ["copfl", *words])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert written["stderr"].getvalue() == b""
    assert b"gr??e" in written["stdout"].getvalue()


# -- what there is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "registry"),
    [
        ("algorithms", ALGORITHMS),
        ("datasets", datasets.DATASETS),
        ("models", MODELS | SOURCES),
        ("partitions", SCHEMES),
        ("optimizers", OPTIMIZERS),
    ],
)
def test_lists_have_one_line_each(capsys: Capture, what: str, registry: dict[str, Any]) -> None:
    answer = called(capsys, "list", what)
    lines = [line.split(None, 1) for line in answer.out.splitlines()]
    assert [name for name, _ in lines] == sorted(registry)
    assert all(10 < len(text) < 120 for _, text in lines)


def test_data_check_says_what_is_there(here: Path, capsys: Capture) -> None:
    answer = called(capsys, "data", "check", "digits")
    assert answer.code == 0
    assert re.match(r"digits: 1,\d+ train and \d+ test samples, uint8 \[1, 8, 8\], 10 classes", answer.out)
    np.savez(here / "mine.npz", x=np.zeros((30, 4), np.float32), y=np.arange(30) % 3)
    assert "mine: 24 train and 6 test samples" in called(capsys, "data", "check", "mine.npz").out
    everything = called(capsys, "data", "check", "--data-dir", here)
    assert everything.code == 0
    assert "digits: 1," in everything.out
    assert "not usable: cifar10:" in everything.out


class Server(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def test_data_get_fetches_and_checks(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "served").mkdir()
    content = np.random.default_rng(0).bytes(300_000)
    (here / "served" / "set.tar").write_bytes(content)
    handler = functools.partial(Server, directory=str(here / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/set.tar"
        good = hashlib.md5(content, usedforsecurity=False).hexdigest()
        monkeypatch.setitem(download.PUBLISHED, "cifar10", (download.RemoteFile(url, good, "set.tar"),))
        answer = called(capsys, "data", "get", "cifar10", "--data-dir", "sets")
        assert answer == Answer(0, "sets/set.tar\n", "")
        assert (here / "sets" / "set.tar").read_bytes() == content
        monkeypatch.setitem(download.PUBLISHED, "cifar10", (download.RemoteFile(url, "0" * 32, "set.tar"),))
        monkeypatch.setenv("COPFL_DATA", "others")
        answer = called(capsys, "data", "get", "cifar10")
        assert answer.code == 2
        assert "has been removed. Get it again, or from another address (--url)" in answer.err
        assert not files(here / "others")
        server.shutdown()


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "default"), [("run", "the algorithm's"), ("compare", "adam"), ("choose", "adam")]
)
def test_help_shows_the_defaults_of_the_command(capsys: Capture, command: str, default: str) -> None:
    text = " ".join(called(capsys, command, "--help").out.split())
    (optimizer,) = re.findall(r"--optimizer TEXT (.*?) --lr", text)
    assert optimizer.endswith(f"default: {default}.")
    assert ("own: each algorithm's" in optimizer) is (command != "run")
    for flag in ("--skip-corrupt", "--benefit"):
        assert re.search(rf"{flag} [^-]*; default: off\.", text)
    assert "default: False" not in text


@pytest.mark.job
def test_help_is_quick_and_leaves_torch_alone(here: Path) -> None:
    look = "import sys; from copfl.cli import main as cli; sys.argv = ['copfl', '--help']\n"
    look += "try: cli.main()\nexcept SystemExit as exit: assert exit.code == 0\n"
    look += "assert not {'torch', 'numpy', 'rich', 'sklearn'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, env=environment())
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run(command("--help"), check=True, capture_output=True, env=environment())
        after = os.times()
        used = after.children_user - before.children_user + after.children_system - before.children_system
        seconds.append(used)  # of a processor, so that other work on the machine does not count
    assert min(seconds) < 0.5


@pytest.mark.job
def test_errors_of_the_line_come_before_torch_is_loaded(here: Path) -> None:
    """It takes seconds, and whoever mistyped a name waits for them."""
    (here / "rows.csv").write_text("a,b\n1,2\n")
    wrong = [
        *(
            "run -a fedavgg",
            "run -d digitz",
            "run -d none.csv",
            "run --rounds 0",
            "run -s run.round=3",
            "run -s a.b=3",
        ),
        *("choose -a copfl,locl", "compare -a copfl,locl:lr=0.1", "compare -d digitz", "sweep -s run.seed=x"),
        *("resume none", "report none", "audit none", "evaluate none --all", "--version"),
        *("run -c none.toml", "export none --out x", "predict none --data rows.csv"),
        *("federate up none", "federate resume none", "federate personalize none --data rows.csv"),
        *(
            "federate watch none",
            "federate run none",
            "federate status none",
            "federate init x --contract no.toml",
        ),
        *("site join rows.csv --data rows.csv", "site start none", "site leave none", "site approve none"),
        *("site report none", "site predict none --data rows.csv", "site check none --data rows.csv"),
        *("run -d none", "run -a fedagv", "run --rounds -3", "run -s run.ronds=3", "run -s rn.rounds=3"),
        *(
            "compare",
            "compare -a fedagv",
            "compare -a fedavg -d none",
            "sweep",
            "choose -d none",
            "bench fedagv",
        ),
        *("resume none", "report none", "watch none", "audit none", "personalize none --data rows.csv"),
        *("list none", "federate init x -d none", "federate init x --ronds 3", "run --ronds 3"),
        *("run --target b", "run -d rows.csv --target none", "compare -d rows.csv --target b --client none"),
        *("federate contract rows.csv --target none", "federate contract rows.csv --target b --group none"),
    ]
    look = "import sys; from copfl.cli import main as cli\n"
    look += f"for words in {wrong!r}:\n    sys.argv = ['copfl', *words.split()]\n"
    look += "    try: cli.main()\n    except SystemExit as exit: assert exit.code == (0 if 'version' in words else 2)\n"
    look += "    assert not {'torch', 'pyarrow', 'pandas'} & set(sys.modules), words"
    subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, env=environment(), cwd=here)


@pytest.mark.job
def test_killed_and_resumed_is_never_killed(here: Path, capsys: Capture) -> None:
    words = ["-r", 12, "-n", 4, "-m", "mlp", "-s", "run.checkpoint_every=4", "--no-local-baseline"]
    one_thread = {**environment(), "OMP_NUM_THREADS": "1"}  # like this process, which does the rest
    assert called(capsys, "run", *words, "-o", "whole").code == 0
    process = subprocess.Popen(command("run", *words, "-o", "killed"), cwd=here, env=one_thread)
    try:
        wait_for(here / "killed" / "rounds.jsonl", 6, process)
        process.send_signal(signal.SIGSTOP)  # in the middle of a round after a checkpoint
        second = called(capsys, "resume", "killed")
        complaint = "copfl: another process is working in killed; wait for it, or name another folder\n"
        assert second == Answer(2, "", complaint)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert len((here / "killed" / "rounds.jsonl").read_bytes().splitlines()) < 12
    assert called(capsys, "resume", "killed").code == 0
    assert found(here / "killed") == found(here / "whole")
    assert files(here / "killed").keys() == files(here / "whole").keys()


def wait_for(path: Path, lines: int, process: subprocess.Popen[Any]) -> None:
    """Returns as soon as the file has so many lines."""
    for _ in range(6000):
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        assert process.poll() is None, f"it ended with {process.returncode} before {path} had {lines} lines"
        time.sleep(0.01)
    raise AssertionError(f"{path} never had {lines} lines")


@pytest.mark.job
@pytest.mark.long
def test_stopped_at_every_moment_it_goes_on_as_if_nothing_was(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    ways = {"kill": 30, "full": 30, "clock": 8} if SLOW else {"some": 6}
    words = [sys.executable, "-m", "tests.killing", str(tmp_path), *ways]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    for how, least in ways.items():
        lines = [line for line in done.stdout.splitlines() if line.startswith(how)]
        assert len(lines) >= least
        assert all(line.endswith(", equal") for line in lines)
        assert [line for line in lines if "resumed" in line]


# -- terminals ---------------------------------------------------------------------------------------------------------


WIDTHS = (100, 40)
ON_A_TERMINAL = f"""
import fcntl, struct, sys, termios
from copfl.cli import main as cli
for width in {WIDTHS}:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    sys.argv = ["copfl", "run", "-r", "3", "--no-rivals", *{TINY}, "-o", f"run-{{width}}"]  # which need 60 columns
    try:
        cli.main()
    except SystemExit as exit:
        assert exit.code == 0
    print(end="\\f")
"""


def on_a_terminal(words: list[str], cwd: Path) -> str:
    """All that a command writes to a terminal."""
    import pty

    ours, theirs = pty.openpty()
    plain = {k: v for k, v in environment().items() if k != "TERM"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(words, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, env=plain)
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:  # the terminal is gone when the last writer is
        pass
    os.close(ours)
    assert process.wait() == 0, b"".join(parts).decode()
    return b"".join(parts).decode()


@pytest.mark.job
def test_on_a_terminal_there_is_a_bar_and_a_table(here: Path) -> None:
    """Runs on a wide and a narrow one, in one process, as torch takes seconds to import."""
    *runs, rest = on_a_terminal([sys.executable, "-c", ON_A_TERMINAL], here).split("\f")
    assert rest == ""
    for width, said in zip(WIDTHS, runs, strict=True):
        assert "alone 3/3" in said  # the training alone, after the rounds
        assert ("accuracy" in said.split("client")[0].split("copfl on")[0]) == (width == 100)
        assert "0:00" in said
        assert "left" in said
        assert "\x1b[" in said  # it is drawn anew in place
        assert "…" not in said.split("copfl on digits")[1]
        assert all(
            len(line) <= width
            for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said).replace("\r", "\n").split("\n")
        )
