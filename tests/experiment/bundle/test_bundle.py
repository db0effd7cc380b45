"""A bundle predicts as the run did, from its own folder alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import copfl
from copfl.algorithms import ALGORITHMS
from copfl.errors import DataError, RunError, UsageError
from copfl.experiment.bundle import description
from copfl.experiment.models.client_models import GLOBAL, RECEIVED
from tests.commands import called, files
from tests.experiment.models.test_client_models import LORA, SMALL, scores, trained
from tests.models import tiny
from tests.slow import slow

MLP: dict[str, Any] = {
    "clients": 3,
    "rounds": 2,
    "model_options": {"width": 8},
    "model": "mlp",
    "engine": "sequential",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    copfl.run("copfl", **MLP, out=path)
    return path


def samples_of(result: copfl.Result, client: int, split: str = "test") -> tuple[Any, NDArray[Any]]:
    """The test or validation samples of a client, and their targets."""
    federation = result.experiment.federation
    data, partition = federation.dataset, federation.partition
    if split == "test":
        samples = data.test.take(partition.test[client])
    else:
        samples = data.train.take(partition.validation[client])
    return samples.x, samples.y


ADDONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all add-ons": {"ema": 0.5, "bn_stats": "local", "lr_schedule": "cosine"},
}
WITHOUT_WEIGHTS = ("ifca", "ktpfl", "local", "reads")  # one vector at the server, so it has no momentum
ONLY_MEAN = ("fedex_lora", "flex_lora")  # they refuse a step of the server


def settings_with(addons: str, algorithm: str) -> dict[str, Any]:
    """The settings of these add-ons, and of a step of the server where the algorithm takes one."""
    has_step = bool(ADDONS[addons]) and algorithm not in WITHOUT_WEIGHTS + ONLY_MEAN
    return {"addons": ADDONS[addons]} | ({"server": {"name": "momentum"}} if has_step else {})


# Quick: models of one vector, of experts mixed by weights and by features, tuned ones, other ones per client,
# and adapters, with all that a bundle may have to undo; a plain one, and one whose base is trained, which takes no
# add-on. `pytest` has a mean, a mixture and an adapter of them, CI all. COPFL_SLOW=1: of every algorithm.
KINDS: dict[str, tuple[str, ...]] = {
    "all add-ons": ("fedavg", "apfl", "feddpa", "fedavg_ft", "copfl", "knn_per", "ktpfl", "fedsa_lora")
}
KINDS["plain"] = ("fedavg", "fedex_lora")
QUICK = (("fedavg", "all add-ons"), ("apfl", "all add-ons"), ("fedex_lora", "plain"))


def marks_of(name: str, addons: str) -> list[pytest.MarkDecorator]:
    if (name, addons) in QUICK:
        return []
    return [pytest.mark.job if name in KINDS[addons] else slow]


CASES = [
    pytest.param(name, addons, marks=marks_of(name, addons))
    for name in ALGORITHMS
    if name not in ("levels", "trees", "wide_levels")  # they train no network: algorithms/test_levels.py
    for addons in ADDONS
]


@pytest.mark.parametrize(("name", "addons"), CASES)
def test_every_clients_bundle_gives_the_number_of_the_table(name: str, addons: str, tmp_path: Path) -> None:
    result = trained(
        name, tmp_path, out=tmp_path / "run", select="best", rounds=2, **settings_with(addons, name)
    )
    table = {"test": result.final("accuracy"), "validation": result.final("accuracy_validation")}
    assert scores(result, result.client_model) == table["test"].tolist()
    for n in range(result.experiment.clients):
        bundle = copfl.load(tmp_path / "run", n)
        assert bundle.description.origin.round == result.rounds_taken[n]
        measured = [score for score in bundle.description.scores if score.metric == "accuracy"]
        assert [score.split for score in measured] == ["test", "validation"]
        for score in measured:
            x, y = samples_of(result, n, score.split)
            outputs = bundle.outputs(x)
            value = table[score.split][n]
            assert (score.metric, score.value, score.samples) == ("accuracy", value, len(y))
            assert np.float32(bundle.score(outputs, y)) == np.float32(value)
        tensors = (
            {k: torch.from_numpy(a) for k, a in x.items()} if isinstance(x, dict) else torch.from_numpy(x)
        )
        with torch.no_grad():  # the same as one module
            np.testing.assert_allclose(bundle.module(tensors).numpy(), outputs, atol=1e-5)


@pytest.mark.job
def test_a_bundle_is_complete_by_itself(tmp_path: Path) -> None:
    base = tiny.base(tmp_path, "BertForSequenceClassification")
    settings: dict[str, Any] = {**LORA, "model": f"hf:{base}", "out": tmp_path / "run"}
    result = copfl.run("fedsa_lora", tiny.sentences(), **settings)
    texts = [str(text) for text in tiny.sentences().test.x]
    expected = copfl.load(tmp_path / "run", 2).predict_proba(texts)
    assert copfl.load(tmp_path / "run", 2).save(tmp_path / "sent") == tmp_path / "sent"
    shutil.rmtree(base)  # neither the base, nor the run, nor its data
    shutil.rmtree(tmp_path / "run")
    tiny._saved.cache_clear()
    bundle = copfl.load(tmp_path / "sent")
    assert np.array_equal(bundle.predict_proba(texts), expected)
    assert bundle.predict(texts[:1]).tolist() == [tiny.CLASSES[expected[0].argmax()]]
    x, y = samples_of(result, 2)
    assert np.float32(bundle.score(bundle.outputs(x), y)) == np.float32(result.latest("accuracy")[2])
    written = files(tmp_path / "sent")
    assert {Path(name).suffix for name in written} == {".json", ".safetensors", ".md"}
    assert not any(str(tmp_path).encode() in content for content in written.values())


def test_bundles_of_one_run_share_their_base(tmp_path: Path) -> None:
    result = copfl.run(
        "fedavg", tiny.sentences(), model=f"hf:{tiny.base(tmp_path)}", out=tmp_path / "run", **LORA
    )
    names = set(files(tmp_path / "run" / "models"))
    assert {f"client-{n:04d}/bundle.json" for n in range(3)} | {"global/bundle.json"} <= names
    assert "base/frozen.safetensors" in names
    assert "base/tokenizer/tokenizer.json" in names
    weights = (tmp_path / "run" / "models" / "client-0000" / "weights.safetensors").stat().st_size
    assert weights < 4 * result.experiment.task.d + 5000  # without the frozen base
    shutil.copytree(tmp_path / "run" / "models" / "client-0000", tmp_path / "alone")
    with pytest.raises(RunError, match=r"lacks its base.*copfl export RUN --client N --format bundle"):
        copfl.load(tmp_path / "alone")


def test_the_global_model_and_its_name(run: Path) -> None:
    result = copfl.run("copfl", **{**MLP, "rounds": 3})
    bundle = copfl.load(run, "global")
    assert (bundle.description.origin.stage, bundle.description.scores) == (GLOBAL, ())
    x, y = samples_of(result, 2)
    assert np.float32(bundle.score(bundle.outputs(x), y)) == np.float32(result.accuracy_global[2, 2])


def test_a_client_that_no_round_evaluated_has_the_score_of_what_it_received(tmp_path: Path) -> None:
    copfl.run("fedavg", **{**SMALL, "clients": 4, "rounds": 1, "participation": 0.25}, out=tmp_path / "run")
    found = [copfl.load(tmp_path / "run", n).description for n in range(4)]
    assert all(one.scores for one in found)
    assert [one.origin.stage for one in found].count(RECEIVED) == 3


def test_using_a_run_changes_nothing_in_its_folder(run: Path) -> None:
    before = files(run)
    bundle = copfl.load(run, 0)
    bundle.predict(np.zeros((2, 1, 8, 8), np.uint8))
    assert files(run) == before


def test_images_in_several_layouts(run: Path) -> None:
    bundle = copfl.load(run, 1)
    x = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8)).astype(np.uint8)
    expected = bundle.predict_proba(x)
    assert np.array_equal(bundle.predict_proba(x[:, 0]), expected)
    assert np.array_equal(bundle.predict_proba(torch.from_numpy(x)), expected)
    with pytest.raises(
        DataError, match=r"x is uint8 \[4, 1, 8, 4\], but a sample of the model is uint8 \[1, 8, 8\]"
    ):
        bundle.predict(x[..., :4])
    with pytest.raises(DataError, match="x is float64"):
        bundle.predict(x / 255)


def test_folders_of_images_are_named_by_their_classes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for training; without them there is nothing to evaluate by, and a class of another name is an error."""
    from PIL import Image

    x = np.random.default_rng(0).integers(0, 256, (4, 8, 8)).astype(np.uint8)
    for n, name in enumerate(("3", "3", "7", "7")):
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[n]).save(tmp_path / "images" / name / f"{n}.png")
    bundle = copfl.load(run, 1)
    done = called(capsys, "evaluate", run, "--client", "1", "--data", tmp_path / "images", "--json")
    assert done.code == 0, done.err
    expected = bundle.evaluate(x, np.array(["3", "3", "7", "7"]))
    assert json.loads(done.out)["metrics"]["accuracy"] == expected.metrics["accuracy"]
    done = called(capsys, "evaluate", run, "--client", "1", "--data", tmp_path / "images" / "3")
    assert done.code == 2
    assert "lacks folders named by the classes" in done.err
    (tmp_path / "images" / "7").rename(tmp_path / "images" / "cat")
    words = (run, "--client", "1", "--data", tmp_path / "images")
    done = called(capsys, "evaluate", *words)
    assert (done.code, "there is a label 'cat', but the names are 0, 1" in done.err) == (2, True)
    done = called(capsys, "predict", *words)
    assert (done.code, "not scored: there is a label 'cat'" in done.err) == (0, True)
    assert [line.split("\t")[1] for line in done.out.splitlines()] == [
        "3/0.png",
        "3/1.png",
        "cat/2.png",
        "cat/3.png",
    ]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="or folders of them named by the classes"):
        bundle.read(tmp_path / "none")


def test_regression_values_are_in_the_units_of_the_targets(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    data = {"x": x, "y": (1000 + 50 * x.sum(1)).astype(np.float32), "kind": "regression"}
    settings: dict[str, Any] = {"model": "mlp", "clients": 2, "partition": "iid", "rounds": 3, "lr": 0.05}
    result = copfl.run("apfl", data, **settings, out=tmp_path / "run")
    bundle = copfl.load(tmp_path / "run", 1)
    own, y = samples_of(result, 1)
    assert bundle.evaluate(own, y).metrics["rmse"] == pytest.approx(result.latest("rmse")[1], rel=1e-6)
    assert bundle.predict(own).shape == y.shape
    assert abs(bundle.predict(own).mean() - 1000) < 100
    with pytest.raises(UsageError, match="predicts values, which have no probabilities"):
        bundle.predict_proba(own)


def test_a_model_that_a_program_passed_is_passed_again(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    result = copfl.run("fedavg", model=net, clients=2, rounds=1, out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"a value that a Python program passed; pass it again: copfl.load"):
        copfl.load(tmp_path / "run", 0)
    bundle = copfl.load(tmp_path / "run", 0, model=net)
    x, y = samples_of(result, 0)
    assert np.float32(bundle.score(bundle.outputs(x), y)) == np.float32(result.latest("accuracy")[0])


def test_an_evaluation_by_hand(run: Path) -> None:
    bundle = copfl.load(run, 0)
    outputs = np.zeros((4, 10))
    outputs[[0, 1, 2, 3], [3, 3, 5, 1]] = (0.9, 0.8, 0.9, 1.0)
    found = bundle.measured(outputs, np.array([3, 5, 5, 1]))
    assert found.metrics["accuracy"] == 0.75
    assert found.confusion is not None
    assert (found.confusion[5, 3], found.confusion[5, 5], found.confusion.sum()) == (1, 1, 4)
    assert [(one.samples, one.accuracy) for one in found.calibration] == [(1, 0.0), (2, 1.0), (1, 1.0)]


# Names and damage


def test_a_client_is_named_by_its_number_or_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    np.savez(tmp_path / "data.npz", x=x, y=y, group=np.repeat(["south", "north"], 20))
    settings: dict[str, Any] = {"partition": "by_group", "model": "mlp", "rounds": 1}
    copfl.run("fedavg", str(tmp_path / "data.npz"), **settings, out=tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=x, y=y)
    names = [
        copfl.load(tmp_path / "run", one).description.origin.client for one in ("north", "south", "1", 0)
    ]
    assert names == [0, 1, 1, 0]
    words = ["predict", tmp_path / "run", "--data", tmp_path / "new.npz", "--client"]
    assert called(capsys, *words, "south") == called(capsys, *words, 1)
    refused = called(capsys, *words, "east")
    assert (refused.code, "the run has clients 0 to 1: north, south" in refused.err) == (2, True)


def test_a_number_is_that_of_the_file_where_the_file_numbers_its_sites(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2
    np.savez(tmp_path / "data.npz", x=x, y=y, group=np.repeat([1, 2, 3], 20))
    settings: dict[str, Any] = {"partition": "by_group", "model": "mlp", "rounds": 1}
    copfl.run("fedavg", str(tmp_path / "data.npz"), **settings, out=tmp_path / "run")
    with pytest.raises(UsageError, match="there is no client 0; the run has clients 0 to 2: 1, 2, 3"):
        copfl.load(tmp_path / "run", "0")
    wanted: list[int | str] = ["1", "2", "3", "0 (1)", "1 (2)", 1]  # a number in Python counts from 0
    assert [copfl.load(tmp_path / "run", one).description.origin.client for one in wanted] == [
        0,
        1,
        2,
        0,
        1,
        1,
    ]


def test_what_is_wrong_with_a_folder_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no client 3; the run has clients 0 to 2"):
        copfl.load(run, 3)
    with pytest.raises(UsageError, match="name the model: client=3, "):
        copfl.load(run)
    with pytest.raises(RunError, match="is neither a bundle"):
        copfl.load(tmp_path)
    shutil.copytree(run, tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / "models")
    with pytest.raises(RunError, match="has no bundles: they are written when a run ends"):
        copfl.load(tmp_path / "old", 0)
    (tmp_path / "old" / "models").mkdir()
    (tmp_path / "old" / "models" / "client-0000.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"is of an earlier version of copfl.*run it again: `copfl.run\("):
        copfl.load(tmp_path / "old", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "zero"}, "seed is damaged: 'zero' is no <class 'int'>"),
        ({"format": 9}, "has the format 9, and this version of copfl reads 1"),
        ({"colour": 1}, 'there is no "colour"'),
        ({"output": {"kind": "classification"}}, 'output is damaged: it lacks "count"'),
        (
            {"scores": [{"metric": "accuracy", "split": "test", "value": None, "samples": 3}]},
            "value is damaged",
        ),
    ],
)
def test_a_damaged_description_is_refused(run: Path, tmp_path: Path, change: Any, message: str) -> None:
    shutil.copytree(run / "models" / "client-0000", tmp_path / "one")
    content = json.loads((tmp_path / "one" / "bundle.json").read_text())
    (tmp_path / "one" / "bundle.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(RunError, match=message):
        description.read(tmp_path / "one")


def test_weights_of_another_model_are_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "models" / "client-0000", tmp_path / "one")
    content = json.loads((tmp_path / "one" / "bundle.json").read_text())
    (tmp_path / "one" / "bundle.json").write_text(
        json.dumps({**content, "model": {"name": "mlp", "width": 9}})
    )
    with pytest.raises(RunError, match="is damaged or of another model"):
        copfl.load(tmp_path / "one")


# scikit-learn


def test_an_estimator_of_scikit_learn(run: Path) -> None:
    from sklearn.base import clone
    from sklearn.metrics import accuracy_score
    from sklearn.model_selection import cross_val_score
    from sklearn.utils.validation import check_is_fitted

    bundle = copfl.load(run, 1)
    x = np.random.default_rng(0).integers(0, 256, (40, 1, 8, 8)).astype(np.uint8)
    y = np.arange(40) % 10
    found = bundle.estimator()
    check_is_fitted(found)
    assert found.classes_.tolist() == list(range(10))
    assert found.fit(x, y) is found
    assert found.score(x, y) == accuracy_score(y, bundle.predict(x))
    assert found.predict_proba(x).shape == (40, 10)
    assert len(cross_val_score(clone(found), x, y, cv=2)) == 2
