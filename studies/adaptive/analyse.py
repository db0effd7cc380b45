"""Prints the tables of README.md from the records: python -m studies.adaptive.analyse [RECORDS]."""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from copfl import stats
from copfl.bench.settings import SETTINGS
from copfl.stats import Numbers
from studies.adaptive.study import NAMES
from studies.defaults import analyse as defaults

RECORDS = Path(__file__).parent / "records.jsonl.gz"
CONFIRMATION = {300, 301, 302, 303, 304}  # seeds, on test samples; all others are on validation samples
REFERENCE = "default"
DRAWS = 10_000  # of the bootstrap over federations

Values = dict[str, dict[str, dict[int, float]]]  # accuracy in %, by variant, setting and seed


def records(path: Path) -> list[dict[str, Any]]:
    """The runs that ended."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text("utf-8")
    return [record for record in map(json.loads, text.splitlines()) if "accuracy" in record]


def values(runs: list[dict[str, Any]]) -> Values:
    """The mean accuracy over the clients of each run."""
    accuracies: Values = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        mean = 100 * float(np.nanmean(np.array(run["accuracy"], float)))
        accuracies[run["variant"]][run["setting"]][run["seed"]] = mean
    return accuracies


def by_round(runs: list[dict[str, Any]]) -> str:
    """The moving average minus the first choice after some rounds, over the federations of 40 rounds or fewer."""
    curves = {(run["variant"], run["setting"], run["seed"]): run["curve"] for run in runs}
    gains: dict[int, list[float]] = defaultdict(list)
    for (variant, name, seed), curve in curves.items():
        averaged = curves.get(("default-ema", name, seed))
        if variant == REFERENCE and averaged and seed not in CONFIRMATION and SETTINGS[name].rounds <= 40:
            for place, (with_it, without) in enumerate(zip(averaged, curve, strict=True)):
                gains[1 + place * (SETTINGS[name].rounds // 20)].append(100 * (with_it - without))
    rounds = [number for number in (5, 9, 13, 17, 19, 31, 39) if gains[number]]
    cells = [f"{np.mean(gains[number]):+.1f}" for number in rounds]
    head = "| after round | " + " | ".join(map(str, rounds)) + " |\n| --- |" + " ---: |" * len(rounds)
    return f"{head}\n| difference | {' | '.join(cells)} |"


def over_federations(numbers: Numbers) -> str:
    """The mean and its 95 % interval, a bootstrap over the federations."""
    rng = np.random.default_rng(0)
    means = rng.choice(numbers, (DRAWS, len(numbers))).mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return f"{numbers.mean():+.2f} [{low:+.2f}, {high:+.2f}]"


def development(accuracies: Values) -> str:
    """Each variant minus the first choice, on the seeds that both have; the regret is against the stored candidates."""
    best = {
        name: max(cells.values())
        for name, cells in defaults.over_seeds(defaults.values(defaults.DEVELOPMENT, {1})).items()
    }
    lines = [
        "| variant | federations | minus the first choice | best | worst | mean regret, seed 200 | largest |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for variant, by_setting in accuracies.items():
        gains, regrets = {}, []
        for name in NAMES:
            seeds = set(by_setting[name]) & set(accuracies[REFERENCE][name]) - CONFIRMATION
            if seeds:
                pairs = [by_setting[name][s] - accuracies[REFERENCE][name][s] for s in seeds]
                gains[name] = float(np.mean(pairs))
            if 200 in by_setting[name]:
                regrets.append(best[name] - by_setting[name][200])
        if not gains:
            continue
        top, bottom = max(gains, key=lambda n: gains[n]), min(gains, key=lambda n: gains[n])
        regret = f"{np.mean(regrets):.2f} | {max(regrets):.1f}" if regrets else " | "
        lines.append(
            f"| `{variant}` | {len(gains)} | {over_federations(np.array([*gains.values()]))} | "
            f"{top} {gains[top]:+.1f} | {bottom} {gains[bottom]:+.1f} | {regret} |"
        )
    return "\n".join(lines)


QUESTIONS = {
    "a moving average of the client's weights": ("default-ema", "default"),
    "a longer one (0.9 instead of 0.8)": ("default-ema-0.9", "default-ema"),
    "holding out a fifth of the samples in the first half of the rounds, no gate": (
        "held-out-ema",
        "default-ema",
    ),
    "gates on what a client predicts with": ("end-ema", "held-out-ema"),
    "gates on the head that training starts from: combined, own, mean": ("pac-start-ema", "held-out-ema"),
    "gates on own head and own body that training starts from": ("own-ema", "held-out-ema"),
    "both of these and those of the predictions": ("own-end-ema", "held-out-ema"),
}


def questions(accuracies: Values) -> str:
    """The difference of two variants that differ in one thing, on the seeds that both have."""
    lines = ["| what is added | difference | best | worst |", "| --- | ---: | --- | --- |"]
    for question, (first, second) in QUESTIONS.items():
        gains = {}
        for name in NAMES:
            one, other = accuracies[first][name], accuracies[second][name]
            if seeds := set(one) & set(other) - CONFIRMATION:
                gains[name] = float(np.mean([one[s] - other[s] for s in seeds]))
        top, bottom = max(gains, key=lambda n: gains[n]), min(gains, key=lambda n: gains[n])
        lines.append(
            f"| {question} | {over_federations(np.array([*gains.values()]))} "
            f"| {top} {gains[top]:+.1f} | {bottom} {gains[bottom]:+.1f} |"
        )
    return "\n".join(lines)


def gate_on_fedrod(accuracies: Values) -> str:
    """`rod-gate` minus FedRoD, which studies/defaults has with the same batch, rate and schedule; seed 200."""
    rules = {
        name: next(c for c in cells if c.head_speed == defaults.HEAD_SPEED)
        for name, cells in defaults.values(CONFIRMATION, {1}).items()
    }
    gains = {}
    for name, cells in defaults.over_seeds(defaults.values(defaults.DEVELOPMENT, {1})).items():
        if name not in rules:
            continue
        rule = rules[name]._replace(algorithm="fedrod", head_speed=0.0)
        same = [c for c in cells if c._replace(batch=c.batch or 32) == rule]
        if same and 200 in accuracies["rod-gate"][name]:
            gains[name] = accuracies["rod-gate"][name][200] - cells[same[0]]
    return (
        f"`rod-gate` minus FedRoD: {over_federations(np.array([*gains.values()]))}, {len(gains)} federations"
    )


def by_federation(accuracies: Values) -> str:
    """The difference of each variant to the first choice in each federation."""
    variants = [v for v in accuracies if v != REFERENCE]
    lines = [
        "| federation | first choice | " + " | ".join(variants) + " |",
        "| --- |" + " ---: |" * (len(variants) + 1),
    ]
    for name in NAMES:
        reference = accuracies[REFERENCE][name]
        seeds = set(reference) - CONFIRMATION
        cells = []
        for variant in variants:
            common = seeds & set(accuracies[variant][name])
            gain = (
                np.mean([accuracies[variant][name][s] - reference[s] for s in common]) if common else np.nan
            )
            cells.append(f"{gain:+.1f}" if common else "")
        mean = f"{np.mean([reference[s] for s in seeds]):.1f}" if seeds else ""
        lines.append(f"| {name} | {mean} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


FIRST, ALONE = "first choice", "training alone"


def stored() -> dict[str, dict[str, dict[int, float]]]:
    """The confirmation of studies/defaults by setting, method and seed."""
    methods: dict[str, dict[str, dict[int, float]]] = {}
    for name, cells in defaults.values(CONFIRMATION, {1}).items():
        methods[name] = {
            FIRST
            if c.head_speed == defaults.HEAD_SPEED
            else ALONE
            if c.algorithm == "local"
            else f"`{c.algorithm}`, {c.server}, {c.lr:g}": by_seed
            for c, by_seed in cells.items()
        }
    return methods


def confirmation(accuracies: Values, variant: str) -> str:
    """A variant on test samples, against training alone seed by seed, and against the best method in hindsight.

    Methods are the seven competitors of studies/defaults, training alone and the first choice, on the one or
    two seeds that all of them have.
    """
    lines = [
        f"| federation | `{variant}` | {FIRST} | {ALONE} | minus {ALONE} | minus {FIRST} | regret "
        f"| of the {FIRST} | best method |",
        "| --- |" + " ---: |" * 7 + " --- |",
    ]
    regrets: dict[str, list[float]] = defaultdict(list)
    verdicts: dict[str, list[str]] = defaultdict(list)
    gains = []
    for name, methods in stored().items():
        mine = {s: value for s, value in accuracies[variant][name].items() if s in CONFIRMATION}
        if set(mine) != CONFIRMATION:
            continue
        cells = []
        for other in (ALONE, FIRST):
            differences = np.array([mine[s] - methods[other][s] for s in sorted(mine)])
            low, high = stats.over_seeds(differences)
            cells.append(f"{differences.mean():+.1f} [{low:+.1f}, {high:+.1f}]")
            if low > 0 or high < 0:
                verdicts[f"{'above' if low > 0 else 'below'} {other}"].append(name)
        gains.append(float(differences.mean()))
        seeds = set.intersection(*(set(by_seed) for by_seed in methods.values()))
        at_hand = {method: float(np.mean([by_seed[s] for s in seeds])) for method, by_seed in methods.items()}
        at_hand_of_mine = float(np.mean([mine[s] for s in seeds]))
        competitors = {method: value for method, value in at_hand.items() if method not in (FIRST, ALONE)}
        for reference, group in (("seven competitors", competitors), ("all nine methods", at_hand)):
            for title, value in ((variant, at_hand_of_mine), (FIRST, at_hand[FIRST])):
                regrets[f"{title}, against {reference}"].append(max(0.0, max(group.values()) - value))
        averaged = accuracies["fedrod-ema"][name].get(min(seeds))
        if averaged is not None:
            beside = max(averaged - mine[min(seeds)], regrets[f"{variant}, against all nine methods"][-1])
            regrets[f"{variant}, against these and fedrod-ema"].append(beside)
        best = max(at_hand, key=lambda method: at_hand[method])
        means = [float(np.mean([*row.values()])) for row in (mine, methods[FIRST], methods[ALONE])]
        own, of_first = (regrets[f"{title}, against all nine methods"][-1] for title in (variant, FIRST))
        lines.append(
            f"| {name} | {means[0]:.1f} | {means[1]:.1f} | {means[2]:.1f} | {' | '.join(cells)} "
            f"| {own:.1f} | {of_first:.1f} | {best} |"
        )
    lines.append("")
    for title, numbers in regrets.items():
        lines.append(
            f"- mean regret of {title}: {over_federations(np.array(numbers))}, largest {max(numbers):.1f}"
        )
    lines.append(f"- minus the {FIRST}: {over_federations(np.array(gains))}")
    lines += [f"- {verdict}: {len(names)} ({', '.join(names)})" for verdict, names in verdicts.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    runs = records(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDS)
    measured = values(runs)
    for table in (development, questions, gate_on_fedrod, by_federation):
        print(table(measured), end="\n\n")
    print(by_round(runs), end="\n\n")
    print(confirmation(measured, "default-ema"))
