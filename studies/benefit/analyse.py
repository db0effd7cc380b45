"""Prints the tables of the study from its records: python studies/benefit/analyse.py studies/benefit."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import study

from copfl.experiment.analysis.benefit import (
    Benefit,
    Judgement,
    design,
    group_benefit,
    judged,
    of_sum,
    worth_to_itself,
)
from copfl.stats import Numbers, mean_of_known, over_seeds, ranked, spearman
from copfl.tables import Table, as_markdown

SETTINGS, HARMS = list(study.SETTINGS), [*study.HARMS, "none"]
ROUNDS = (25, 35, 50)
RECEIVED, TRAINED = (
    "test_loss_before",
    "test_loss",
)  # the test loss of a model before and after local training


class Cell(NamedTuple):
    setting: str
    harm: str
    seed: int


class Run(NamedTuple):
    """The run of all clients, and each client's test loss in it and in those without a client."""

    bad: Numbers  # [clients] bool
    half: Numbers  # [rounds, clients]
    difference: Numbers
    weight: Numbers  # [clients]
    loss: dict[str, Numbers]  # [clients], of the run of all, by metric
    without: dict[int, dict[str, Numbers]]  # by the client that was left out

    def benefit(self, rounds: int | None = None) -> Benefit:
        return group_benefit(self.half[:rounds], self.difference[:rounds])

    def worth_to_itself(self) -> Numbers:
        return worth_to_itself(self.half, self.difference).value

    def left_out(self, metric: str) -> tuple[Numbers, Numbers]:
        """The clients that were left out, and by how much the others' loss is then higher."""
        clients = np.array(sorted(self.without), np.int64)
        losses = [np.delete(self.without[int(n)][metric] - self.loss[metric], n) for n in clients]
        return clients, np.array([float(mean_of_known(loss)) for loss in losses])


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode()
    return [line for line in map(json.loads, text.splitlines()) if "error" not in line]


def array(values: Any) -> Numbers:
    return np.array(values, np.float64)


def cell_of(line: dict[str, Any]) -> Cell:
    return Cell(line["setting"], line["harm"], line["seed"])


def run_of(line: dict[str, Any]) -> Run:
    weight = array(line["weight"])
    bad = np.isin(np.arange(len(weight)), line["bad"])
    losses = {name: array(line[name]) for name in (RECEIVED, TRAINED)}
    return Run(bad, array(line["half"]), array(line["difference"]), weight, losses, {})


def runs_of(lines: Iterable[dict[str, Any]]) -> tuple[dict[Cell, Run], dict[Cell, Run]]:
    """The runs of all clients with those without a client, and those with secure sums."""
    lines = sorted(lines, key=lambda line: int(line["without"]))
    runs = {cell_of(line): run_of(line) for line in lines if line["without"] == study.ALL}
    secure = {cell_of(line): run_of(line) for line in lines if line["without"] == study.SECURE}
    for line in lines:
        if line["without"] >= 0:
            losses = {name: array(line[name]) for name in (RECEIVED, TRAINED)}
            runs[cell_of(line)].without[line["without"]] = losses
    return runs, secure


# -- numbers of a run ----------------------------------------------------------------------------------------


def auc(score: Numbers, bad: Numbers) -> float:
    """The probability that a client that does harm has a lower score than one that does not."""
    order, count = ranked(-score), int(bad.sum())
    return float((order[bad].sum() - count * (count + 1) / 2) / (count * (len(bad) - count)))


def auc_left_out(run: Run) -> float:
    clients, gains = run.left_out(RECEIVED)
    return auc(gains, run.bad[clients]) if len(clients) else float("nan")


def agreement(run: Run, metric: str, honest: bool = False) -> float:
    """Spearman's correlation of the benefit with leaving out; nan where no client was."""
    clients, gains = run.left_out(metric)
    kept = ~run.bad[clients] if honest else np.ones(len(clients), bool)
    if kept.sum() < 3:
        return float("nan")
    return float(spearman(run.benefit().value[clients[kept]], gains[kept]))


def gain(run: Run, bad: bool) -> float:
    """What the others lose without a client of this kind, in thousandths of the test loss."""
    clients, gains = run.left_out(RECEIVED)
    kept = run.bad[clients] == bad
    return 1000 * float(mean_of_known(gains[kept])) if kept.any() else float("nan")


def secure_benefit(run: Run) -> Benefit:
    """The benefit from the sum of the judgements, each of which is rounded as secure aggregation does."""
    from copfl.federation.protocol.secure_sum import Rules, dequantised, quantised

    regression, clients = design(run.half), run.half.shape[1]
    assert regression is not None
    rules = Rules(clients)
    judgements = (judged(regression, run.difference[:, n], n) for n in range(clients))
    sent = (
        Judgement(*(dequantised(quantised(t.ravel(), rules), rules).reshape(t.shape) for t in one))
        for one in judgements
    )
    return of_sum(reduce(Judgement.plus, sent), regression.freedom)


def verdict_with_liars(run: Run, liars: int, sign: float) -> str:
    """The verdict on the middle honest client where some others report losses made up for (1) or against it (-1)."""
    honest = np.flatnonzero(~run.bad)
    target = honest[np.argsort(run.benefit().value[honest])[len(honest) // 2]]
    difference = run.difference.copy()
    for liar in honest[honest != target][:liars]:
        difference[:, liar] = sign * run.half[:, target]  # a half with the target is better, or worse
    return group_benefit(run.half, difference).verdicts[target]


# -- tables --------------------------------------------------------------------------------------------------


def over(values: Iterable[float], digits: int = 2) -> str:
    """The mean over the seeds and its t interval."""
    known = np.array([value for value in values if not np.isnan(value)])
    if not len(known):
        return "-"
    low, high = over_seeds(known)
    return f"{known.mean():.{digits}f}" + (
        f" [{low:.{digits}f}, {high:.{digits}f}]" if len(known) > 1 else ""
    )


def by_kind(
    title: str,
    cells: dict[Cell, Any],
    columns: dict[str, Callable[[list[Any]], str]],
    notes: Sequence[str] = (),
) -> Table:
    """A row for each setting and harm, from the list of its runs."""
    kinds = sorted(
        {cell[:2] for cell in cells}, key=lambda kind: (SETTINGS.index(kind[0]), HARMS.index(kind[1]))
    )
    rows = [
        [
            *kind,
            *(text([run for cell, run in cells.items() if cell[:2] == kind]) for text in columns.values()),
        ]
        for kind in kinds
    ]
    return Table(title, ["setting", "harm", *columns], rows, list(notes))


def mean_over_runs(value: Callable[[Any], float], digits: int = 2) -> Callable[[list[Any]], str]:
    return lambda runs: over(map(value, runs), digits)


def fraction(verdict: str, bad: bool) -> Callable[[list[Run]], str]:
    """Of these clients, how many have this verdict."""

    def text(runs: list[Run]) -> str:
        found = [np.array(run.benefit().verdicts)[run.bad == bad] == verdict for run in runs]
        return f"{np.concatenate(found).mean():.2f}"

    return text


def study_tables(runs: dict[Cell, Run], secure: dict[Cell, Run]) -> list[Table]:
    detection = by_kind(
        "Detection of the four harmful clients of twenty: AUC, mean over the seeds and 95 % interval",
        runs,
        {
            **{
                f"benefit, {rounds} rounds": mean_over_runs(
                    lambda run, rounds=rounds: auc(run.benefit(rounds).value, run.bad)
                )
                for rounds in ROUNDS
            },
            "worth to itself, 50 rounds": mean_over_runs(lambda run: auc(run.worth_to_itself(), run.bad)),
            "leave-one-out by retraining": mean_over_runs(auc_left_out),
            "weight (COWA in copfl)": mean_over_runs(lambda run: auc(run.weight, run.bad)),
        },
    )
    verdict = by_kind(
        "Verdicts after all rounds: fraction of the clients",
        runs,
        {
            f"{'harmful' if bad else 'honest'}: {verdict}": fraction(verdict, bad)
            for bad in (True, False)
            for verdict in ("lower", "higher")
        },
    )
    retraining = by_kind(
        "Spearman's correlation of the benefit with leave-one-out by retraining: the others' test loss",
        runs,
        {
            "received model": mean_over_runs(lambda run: agreement(run, RECEIVED)),
            "model after training": mean_over_runs(lambda run: agreement(run, TRAINED)),
            "received model, honest clients alone": mean_over_runs(
                lambda run: agreement(run, RECEIVED, honest=True)
            ),
        },
    )
    harm = by_kind(
        "What the others lose without a client: test loss of the received model, in thousandths",
        runs,
        {
            "without a harmful client": mean_over_runs(lambda run: gain(run, True), 1),
            "without an honest client": mean_over_runs(lambda run: gain(run, False), 1),
        },
    )
    return [detection, verdict, retraining, harm, secure_table(runs, secure), liar_table(runs)]


def secure_table(runs: dict[Cell, Run], secure: dict[Cell, Run]) -> Table:
    pairs = {cell: (runs[cell], run) for cell, run in secure.items()}

    def largest(pair: tuple[Run, Run]) -> float:
        plain, benefit = pair[0].benefit(), secure_benefit(pair[1])
        return float((np.abs(benefit.value - plain.value) / plain.error).max())

    return by_kind(
        "With secure sums: the largest change of a client's benefit, in standard errors",
        pairs,
        {
            "change": mean_over_runs(largest, 3),
            "rank correlation": mean_over_runs(
                lambda pair: float(spearman(pair[0].benefit().value, secure_benefit(pair[1]).value)), 3
            ),
        },
    )


def liar_table(runs: dict[Cell, Run]) -> Table:
    """How often honest clients that lie about another one of twenty decide on its verdict."""

    def fraction(verdict: str, liars: int, sign: float) -> str:
        found = [verdict_with_liars(run, liars, sign) == verdict for run in runs.values()]
        return f"{np.mean(found):.2f}"

    return Table(
        "Losses made up about the middle honest client: fraction of the runs with this verdict on it",
        ["clients that lie", "lower, if against it", "higher, if for it"],
        [[str(liars), fraction("lower", liars, -1), fraction("higher", liars, 1)] for liars in range(4)],
        [],
    )


def subset_table(lines: list[dict[str, Any]]) -> Table:
    """Six clients: the benefit beside leave-one-out and Shapley values by retraining."""

    def retrained(line: dict[str, Any], name: str) -> Numbers:
        return array(line["retraining"][RECEIVED][name])

    def benefit(line: dict[str, Any]) -> Numbers:
        return run_of(line).benefit().value

    def bad(line: dict[str, Any]) -> Numbers:
        return run_of(line).bad

    columns = {
        "benefit, Shapley": lambda line: float(spearman(benefit(line), retrained(line, "shapley"))),
        "benefit, leave-one-out": lambda line: float(spearman(benefit(line), retrained(line, "left_out"))),
        "leave-one-out, Shapley": lambda line: float(
            spearman(retrained(line, "left_out"), retrained(line, "shapley"))
        ),
        "AUC: benefit": lambda line: auc(benefit(line), bad(line)),
        "AUC: leave-one-out": lambda line: auc(retrained(line, "left_out"), bad(line)),
        "AUC: Shapley": lambda line: auc(retrained(line, "shapley"), bad(line)),
    }
    return by_kind(
        "Six clients, one of them harmful: Spearman's correlations with exact Shapley values by retraining, and AUC",
        {cell_of(line): line for line in lines},
        {name: mean_over_runs(value) for name, value in columns.items()},
    )


def coverage_table(lines: list[dict[str, Any]]) -> Table:
    return by_kind(
        "Fraction of the 95 % intervals that contain the benefit",
        {cell_of(line): line for line in lines},
        {
            "all clients": mean_over_runs(lambda line: float(array(line["covered"]).mean()), 3),
            "lowest client": mean_over_runs(lambda line: float(array(line["covered"]).min()), 3),
        },
    )


def weight_tables(lines: list[dict[str, Any]]) -> list[Table]:
    """Accuracy of the honest clients: equal weights, and what each rule changes."""
    rules: dict[Cell, dict[str, dict[str, Any]]] = {}
    for line in lines:
        rules.setdefault(cell_of(line), {})[line["rule"]] = line

    def honest(line: dict[str, Any]) -> Numbers:
        return ~np.isin(np.arange(len(line["accuracy"])), line["bad"])

    def accuracy(line: dict[str, Any] | None, model: str) -> float:
        return float("nan") if line is None else 100 * float(mean_of_known(array(line[model])[honest(line)]))

    def gained(rule: str, model: str) -> Callable[[dict[str, dict[str, Any]]], float]:
        return lambda by_rule: accuracy(by_rule.get(rule), model) - accuracy(by_rule.get("equal"), model)

    def left_out(by_rule: dict[str, dict[str, Any]], kind: bool) -> float:
        line = by_rule["evidence"]
        counted = array(line["rounds_counted"])
        return float((counted < counted.max())[honest(line) == kind].sum())

    def table(title: str, model: str) -> Table:
        columns = {"equal weights": mean_over_runs(lambda by_rule: accuracy(by_rule.get("equal"), model), 1)}
        columns |= {
            rule: mean_over_runs(gained(rule, model), 1) for rule in ("evidence", "trimmed_mean", "median")
        }
        return by_kind(
            f"{title}: accuracy in %, and the gain of each rule over equal weights", rules, columns
        )

    return [
        table("Received model, honest clients", "accuracy_before"),
        table("After local training, honest clients", "accuracy"),
        by_kind(
            "Clients that `evidence` left out, of 4 harmful ones (0 in rows without harm) and 16 or 20 honest ones",
            {cell: by_rule for cell, by_rule in rules.items() if "evidence" in by_rule},
            {
                "harmful": mean_over_runs(lambda by_rule: left_out(by_rule, False), 1),
                "honest": mean_over_runs(lambda by_rule: left_out(by_rule, True), 1),
            },
        ),
    ]


def main(argv: list[str]) -> None:
    folder = Path(argv[1])
    tables = study_tables(*runs_of(lines_of(folder / "records.jsonl.gz")))
    if (subsets := folder / "subsets.jsonl.gz").exists():
        tables.append(subset_table(lines_of(subsets)))
    tables.append(coverage_table(lines_of(folder / "coverage.jsonl.gz")))
    tables += weight_tables(lines_of(folder / "weights.jsonl.gz"))
    for table in tables:
        print(as_markdown(table), end="\n\n")


if __name__ == "__main__":
    main(sys.argv)
