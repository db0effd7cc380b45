"""Every benchmark runs with the library as it is now, on a CPU and in the smallest setting; its numbers mean nothing.

What only a GPU or other processes can show is left out: a benchmark's own functions get stand-ins for those.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.task import task_of
from copfl.engine import mapping
from copfl.kernels import topk
from copfl.testing import SIZES

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LIBRARIES = {
    "baseline_pfl": "pfl",
    "baseline_flower": "ray",
}  # what a benchmark compares with, in its own process
ELSEWHERE = {  # benchmarks that the tests of what they measure run
    "audit": "audit/test_synthetic.py",
    "exam": "experiment/test_exam.py",
    "kills": "test_faults.py",
    "flower_kills": "federation/machines/test_faults.py",
}
SMOKE: dict[str, Callable[..., None]] = {}


def smoke(function: Callable[..., None]) -> Callable[..., None]:
    """The smoke test of the benchmark of this name."""
    SMOKE[function.__name__] = function
    return function


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param in LIBRARIES:
        pytest.importorskip(LIBRARIES[request.param])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before, threads = set(sys.modules), torch.get_num_threads()
    yield loaded(request.param)
    torch.set_num_threads(threads)
    for name in (
        set(sys.modules) - before
    ):  # such as digits, images and common, whose names are not ours alone
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def main_of(module: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit status of the benchmark with these arguments."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *words])
    try:
        return int(module.main() or 0)
    except SystemExit as ended:
        return int(ended.code or 0)


class Tiny(nn.Sequential):
    """An image classifier."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 10)
        )


@smoke
def natural(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (90, 1, 8, 8), dtype=np.uint8), np.arange(90) % 2
    x[y == 1, :, :4] //= 4
    np.savez(folder / "spoken.npz", x=x, y=y, group=np.arange(90) // 45)
    main_of(module, monkeypatch, ".", "--of=spoken", "--rounds=1")
    record = json.loads(Path("natural.jsonl").read_text())
    assert record["rounds"] == 1
    assert 0 <= record["accuracy"] <= 100


@smoke
def adapters(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SENTENCES", 4)
    monkeypatch.setattr(module, "BATCH", 2)
    data = module.federation(2, 1009, "cpu")

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(1009, 4), nn.Linear(4, module.CLASSES)

        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            answer: torch.Tensor = self.head(self.words(x["input_ids"]).mean(1))
            return answer

    model = Words()
    assert module.plain_round(model, data, 2, short=False) > 0
    first = tree.row(data.train.rows([0]), 0)
    task = task_of(model, module.CLASSES).probed(first).with_batching(None, first)
    assert len(module.copfl_rounds(task, data, 2, rounds=2)) == 2


@smoke
def attacks(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rules_of", lambda algorithm: list(module.ROBUST)[:2])
    words = "--rounds 1 --seeds 1 --algorithms fedavg --attacks none --out found.json"
    assert main_of(module, monkeypatch, *words.split()) == 0
    assert len(json.loads(Path("found.json").read_text())) > 0


@smoke
def check_gpu(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = (
        module.run("fedper", "cpu", engine, SIZES) for engine in (mapping.sequential(), mapping.vmap(8))
    )
    gaps = module.differences((one.server, one.clients.all), (many.server, many.clients.all))
    assert max(gaps.values()) < module.TOLERANCE


@smoke
def check_masks(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(keys: torch.Tensor, counts: torch.Tensor, width: int, sizes: tuple[int, ...]) -> torch.Tensor:
        rows = zip(keys.float(), counts, strict=True)
        return torch.stack([topk.largest_of_each(row, count, sizes) for row, count in rows])

    keys = torch.randint(0, 2**20, (3, 40), dtype=torch.int32)
    assert module.errors(SimpleNamespace(largest=largest), keys, (12, 28)) == 0
    assert (
        module.errors(
            SimpleNamespace(largest=lambda *_: torch.zeros(3, 40, dtype=torch.bool)), keys, (12, 28)
        )
        == 6
    )


@smoke
def common(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = module.federation(*module.random_images(2, 3), 3)
    assert (data.clients, module.task("mlp", data.shape).classes) == (2, module.CLASSES)


@smoke
def cpu(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.digits, "samples", lambda: module.random_images(3, module.digits.SIZE))
    monkeypatch.setattr(module, "with_mkldnn", lambda step, enabled: step)  # torch warns of its own flags
    case = module.digits_case()._replace(participants=2)
    with contextlib.ExitStack() as stack:
        steps = {
            "copfl": module.copfl_rounds(case, stack, mapping.vmap(2), 1),
            "plain loop": module.plain_rounds(case, mkldnn=True),
        }
        rows = module.table(case.title, module.measured(steps, 1))
    assert {row["way"] for row in rows} == set(steps)


@smoke
def demo(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS", 1)
    assert len(module.means(10)) == 6


@smoke
def digits(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = module.samples(3)
    assert len(x) == len(y) == 3 * module.SIZE
    assert module.net()(torch.zeros(2, *x.shape[1:])).shape == (2, 10)


@smoke
def flower(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.processor_seconds([os.getpid(), 2**22 + 1])[os.getpid()] > 0  # the other has ended


@smoke
def gpu(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "SIZE", 4)
    form = ALGORITHMS["copfl"](**module.TWO_PHASES)  # what the plain loop does
    steps = math.ceil(100 / module.BATCH)
    assert (form.total_epochs * steps, form.growth.budget) == (
        module.STEPS,
        module.PlainCoPfl(nn.Linear(1, 1), 1).budget,
    )
    assert module.seconds_per_round("fedavg", 2, mapping.vmap(2), 1, model="cnn", batched=True) > 0
    assert module.plain_seconds(2, "cnn", 1) > 0


@smoke
def grouped(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "SHAPES", [module.Shape("small", 4, 2, 4), module.Shape("strided", 6, 3, 4, 2)]
    )
    words = "--clients 2 --batch 1 --device cpu --out found.json"
    assert main_of(module, monkeypatch, *words.split()) == 0
    for row in json.loads(Path("found.json").read_text()):
        assert row["cuDNN, difference"] < 1e-5 > row["products, difference"]


@smoke
def images(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZE", 2)
    x, y = module.tensors()
    assert x.shape[:2] == y.shape == (module.CLIENTS, 2)


@smoke
def jobs(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        if "copfl" in command:
            commands.append(command)
            run_folder = Path(command[command.index("--out") + 1], "runs", "fedavg-seed0")
            run_folder.mkdir(parents=True)
            (run_folder / "rounds.jsonl").write_text(results.pop(0))
        return SimpleNamespace(returncode=0, stdout="", stderr="the runs share the GPU through MPS")

    monkeypatch.setattr(subprocess, "run", run)
    results = ["same", "same"]
    assert main_of(module, monkeypatch, "--repeat", "1", "--device", "cpu", "--", "--rounds", "1") == 0
    assert ["--jobs" in command for command in commands] == [True, False]
    results = ["same", "other"]
    assert main_of(module, monkeypatch, "--repeat", "1", "--device", "cpu") == 1


@smoke
def levels(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main_of(module, monkeypatch, "heart", "--splits", "1") == 0


@smoke
def load(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.memory(os.getpid()) > 1
    assert module.seconds_of(os.getpid()) > 0
    log = folder / "load.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in ({"t": 0}, {"t": 1}, {"result": "ended"})))
    assert module.summary(log)["samples"] == [{"t": 0}, {"t": 1}]


@smoke
def many_clients(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARTICIPANTS", 2)
    module.measure(4, 2, str(folder / "run"))


@smoke
def pfl_cifar(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COPFL_DATA", raising=False)
    monkeypatch.setattr(module, "MOST", 2)
    x, y = module.tensors()
    assert y.shape == (2, module.SIZE)
    assert module.net()(x[0]).shape == (module.SIZE, 10)
    assert sum(p.numel() for p in module.net().parameters()) == 1_626_442
    assert module.accuracy(module.net()) is None
    monkeypatch.setattr(module, "images", lambda: {"test": (x[0].numpy(), y[0].numpy())})
    assert 0 <= module.accuracy(module.net()) <= 1


@smoke
def pfl_research(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of both; pfl-research's, which is no dependency, has a stand-in."""
    images = {"train": module.pfl_cifar.random_images(2, module.pfl_cifar.SIZE)}
    monkeypatch.setattr(module.pfl_cifar, "images", lambda: images)
    monkeypatch.setattr(module.pfl_cifar, "PARTICIPANTS", 2)
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(
            returncode=0, stdout='{"cpu": [9, 5, 7], "wall": [9, 8, 8], "accuracy": null}\n'
        )

    monkeypatch.setattr(module.subprocess, "run", run)
    words = "--pfl PYTHON --rounds 2 --turns 1 --out found.json"
    assert main_of(module, monkeypatch, *words.split()) == 0
    rows = {row["way"]: row for row in json.loads(Path("found.json").read_text())["rows"]}
    assert [command[2:] for command in commands] == [["pfl_cifar", "2", how, "0"] for how in ("on", "off")]
    assert rows["pfl-research, mkldnn"]["cpu_seconds"] == 6
    assert rows["copfl, sequential 1"]["times_copfl"] == 1


@smoke
def pfllib(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARM_UP", 0)
    monkeypatch.setattr(module.sizes, "CLIENTS", 2)
    words = "--device cpu --rounds 1 --images 12 --out found"
    assert main_of(module, monkeypatch, *words.split()) == 0
    found = json.loads(Path("found/pfllib.json").read_text())
    assert [row["method"] for row in found["rows"]] == [method.name for method in module.PFLLIB]
    assert all(row["seconds"] > 0 for row in found["rows"])


@smoke
def trees(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few trees all three have about the same error."""
    tables = {"diabetes": module.TABLES["diabetes"]}
    for name, value in {"TREES": 3, "SHAPES": ((2, 60, 3),), "TABLES": tables}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "RECORD", folder / "trees.json")
    assert main_of(module, monkeypatch, "--seeds", "2") == 0
    assert main_of(module, monkeypatch, "--speed") == 0
    monkeypatch.setattr(module, "MEMORY", ((2, 1),))
    assert main_of(module, monkeypatch, "--memory") == 0
    record = json.loads((folder / "trees.json").read_text())
    assert record["memory"][0]["peak_mib"] >= record["memory"][0]["rows_mib"] > 0
    mine, *others = record["errors"]["diabetes"].values()
    assert all(mine == pytest.approx(errors, rel=0.02) for errors in others)
    assert record["speed"][0]["copfl"] > 0
    committed = json.loads((BENCHMARKS.parent / "results" / "trees.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "trees.md").read_text("utf-8")
    assert module.as_markdown(module.error_table(committed["errors"])).strip() in page
    for table in (module.speed_table(committed["speed"]), module.speed_table(committed["large"])):
        assert module.as_markdown(table).strip() in page
    assert module.as_markdown(module.memory_table(committed["memory"])).strip() in page


@smoke
def plain(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [[(torch.randn(2, 3, 6, 6), torch.tensor([0, 1]))] for _ in range(2)]
    model = Tiny()
    server = {name: t.clone() for name, t in model.state_dict().items()}
    total = module.plain_fedavg_round(model, server, batches, 0.1)
    assert total.keys() == server.keys()


@smoke
def policy_cost(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.measured(next(iter(module.CASES.values())), True) > 0


@smoke
def privacy(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENTS", 4)
    assert module.measure("fedavg", 1.0, 1, 0)["epsilon"] > 0


@smoke
def profile_gpu(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def event(start: float, end: float) -> Any:
        autograd: Any = torch.autograd
        kind = autograd.DeviceType.CUDA
        return SimpleNamespace(
            name="kernel", device_type=kind, time_range=SimpleNamespace(start=start, end=end)
        )

    lines: list[str] = []
    monkeypatch.setattr(module, "print", lines.append, raising=False)
    module.gaps(SimpleNamespace(events=lambda: [event(3000, 4000), event(0, 1000), event(500, 2000)]))
    assert lines[:2] == [
        "4.0 ms from the first kernel to the end of the last one",
        "1.0 ms idle in between; the longest:",
    ]


@smoke
def ranks(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> None:
        assert "torch.distributed.run" in command
        assert "copfl" in command
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        (out / "timing.jsonl").write_text("".join(f'{{"seconds": {n}}}\n' for n in range(4)))

    monkeypatch.setattr(subprocess, "run", run)
    how = SimpleNamespace(clients=2, rounds=2, algorithm="fedavg", device="cpu")
    assert module.measured(2, folder / "data.npz", folder / "run", how) == [1, 2]


@smoke
def scale(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = module.measure(clients=4, participants=2, rounds=2, width=2, folder=str(folder))
    assert row["disk"] > 0
    assert all(case["clients"] >= 2 for cases in module.cases(0.001, True).values() for case in cases)


@smoke
def secure_aggregation(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(module.measured("fedavg", 3, 0, True, 2)) == set(module.COLUMNS)


@smoke
def secure_masks(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.SETTINGS["digits"], "rounds", 1)
    assert set(module.accuracies("digits", next(iter(module.ROWS)), 0, None)) == {"after", "before"}


@smoke
def first_run(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> None:
        out = Path(next(word for word in command if word.startswith("--out=")).partition("=")[2])
        out.mkdir()
        for name in ("choice.json", "rounds.jsonl"):
            (out / name).write_text(command[-2] if differs else "the same")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["first_run.py", "--repeat=2", f"--out={folder / 'record.json'}"])
    differs = False
    module.main()
    record = json.loads((folder / "record.json").read_text())
    assert {way: len(seconds) for way, seconds in record["seconds"].items()} == dict.fromkeys(module.WAYS, 2)
    differs = True
    with pytest.raises(SystemExit, match="differ in choice"):
        module.main()


@smoke
def startup(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started:
        """A command that ends after its first round."""

        def __init__(self, command: list[str], **_: Any) -> None:
            self.out = Path(next(word for word in command if word.startswith("--out=")).partition("=")[2])
            self.returncode: int | None = None

        def poll(self) -> int | None:
            ended, self.returncode = self.returncode, 0
            if ended is None:
                self.out.mkdir()
                (self.out / "timing.jsonl").write_text("{}\n")
            return ended

        def terminate(self) -> None:
            self.returncode = -15

        def wait(self) -> int | None:
            return self.returncode

    monkeypatch.setattr(subprocess, "Popen", Started)
    assert list(module.start(folder, "first", "cpu")) == ["round 1", "folder", "end"]
    assert list(module.start(folder, "second", "cpu", to_the_end=False)) == ["round 1", "folder"]


@smoke
def sizes(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {name: sum(counts) for name, counts in module.federations().items()}
    assert totals["equal"] == pytest.approx(totals["unequal"], rel=0.01) == totals["one giant"]
    assert module.measured([12, 3], "cpu", 1)["seconds"] > 0


@smoke
def tables(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def cost_of(*words: str) -> Any:
        commands.append(words)
        return module.Cost(2.0, 3.0)

    monkeypatch.setattr(module, "cost_of", cost_of)
    assert main_of(module, monkeypatch, "--sites", "2", "--rows", "5") == 0
    assert len(commands) == 2
    module.table_of(folder / "table.csv", 2, 5)
    assert len((folder / "table.csv").read_text().splitlines()) == 11
    monkeypatch.undo()
    assert module.cost_of("--version").processor > 0


@smoke
def zoo(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.MODELS, "tiny", lambda size: Tiny())
    row = module.measured("tiny", module.Size(clients=2, batch=2, pixels=8, tokens=4, rounds=1), "cpu")
    assert row["ratio"] > 0 < row["ratio_evaluated"]


@pytest.mark.parametrize("benchmark", sorted(SMOKE), indirect=True)
def test_smoke(
    benchmark: Any, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    SMOKE[benchmark.__name__.removeprefix("benchmark_")](benchmark, tmp_path, monkeypatch)


@pytest.mark.parametrize("benchmark", sorted(LIBRARIES), indirect=True)
def test_a_baseline_loads(benchmark: Any) -> None:
    assert benchmark.__doc__


def test_every_benchmark_has_a_smoke_test() -> None:
    tests = Path(__file__).parents[2]
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == {*SMOKE, *LIBRARIES, *ELSEWHERE}
    assert all(name in (tests / place).read_text("utf-8") for name, place in ELSEWHERE.items())
