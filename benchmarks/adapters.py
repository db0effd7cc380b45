"""Personalised LoRA over one frozen model on a GPU, against a plain loop over peft models.

`python benchmarks/adapters.py` prints a table and writes adapters.json. The model has the shape of
all-MiniLM-L6-v2 and random weights, which take as long as others; `--model FOLDER` takes one that transformers
saved. Every client has 80 sentences of 32 tokens: a round is one local
epoch of five batches of 16, FedPer with Adam. Both are measured in one process, after the same warm-up.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.optim import Adam
from copfl.core.task import Task, task_of
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine import features, mapping
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.models import adapters, pretrained

SENTENCES, TOKENS, BATCH, CLASSES = 80, 32, 16, 77
PEAK = 989e12  # operations a second of an H200 in bf16


def federation(clients: int, words: int, device: str) -> FederatedData:
    """Random sentences: speed does not depend on their words."""
    rng, count = np.random.default_rng(0), clients * SENTENCES
    lengths = rng.integers(8, TOKENS + 1, count)
    seen = (np.arange(TOKENS) < lengths[:, None]).astype(np.int64)
    x: Any = {"input_ids": rng.integers(1000, words, (count, TOKENS)) * seen, "attention_mask": seen}
    samples = Samples(x, rng.integers(0, CLASSES, count))
    cuts = tuple(np.split(np.arange(count), clients))
    names = tuple(map(str, range(CLASSES)))
    return FederatedData(Dataset("words", samples, samples, names), Partition(cuts, cuts, "even", {}), device)


def random_model(folder: str, dropout: float = 0.1) -> str:
    """A folder with a model of the shape of all-MiniLM-L6-v2."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30_522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def model_of(folder: str, train: str) -> torch.nn.Module:
    """The frozen model with a new head, and with LoRA on query and value unless the head alone is trained."""
    model: torch.nn.Module = pretrained.build(f"hf:{folder}", CLASSES, seed=0, task="embedding")
    if train == "lora":
        model = adapters.lora(model, r=8, alpha=16.0, targets="query+value")
    adapters.select(model, train="" if train == "lora" else "head", adapted=train == "lora")
    return model


def idle() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def plain_round(model: torch.nn.Module, data: FederatedData, clients: int, short: bool) -> float:
    """Seconds: each client loads its entries into one model, trains an epoch with Adam, and takes them out."""
    device = data.train.y.device
    trained = [p for p in model.parameters() if p.requires_grad]
    records = [[p.detach().clone() for p in trained] for _ in range(clients)]
    model.train()
    start = idle()
    for n in range(clients):
        rows = tree.row(data.train.rows(range(clients)), n)
        for p, value in zip(trained, records[n], strict=True):
            p.data.copy_(value)
        optimizer = torch.optim.Adam(trained, lr=1e-3)
        for index in torch.randperm(SENTENCES, device=device).split(BATCH):
            with torch.autocast(device.type, torch.bfloat16, enabled=short):
                logits = model({name: t[index] for name, t in rows.x.items()})
            F.cross_entropy(logits.float(), rows.y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        records[n] = [p.detach().clone() for p in trained]
    return idle() - start


def copfl_rounds(task: Task, data: FederatedData, clients: int, rounds: int) -> list[float]:
    """Seconds of each round without evaluation."""
    algorithm = ALGORITHMS["fedper"](Adam(lr=1e-3), epochs=1)
    engine = mapping.cuda_graph(clients) if task.device.type == "cuda" else mapping.vmap(clients)
    state = begin(algorithm, task, clients)
    found, start = [], idle()
    for _ in simulate(
        Simulation(algorithm, task, data, engine, batch=BATCH),
        state,
        rounds=rounds,
        eval_every=10**6,
        eval_models="final",
    ):
        end = idle()
        found.append(end - start)
        start = end
    return found[4:-1] or found  # not those in which the program is recorded, and not the evaluated last one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--clients", default="20,50")
    parser.add_argument("--train", default="lora,head,features", help="features: the head, on kept features")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("adapters.json"))
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    folder = options.model or random_model(tempfile.mkdtemp())
    table: list[dict[str, Any]] = []
    for train in options.train.split(","):
        # Features of a frozen part can be kept only where it draws nothing.
        used = random_model(tempfile.mkdtemp(), 0.0) if train == "features" else folder
        model = model_of(used, train).to(options.device)
        body = sum(p.numel() for n, p in model.named_parameters() if "embeddings" not in n)
        for clients in map(int, options.clients.split(",")):
            data = federation(clients, 30_000, options.device)
            first = tree.row(data.train.rows([0]), 0)
            row: dict[str, Any] = {"train": train, "clients": clients}
            loop = copy.deepcopy(model)
            for name, short in (("loop, tf32", False), ("loop, bf16", True)):
                plain_round(loop, data, 2, short)
                row[name] = plain_round(loop, data, clients, short)
            for name, products in (("copfl, tf32", None), ("copfl, bf16", torch.bfloat16)):
                task = task_of(model, CLASSES, device=options.device).probed(first)
                kept = features.training_of(task, data, "auto" if train == "features" else "off")
                assert (kept.front is not None) == (train == "features")
                kept.compute()
                one = tree.row(kept.federation.train.rows([0]), 0)
                kept = kept._replace(task=kept.task.with_batching(products, one))
                assert kept.task.batched is not None
                row[name] = statistics.median(copfl_rounds(*kept[:2], clients, options.rounds))
            # Forward and, for adapters, the gradient of the activations: twice 2 operations per weight and token.
            passes = {"lora": 4, "head": 2, "features": 0}[train]
            row["floor"] = passes * body * clients * SENTENCES * TOKENS / PEAK
            row["entries"] = task.d
            row["ratio"] = min(row["loop, tf32"], row["loop, bf16"]) / min(
                row["copfl, tf32"], row["copfl, bf16"]
            )
            if torch.cuda.is_available():
                row["gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
            table.append(row)
            print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            options.out.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
