from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from copfl.audit import study, synthetic, tables
from copfl.audit.synthetic import DOUBLE, HELD_OUT, NAMES, PUBLISHED, RARE, RIDER, TWIN, WRONG
from copfl.core import tree
from copfl.data import datasets
from copfl.data.samples import Dataset
from tests.audit.test_replay import moments_of


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return datasets.load("digits")


def test_the_odd_clients_are_odd_and_the_others_are_not(digits: Dataset) -> None:
    data, who = synthetic.federation(digits, 0)
    clean, same = synthetic.federation(digits, 0, odd=False)
    wrong = [int((data.train.y[part] != digits.train.y[part]).sum()) for part in who.train]
    assert wrong == [13 if n == WRONG else 0 for n in range(len(NAMES))]  # 0.4 · 32
    np.testing.assert_array_equal(clean.train.y, digits.train.y)
    np.testing.assert_array_equal(data.test.y, digits.test.y)
    np.testing.assert_array_equal(who.train[DOUBLE], who.train[TWIN])
    held = np.concatenate([part for n, part in enumerate(who.train) if n != DOUBLE])
    assert len(np.unique(held)) == len(held)
    for n, part in enumerate(same.train):
        assert len(part) == 32
        assert bool({8, 9} & set(digits.train.y[part].tolist())) == (n == RARE)
        if n != DOUBLE:
            np.testing.assert_array_equal(part, who.train[n])
    assert synthetic.federation(digits, 0)[1].fingerprint == who.fingerprint


def test_a_free_rider_goes_as_far_as_an_honest_client_and_nowhere_in_particular() -> None:
    e = synthetic.experiment("equal weights", 0, rounds=1)
    assert isinstance(e.algorithm, synthetic.FreeRider)
    sent = {}  # [clients, D]
    for kind, algorithm in (("honest", e.algorithm.algorithm), ("riding", e.algorithm)):
        (moment,) = moments_of(dataclasses.replace(e, algorithm=algorithm))
        sent[kind] = tree.leaves(moment.heard[0].parts)[0]
    others = [n for n in range(len(NAMES)) if n != RIDER]
    assert torch.equal(sent["honest"][others], sent["riding"][others])
    start = e.task.initial
    honest, riding = (torch.where(sent[kind][RIDER] != 0, sent[kind][RIDER] - start, 0) for kind in sent)
    assert float(riding.norm() / honest.norm()) == pytest.approx(1, abs=0.7)
    assert abs(float(torch.nn.functional.cosine_similarity(honest, riding, dim=0))) < 0.3


def test_the_study_from_end_to_end() -> None:
    found = study.study((0,), variants=(PUBLISHED, HELD_OUT), rounds=1, long=1)
    assert [v.name for v in found.variants] == [PUBLISHED, HELD_OUT]
    for variant in found.variants:
        np.testing.assert_allclose(variant.shares["weight"].sum(1), len(NAMES))
        assert set(variant.gains) == set(synthetic.ODD)
    published, trusted = (v.shares["weight"][0] for v in found.variants)
    assert trusted[RIDER] < 0.9 < published[RIDER]
    assert trusted[WRONG] < 0.95 < published[WRONG]
    assert found.audit.scores[-1] == "trust=held_out weight"
    text = tables.as_markdown(study.TITLE, study.sheets(found), tables.remarks(found.audit))
    assert "| trust=held_out | " in text
    assert "rare classes" in study.as_json(found)["variants"][0]["gains"]


def test_the_page_says_what_was_found() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "audit.md").read_text("utf-8")
    found = json.loads((root / "results" / "audit.json").read_text("utf-8"))
    for variant in found["variants"]:
        (line,) = [
            line
            for line in page.partition("## Trust")[0].splitlines()
            if line.startswith(f"| {variant['name']}")
        ]
        for n in (WRONG, RIDER, DOUBLE, RARE, TWIN):
            shares = np.array(variant["shares"]["weight"])[:, n]
            assert f"{shares.mean():.2f} ± {shares.std(ddof=1):.2f}" in line
