"""Small files of four kinds, for the commands of docs/tasks.md: python examples/five_tasks.py FOLDER."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, make_multilabel_classification

WORDS = {
    "card": ["card", "lost", "stolen", "blocked", "chip", "pin", "plastic", "terminal"],
    "loan": ["loan", "interest", "rate", "house", "monthly", "repay", "credit", "mortgage"],
    "travel": ["flight", "hotel", "abroad", "ticket", "airport", "luggage", "insurance", "visa"],
    "other": ["please", "help", "today", "my", "the", "account", "question", "thanks", "when", "how"],
}


def tumours(path: Path) -> None:
    """Breast cancer as a table with a column of hospitals: those with a higher number have larger tumours."""
    data = load_breast_cancer()
    hospital = (
        np.argsort(np.argsort(data.data[:, 0] + np.random.default_rng(0).normal(0, 4, len(data.data)))) * 6
    )
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*data.feature_names, "diagnosis", "hospital"])
        for x, y, h in zip(data.data, data.target, hospital // len(data.data), strict=True):
            rows.writerow([*x, data.target_names[y], f"hospital {h}"])


def questions(path: Path, count: int = 600) -> None:
    """Questions with a topic; the customers of each branch ask about two of three."""
    rng, topics = np.random.default_rng(0), ["card", "loan", "travel"]
    with path.open("w") as file:
        for number in range(count):
            branch = number % 6
            topic = str(rng.choice([t for k, t in enumerate(topics) if k != branch % 3]))
            words = [
                *rng.choice(WORDS[topic], 2),
                *rng.choice(WORDS["other"], 5),
                *rng.choice(WORDS["card"], 1),
            ]
            text = " ".join(str(word) for word in rng.permutation(words))
            file.write(json.dumps({"text": text, "topic": topic, "branch": f"branch {branch}"}) + "\n")


def signals(path: Path, persons: int = 8, each: int = 60) -> None:
    """Movements of 3 signals x 64 steps; each person has a speed and a direction of the sensor."""
    rng = np.random.default_rng(0)
    person, activity = np.repeat(np.arange(persons), each), rng.integers(0, 4, persons * each)
    speed, turn = rng.uniform(0.8, 1.2, persons), rng.normal(0, 0.5, (persons, 3, 3)) + np.eye(3)
    time = np.arange(64) * speed[person][:, None] * (0.1 + 0.1 * activity[:, None])
    wave = np.stack([np.sin(time), np.cos(2 * time), 0.3 * activity[:, None] * np.sin(3 * time)], 1)
    x = np.einsum("nij,njt->nit", turn[person], wave) + rng.normal(0, 0.6, wave.shape)
    np.savez(path, x=x.astype(np.float32), y=activity, group=person)


def labels(path: Path) -> None:
    """Samples with any number of five labels."""
    x, y = make_multilabel_classification(600, 20, n_classes=5, n_labels=2, random_state=0)
    np.savez(path, x=x.astype(np.float32), y=y.astype(np.int64), group=np.digitize(x[:, 0], np.arange(1, 8)))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "five-tasks")
    folder.mkdir(parents=True, exist_ok=True)
    tumours(folder / "tumours.csv")
    questions(folder / "questions.jsonl")
    signals(folder / "signals.npz")
    labels(folder / "labels.npz")
