"""What the planted federation shows: who gets weight under each way of weighing, and what that costs the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl import stats
from copfl.audit import audit as auditing
from copfl.audit import replay, tables
from copfl.audit.audit import LAST, SCORES, Audit, Cache, Tick, even_shares, figures_of
from copfl.audit.games import DEFAULT, Sampling
from copfl.audit.synthetic import (
    FEDCE,
    HELD_OUT,
    LONG,
    NAMES,
    ODD,
    PLAIN,
    PUBLISHED,
    RIDER,
    ROUNDS,
    TWIN,
    VARIANTS,
    WRONG,
    experiment,
)  # fmt: skip
from copfl.audit.tables import Sheet
from copfl.experiment.run import execute

Numbers = NDArray[np.float64]
TITLE = "Digits with four odd clients"
CLOSER = (PUBLISHED, HELD_OUT)  # looked at more closely
BESIDE = {HELD_OUT: HELD_OUT, FEDCE: "fedce"}


@dataclass(frozen=True, eq=False)
class Variant:
    """What one way of weighing does. Accuracies are means over the plain clients, [seeds]."""

    name: str
    shares: dict[str, Numbers]  # by score, [seeds, clients], times the clients: 1 is even
    accuracy: dict[str, Numbers]  # "planted" and "clean": personal, after training
    broadcast: dict[str, Numbers]  # the same of the broadcast alone
    gains: dict[str, Numbers]  # by odd client: personal accuracy with it, minus that of training without it
    broadcast_gains: dict[str, Numbers]
    lied: Numbers | None  # [seeds], the share of a free rider that sends the score of honest training
    by_heart: Numbers | None  # [seeds], the share of wrong labels when its model has learned them all


@dataclass(frozen=True, eq=False)
class Study:
    """All variants, and the audit of COWA as published."""

    seeds: list[int]
    variants: list[Variant]
    audit: Audit


def study(
    seeds: Sequence[int] = (0, 1, 2),
    *,
    variants: Sequence[str] = tuple(VARIANTS),
    rounds: int = ROUNDS,
    long: int = LONG,
    sampling: Sampling = DEFAULT,
    notes: Path | None = None,
    start: Callable[[int], Tick] | None = None,
) -> Study:
    """The study; the first variant is audited, with the weights of the others in BESIDE tried on its clients."""
    beside = [name for name in variants[1:] if name in BESIDE]
    closer = sum(name in CLOSER for name in variants)
    runs = len(beside) + (1 + len(NAMES) + len(beside)) + len(variants) * (2 + len(ODD)) + closer
    tick = (lambda done: None) if start is None else start(len(seeds) * (runs * rounds + closer * long))
    books = {name: Cache(None if notes is None else notes / _folder(name)) for name in variants}
    looks = {name: Looks(name, books[name], rounds, tick) for name in variants}
    first = variants[0]
    for name in beside:  # the audit finds their runs noted
        for seed in seeds:
            weight = looks[name].noted("odd", seed)["figures"]["weight"]
            books[first].note(f"seed-{seed}-beside-{BESIDE[name]}-{rounds}", {"figures": {"weight": weight}})
    found = auditing.audit(
        lambda seed: experiment(first, seed, rounds=rounds),
        seeds,
        beside={BESIDE[name]: partial(experiment, name, rounds=rounds) for name in beside},
        sampling=sampling,
        notebook=books[first],
        start=lambda total: tick,
        names=NAMES,
        title=f"{TITLE}, {first}",
    )
    return Study(list(seeds), [_variant(looks[name], seeds, long) for name in variants], found)


def _folder(name: str) -> str:
    return "-".join(name.lower().replace("=", " ").split())


class Looks(NamedTuple):
    """The runs of one variant, each carried out once."""

    name: str
    book: Cache
    rounds: int
    tick: Tick

    def noted(self, kind: str, seed: int, gone: int | None = None, rounds: int = 0) -> Any:
        """The figures of a run, see `experiment`; with `gone`, of one that this client's uploads do not reach."""
        rounds = rounds or self.rounds
        label = kind if gone is None else f"without-{gone}"

        def work(on_round: Any) -> Any:
            e = experiment(self.name, seed, kind, rounds)
            return figures_of(
                execute(e, None, on_round) if gone is None else replay.without(e, [gone], on_round)
            )

        name = f"seed-{seed}-{'run' if label == 'odd' else label}"
        return auditing.noted(self.book, name, rounds, self.tick, work)


def _variant(looks: Looks, seeds: Sequence[int], long: int) -> Variant:
    def plain(found: Sequence[Any], what: str) -> Numbers:
        return np.array([np.nanmean(np.array(one[what], np.float64)[PLAIN]) for one in found])

    odd, clean = ([looks.noted(kind, seed) for seed in seeds] for kind in ("odd", "clean"))
    gone = {odd_one: [looks.noted("odd", seed, n) for seed in seeds] for odd_one, n in ODD.items()}
    lied = by_heart = None
    if looks.name in CLOSER:
        lied = np.array([_share(looks.noted("lied", seed), "weight")[RIDER] for seed in seeds])
        late = [looks.noted("odd", seed, rounds=long) for seed in seeds]
        by_heart = np.array([_share(found, "weight", LAST)[WRONG] for found in late])
    accuracy, broadcast = (
        {kind: plain(found, what) for kind, found in (("planted", odd), ("clean", clean))}
        for what in ("accuracy", "broadcast")
    )
    gains, broadcast_gains = (
        {odd_one: plain(odd, what) - plain(without, what) for odd_one, without in gone.items()}
        for what in ("accuracy", "broadcast")
    )
    shares = {score: np.stack([_share(found, score) for found in odd]) for score in odd[0]["figures"]}
    return Variant(looks.name, shares, accuracy, broadcast, gains, broadcast_gains, lied, by_heart)


def _share(found: Any, score: str, last: int = 0) -> Numbers:
    """The mean over all rounds, or the last ones, of each client's share, times the clients."""
    return np.asarray(even_shares(np.array(found["figures"][score], np.float64))[-last:].mean(0))


def sheets(found: Study) -> list[Sheet]:
    """All that is shown, grid by grid."""
    return [_weights(found), _closer(found), _costs(found), *_gains(found), *tables.sheets(found.audit)]


def _weights(found: Study) -> Sheet:
    rows = []
    for variant in found.variants:
        for score, shares in variant.shares.items():
            if score == "weight" or variant.name == PUBLISHED:
                title = variant.name if score == "weight" else f"- its {SCORES[score]}"
                rows.append([title, *_cells(shares), _number(shares[:, PLAIN[1:]].mean(1))])
    return Sheet(
        "Who gets the weight? 1 is an even share",
        ["", *ODD, "its twin", "plain"],
        rows,
        f"Mean ± standard deviation over the seeds {', '.join(map(str, found.seeds))}; in brackets the mean rank "
        f"among the {len(NAMES)} clients, 1 is the most weight.",
    )


def _closer(found: Study) -> Sheet:
    rows = []
    for variant in found.variants:
        if variant.lied is not None and variant.by_heart is not None:
            usual = variant.shares["weight"][:, [RIDER, WRONG]].T
            rows.append([variant.name, *map(_number, (usual[0], variant.lied, usual[1], variant.by_heart))])
    return Sheet(
        "Where trust ends: shares of the weight",
        ["", "free rider", "that lies", "wrong labels", "known by heart"],
        rows,
        "that lies: it sends the score of honest training with its noise. known by heart: the share of wrong labels in "
        f"the last {LAST} rounds of a longer run, when the client's model has learned them all.",
    )


def _cells(shares: Numbers) -> list[str]:
    """A cell for each odd client and the twin."""
    places = len(NAMES) + 1 - stats.ranked(shares)  # [seeds, clients]
    even = np.ptp(shares) < 1e-9
    shown = [*ODD.values(), TWIN]
    return [_number(shares[:, n]) + ("" if even else f" ({places[:, n].mean():.1f})") for n in shown]


def _costs(found: Study) -> Sheet:
    rows = [
        [
            v.name,
            *(_percent(part[kind]) for part in (v.accuracy, v.broadcast) for kind in ("clean", "planted")),
        ]
        for v in found.variants
    ]
    return Sheet(
        "What does it cost the plain clients? Their accuracy in %",
        ["", "personal, clean", "personal, planted", "broadcast, clean", "broadcast, planted"],
        rows,
        "Mean ± standard deviation over seeds. clean: the same clients, with right labels, honest, and samples of "
        "their own. The broadcast alone is tried on the plain clients' test samples.",
    )


def _gains(found: Study) -> list[Sheet]:
    below = (
        "Their accuracy with the odd client minus that of training again without it; mean ± standard deviation over "
        "seeds. Negative: they are better off without."
    )
    return [
        Sheet(
            f"What do the plain clients gain by having it? Points of {what} accuracy",
            ["", *ODD],
            [[v.name, *(_points(getattr(v, kind)[name]) for name in ODD)] for v in found.variants],
            below if kind == "broadcast_gains" else "",
        )
        for what, kind in (("personal", "gains"), ("the broadcast's", "broadcast_gains"))
    ]


def _number(values: Numbers) -> str:
    return f"{values.mean():.2f} ± {_spread(values):.2f}"


def _percent(values: Numbers) -> str:
    return f"{100 * values.mean():.1f} ± {100 * _spread(values):.1f}"


def _points(values: Numbers) -> str:
    return f"{100 * values.mean():+.1f} ± {100 * _spread(values):.1f}"


def _spread(values: Numbers) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def as_json(found: Study) -> dict[str, Any]:
    """All that was found."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: plain(value) for name, value in part.items()}
        return None if part is None else part.tolist()

    kinds = ("shares", "accuracy", "broadcast", "gains", "broadcast_gains", "lied", "by_heart")
    return {
        "title": TITLE,
        "seeds": found.seeds,
        "clients": NAMES,
        "variants": [
            {"name": v.name, **{kind: plain(getattr(v, kind)) for kind in kinds}} for v in found.variants
        ],
        "audit": tables.as_json(found.audit),
    }
