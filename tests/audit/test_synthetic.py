from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from copfl.audit import synthetic
from copfl.audit.synthetic import DUPLICATE, DUPLICATED, NAMES, RARE, RIDER, WRONG
from copfl.core import tree
from copfl.data.samples import Dataset
from copfl.data.sets import datasets
from copfl.tables import as_markdown
from tests.audit.test_replay import snapshots_of
from tests.slow import slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return datasets.load("digits")


def test_the_anomalous_clients_are_anomalous_and_the_others_are_not(digits: Dataset) -> None:
    data, who = synthetic.federation(digits, 0)
    clean, same = synthetic.federation(digits, 0, anomalous=False)
    wrong = [int((data.train.y[part] != digits.train.y[part]).sum()) for part in who.train]
    assert wrong == [13 if n == WRONG else 0 for n in range(len(NAMES))]  # 0.4 · 32
    np.testing.assert_array_equal(clean.train.y, digits.train.y)
    np.testing.assert_array_equal(data.test.y, digits.test.y)
    np.testing.assert_array_equal(who.train[DUPLICATE], who.train[DUPLICATED])
    held = np.concatenate([part for n, part in enumerate(who.train) if n != DUPLICATE])
    assert len(np.unique(held)) == len(held)
    for n, part in enumerate(same.train):
        assert len(part) == 32
        assert bool({8, 9} & set(digits.train.y[part].tolist())) == (n == RARE)
        if n != DUPLICATE:
            np.testing.assert_array_equal(part, who.train[n])
    assert synthetic.federation(digits, 0)[1].fingerprint == who.fingerprint


def test_a_free_rider_goes_as_far_as_an_honest_client_and_nowhere_in_particular() -> None:
    e = synthetic.experiment({"name": "copfl", "score": "none"}, 0, rounds=1)
    assert isinstance(e.algorithm, synthetic.FreeRider)
    sent = {}  # [clients, D]
    for kind, algorithm in (("honest", e.algorithm.algorithm), ("riding", e.algorithm)):
        (snapshot,) = snapshots_of(dataclasses.replace(e, algorithm=algorithm))
        sent[kind] = tree.leaves(snapshot.received[0].summands)[0]
    others = [n for n in range(len(NAMES)) if n != RIDER]
    assert torch.equal(sent["honest"][others], sent["riding"][others])
    (again,) = snapshots_of(e)
    assert torch.equal(tree.leaves(again.received[0].summands)[0], sent["riding"])  # the noise is the seed's
    start = e.task.initial
    honest, riding = (torch.where(sent[kind][RIDER] != 0, sent[kind][RIDER] - start, 0) for kind in sent)
    assert float(riding.norm() / honest.norm()) == pytest.approx(1, abs=0.7)
    assert abs(float(torch.nn.functional.cosine_similarity(honest, riding, dim=0))) < 0.3


@pytest.mark.job
def test_the_audit_of_the_federation() -> None:
    found = synthetic.synthetic_audit([0], [], rounds=1, retrain=False)
    assert (found.names, found.scores[0], len(found.seeds)) == (NAMES, "weight", 1)
    assert found.seeds[0].scores["weight"].sum() == pytest.approx(len(NAMES))


@slow
def test_the_study_from_end_to_end() -> None:
    spec = importlib.util.spec_from_file_location("audit_study", ROOT / "benchmarks" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    variants = ("COWA (our interpretation)", "trust=held_out")
    found = benchmark.study((0,), variants=variants, rounds=1, long=1)
    assert tuple(v.name for v in found.variants) == variants
    for variant in found.variants:
        np.testing.assert_allclose(variant.weights["weight"].sum(1), len(NAMES))
        assert set(variant.gains) == set(synthetic.ANOMALIES)
    published, held_out = (v.weights["weight"][0] for v in found.variants)
    assert held_out[RIDER] < 0.9 < published[RIDER]
    assert held_out[WRONG] < 0.95 < published[WRONG]
    assert "trust=held_out weight" in found.audit.scores
    text = "\n".join(map(as_markdown, benchmark.tables_of(found)))
    assert "| trust=held_out | " in text
    assert "rare classes" in benchmark.as_json(found)["variants"][0]["gains"]


def test_the_page_says_what_was_found() -> None:
    page = (ROOT / "docs" / "audit.md").read_text("utf-8")
    found = json.loads((ROOT / "results" / "audit.json").read_text("utf-8"))
    for variant in found["variants"]:
        (line,) = [
            line
            for line in page.partition("## Trust")[0].splitlines()
            if line.startswith(f"| {variant['name']}")
        ]
        for n in (WRONG, RIDER, DUPLICATE, RARE, DUPLICATED):
            shares = np.array(variant["weights"]["weight"])[:, n]
            assert f"{shares.mean():.2f} ± {shares.std(ddof=1):.2f}" in line
