"""Does the default hold in extreme federations? python studies/defaults/extremes.py FILES OUT.jsonl.

    python studies/defaults/extremes.py FILES OUT.jsonl --data DATA --runs "9400,9401:default"
    python studies/defaults/extremes.py FILES OUT.jsonl --data DATA --runs "9400:fedper;fedexp,apfl:giant,two-groups"

A federation is files as a user has them: a table or texts with a column of sites, an .npz file with an array of sites,
a folder of images; with test samples of the same sites. Every seed draws the rows, the sites and what they differ in
anew. The default is `copfl run -d DATA` without an algorithm, and trains each client alone as well. The others
have the rule's batch and rate, the default's number of epochs and, from 20 rounds on, its averaged weights.
DATA has banking77/, clinc150/, mini-imagenet.tar and cinic-10-style.tar; FILES keeps the parts of them that are needed.
Runs whose record is in OUT already are left out, so a study that was stopped goes on.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[1]))
from parallel import run_jobs, study_parser  # type: ignore[import-not-found]
from unseen import _write, _write_rows, quantiles, values_by_site  # type: ignore[import-not-found]

Array = NDArray[Any]
Rng = np.random.Generator
TEST = 60  # samples of a site


class Rows(NamedTuple):
    x: Array  # [n, columns], [n, channels, ...], or [n] texts
    y: Array  # [n] classes or values, or [n, labels]
    site: Array  # [n]
    is_test: Array  # [n] bool


Change = Callable[[Rng, Rows], Rows]  # what makes the sites differ


# -- sites -------------------------------------------------------------------------------------------------------------


def shared_out(
    rng: Rng, x: Array, y: Array, sizes: Sequence[int], shares: Array | None = None, test: int = TEST
) -> Rows:
    """Rows without replacement for every site: so many for training, and `test` others. `shares` [sites, classes]."""
    free, parts = np.ones(len(x), bool), []
    kind = np.unique(y, return_inverse=True)[1] if y.ndim == 1 else np.zeros(len(y), int)
    counts = np.bincount(kind)
    for number, size in enumerate(sizes):
        weight = np.ones(len(x)) if shares is None else (shares[number] / counts)[kind] + 1e-9
        weight = np.where(free, weight, 0.0)
        members = rng.choice(len(x), size + test, replace=False, p=weight / weight.sum())
        free[members] = False
        parts.append(members)
    members, site = np.concatenate(parts), np.repeat(np.arange(len(sizes)), [len(part) for part in parts])
    is_test = np.concatenate([np.arange(len(part)) >= len(part) - test for part in parts])
    return Rows(x[members], y[members], site, is_test)


def of_sites(rows: Rows) -> int:
    return int(rows.site.max()) + 1


def shifted(rng: Rng, rows: Rows, by: float) -> Rows:
    """Each site adds a constant of its own to every column."""
    return rows._replace(x=rows.x + by * rng.normal(size=(of_sites(rows), rows.x.shape[1]))[rows.site])


def in_other_units(rng: Rng, rows: Rows, by: float = 1.0) -> Rows:
    """Each site multiplies every column by a factor of its own."""
    factors = np.exp(by * rng.normal(size=(of_sites(rows), rows.x.shape[1])))
    return rows._replace(x=rows.x * factors[rows.site])


def renamed(rng: Rng, rows: Rows, groups: int = 0) -> Rows:
    """Each site, or each of so many groups of sites, has its classes, or labels, in an order of its own."""
    number = rows.y.shape[1] if rows.y.ndim == 2 else len(np.unique(rows.y))
    orders = np.array([rng.permutation(number) for _ in range(groups or of_sites(rows))])
    order = orders[rows.site % len(orders)]
    if rows.y.ndim == 2:
        return rows._replace(y=np.take_along_axis(rows.y, order, axis=1))
    names, kind = np.unique(rows.y, return_inverse=True)
    return rows._replace(y=names[order[np.arange(len(order)), kind]])


def with_wrong_labels(rng: Rng, rows: Rows, most: float = 0.4) -> Rows:
    """Each site has a share of wrong classes of its own, up to `most`, in its training samples."""
    share = rng.uniform(0, most, of_sites(rows))[rows.site]
    is_wrong = (rng.random(len(share)) < share) & ~rows.is_test
    return rows._replace(y=np.where(is_wrong, rng.permutation(rows.y), rows.y))


def without_columns(rng: Rng, rows: Rows, share: float = 0.33) -> Rows:
    """Each site lacks a share of the columns: they are 0 there."""
    return rows._replace(x=rows.x * (rng.random((of_sites(rows), rows.x.shape[1])) > share)[rows.site])


def with_offsets(rng: Rng, rows: Rows, by: float) -> Rows:
    """Each site adds a constant of its own to the values, in standard deviations."""
    return rows._replace(y=rows.y + by * rows.y.std() * rng.normal(size=of_sites(rows))[rows.site])


def with_other_signs(rng: Rng, rows: Rows) -> Rows:
    """The values of every second site are negative."""
    return rows._replace(y=np.where(rows.site % 2, -rows.y, rows.y))


def opposite(rng: Rng, rows: Rows) -> Rows:
    """Every second site has the other of two classes, or the opposite of every label."""
    if rows.y.ndim == 2:
        return rows._replace(y=np.where(rows.site[:, None] % 2, 1 - rows.y, rows.y))
    names, kind = np.unique(rows.y, return_inverse=True)
    return rows._replace(y=names[np.where(rows.site % 2, 1 - kind, kind)])


def in_other_orders(rng: Rng, rows: Rows) -> Rows:
    """Each site has its columns in an order of its own, so that it has nothing to learn from the others."""
    orders = np.array([rng.permutation(rows.x.shape[1]) for _ in range(of_sites(rows))])
    return rows._replace(x=np.take_along_axis(rows.x, orders[rows.site], axis=1))


def turned(rng: Rng, rows: Rows) -> Rows:
    """Images [n, 1, h, w] of each site are turned by a multiple of 90 degrees."""
    return rows._replace(
        x=np.stack([np.rot90(x, s % 4, (1, 2)) for x, s in zip(rows.x, rows.site, strict=True)])
    )


def by_cameras(rng: Rng, rows: Rows) -> Rows:
    """Each site has a colour cast, a brightness and a contrast of its own; images [n, 3, h, w] from 0 to 255."""
    sites = of_sites(rows)
    gain = np.exp(0.4 * rng.normal(size=(sites, 3, 1, 1)))[rows.site]
    offset = 40 * rng.normal(size=(sites, 1, 1, 1))[rows.site]
    return rows._replace(
        x=np.clip((rows.x.astype(float) - 128) * gain + 128 + offset, 0, 255).astype(np.uint8)
    )


# -- samples -----------------------------------------------------------------------------------------------------------


def generated(
    rng: Rng, sizes: Sequence[int], classes: int = 4, alpha: float = 0.0, rare: float = 0.0, **options: Any
) -> Rows:
    """scikit-learn's make_classification. alpha: of the sites' class frequencies; rare: the share of class 1 of 2."""
    from sklearn.datasets import make_classification

    n = 3 * (sum(sizes) + len(sizes) * TEST)
    shape = {
        "n_features": 20,
        "n_informative": 8,
        "n_redundant": 4,
        "n_clusters_per_class": 2,
        "flip_y": 0.02,
    }
    weights = [1 - rare, rare] if rare else None
    state = int(rng.integers(2**31))
    x, y = make_classification(n, n_classes=classes, weights=weights, random_state=state, **shape | options)
    prior = np.bincount(y) / n
    shares = rng.dirichlet(alpha * len(prior) * prior, len(sizes)) if alpha else None
    rows = shared_out(rng, x, y, sizes, shares)
    return rows._replace(y=np.array([f"kind{kind}" for kind in rows.y]))


def packaged(rng: Rng, name: str, sizes: Sequence[int], test: int) -> Rows:
    """A table of scikit-learn."""
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    return shared_out(rng, data.data, data.target, sizes, test=test)


def tumours(rng: Rng) -> Rows:
    """Two hospitals that differ in the texture of the tumours, 60 and 40 rows."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    half = quantiles(x[:, 1], 2, 1.0, rng)
    parts = [shared_out(rng, x[half == s], y[half == s], [(60, 40)[s]], test=150) for s in (0, 1)]
    return joined([part._replace(site=part.site + number) for number, part in enumerate(parts)])


def joined(parts: Sequence[Rows]) -> Rows:
    return Rows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def digits(rng: Rng, sizes: Sequence[int]) -> Rows:
    """scikit-learn's images [n, 1, 8, 8]."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return shared_out(rng, x.reshape(-1, 1, 8, 8).astype(np.float32), y, sizes, test=40)


def photographs(
    rng: Rng, files: Path, name: str, classes: int, sizes: Sequence[int], alpha: float = 0.0
) -> Rows:
    """Images of so many classes; alpha: of the sites' class frequencies."""
    stored = np.load(files / f"{name}.npz")
    kinds = rng.permutation(stored["y"].max() + 1)[:classes]
    chosen = np.isin(stored["y"], kinds)
    x, y = stored["x"][chosen], np.unique(stored["y"][chosen], return_inverse=True)[1]
    shares = rng.dirichlet(np.full(classes, alpha), len(sizes)) if alpha else None
    return shared_out(rng, x, y, sizes, shares, test=40)


def sentences(files: Path, name: str) -> tuple[Array, Array]:
    """Texts and intents of Banking77 or CLINC150."""
    rows = json.loads((files / f"{name}.json").read_text("utf-8"))
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


def domains(rng: Rng, files: Path, sizes: Sequence[int], alpha: float) -> Rows:
    """CLINC150: the domain of a sentence, of ten; the sites differ in the frequencies of intents."""
    texts, intents = sentences(files, "clinc")
    domain_of = {i: d for d, names in json.loads((files / "domains.json").read_text()).items() for i in names}
    shares = rng.dirichlet(np.full(len(np.unique(intents)), alpha), len(sizes))
    rows = shared_out(rng, texts, intents, sizes, shares)
    return rows._replace(y=np.array([domain_of[intent] for intent in rows.y]))


TOPICS = ("card_payment", "cash", "top_up", "transfer", "exchange", "pin", "card", "")  # of an intent's name


def topics(rng: Rng, files: Path, sites: int, size: int) -> Rows:
    """Banking77: the topic of a sentence, of eight; each intent is at two sites at most."""
    texts, intents = sentences(files, "banking")
    names = np.unique(intents)
    shares = np.zeros((sites, len(names)))
    for number in range(len(names)):
        shares[rng.choice(sites, 2, replace=False), number] = 1
    rows = shared_out(rng, texts, intents, [size] * sites, shares / shares.sum(1, keepdims=True))
    topic = [next(t for t in TOPICS if t in intent) or "other" for intent in rows.y]
    return rows._replace(y=np.array(topic))


def intents(rng: Rng, files: Path, name: str, classes: int, sizes: Sequence[int], test: int = TEST) -> Rows:
    """The intent of a sentence, of so many; the sites do not differ."""
    texts, names = sentences(files, name)
    chosen = np.isin(names, rng.permutation(np.unique(names))[:classes])
    return shared_out(rng, texts[chosen], names[chosen], sizes, test=test)


def domain_lines(rng: Rng, files: Path, size: int) -> Rows:
    """CLINC150: lines, eight domains are the sites; the next token is predicted."""
    texts, intents = sentences(files, "clinc")
    by_domain = json.loads((files / "domains.json").read_text())
    parts = []
    for number, domain in enumerate(sorted(by_domain)[:8]):
        own = texts[np.isin(intents, by_domain[domain])]
        part = shared_out(rng, own, np.zeros(len(own), int), [size], test=40)
        parts.append(part._replace(site=part.site + number))
    return joined(parts)


def lines(rng: Rng, files: Path, names: Sequence[str], sizes: Sequence[int]) -> Rows:
    """Lines of Banking77, CLINC150 or both; with both, the sites have them in turn."""
    sources = [sentences(files, name)[0] for name in names]
    parts = []
    for number, size in enumerate(sizes):
        texts = rng.permutation(sources[number % len(sources)])
        part = shared_out(rng, texts, np.zeros(len(texts), int), [size], test=40)
        parts.append(part._replace(site=part.site + number))
    return joined(parts)


def in_ciphers(rng: Rng, rows: Rows) -> Rows:
    """Each site has other words for the same: a permutation of all words."""
    words = sorted({word for text in rows.x for word in text.split()})
    codes = [dict(zip(words, rng.permutation(words), strict=True)) for _ in range(of_sites(rows))]
    texts = [" ".join(codes[s][w] for w in text.split()) for text, s in zip(rows.x, rows.site, strict=True)]
    return rows._replace(x=np.array(texts))


def in_other_letters(rng: Rng, rows: Rows) -> Rows:
    """Each site has an alphabet of its own: a permutation of the letters, so that no token means the same."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    codes = [str.maketrans(letters, "".join(rng.permutation(list(letters)))) for _ in range(of_sites(rows))]
    texts = [text.lower().translate(codes[s]) for text, s in zip(rows.x, rows.site, strict=True)]
    return rows._replace(x=np.array(texts))


def backwards(rng: Rng, rows: Rows) -> Rows:
    """Every second site has its words in the reverse order."""
    texts = [
        " ".join(text.split()[::-1]) if s % 2 else text for text, s in zip(rows.x, rows.site, strict=True)
    ]
    return rows._replace(x=np.array(texts))


def machines(rng: Rng, sizes: Sequence[int]) -> Rows:
    """Signals [n, 1, 64] of five forms; every machine has a speed and a noise of its own."""
    n = sum(sizes) + len(sizes) * TEST
    rows = shared_out(rng, np.arange(n), rng.integers(0, 5, n), sizes)
    speed = rng.uniform(2, 6, len(sizes))[rows.site] * rng.uniform(0.9, 1.1, n)
    phase = 2 * np.pi * (np.linspace(0, 1, 64) * speed[:, None] + rng.random((n, 1)))
    wave = np.sin(phase)
    saw = (phase / np.pi) % 2 - 1
    forms = np.stack([wave, np.sign(wave), saw, np.abs(wave) * 2 - 1, np.sin(phase) * np.sin(3 * phase)])
    noise = rng.uniform(0.3, 1.0, len(sizes))[rows.site]
    signals = forms[rows.y, np.arange(n)] + noise[:, None] * rng.normal(size=(n, 64))
    return rows._replace(x=signals[:, None].astype(np.float32))


def function(rng: Rng, sizes: Sequence[int], name: str = "friedman1", **options: Any) -> Rows:
    """scikit-learn's functions with values."""
    from sklearn import datasets

    n = sum(sizes) + len(sizes) * TEST
    x, y = getattr(datasets, f"make_{name}")(n, random_state=int(rng.integers(2**31)), **options)
    y = (y - y.mean()) / y.std() + rng.normal(0, 0.3, n)
    return shared_out(rng, (x - x.mean(0)) / x.std(0), y, sizes)


def labels(rng: Rng, sizes: Sequence[int], count: int = 4, mean: int = 2) -> Rows:
    """scikit-learn's make_multilabel_classification; `mean`: labels of a row."""
    from sklearn.datasets import make_multilabel_classification

    n, state = sum(sizes) + len(sizes) * TEST, int(rng.integers(2**31))
    x, y = make_multilabel_classification(n, 20, n_classes=count, n_labels=mean, random_state=state)
    return shared_out(rng, x, y, sizes)


# -- the federations ---------------------------------------------------------------------------------------------------

CSV, NPZ, FOLDER, TEXTS, LINES = "table", "arrays", "image folder", "texts", "lines"


class Federation(NamedTuple):
    draw: Callable[..., Rows]
    rounds: int = 40
    changes: tuple[Change, ...] = ()
    form: str = CSV
    kind: str = "classification"
    has_model: bool = False  # a module of the user's


def many(sites: int, size: int) -> list[int]:
    return [size] * sites


VALUES, LABELS = {"kind": "regression"}, {"kind": "multilabel"}
TOKENS: dict[str, Any] = {"form": LINES, "kind": "next_token"}
FEDERATIONS: dict[str, Federation] = {
    # Tables
    "giant": Federation(
        partial(generated, sizes=[300, *many(15, 15)], classes=3), 40, (partial(shifted, by=0.3),)
    ),
    "iid-30x20": Federation(partial(generated, sizes=many(30, 20))),
    "renamed-8x80": Federation(partial(generated, sizes=many(8, 80), classes=5), 40, (renamed,)),
    "renamed-2x80": Federation(partial(generated, sizes=many(2, 80), classes=5), 40, (renamed,)),
    "opposite-2x60": Federation(partial(generated, sizes=many(2, 60), classes=2), 40, (opposite,)),
    "opposite-8x40": Federation(partial(generated, sizes=many(8, 40), classes=2), 40, (opposite,)),
    "two-groups-12x40": Federation(partial(generated, sizes=many(12, 40)), 40, (partial(renamed, groups=2),)),
    "60x12": Federation(partial(generated, sizes=many(60, 12), classes=2), 40, (partial(shifted, by=0.5),)),
    "three-rounds-10x50": Federation(partial(generated, sizes=many(10, 50)), 3, (partial(shifted, by=0.3),)),
    "200-rounds-8x30": Federation(partial(generated, sizes=many(8, 30)), 200, (partial(shifted, by=0.3),)),
    "rare-12x50": Federation(partial(generated, sizes=many(12, 50), classes=2, rare=0.1, alpha=4.0)),
    "60-classes-10x240": Federation(
        partial(
            generated,
            sizes=many(10, 240),
            classes=60,
            n_features=40,
            n_informative=30,
            n_clusters_per_class=1,
            class_sep=2.0,
        ),
        20,
        (partial(shifted, by=0.3),),
    ),
    "wrong-labels-15x40": Federation(partial(generated, sizes=many(15, 40)), 40, (with_wrong_labels,)),
    "lacking-columns-10x40": Federation(partial(generated, sizes=many(10, 40)), 40, (without_columns,)),
    "units-8x40": Federation(partial(generated, sizes=many(8, 40)), 40, (in_other_units,)),
    "tumours-2": Federation(tumours),
    "wine-units-5x12": Federation(
        partial(packaged, name="wine", sizes=many(5, 12), test=22), 40, (in_other_units,)
    ),
    "iris-5x10": Federation(partial(packaged, name="iris", sizes=many(5, 10), test=20)),
    "five-rounds-8x300": Federation(partial(generated, sizes=many(8, 300)), 5, (partial(shifted, by=0.3),)),
    # Images
    "turned-digits-8x25": Federation(partial(digits, sizes=many(8, 25)), 40, (turned,), NPZ, has_model=True),
    "cameras-5x48": Federation(
        partial(photographs, name="mini", classes=12, sizes=many(5, 48)), 20, (by_cameras,), FOLDER
    ),
    "cinic-15x20": Federation(
        partial(photographs, name="cinic", classes=10, sizes=many(15, 20)), 20, (), NPZ
    ),
    "50-classes-6x150": Federation(
        partial(photographs, name="mini", classes=50, sizes=many(6, 150), alpha=0.3), 20, (), NPZ
    ),
    # Texts
    "domains-12x40": Federation(partial(domains, sizes=many(12, 40), alpha=0.1), 40, (), TEXTS),
    "topics-8x60": Federation(partial(topics, sites=8, size=60), 40, (), TEXTS),
    "150-intents-10x200": Federation(
        partial(intents, name="clinc", classes=150, sizes=many(10, 200)), 20, (), TEXTS
    ),
    "renamed-intents-8x60": Federation(
        partial(intents, name="banking", classes=10, sizes=many(8, 60), test=40), 40, (renamed,), TEXTS
    ),
    "lines-8x40": Federation(partial(domain_lines, size=40), 20, **TOKENS),
    "lines-iid-6x60": Federation(partial(lines, names=["banking"], sizes=many(6, 60)), 20, **TOKENS),
    "lines-2x150": Federation(partial(lines, names=["banking", "clinc"], sizes=many(2, 150)), 20, **TOKENS),
    "lines-ciphers-4x60": Federation(
        partial(lines, names=["banking"], sizes=many(4, 60)), 20, (in_ciphers,), **TOKENS
    ),
    "lines-five-rounds-6x60": Federation(partial(lines, names=["clinc"], sizes=many(6, 60)), 5, **TOKENS),
    # Signals
    "machines-10x30": Federation(partial(machines, sizes=many(10, 30)), 30, (), NPZ),
    # Values
    "offsets-20x25": Federation(
        partial(function, sizes=many(20, 25), name="regression", n_features=15),
        40,
        (partial(with_offsets, by=2.0),),
        **VALUES,
    ),
    "values-iid-10x30": Federation(partial(function, sizes=many(10, 30)), **VALUES),
    "values-giant": Federation(
        partial(packaged, name="diabetes", sizes=[150, *many(8, 12)], test=20), **VALUES
    ),
    "values-three-rounds-10x50": Federation(partial(function, sizes=many(10, 50)), 3, **VALUES),
    "values-signs-2x60": Federation(partial(function, sizes=many(2, 60)), 40, (with_other_signs,), **VALUES),
    "values-signs-8x60": Federation(partial(function, sizes=many(8, 60)), 40, (with_other_signs,), **VALUES),
    "values-orders-2x60": Federation(partial(function, sizes=many(2, 60)), 40, (in_other_orders,), **VALUES),
    "values-iid-2x30": Federation(partial(function, sizes=many(2, 30)), **VALUES),
    "values-offsets-2x40": Federation(
        partial(function, sizes=many(2, 40), name="regression", n_features=15),
        40,
        (partial(with_offsets, by=2.0),),
        **VALUES,
    ),
    # Labels
    "labels-iid-25x20": Federation(partial(labels, sizes=many(25, 20)), **LABELS),
    "labels-giant": Federation(partial(labels, sizes=[300, *many(12, 15)]), **LABELS),
    "labels-rare-10x60": Federation(partial(labels, sizes=many(10, 60), count=8, mean=1), **LABELS),
    "labels-renamed-8x50": Federation(partial(labels, sizes=many(8, 50)), 40, (renamed,), **LABELS),
    "labels-opposite-2x60": Federation(partial(labels, sizes=many(2, 60)), 40, (opposite,), **LABELS),
    "labels-200-rounds-8x30": Federation(partial(labels, sizes=many(8, 30)), 200, **LABELS),
    "labels-three-rounds-10x50": Federation(partial(labels, sizes=many(10, 50)), 3, **LABELS),
}
# Federations on which a change was judged that the others led to: at least 200 samples of a client, few rounds.
JUDGED: dict[str, Federation] = {
    "cinic-4x220": Federation(
        partial(photographs, name="cinic", classes=10, sizes=many(4, 220)), 10, (), NPZ
    ),
    "intents-6x300": Federation(
        partial(intents, name="banking", classes=77, sizes=many(6, 300)), 15, (), TEXTS
    ),
    "machines-5x250": Federation(partial(machines, sizes=many(5, 250)), 20, (), NPZ),
    "20-classes-6x250": Federation(
        partial(
            generated, sizes=many(6, 250), classes=20, alpha=0.5, n_informative=12, n_clusters_per_class=1
        ),
        20,
    ),
    "rare-5x400": Federation(partial(generated, sizes=many(5, 400), classes=2, rare=0.15, alpha=4.0), 10),
    "units-8x220": Federation(partial(generated, sizes=many(8, 220)), 20, (in_other_units,)),
    "renamed-6x250": Federation(partial(generated, sizes=many(6, 250)), 20, (renamed,)),
    "three-rounds-6x500": Federation(partial(generated, sizes=many(6, 500)), 3, (partial(shifted, by=0.5),)),
    "digits-4x250": Federation(partial(digits, sizes=many(4, 250)), 15, (turned,), NPZ),
    "values-6x250": Federation(partial(function, sizes=many(6, 250), name="friedman2"), 20, **VALUES),
    "values-signs-6x300": Federation(
        partial(function, sizes=many(6, 300)), 15, (with_other_signs,), **VALUES
    ),
    "labels-6x250": Federation(partial(labels, sizes=many(6, 250)), 20, **LABELS),
    "labels-renamed-6x220": Federation(partial(labels, sizes=many(6, 220)), 20, (renamed,), **LABELS),
    "lines-4x220": Federation(partial(lines, names=["clinc"], sizes=many(4, 220)), 20, **TOKENS),
    "lines-backwards-6x80": Federation(
        partial(lines, names=["banking"], sizes=many(6, 80)), 20, (backwards,), **TOKENS
    ),
    "lines-ciphers-8x30": Federation(
        partial(lines, names=["clinc"], sizes=many(8, 30)), 40, (in_ciphers,), **TOKENS
    ),
    "lines-letters-4x60": Federation(
        partial(lines, names=["clinc"], sizes=many(4, 60)), 20, (in_other_letters,), **TOKENS
    ),
    "lines-20x15": Federation(partial(lines, names=["banking", "clinc"], sizes=many(20, 15)), 20, **TOKENS),
}
ALL = {**FEDERATIONS, **JUDGED}

MODEL = '''"""A small network of the user's."""

from torch import nn


def net(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 48), nn.ReLU(), nn.Linear(48, classes),
    )
'''


def write(name: str, seed: int, files: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Writes the files of a federation into a folder; the tables of its run, as a user has them."""
    federation = ALL[name]
    rng = np.random.default_rng((zlib.crc32(name.encode()), seed))
    own = {"files": files} if getattr(federation.draw, "func", None) in READ else {}
    rows = federation.draw(rng, **own)
    for change in federation.changes:
        rows = change(rng, rows)
    learnt = (
        rows.is_test
        if rows.y.ndim == 2 or federation.kind == "regression"
        else np.isin(rows.y, rows.y[~rows.is_test])
    )
    rows = Rows(
        *(array[~rows.is_test | learnt] for array in rows)
    )  # a class that nobody trains on is not tested
    stem, run = folder / name, {"rounds": federation.rounds}
    train, test = (Rows(*(array[part] for array in rows)) for part in (~rows.is_test, rows.is_test))
    if federation.form == NPZ:
        arrays = {"x": train.x, "y": train.y, "group": train.site}
        held_out = {"x_test": test.x, "y_test": test.y, "group_test": test.site}
        np.savez_compressed(f"{stem}.npz", **arrays, **held_out)
        model = {}
        if federation.has_model:
            (folder / "own_model.py").write_text(MODEL)
            model = {"model": {"name": "own_model:net"}}
        return {"data": {"name": f"{stem}.npz"}, "run": run, **model}
    if federation.form == FOLDER:
        write_images(stem, {"train": train, "test": test})
        return {"data": {"name": str(stem)}, "run": run}
    for path, part in ((f"{stem}.csv", train), (f"{stem}-test.csv", test)):
        site = [f"site{number:02}" for number in part.site]
        if federation.form in (TEXTS, LINES):
            cells = {"text": part.x, "site": site} | ({"target": part.y} if federation.form == TEXTS else {})
            _write_rows(Path(path), [*cells], zip(*cells.values(), strict=True))
            continue
        targets = dict(zip(target_names(rows), np.atleast_2d(part.y.T), strict=True))
        _write(Path(path), [f"x{n}" for n in range(part.x.shape[1])], part.x, **targets, site=np.array(site))
    data = {"name": f"{stem}.csv", "test": f"{stem}-test.csv", "client": "site"}
    if federation.form in (TEXTS, LINES):
        data["text"] = "text"
    if federation.form != LINES:
        data["target"] = ",".join(target_names(rows))
    if federation.kind != "classification":
        data["kind"] = federation.kind
    return {"data": data, "run": run}


READ = (lines, photographs, domains, topics, intents, domain_lines)  # they need FILES


def target_names(rows: Rows) -> list[str]:
    return [f"label{n}" for n in range(rows.y.shape[1])] if rows.y.ndim == 2 else ["target"]


def write_images(folder: Path, parts: dict[str, Rows]) -> None:
    """PART/SITE/CLASS/NUMBER.png."""
    from PIL import Image

    for name, rows in parts.items():
        for number, (x, y, site) in enumerate(zip(rows.x, rows.y, rows.site, strict=True)):
            path = folder / name / f"site{site}" / f"class{y}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x.transpose(1, 2, 0)).save(path)


def prepare_files(files: Path, data: Path) -> None:
    """The parts of DATA that the federations need: images of 32 pixels, sentences."""
    rng = np.random.default_rng(0)
    for name, archive, classes, per_class in (
        ("mini", "mini-imagenet.tar", 50, 40),
        ("cinic", "cinic-10-style.tar", 10, 120),
    ):
        x, y = images(data / archive, classes, per_class, rng)
        np.savez_compressed(files / f"{name}.npz", x=x, y=y)
    with (data / "banking77" / "train.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    (files / "banking.json").write_text(json.dumps(rows), "utf-8")
    known = json.loads((data / "clinc150" / "data_full.json").read_text("utf-8"))["train"]
    (files / "clinc.json").write_text(json.dumps(known), "utf-8")
    (files / "domains.json").write_bytes((data / "clinc150" / "domains.json").read_bytes())


def images(archive: Path, classes: int, per_class: int, rng: Rng) -> tuple[Array, Array]:
    """So many training images [n, 3, 32, 32] of each of the first classes of an archive."""
    from PIL import Image

    x, y, seen = [], [], Counter[str]()
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = member.name.split("/")
            if not member.isfile() or len(parts) < 4 or parts[1] != "train":
                continue
            if seen[parts[2]] >= per_class or (parts[2] not in seen and len(seen) >= classes):
                continue
            number = list(seen).index(parts[2]) if parts[2] in seen else len(seen)
            seen[parts[2]] += 1
            content = tar.extractfile(member)
            assert content is not None
            image = (
                Image.open(io.BytesIO(content.read())).convert("RGB").resize((32, 32), Image.Resampling.BOX)
            )
            x.append(np.asarray(image).transpose(2, 0, 1))
            y.append(number)
    return np.stack(x), np.array(y)


# -- the runs ----------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    federation: str
    candidate: str
    seed: int


def is_possible(candidate: str, federation: Federation) -> bool:
    """FedPAC and FedRoD need classes."""
    return federation.kind == "classification" or not candidate.startswith(("fedpac", "fedrod"))


def changed(name: str) -> dict[str, dict[str, Any]]:
    """What "default;batch=8" or "default;alignment=0" changes in the default."""
    tables: dict[str, dict[str, Any]] = {}
    for change in name.split(";")[1:]:
        key, _, value = change.partition("=")
        kind = {"batch": "run", "lr": "optimizer", "ema": "addons"}.get(key, "algorithm")
        tables.setdefault(kind, {})[key] = int(value) if key in ("batch", "epochs") else float(value)
    return tables


def candidate(name: str, rounds: int, lam: float) -> dict[str, dict[str, Any]]:
    """Such as "ditto", or "ditto;lam=0.1;fedexp;last": with FedExP's step, and without averaged weights."""
    algorithm, *changes = name.split(";")
    options = {key: float(value) for key, _, value in (c.partition("=") for c in changes if "=" in c)}
    if "pull" in options:  # in multiples of the rule's lambda
        options["lam"] = options.pop("pull") * lam
    whole = {key: int(value) if key.endswith("epochs") else value for key, value in options.items()}
    steps = [step for step in ("fedexp", "momentum") if step in changes]
    server = {"name": steps[0]} if steps else {}
    return {
        "algorithm": {"name": algorithm, **whole},
        "server": server,
        "addons": {"ema": 0.8} if rounds >= 20 and "last" not in changes else {},
    }


def record(job: Job, files: Path, device: str) -> dict[str, Any]:
    """The primary metric of each site at the end; of the default, of each trained alone too."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        results = trained(job, write(job.federation, job.seed, files, Path(folder)), device)
    return {**results, "seconds": round(time.monotonic() - started, 2)}


def trained(job: Job, tables: dict[str, dict[str, Any]], device: str) -> dict[str, Any]:
    from copfl.experiment.preparation import prepare
    from copfl.experiment.training import train
    from copfl.settings.complete import complete

    tables["run"] |= {"seed": job.seed, "device": device, "threads": 1, "workers": 1}
    default = complete({**tables, "run": tables["run"] | {"local_baseline": True}})
    if job.candidate.startswith("default"):
        run = complete(default.tables(), changed(job.candidate))
    else:
        epochs = prepare(default).algorithm.total_epochs
        layer = candidate(job.candidate, default.run.rounds, default.algorithm.options.get("lam", 1.0))
        if layer["algorithm"]["name"] == "fedpac":
            layer["algorithm"] = {"head_speed": 3.0, "epochs": epochs - 1, **layer["algorithm"]}
        else:
            layer["algorithm"] = {"epochs": epochs, **layer["algorithm"]}
        run = complete(tables, layer)
    run = dataclasses.replace(run, run=dataclasses.replace(run.run, eval_every=run.run.rounds))
    result = train(prepare(run), None)
    primary = result.primary
    about = {"metric": primary.name, "higher": primary.higher_is_better, "method": run.method_text}
    return about | values_by_site(result)


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument(
        "--runs",
        required=True,
        help="SEED,...:CANDIDATE,...[:FEDERATION,...] in the order of the runs, parted by spaces; "
        '"judged" are those of the decision, without federations: the others',
    )
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.files.mkdir(parents=True, exist_ok=True)
    if args.data is not None and not (args.files / "domains.json").is_file():
        prepare_files(args.files, args.data)
    jobs = []
    for part in args.runs.split():
        seeds, candidates, *federations = (names.split(",") for names in part.split(":"))
        names = federations[0] if federations else list(FEDERATIONS)
        names = list(JUDGED) if names == ["judged"] else names
        combined = [(seed, c, f) for seed in seeds for c in candidates for f in names]
        jobs += [Job(f, c, int(seed)) for seed, c, f in combined if is_possible(c, ALL[f])]
    run_jobs(
        jobs, partial(record, files=args.files, device=args.device), args.out, args.processes, args.budget
    )


if __name__ == "__main__":
    main()
