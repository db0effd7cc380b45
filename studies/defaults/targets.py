"""What to train first where the targets are values or labels: python studies/defaults/targets.py FILES OUT.jsonl.

    python studies/defaults/targets.py FILES OUT.jsonl --runs "9100,9101:local,ditto,apfl"      # the choice
    python studies/defaults/targets.py FILES OUT.jsonl --runs "9200,9201:default:unseen"        # the decision

A federation is a table with a column of sites, as a user has it, and a table of test rows of the same sites;
FILES gets both. A generated one has the same sites in every seed and fresh rows. An embedded one has its rows
split anew in every seed. No federation is in both the choice and the decision; embedded tables such as
diabetes are in both, with other targets and sites. Runs whose record is in OUT already are left out, so a
study that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[1]))
from parallel import run_jobs, study_parser  # type: ignore[import-not-found]
from unseen import _write, quantiles, values_by_site  # type: ignore[import-not-found]

Array = NDArray[Any]
Rng = np.random.Generator

TEST_ROWS = 60  # of each site of a generated federation
TEST_SHARE = 0.3  # of the rows of each site of an embedded table


class Rows(NamedTuple):
    x: Array  # [n, columns]
    y: Array  # [n] values, or [n, labels]
    site: Array  # [n]


# -- generated federations -----------------------------------------------------------------------------------


class Sites(NamedTuple):
    """How the sites of a generated federation differ."""

    sites: int
    rows: int  # of a site for training, a mean
    concept: float = 0.0  # the function of a site differs from the common one
    shift: float = 0.0  # the columns of a site are shifted
    offset: float = 0.0  # the values of a site, or the frequency of its labels, are
    sizes: float = 0.0  # concentration of the numbers of rows; 0: all have the same

    def counts(self, rng: Rng) -> Array:
        """The training rows of each site; none has fewer than ten."""
        if not self.sizes:
            return np.full(self.sites, self.rows)
        shares = rng.dirichlet(np.full(self.sites, self.sizes))
        return np.maximum(10, np.round(shares * self.rows * self.sites)).astype(int)


Function = Callable[
    [Rng, Rng, Sites, Array], Rows
]  # generators of the sites and of the rows; the site of each row


def factors(of_sites: Rng, of_rows: Rng, how: Sites, site: Array, labels: int = 0, rank: int = 8) -> Rows:
    """Twenty columns of eight hidden factors; targets are linear in the factors and three of their products.

    Labels are correlated where the `rank` of their weights is small. Without labels, the target is one value.
    """
    outputs = labels or 1
    mixing = of_sites.normal(size=(8, 20))
    common = of_sites.normal(size=(11, rank)) @ of_sites.normal(size=(rank, outputs)) / np.sqrt(rank)
    of_site = of_sites.normal(size=(how.sites, 11, outputs))
    weights = np.sqrt(1 - how.concept) * common + np.sqrt(how.concept) * of_site
    centres = how.shift * of_sites.normal(size=(how.sites, 8))
    offsets = how.offset * 3 * of_sites.normal(size=(how.sites, outputs))
    z = of_rows.normal(size=(len(site), 8)) + centres[site]
    features = np.concatenate([z, z[:, :3] * z[:, 3:6]], axis=1)
    scores = np.einsum("nf,nfo->no", features, weights[site]) + offsets[site]
    scores += of_rows.normal(size=scores.shape)
    x = z @ mixing + 0.5 * of_rows.normal(size=(len(site), 20))
    return Rows(x, (scores > 0).astype(int) if labels else scores[:, 0], site)


def generated(function: Function, how: Sites, name: str, seed: int) -> tuple[Rows, Rows]:
    number = zlib.crc32(name.encode())
    counts = how.counts(np.random.default_rng(number))
    parts = []
    for part, rows in enumerate((counts, np.full(how.sites, TEST_ROWS))):
        site = np.repeat(np.arange(how.sites), rows)
        of_rows = np.random.default_rng((number, seed, part))
        parts.append(function(np.random.default_rng(number), of_rows, how, site))
    return parts[0], parts[1]


# -- embedded tables -----------------------------------------------------------------------------------------


def wine_labels(rng: Rng) -> Rows:
    """178 wines, four laboratories that differ in proline: strong, dark, acid; as in unseen.py."""
    from sklearn.datasets import load_wine

    table = load_wine().data
    above = (table > np.median(table, axis=0)).astype(int)
    return Rows(table[:, 2:9], above[:, [0, 9, 1]], quantiles(table[:, 12], 4, 0.5, rng))


def tumour_labels(rng: Rng) -> Rows:
    """569 tumours, six hospitals that differ in the radius: five worst values above their medians."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer().data
    worst = table[:, 23:28]
    return Rows(
        table[:, :10], (worst > np.median(worst, axis=0)).astype(int), quantiles(table[:, 0], 6, 1.0, rng)
    )


def digit_labels(rng: Rng) -> Rows:
    """700 digits, ten sites by a Dirichlet distribution over the digits: even, large, loop, prime."""
    from sklearn.datasets import load_digits

    x, digit = load_digits(return_X_y=True)
    chosen = rng.permutation(len(x))[:700]
    x, digit = x[chosen], digit[chosen]
    sets = ((0, 2, 4, 6, 8), (5, 6, 7, 8, 9), (0, 6, 8, 9), (2, 3, 5, 7))
    labels = np.stack([np.isin(digit, members).astype(int) for members in sets], axis=1)
    return Rows(x, labels, dirichlet(digit, 10, 0.5, rng))


def diabetes_by_age(rng: Rng) -> Rows:
    """442 patients, five clinics that differ in age: the progression."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    return Rows(data.data, data.target, quantiles(data.data[:, 0], 5, 0.5, rng))


def tumour_area(rng: Rng) -> Rows:
    """569 tumours, six hospitals that differ in the radius: the worst area."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer().data
    return Rows(table[:, :10], table[:, 23], quantiles(table[:, 0], 6, 1.0, rng))


def alcohol(rng: Rng) -> Rows:
    """178 wines, three cultivars: the alcohol."""
    from sklearn.datasets import load_wine

    data = load_wine()
    return Rows(data.data[:, 1:], data.data[:, 0], data.target)


def iris_labels(rng: Rng) -> Rows:
    """150 irises, four gardens that differ in the sepal's width: the petal is long, wide; the sepal is long."""
    from sklearn.datasets import load_iris

    table = load_iris().data
    above = (table > np.median(table, axis=0)).astype(int)
    x = np.concatenate([table[:, 1:2], table[:, [0, 2]] + rng.normal(0, 0.5, (150, 2))], axis=1)
    return Rows(x, above[:, [2, 3, 0]], quantiles(table[:, 1], 4, 0.5, rng))


def diabetes_labels(rng: Rng) -> Rows:
    """442 patients, eight clinics that differ in the body mass: three blood values and the progression are high."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    values = np.column_stack([data.data[:, [4, 6, 8]], data.target])
    x = data.data[:, [0, 1, 2, 3, 5, 7, 9]]
    return Rows(x, (values > np.median(values, axis=0)).astype(int), quantiles(x[:, 2], 8, 0.5, rng))


def iris_width(rng: Rng) -> Rows:
    """150 irises, five gardens that differ in the sepal's length: the petal's width."""
    from sklearn.datasets import load_iris

    table = load_iris().data
    return Rows(table[:, :3], table[:, 3], quantiles(table[:, 0], 5, 0.5, rng))


def digit_ink(rng: Rng) -> Rows:
    """700 digits, ten sites by a Dirichlet distribution over the digits: the ink of the lower half from the upper."""
    from sklearn.datasets import load_digits

    x, digit = load_digits(return_X_y=True)
    chosen = rng.permutation(len(x))[:700]
    x, digit = x[chosen], digit[chosen]
    return Rows(x[:, :32], x[:, 32:].sum(1), dirichlet(digit, 10, 0.5, rng))


def photo(rng: Rng, labels: bool) -> Rows:
    """Patches of two photographs, whose strips are eight sites: what is to the right of a patch, or its colours."""
    from sklearn.datasets import load_sample_images

    parts = []
    for number, image in enumerate(load_sample_images().images):
        blocks = image[:416, :640].reshape(104, 4, 160, 4, 3).mean((1, 3)) / 255  # of 4 x 4 pixels
        patches = blocks.reshape(26, 4, 40, 4, 3).transpose(0, 2, 1, 3, 4)  # of 4 x 4 blocks
        strip = np.repeat(np.arange(26) // 7 + 4 * number, 39)
        left, right = (
            patches[:, columns].reshape(26 * 39, 4, 4, 3) for columns in (slice(0, -1), slice(1, None))
        )
        gray, colour = left.mean(3).reshape(-1, 16), left.mean((1, 2))
        if labels:
            warm = colour[:, 0] > colour[:, 2]
            brighter = right.mean((1, 2, 3)) > gray.mean(1)
            rough = right.std((1, 2, 3)) > np.median(right.std((1, 2, 3)))
            y = np.column_stack([warm, brighter, rough]).astype(int)
        else:
            y = 255 * right[..., 2].mean((1, 2))
        parts.append(Rows(gray, y, strip))
    x, y, site = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    chosen = rng.permutation(len(x))[:1000]
    return Rows(x[chosen], y[chosen], site[chosen])


def word_counts(rng: Rng, sites: int, rows: int, by: str) -> Rows:
    """scikit-learn's rows with labels. Sites differ by label combination, column scale or the columns' order."""
    from sklearn.datasets import make_multilabel_classification

    x, y = make_multilabel_classification(
        sites * rows, 20, n_classes=4, n_labels=2, random_state=int(rng.integers(2**31))
    )
    if by == "combination":
        return Rows(x, y, dirichlet(y @ (1 << np.arange(4)), sites, 0.5, rng))
    site = rng.choice(sites, len(x), p=rng.dirichlet(np.full(sites, 8.0)))
    if by == "scale":
        return Rows(x * rng.uniform(0.5, 1.5, (sites, 20))[site], y, site)
    orders = np.array([rng.permutation(20) for _ in range(sites)])
    return Rows(np.take_along_axis(x, orders[site], axis=1), y, site)


def functions(rng: Rng, sites: int, rows: int, name: str, by: str) -> Rows:
    """scikit-learn's functions with values. Sites differ by an offset, column scale or the columns' order."""
    from sklearn import datasets

    x, y = getattr(datasets, f"make_{name}")(sites * rows, random_state=int(rng.integers(2**31)))
    y = (y - y.mean()) / y.std() + rng.normal(0, 0.3, len(y))
    x, columns = (x - x.mean(0)) / x.std(0), x.shape[1]
    site = rng.choice(sites, len(x), p=rng.dirichlet(np.full(sites, 8.0)))
    if by == "offset":
        return Rows(x, y + rng.normal(0, 1, sites)[site], site)
    if by == "scale":
        return Rows(x * rng.uniform(0.5, 1.5, (sites, columns))[site], y, site)
    orders = np.array([rng.permutation(columns) for _ in range(sites)])
    return Rows(np.take_along_axis(x, orders[site], axis=1), y, site)


def dirichlet(kinds: Array, sites: int, concentration: float, rng: Rng) -> Array:
    """The site of each row; every kind of row is shared out by a Dirichlet distribution. No site has below ten."""
    names, kind = np.unique(kinds, return_inverse=True)
    shares = rng.dirichlet(np.full(sites, concentration), len(names))
    site = np.array([rng.choice(sites, p=shares[k]) for k in kind])
    for small in range(sites):
        while (lacking := 10 - np.count_nonzero(site == small)) > 0:
            largest = np.flatnonzero(site == np.bincount(site, minlength=sites).argmax())
            site[rng.choice(largest, lacking, replace=False)] = small
    return site


def embedded(table: Callable[[Rng], Rows], share: float, name: str, seed: int) -> tuple[Rows, Rows]:
    """A `share` of the rows of each site is for testing."""
    number = zlib.crc32(name.encode())
    rows = table(np.random.default_rng(number))
    rng, is_test = np.random.default_rng((number, seed)), np.zeros(len(rows.x), bool)
    for site in np.unique(rows.site):
        members = rng.permutation(np.flatnonzero(rows.site == site))
        is_test[members[: max(2, round(share * len(members)))]] = True
    train, test = (Rows(*(array[part] for array in rows)) for part in (~is_test, is_test))
    return train, test


# -- the federations -----------------------------------------------------------------------------------------


class Federation(NamedTuple):
    draw: Callable[[str, int], tuple[Rows, Rows]]  # training and test rows of its name and a seed
    rounds: int


def labels(rounds: int, how: Sites, count: int = 5, rank: int = 8) -> Federation:
    return Federation(partial(generated, partial(factors, labels=count, rank=rank), how), rounds)


def values(rounds: int, how: Sites) -> Federation:
    return Federation(partial(generated, factors, how), rounds)


def table(rounds: int, rows: Callable[[Rng], Rows], share: float = TEST_SHARE) -> Federation:
    return Federation(partial(embedded, rows, share), rounds)


def pool(rounds: int, function: Callable[..., Rows], sites: int, rows: int, *how: str) -> Federation:
    """Rows of scikit-learn's generators; `rows` of a site are for training, a mean, and as many for testing."""

    def draw(rng: Rng) -> Rows:
        return function(rng, sites, 2 * rows, *how)

    return table(rounds, draw, 0.5)


DEVELOPMENT: dict[str, Federation] = {
    "wine-labels": table(40, wine_labels),
    "tumour-labels": table(20, tumour_labels),
    "digit-labels": table(20, digit_labels),
    "labels-20x15": labels(40, Sites(20, 15, concept=0.05, shift=0.3), rank=2),
    "labels-10x15-own": labels(40, Sites(10, 15, concept=0.8)),
    "labels-10x60-unequal": labels(40, Sites(10, 60, concept=0.3, shift=0.5, sizes=4.0), rank=3),
    "labels-5x40-own-long": labels(100, Sites(5, 40, concept=0.8, shift=0.5)),
    "labels-40x30-frequencies": labels(20, Sites(40, 30, concept=0.05, offset=1.0), rank=3),
    "labels-8x300": labels(20, Sites(8, 300, concept=0.3, shift=0.5)),
    "diabetes-age": table(40, diabetes_by_age),
    "tumour-area": table(20, tumour_area),
    "alcohol": table(40, alcohol),
    "values-20x15": values(40, Sites(20, 15, concept=0.05, shift=0.3)),
    "values-10x15-own": values(40, Sites(10, 15, concept=0.8)),
    "values-10x60-unequal": values(40, Sites(10, 60, concept=0.3, shift=0.5, sizes=4.0)),
    "values-5x40-own-long": values(100, Sites(5, 40, concept=0.8, shift=0.5)),
    "values-40x30-offsets": values(20, Sites(40, 30, concept=0.05, offset=1.0)),
    "values-8x300": values(20, Sites(8, 300, concept=0.3, shift=0.5)),
}
UNSEEN: dict[str, Federation] = {
    "iris-labels": table(40, iris_labels),
    "diabetes-labels": table(40, diabetes_labels),
    "photo-labels": table(20, partial(photo, labels=True)),
    "words-12x25-combinations": pool(20, word_counts, 12, 25, "combination"),
    "words-20x40-scales": pool(20, word_counts, 20, 40, "scale"),
    "words-5x30-own-long": pool(100, word_counts, 5, 30, "order"),
    "words-6x250-own": pool(20, word_counts, 6, 250, "order"),
    "words-6x250": pool(20, word_counts, 6, 250, "scale"),
    "iris-width": table(40, iris_width),
    "photo-values": table(20, partial(photo, labels=False)),
    "digit-ink": table(20, digit_ink),
    "friedman1-15x20": pool(40, functions, 15, 20, "friedman1", "scale"),
    "friedman2-30x25-offsets": pool(20, functions, 30, 25, "friedman2", "offset"),
    "friedman1-6x50-own-long": pool(100, functions, 6, 50, "friedman1", "order"),
    "uncorrelated-8x120-own": pool(20, functions, 8, 120, "sparse_uncorrelated", "order"),
    "friedman3-6x250": pool(20, functions, 6, 250, "friedman3", "scale"),
}
FEDERATIONS = {**DEVELOPMENT, **UNSEEN}


def write(name: str, seed: int, folder: Path) -> tuple[dict[str, Any], float]:
    """Writes the two files of a federation; the tables [data] and [run] of a user, and the rows of a site."""
    federation = FEDERATIONS[name]
    files = [folder / f"{name}-{seed}{part}.csv" for part in ("", "-test")]
    parts = federation.draw(name, seed)
    targets = [f"target{n}" for n in range(parts[0].y.shape[1])] if parts[0].y.ndim == 2 else ["target"]
    for file, rows in zip(files, parts, strict=True):
        columns = dict(zip(targets, np.atleast_2d(rows.y.T), strict=True))
        _write(file, [f"x{n}" for n in range(rows.x.shape[1])], rows.x, **columns, site=rows.site)
    kind = "multilabel" if len(targets) > 1 else "regression"
    data = {"name": str(files[0]), "test": str(files[1]), "target": ",".join(targets), "client": "site"}
    rows = len(parts[0].x) / len(np.unique(parts[0].site))
    return {"data": {**data, "kind": kind}, "run": {"rounds": federation.rounds}}, rows


# -- the runs ------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    federation: str
    candidate: str
    seed: int


def candidate(name: str, seen: float) -> dict[str, dict[str, Any]]:
    """Such as "ditto", or "ditto;lam=0.1;fedexp;last": with FedExP's step, and without averaged weights.

    With "pull=60", lam is 60 over the samples that a site has `seen` in all rounds.
    """
    algorithm, *changes = name.split(";")
    options = {key: float(value) for key, _, value in (c.partition("=") for c in changes if "=" in c)}
    if "pull" in options:
        options["lam"] = min(1.0, options.pop("pull") / seen)
    whole = {key: int(value) if key.endswith("epochs") else value for key, value in options.items()}
    server = {"name": "fedexp"} if "fedexp" in changes else {}
    addons = {} if "last" in changes else {"ema": 0.8}
    return {"algorithm": {"name": algorithm, **whole}, "server": server, "addons": addons}


def record(job: Job, folder: Path) -> dict[str, Any]:
    """The primary metric of each site at the end; of the default, of each trained alone too."""
    from copfl.experiment.preparation import prepare
    from copfl.experiment.run import train
    from copfl.settings.complete import complete

    started = time.monotonic()
    tables, rows = write(job.federation, job.seed, folder)
    is_default = job.candidate == "default"
    tables["run"] |= {"seed": job.seed, "device": "cpu", "threads": 1, "workers": 1, "eval_models": "final"}
    tables["run"] |= {"local_baseline": is_default}
    run = (
        complete(tables)
        if is_default
        else complete(tables, candidate(job.candidate, rows * tables["run"]["rounds"]))
    )
    run = dataclasses.replace(run, run=dataclasses.replace(run.run, eval_every=run.run.rounds))
    result = train(prepare(run), None)
    return {
        "metric": result.primary.name,
        "method": run.method_text,
        **values_by_site(result),
        "seconds": round(time.monotonic() - started, 2),
    }


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument(
        "--runs",
        required=True,
        help="SEED,...:CANDIDATE,...[:FEDERATION,...] in the order of the runs, parted by spaces; "
        '"unseen" are those of the decision, without federations: those of the choice',
    )
    args = parser.parse_args()
    args.files.mkdir(parents=True, exist_ok=True)
    jobs = []
    for part in args.runs.split():
        seeds, candidates, *federations = (names.split(",") for names in part.split(":"))
        names = federations[0] if federations else list(DEVELOPMENT)
        names = list(UNSEEN) if names == ["unseen"] else names
        jobs += [Job(f, c, int(seed)) for seed in seeds for c in candidates for f in names]
    run_jobs(jobs, partial(record, folder=args.files), args.out, args.processes, args.budget)


if __name__ == "__main__":
    main()
