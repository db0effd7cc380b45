"""Prints the tables of extremes.md from the records: python studies/defaults/analyse_extremes.py."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from copfl import stats

FOLDER = Path(__file__).parent
DEFAULT, FORMER = "default", "default;batch=32"
PER, TUNED = "fedper;fedexp;last", "fedavg_ft;fedexp"  # of next tokens
COMPETITORS = (
    *("fedavg_ft;fedexp", "fedper;fedexp", "ditto", "ditto;fedexp", "apfl;fedexp", "fedavg;fedexp"),
    *("fedpac;momentum", "fedrod;fedexp"),
)
AUDITED, JUDGED, OF_TARGETS = range(9400, 9500), range(9500, 9600), range(9200, 9300)  # seeds
UNITS = {
    "accuracy": "points of accuracy",
    "macro_f1": "points of macro F1",
    "rmse": "% of RMSE",
}


class Runs(NamedTuple):
    """The runs of a federation."""

    metric: str
    higher: bool  # is better
    methods: dict[str, str]  # by candidate
    values: dict[str, dict[int, float]]  # by candidate and seed: % or an error
    alone: dict[str, dict[int, float]]  # of each trained alone, as the candidate trains

    def gain(self, ours: dict[int, float], theirs: dict[int, float]) -> dict[int, float]:
        """By seed: how many points the first is above the second, or by how many percent its error is lower."""
        seeds = sorted(ours.keys() & theirs.keys())
        if self.higher:
            return {seed: ours[seed] - theirs[seed] for seed in seeds}
        return {seed: 100 * (1 - ours[seed] / theirs[seed]) for seed in seeds}

    def over_alone(self, candidate: str) -> dict[int, float]:
        return self.gain(self.values[candidate], self.alone[candidate])


def federations(seeds: range) -> dict[str, Runs]:
    """The records of these seeds, by federation; the values are means over the sites."""
    found: dict[str, Runs] = {}
    for line in gzip.decompress((FOLDER / "extremes.jsonl.gz").read_bytes()).decode().splitlines():
        record = json.loads(line)
        if record["seed"] not in seeds:
            continue
        empty = Runs(record["metric"], record["higher"], {}, defaultdict(dict), defaultdict(dict))
        runs = found.setdefault(record["federation"], empty)
        scale = 100 if record["higher"] else 1
        runs.methods[record["candidate"]] = record["method"]
        for kind, table in (("personal", runs.values), ("alone", runs.alone)):
            if kind in record:
                mean = scale * float(np.nanmean(np.array(record[kind], float)))
                table[record["candidate"]][record["seed"]] = mean
    return found


class Regret(NamedTuple):
    """How far the default is below the best of all, on the seeds that all have."""

    best: str
    value: float
    on_another_seed: float  # where the best is chosen on the other seeds: its choice gains nothing by chance


def regret(runs: Runs) -> Regret | None:
    """None where no competitor was trained."""
    others = {name: row for name, row in runs.values.items() if name in COMPETITORS}
    if not others:
        return None
    candidates = {DEFAULT: runs.values[DEFAULT], "training alone": runs.alone[DEFAULT], **others}
    seeds = sorted(set.intersection(*(set(row) for row in candidates.values())))
    gains = {name: runs.gain(row, runs.values[DEFAULT]) for name, row in candidates.items()}

    def best_on(chosen: list[int]) -> str:
        return max(gains, key=lambda name: float(np.mean([gains[name][seed] for seed in chosen])))

    best = best_on(seeds)
    crossed = [gains[best_on([other for other in seeds if other != seed] or seeds)][seed] for seed in seeds]
    return Regret(best, float(np.mean([gains[best][seed] for seed in seeds])), float(np.mean(crossed)))


def shown(gains: dict[int, float]) -> str:
    """The mean, with the 95 % interval over the seeds."""
    values = np.array(list(gains.values()))
    low, high = stats.over_seeds(values)
    return f"{values.mean():+.1f} [{low:+.1f}, {high:+.1f}]"


def default_table(found: dict[str, Runs]) -> str:
    """The default against training alone and against the best of all candidates."""
    lines = [
        "| federation | method | seeds | default | training alone | difference, 95 % interval | p, Holm "
        "| regret | best |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    gains = {name: runs.over_alone(DEFAULT) for name, runs in found.items()}
    p_values = stats.holm([stats.t_test(np.array(list(row.values()))) for row in gains.values()])
    for (name, runs), p in zip(found.items(), p_values, strict=True):
        means = [f"{np.mean(list(row[DEFAULT].values())):.3g}" for row in (runs.values, runs.alone)]
        lost = regret(runs)
        unit = "" if runs.higher else " %"
        cells = [
            name,
            runs.methods[DEFAULT].split()[0],
            str(len(gains[name])),
            *means,
            shown(gains[name]).replace(" [", f"{unit} ["),
            f"{p:.2g}",
            f"{lost.value:.1f}{unit}" if lost else "",
            f"`{lost.best}`" if lost else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(found: dict[str, Runs]) -> str:
    """Of each metric: in how many federations the default is above and below training alone, and its regret."""
    lines = [
        "| in | federations | above training alone | below "
        "| with competitors | mean regret | the best chosen on another seed | largest |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for metric in dict.fromkeys(runs.metric for runs in found.values()):
        rows = {name: runs for name, runs in found.items() if runs.metric == metric}
        bounds = [
            stats.over_seeds(np.array(list(runs.over_alone(DEFAULT).values()))) for runs in rows.values()
        ]
        above, below = sum(low > 0 for low, _ in bounds), sum(high < 0 for _, high in bounds)
        regrets = {name: lost for name, runs in rows.items() if (lost := regret(runs)) is not None}
        worst = max(regrets, key=lambda name: regrets[name].value)
        means = [np.mean([getattr(lost, key) for lost in regrets.values()]) for key in Regret._fields[1:]]
        cells = [UNITS[metric], len(rows), above, below, len(regrets), *(f"{mean:.1f}" for mean in means)]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {regrets[worst].value:.1f}, {worst} |")
    return "\n".join(lines)


def change_table(found: dict[str, Runs]) -> str:
    """The former default and the new one against training alone as each trains, and against each other."""
    lines = [
        "| federation | seeds | former: minus training alone | now: minus training alone | now minus former |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, runs in found.items():
        if FORMER in runs.values:
            change = runs.gain(runs.values[DEFAULT], runs.values[FORMER])
            cells = [shown(runs.over_alone(FORMER)), shown(runs.over_alone(DEFAULT)), shown(change)]
            lines.append(f"| {name} | {len(change)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tried_table(found: dict[str, Runs]) -> str:
    """What was tried beside the competitors, and what of them was best there, against training alone."""
    lines = [
        "| federation | candidate | minus training alone, by seed | default |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, runs in found.items():
        tried = [key for key in runs.values if key not in (DEFAULT, FORMER, *COMPETITORS)]
        best = [lost.best] if tried and (lost := regret(runs)) and lost.best in COMPETITORS else []
        for candidate in [*tried, *best]:
            like = FORMER if "batch=32" in candidate else DEFAULT
            gains = runs.gain(runs.values[candidate], runs.alone[like])
            default = [runs.over_alone(like)[seed] for seed in gains]
            cells = [" ".join(f"{gain:+.1f}" for gain in row) for row in (gains.values(), default)]
            lines.append(f"| {name} | `{candidate}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def token_table(found: dict[str, Runs]) -> str:
    """Next tokens: FedPer, the former default, and FedAvg with fine-tuning, both with FedExP's step."""
    lines = [
        "| federation | seeds | former: perplexity | its training alone | FedAvg with fine-tuning "
        "| lower than the former, %, by seed | now: lower than its training alone, % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, runs in found.items():
        former, alone, other = runs.values[PER], runs.alone[PER], runs.values[TUNED]
        lower = runs.gain(other, former)
        means = [f"{np.mean([row[seed] for seed in lower]):.2f}" for row in (former, alone, other)]
        texts = [
            " ".join(f"{value:.1f}" for value in row.values()) for row in (lower, runs.over_alone(DEFAULT))
        ]
        lines.append("| " + " | ".join([name, str(len(lower)), *means, *texts]) + " |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """All tables of the page, by what they show."""
    audited, judged = federations(AUDITED), federations(JUDGED)
    of_tokens = {name: r for name, r in {**audited, **judged}.items() if r.metric == "perplexity"}
    audited = {name: runs for name, runs in audited.items() if name not in of_tokens}
    return {
        "summary": summary(audited),
        "the default": default_table(audited),
        "the change, where it was found": change_table(audited),
        "the change, in other federations": change_table(judged),
        "the change, in those of targets.md": change_table(federations(OF_TARGETS)),
        "next tokens": token_table(of_tokens),
        "what was tried": tried_table(audited),
    }


if __name__ == "__main__":
    for title, table in tables().items():
        print(f"{title}\n\n{table}\n")
