"""Prints the tables of the study from its records: python studies/benefit/analyse.py RECORDS.jsonl[.gz]."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.experiment.benefit import Benefit, group_benefit
from copfl.stats import Numbers, mean_of_known, over_seeds, ranked, spearman
from copfl.tables import Table, as_markdown

ALL = -1
ROUNDS = (25, 35, 50)


class Cell(NamedTuple):
    setting: str
    harm: str
    seed: int


class Run(NamedTuple):
    """The run of all clients, and the others' mean test loss in it and without some of the clients."""

    bad: Numbers  # [clients] bool
    half: Numbers  # [rounds, clients]
    difference: Numbers
    weight: Numbers  # [clients]
    loss: dict[str, Numbers]  # [clients], of the run of all, by metric
    without: dict[int, dict[str, Numbers]]  # by the client that was left out


METRICS = ("test_loss_before", "test_loss")


def read(path: Path) -> dict[Cell, Run]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = [line for line in map(json.loads, text.decode().splitlines()) if "error" not in line]
    found: dict[Cell, Run] = {}
    for line in sorted(lines, key=lambda line: int(line["without"])):  # the run of all clients is first
        cell = Cell(line["setting"], line["harm"], line["seed"])
        losses = {name: np.array(line[name], np.float64) for name in METRICS}
        if line["without"] != ALL:
            found[cell].without[line["without"]] = losses
            continue
        table = {name: np.array(line[name], np.float64) for name in ("half", "difference", "weight")}
        bad = np.isin(np.arange(len(table["weight"])), line["bad"])
        found[cell] = Run(bad, **table, loss=losses, without={})
    return found


def auc(score: Numbers, bad: Numbers) -> float:
    """The probability that a client that does harm has a lower score than one that does not."""
    order, count = ranked(-score), int(bad.sum())
    return float((order[bad].sum() - count * (count + 1) / 2) / (count * (len(bad) - count)))


def benefit(run: Run, rounds: int = 0) -> Benefit:
    last = rounds or len(run.half)
    return group_benefit(run.half[:last], run.difference[:last])


def left_out(run: Run, metric: str) -> tuple[Numbers, Numbers]:
    """The clients that were left out, and by how much the others' loss is then higher."""
    clients = np.array(sorted(run.without), np.int64)
    losses = [np.delete(run.without[int(n)][metric] - run.loss[metric], n) for n in clients]
    return clients, np.array([float(mean_of_known(loss)) for loss in losses])


def agreement(run: Run, metric: str, honest: bool = False) -> float:
    """Spearman's correlation of the benefit with leaving out; nan where no client was."""
    clients, gains = left_out(run, metric)
    kept = ~run.bad[clients] if honest else np.ones(len(clients), bool)
    if kept.sum() < 3:
        return float("nan")
    return float(spearman(benefit(run).value[clients[kept]], gains[kept]))


def over(runs: list[Run], value: Callable[[Run], float]) -> str:
    """The mean over the seeds and its t interval."""
    values = np.array([value(run) for run in runs])
    values = values[~np.isnan(values)]
    if not len(values):
        return "-"
    low, high = over_seeds(values)
    return f"{values.mean():.2f}" + (f" [{low:.2f}, {high:.2f}]" if len(values) > 1 else "")


def rows(cells: dict[Cell, Run], *values: Callable[[list[Run]], str]) -> Iterator[list[str]]:
    for setting, harm in dict.fromkeys((cell.setting, cell.harm) for cell in cells):
        runs = [run for cell, run in cells.items() if cell[:2] == (setting, harm)]
        yield [setting, harm, *(value(runs) for value in values)]


def verdicts(runs: list[Run], verdict: str, bad: bool) -> str:
    """The fraction of these clients with this verdict."""
    found = [np.array(benefit(run).verdicts)[run.bad == bad] == verdict for run in runs]
    return f"{np.concatenate(found).mean():.2f}"


def tables(cells: dict[Cell, Run]) -> list[Table]:
    detection = Table(
        "Detection of the four harmful clients of twenty: AUC, mean over the seeds and 95 % interval",
        ["setting", "harm", *(f"benefit, {rounds} rounds" for rounds in ROUNDS), "weight (COWA in copfl)"],
        list(
            rows(
                cells,
                *(
                    lambda runs, t=t: over(runs, lambda run: auc(benefit(run, t).value, run.bad))
                    for t in ROUNDS
                ),
                lambda runs: over(runs, lambda run: auc(run.weight, run.bad)),
            )
        ),
    )
    verdict = Table(
        "Verdicts after all rounds: fraction of the clients",
        ["setting", "harm", "harmful: lower", "harmful: higher", "honest: lower", "honest: higher"],
        list(
            rows(
                cells,
                *(
                    lambda runs, v=v, bad=bad: verdicts(runs, v, bad)
                    for bad in (True, False)
                    for v in ("lower", "higher")
                ),
            )
        ),
    )
    retraining = Table(
        "Spearman's correlation with leave-one-out by retraining: the others' test loss",
        ["setting", "harm", "received model", "model after training", "received model, honest clients alone"],
        list(
            rows(
                cells,
                *(lambda runs, m=m: over(runs, lambda run: agreement(run, m)) for m in METRICS),
                lambda runs: over(runs, lambda run: agreement(run, METRICS[0], honest=True)),
            )
        ),
    )
    return [detection, verdict, retraining, harms(cells)]


def harms(cells: dict[Cell, Run]) -> Table:
    """What leaving out a harmful client does to the others, against leaving out an honest one."""

    def gain(run: Run, bad: bool) -> float:
        clients, gains = left_out(run, METRICS[0])
        kept = run.bad[clients] == bad
        return 1000 * float(mean_of_known(gains[kept])) if kept.any() else float("nan")

    head = ["setting", "harm", "without a harmful client", "without an honest client"]
    kinds = (True, False)
    body = list(rows(cells, *(lambda runs, bad=bad: over(runs, lambda run: gain(run, bad)) for bad in kinds)))
    return Table(
        "What the others lose without a client: test loss of the received model, in thousandths", head, body
    )


def main(argv: list[Any]) -> None:
    for table in tables(read(Path(argv[1]))):
        print(as_markdown(table), end="\n\n")


if __name__ == "__main__":
    main(sys.argv)
