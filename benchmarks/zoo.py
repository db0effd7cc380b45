"""Models that nobody here wrote: copfl against a plain loop, in one process: `python benchmarks/zoo.py`

Classifiers of torchvision and a BERT of transformers with six layers, from their configurations, with
random weights. 10 clients (3 on a CPU, with tiny inputs), FedPer, Adam, a round of five steps, alone and with an
evaluation of every client's model after it. Rounds of both alternate. Prints the engine that `auto` takes and the
ratios, and writes a JSON file after every model.
The exit status is 1 if a model falls back to one client at a time on a GPU, or is slower than the loop.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import copfl  # isort: skip  # noqa: F401 - before torch, as the command does: it sets up torch's allocator
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.optim import Adam
from copfl.core.task import Data, task_of
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine import autotune
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.models.pretrained import wrapped

CLASSES, STEPS = 10, 5


class Size(NamedTuple):
    """Of the samples and of the work."""

    clients: int
    batch: int
    pixels: int
    tokens: int
    rounds: int  # measured


GPU, CPU = Size(10, 16, 64, 32, 6), Size(3, 4, 32, 8, 3)


def vision(name: str) -> Callable[[Size], nn.Module]:
    def make(size: Size) -> nn.Module:
        from torchvision import models

        if name == "vit":
            return models.VisionTransformer(
                size.pixels, size.pixels // 8, 12, 3, 192, 768, num_classes=CLASSES
            )
        how = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        model: nn.Module = getattr(models, name)(weights=None, num_classes=CLASSES, **how)
        return model

    return make


def bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    config = BertConfig(vocab_size=5000, num_hidden_layers=6, num_labels=CLASSES, **shape)
    return wrapped(BertForSequenceClassification(config))


IMAGES = [
    "efficientnet_b0",
    "convnext_tiny",
    "swin_t",
    "vgg11",
    "mobilenet_v3_small",
    "vit",
    "densenet121",
    "resnet50",
    "resnext50_32x4d",
    "regnet_x_400mf",
    "shufflenet_v2_x1_0",
    "googlenet",
    "efficientnet_v2_s",
    "squeezenet1_1",
    "alexnet",
]
MODELS = {name: vision(name) for name in IMAGES} | {"bert": bert}


def federation(name: str, size: Size, device: str) -> FederatedData:
    """Random samples, as many for training as for the evaluation."""
    rng, count = np.random.default_rng(0), size.clients * size.batch * STEPS
    x: Any = rng.normal(size=(count, 3, size.pixels, size.pixels)).astype(np.float32)
    if name == "bert":
        x = {"input_ids": rng.integers(1, 5000, (count, size.tokens))}
        x["attention_mask"] = np.ones_like(x["input_ids"])
    samples = Samples(x, rng.integers(0, CLASSES, count))
    cuts = tuple(np.split(np.arange(count), size.clients))
    dataset = Dataset("random", samples, samples, tuple(map(str, range(CLASSES))))
    return FederatedData(dataset, Partition(cuts, cuts, "even", {}), device)


def clock(device: str) -> float:
    """Seconds; on a CPU those of this process, which the load of others does not change."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def called(model: nn.Module, x: Any) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


class Loop:
    """FedPer in plain PyTorch, client after client, with one model and Adam."""

    def __init__(self, model: nn.Module, head: str, clients: int) -> None:
        self.model, self.head = model, head
        self.server = copy.deepcopy(model.state_dict())
        own = {name: t for name, t in self.server.items() if name.startswith(head)}
        self.heads = [copy.deepcopy(own) for _ in range(clients)]

    def round(self, data: list[Data], size: Size, evaluated: bool) -> None:
        total: dict[str, Tensor] = {}
        for n, client in enumerate(data):
            self.model.load_state_dict(self.server | self.heads[n])
            optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
            self.model.train()
            for index in torch.randperm(len(client.y), device=client.y.device).split(size.batch):
                x, y = tree.each(lambda t, index=index: t[index], (client.x, client.y))
                optimizer.zero_grad()
                F.cross_entropy(called(self.model, x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name, value in self.model.state_dict().items():
                if name in self.heads[n]:
                    self.heads[n][name] = value.clone()
                else:
                    total[name] = total.get(name, 0) + value / len(data)
            if evaluated:
                self.model.eval()
                with torch.no_grad():
                    logits = torch.cat([called(self.model, tree.each(lambda t, i=i: t[i : i + 250], client.x))
                                        for i in range(0, len(client.y), 250)])  # fmt: skip
                    (logits.argmax(1) == client.y).double().mean().item()
        self.server |= {name: value.to(self.server[name].dtype) for name, value in total.items()}


def measured(name: str, size: Size, device: str) -> dict[str, Any]:
    """Rounds of both in turn, alone and with an evaluation: medians, and the engine that `auto` takes."""
    torch.manual_seed(0)
    model, data = MODELS[name](size), federation(name, size, device)
    task = task_of(model, CLASSES, device=device).probed(tree.row(data.train.rows([0]), 0))
    rows = data.train.rows(range(size.clients))
    clients = [tree.row(rows, n) for n in range(size.clients)]
    loop = Loop(copy.deepcopy(model).to(device), task.layout.head, size.clients)
    loop.round(clients[:1], size, evaluated=True)

    start = clock(device)
    algorithm = ALGORITHMS["fedper"](Adam(lr=1e-4), epochs=1)
    load = autotune.Workload(algorithm, task, data, size.batch, size.clients, rounds=100)
    engine = autotune.choose_engine(load, engine="auto", chunk=0)
    if engine.name != "sequential":
        task = task.with_batching(None, tree.row(data.train.rows([0]), 0))
    warmup = 3 if device == "cuda" else 1  # eager rounds of each kind, and the one that is recorded
    rounds = 2 * (warmup + size.rounds)
    begun = begin(algorithm, task, size.clients)
    simulation = Simulation(algorithm, task, data, engine, batch=size.batch)
    steps = simulate(simulation, begun, rounds=rounds, eval_every=2, eval_models="final")
    next(steps)
    first = clock(device) - start
    seconds: dict[str, list[float]] = {"loop": [], "copfl": [], "loop_evaluated": [], "copfl_evaluated": []}

    def timed(kind: str, round: Callable[[], object]) -> None:
        before = clock(device)
        round()
        seconds[kind].append(clock(device) - before)

    for number in range(1, rounds):
        suffix = "_evaluated" if number % 2 else ""
        before = seconds["loop" + suffix]
        if number >= 2 * warmup and (device == "cpu" or (sum(before) < 1 and len(before) < 3)):
            timed("loop" + suffix, lambda number=number: loop.round(clients, size, bool(number % 2)))
        timed("copfl" + suffix, lambda: next(steps))
    found = {kind: statistics.median(times[-size.rounds :]) for kind, times in seconds.items()}
    forms = {"sequential": "one client at a time"}
    return {
        "model": name,
        "entries": task.d,
        "random": task.random,
        "engine": engine.name,
        "form": forms.get(engine.name, "batched" if task.batched is not None else "plain vmap"),
        **found,
        "ratio": found["loop"] / found["copfl"],
        "ratio_evaluated": found["loop_evaluated"] / found["copfl_evaluated"],
        "first_round": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no other model after this many")
    parser.add_argument("--out", type=Path, default=Path("zoo.json"))
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    if options.device == "cpu":
        torch.set_num_threads(1)
    size, began, table = GPU if options.device == "cuda" else CPU, time.perf_counter(), []
    aim = 3.0 if options.device == "cuda" else 1.0
    print(
        f"{'model':20}{'engine':28}{'loop':>9}{'copfl':>9}{'ratio':>7}  with evaluation{'ratio':>7}  first round"
    )
    failed = []
    for name in options.models.split(","):
        if time.perf_counter() - began > options.seconds:
            print(f"{name}: not measured, the time is over")
            failed.append(name)
            continue
        row = measured(name, size, options.device)
        table.append(row)
        print(
            f"{name:20}{row['engine'] + ', ' + row['form']:28}{row['loop']:9.3f}{row['copfl']:9.3f}"
            f"{row['ratio']:6.1f}x  {row['copfl_evaluated']:15.3f}{row['ratio_evaluated']:6.1f}x"
            f"  {row['first_round']:9.1f} s",
            flush=True,
        )
        fell_back = options.device == "cuda" and row["engine"] == "sequential"
        if fell_back or min(row["ratio"], row["ratio_evaluated"]) < aim:
            failed.append(name)
        options.out.write_text(json.dumps(table, indent=1) + "\n")
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(f"below {aim:g}x, or one client at a time: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
