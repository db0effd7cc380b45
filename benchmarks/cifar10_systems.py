"""The paper's systems on CIFAR-10, 10 clients of 2 classes and 50 images a class: rivals with SGD, and all with Adam.

    python benchmarks/cifar10_systems.py --data-dir DIR --out runs/cifar10 --protocol sgd|adam --stage tune|final

The learning rate is chosen for every system from the same number of values, on a validation part of the training
images, in shorter runs of the first seed; then every system runs on every seed with what it chose. Runs that are there
are used again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from copfl.comparison import tables
from copfl.comparison.compare import compare

RIVALS = ("local", "fedavg", "lg_fedavg", "fedper", "fedpac", "fedselect")
GRIDS = {"sgd": (1e-2, 1e-3, 1e-4), "adam": (1e-3, 1e-4, 1e-5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--protocol", choices=("sgd", "adam"), required=True)
    parser.add_argument("--stage", choices=("tune", "final"), required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tune-rounds", type=int, default=60)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="some of the systems, such as fedpac,fedselect")
    args = parser.parse_args()
    optimizer = "" if args.protocol == "sgd" else ":optimizer=adam"
    entries = ["copfl", *(f"{name}{optimizer}" for name in RIVALS)]
    if args.protocol == "adam":
        entries.append("copfl:optimizer=adam")
    wanted = args.only.split(",") if args.only else entries
    entries = [entry for entry in entries if entry in wanted or entry.split(":")[0] in wanted]
    base = {
        "data": {"name": "cifar10", "dir": args.data_dir},
        "model": {"name": "resnet18"},
        "run": {"rounds": args.rounds, "device": args.device, "eval_every": 8, "clients": 10},
    }
    seeds = [int(s) for s in args.seeds.split(",")]
    chosen_at = args.out / f"chosen-{args.protocol}.json"
    if args.stage == "tune":
        base["run"]["rounds"] = args.tune_rounds
        grid = {"lr": GRIDS[args.protocol]}
        found = compare(
            entries,
            seeds[:1],
            base,
            args.out / "tune" / args.protocol,
            tune=grid,
            jobs=args.jobs,
            say=print,
            last=3,
        )
        chosen = {row.label: row.tuned.chosen["optimizer"]["lr"] for row in found.rows}
        trials = {
            row.label: [(t.settings["optimizer"]["lr"], t.accuracy) for t in row.tuned.trials]
            for row in found.rows
        }
        chosen_at.write_text(json.dumps({"chosen": chosen, "trials": trials}, indent=1))
        print(chosen_at.read_text())
        return
    chosen = json.loads(chosen_at.read_text())["chosen"]
    rows = [f"{entry}:lr={chosen[label]!r}" for entry, label in ((e, e.replace(":", " ")) for e in entries)]
    found = compare(
        rows, seeds, base, args.out / args.protocol, reference=_reference(rows), jobs=args.jobs, say=print
    )
    print(found)
    for name, text in (("md", tables.as_markdown(found)), ("json", json.dumps(tables.as_json(found)))):
        (args.out / f"table-{args.protocol}.{name}").write_text(text)


def _reference(rows: list[str]) -> str:
    """Local training, where it is among the rows."""
    return next((row for row in rows if row.startswith("local")), rows[0]).replace(":", " ")


if __name__ == "__main__":
    main()
