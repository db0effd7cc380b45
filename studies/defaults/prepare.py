"""Writes the files that copfl/bench/settings.py reads: python studies/defaults/prepare.py DATA OUT [--encoder FOLDER].

DATA has CIFAR-10's batches, banking77/ and clinc150/ as they are published. With --encoder, a folder of a
sentence-transformers model, OUT also gets the features of Banking77's sentences. With --embedded alone, OUT
gets the sets that come with scikit-learn, for a machine without it.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np

from copfl.bench.settings import CIFAR_TEST, CIFAR_TRAIN, EMBEDDED
from copfl.data.sets import datasets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--embedded", action="store_true", help="only the sets that come with scikit-learn")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.embedded:
        for name, load in EMBEDDED.items():
            np.savez_compressed(args.out / f"{name}.npz", **load())
        return
    cifar = datasets.load("cifar10", args.data)
    splits = (("", cifar.train, CIFAR_TRAIN), ("_test", cifar.test, CIFAR_TEST))
    arrays = {
        f"{key}{end}": getattr(split, key)[:count] for end, split, count in splits for key in ("x", "y")
    }
    np.savez(args.out / "cifar.npz", **arrays)
    banking = {}
    for end, name in (("", "train"), ("_test", "test")):
        with (args.data / "banking77" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        banking |= {f"x{end}": [row["text"] for row in rows], f"y{end}": [row["category"] for row in rows]}
    (args.out / "banking.json").write_text(json.dumps(banking), "utf-8")
    parts = json.loads((args.data / "clinc150" / "data_full.json").read_text("utf-8"))
    clinc = {}
    for end, name in (("", "train"), ("_test", "test")):
        clinc |= {
            f"x{end}": [text for text, _ in parts[name]],
            f"y{end}": [intent for _, intent in parts[name]],
        }
    (args.out / "clinc.json").write_text(json.dumps(clinc), "utf-8")
    if args.encoder:
        features = {}
        for end in ("", "_test"):
            features[f"x{end}"] = encoded(banking[f"x{end}"], args.encoder).astype(np.float16)
            features[f"y{end}"] = np.array(banking[f"y{end}"])
        np.savez(args.out / "features.npz", **features)


def encoded(sentences: list[str], folder: Path) -> np.ndarray:
    """The mean of the last layer's tokens, which is how MiniLM was trained to be read."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    parts = []
    with torch.inference_mode():
        for start in range(0, len(sentences), 256):
            batch = tokenizer(
                sentences[start : start + 256],
                padding=True,
                truncation=True,
                max_length=32,
                return_tensors="pt",
            )
            mask = batch["attention_mask"][..., None]
            hidden = model(**batch).last_hidden_state
            parts.append(((hidden * mask).sum(1) / mask.sum(1)).numpy())
    return np.concatenate(parts)


if __name__ == "__main__":
    main()
