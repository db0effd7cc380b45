from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.algorithms import Trees
from copfl.core.optim import Adam
from copfl.data.samples import Samples
from copfl.errors import DataError, UsageError
from copfl.experiment import personalisation
from copfl.experiment.models.client_models import vector_of
from copfl.experiment.personalisation import FineTuning, Personalisation, fine_tuned, nearest
from tests.commands import called

SETTINGS: dict[str, Any] = {"clients": 3, "rounds": 2, "model_options": {"width": 8}, "model": "mlp"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> copfl.Result:
    return copfl.run("copfl", **SETTINGS, out=tmp_path_factory.mktemp("trained") / "run")


def newcomer(result: copfl.Result, classes: tuple[int, ...], train: int = 40) -> tuple[Samples, Samples]:
    """Some train samples and all test samples of these classes."""
    dataset = result.experiment.federation.dataset
    own, test = (split.take(np.isin(split.y, classes)) for split in (dataset.train, dataset.test))
    return own.take(np.arange(train)), test


def of(result: copfl.Result) -> Personalisation:
    assert result.folder is not None
    return Personalisation.of(result.folder)


@pytest.mark.job
def test_a_new_client_learns_with_defaults_and_is_compared_with_training_alone(result: copfl.Result) -> None:
    new = of(result)
    own, test = newcomer(result, (1, 4, 7), train=24)
    fitted = new.fit(own, test)
    start = new.shared.score(new.shared.outputs(test.x), test.y)
    assert fitted.scores[-1] > start + 0.3
    assert len(fitted.scores) == fitted.epochs + 1
    assert fitted.lr in (0.003, 0.01, 0.03)
    assert fitted.alone[-1] > 0.6  # it has a fair chance too
    gain = fitted.scores[-1] - fitted.alone[-1]
    assert fitted.gain is not None
    assert fitted.gain.low <= gain <= fitted.gain.high
    frequent = np.bincount(own.y).argmax()
    assert fitted.constant == pytest.approx(float((test.y == frequent).mean()))
    bundle = fitted.bundle
    assert bundle.score(bundle.outputs(test.x), test.y) == pytest.approx(fitted.scores[-1])
    assert [(score.value, score.samples) for score in bundle.description.scores] == [
        (fitted.scores[-1], len(test))
    ]


def test_the_choices_for_a_new_client_depend_on_its_train_samples_alone(
    result: copfl.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(personalisation, "EPOCHS", (1, 2))
    own, test = newcomer(result, (1, 4, 7), train=24)
    fitted, other = (of(result).fit(own, some) for some in (test, test.take(np.arange(5))))
    assert (other.start, other.lr, other.epochs) == (fitted.start, fitted.lr, fitted.epochs)
    assert torch.equal(vector_of(other.bundle.model), vector_of(fitted.bundle.model))


def test_the_nearest_client_is_the_one_with_the_same_digits(result: copfl.Result) -> None:
    federation, task = result.experiment.federation, of(result).shared.task
    own = federation.dataset.train.take(federation.partition.train[1])
    models = {n: vector_of(result.client_model(n)) for n in range(3)}
    models[1] = fine_tuned(FineTuning(task, Adam(lr=0.01), 8, 0, 9), models[1], own, epochs=20)[-1]
    assert nearest(task, models, own) == 1


def test_it_says_how_many_trainings_there_are_and_leaves_torch_as_it_was(
    result: copfl.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small steps on several threads that wait for each other took five times as long."""
    announced, done, threads = [], [], []

    def start(trainings: int) -> Callable[[int], None]:
        announced.append(trainings)

        def tick(more: int) -> None:
            done.append(more)
            threads.append(torch.get_num_threads())

        return tick

    monkeypatch.setattr(personalisation, "EPOCHS", (0, 1))
    before = torch.get_num_threads()
    of(result).fit(*newcomer(result, (1, 4)), start=start)
    assert announced == [4 * 3 * 3] == [sum(done)]  # starts and training alone, rates, folds
    assert set(threads) == {1}
    assert torch.get_num_threads() == before


def test_a_single_sample_is_not_split(result: copfl.Result) -> None:
    fitted = of(result).fit(*newcomer(result, (1, 4), train=1))
    assert (fitted.start, fitted.lr, fitted.epochs) == ("the global model", 0.003, 1)
    with pytest.raises(UsageError, match="epochs=0"):
        of(result).fit(*newcomer(result, (1, 4)), epochs=0)


@pytest.mark.parametrize("algorithm", ["apfl", "ktpfl"])
def test_mixtures_and_messages_of_their_own_serve_a_new_client_too(algorithm: str, tmp_path: Path) -> None:
    result = copfl.run(algorithm, **SETTINGS, out=tmp_path / "run")
    assert of(result).fit(*newcomer(result, (1, 4)), epochs=1, lr=0.01).epochs == 1


def test_the_command(result: copfl.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, _ = newcomer(result, (1, 4, 7))
    np.savez(tmp_path / "xy.npz", x=own.x, y=own.y)
    np.savez(tmp_path / "x.npz", x=own.x)
    words: list[Any] = ["personalize", result.folder, "--data", tmp_path / "xy.npz", "--epochs", 2]
    answer = called(capsys, *words, "--out", tmp_path / "new", "--json")
    assert len(json.loads(answer.out)["accuracy"]) == 3
    assert copfl.load(tmp_path / "new").predict(own.x).shape == (len(own),)
    answer = called(capsys, *words, "--lr", 0.01)
    number = r"[+-]?[\d.]+"
    said = rf"training alone: {number} %, gain \[{number}, {number}\] .*; constant answer: {number} %"
    assert re.search(said, answer.out)
    assert "start: the " in answer.out
    with pytest.raises(DataError, match="lacks the array y"):
        of(result).samples(tmp_path / "x.npz")


@pytest.mark.job
def test_trees_fit_a_new_client_by_their_own_updates(tmp_path: Path) -> None:
    """The intercept of the site, and as many trees of its own as its rows reward; nothing is trained by a rate."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)).astype(np.float32)
    y = np.where(x[:, 0] > 0, 1.0, -1.0) + 0.1 * rng.normal(size=300)
    run = copfl.run(
        Trees(own=3, least=5, own_penalty=1), {"x": x, "y": y, "kind": "regression"}, model="trees",
        model_options={"trees": 23, "depth": 1}, clients=3, partition="iid", out=tmp_path / "run",
    )  # fmt: skip
    strange = Samples(x[:200], y[:200] + 3 + 2 * (x[:200, 1] > 0))
    found = Personalisation.of(tmp_path / "run", algorithm=run.experiment.algorithm)
    fitted = found.fit(strange.take(np.arange(150)), strange.take(np.arange(150, 200)))
    assert fitted.lr is None
    assert fitted.scores[-1] < 0.7 * fitted.scores[0]  # an error; sites that are alike shrink its intercept
    with pytest.raises(UsageError, match="leave out lr"):
        found.fit(strange, strange, lr=0.1)
