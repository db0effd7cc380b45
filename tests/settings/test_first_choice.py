"""What is trained where no algorithm is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch import nn

import copfl
from copfl.data.arrays import from_arrays
from copfl.data.samples import CLASSIFICATION, REGRESSION
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.first_choice import Known, first_choice


@pytest.mark.parametrize(
    ("known", "how"),  # algorithm, server, lr, schedule, batch
    [
        (Known(CLASSIFICATION, 40, 40, "cnn"), ("fedpac", "fedexp", 3e-3, "constant", 8)),
        (Known(CLASSIFICATION, 100, 40, "cnn"), ("fedpac", "fedexp", 1e-3, "constant", 8)),
        (Known(CLASSIFICATION, 200, 40, "cnn"), ("fedpac", "fedexp", 1e-3, "constant", 32)),
        (Known(CLASSIFICATION, math.inf, 1, "resnet18"), ("fedpac", "fedexp", 1e-3, "constant", 32)),
        (Known(CLASSIFICATION, 40, 40, "embedding"), ("fedpac", "fedexp", 1e-2, "cosine", 8)),
        (Known(CLASSIFICATION, 40, 10, "hf:base", True), ("fedpac", "fedexp", 1e-3, "constant", 16)),
        (Known(REGRESSION, 300, 40, "mlp"), ("fedper", "fedexp", 1e-3, "constant", 32)),
        (Known(CLASSIFICATION, 300, 40, "mlp", sums_only=True), ("fedper", "mean", 1e-3, "constant", 32)),
        (Known(CLASSIFICATION, 40, 40, "cnn", head_only=True), ("fedavg_ft", "fedexp", 3e-3, "constant", 8)),
    ],
)
def test_the_rule(known: Known, how: tuple[str, str, float, str, int]) -> None:
    choice = first_choice(known)
    assert (choice.algorithm, choice.server, choice.lr, choice.schedule, choice.batch) == how


def test_it_counts_the_samples_of_a_client() -> None:
    rng = np.random.default_rng(0)
    for samples, clients, batch in ((900, 3, 32), (900, 9, 8)):
        y = np.arange(samples) % 3
        data = from_arrays(
            rng.normal(size=(samples, 4)).astype(np.float32), y, group=np.arange(samples) % clients
        )
        run = complete({"run": {"rounds": 5}}, values={"data": data})
        assert (run.algorithm.name, run.server.name, run.run.clients) == ("fedpac", "fedexp", clients)
        assert (run.optimizer.name, run.optimizer.lr, run.run.batch) == ("adam", 3e-3, batch)


def test_every_setting_overrides_it() -> None:
    run = complete({"optimizer": {"lr": 0.1}, "server": {"name": "mean"}, "run": {"batch": 3}})
    assert (run.algorithm.name, run.optimizer.lr, run.server.name, run.run.batch) == (
        "fedpac",
        0.1,
        "mean",
        3,
    )
    assert complete({"optimizer": {"name": "sgd"}}).optimizer.name == "sgd"
    assert complete(preset="paper").algorithm.name == "copfl"


def test_what_is_set_for_any_algorithm_stays_when_one_is_named() -> None:
    file = {"optimizer": {"lr": 0.05}}
    for name in ("fedper", "copfl"):
        assert complete(file, {"algorithm": {"name": name}}).optimizer.lr == 0.05


def test_small_sets_and_texts_have_their_own() -> None:
    assert complete({"data": {"name": "diabetes"}}).algorithm.name == "fedper"
    words = complete({"data": {"name": "banking77"}})
    assert (words.optimizer.lr, words.addons.options["lr_schedule"]) == (1e-2, "cosine")
    assert complete({"privacy": {"noise": 1.0}}).algorithm.name == "fedper"


def test_a_model_of_one_layer_is_shared_as_a_whole() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert complete(values={"model": flat}).algorithm.name == "fedavg_ft"
    deep = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    assert complete(values={"model": deep}).algorithm.name == "fedpac"
    assert complete({"model": {"name": "mlp", "train": "head"}}).algorithm.name == "fedavg_ft"


def test_an_option_needs_the_name_of_its_algorithm() -> None:
    with pytest.raises(SettingError, match=r"algorithm\.rate=0\.1 needs the name of its algorithm"):
        complete({"algorithm": {"rate": 0.1}})
    assert complete({"algorithm": {"epochs": 2}}).algorithm.epochs == 2


def test_it_trains() -> None:
    result = copfl.run(dataset="digits", rounds=2, clients=3)
    assert result.experiment.title == "fedpac on digits"
    assert np.isfinite(result.accuracy).all()
