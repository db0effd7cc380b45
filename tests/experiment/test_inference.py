from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import copfl
from copfl.core.optim import Adam
from copfl.data.samples import Dataset
from copfl.errors import DataError, RunError, UsageError
from copfl.experiment import export, inference
from copfl.experiment.client_models import vector_of
from copfl.experiment.inference import Training, fine_tuned, nearest
from copfl.models import build
from tests.commands import called, files

SETTINGS: dict[str, Any] = {"clients": 3, "rounds": 2, "mlp": {"width": 8}, "model": "mlp"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    copfl.run("copfl", **SETTINGS, out=path)
    return path


@pytest.fixture(scope="module")
def data(run: Path) -> dict[str, Any]:
    """Client 1's test samples, and their labels."""
    found = inference.load(run).experiment.federation
    chosen = found.partition.test[1]
    return {"x": found.dataset.test.x[chosen], "y": found.dataset.test.y[chosen]}


def test_a_clients_predictions_are_those_of_the_run(run: Path, data: dict[str, Any]) -> None:
    result = copfl.run("copfl", **SETTINGS)
    found = inference.load(run)
    answers = found.predict(found.client(1), **data)
    assert answers.score == result.accuracy[1, 1]
    assert answers.outputs.sum(1) == pytest.approx(1, abs=1e-6)


def test_using_a_run_changes_nothing_in_its_folder(run: Path, data: dict[str, Any]) -> None:
    before = files(run)
    found = inference.load(run)
    found.predict(found.client(0), data["x"])
    found.new_client()
    assert files(run) == before


def test_a_new_client_gets_the_global_model(run: Path) -> None:
    found = inference.load(run)
    result = copfl.run("copfl", **{**SETTINGS, "rounds": 3})
    split = result.experiment.federation
    own = split.dataset.test.x[split.partition.test[2]], split.dataset.test.y[split.partition.test[2]]
    assert found.predict(found.new_client(), *own).score == pytest.approx(result.accuracy_global[2, 2])


def newcomer(found: inference.RunModels, classes: tuple[int, ...], train: int = 40) -> Dataset:
    """A data set of these classes: some train samples, and all test samples."""
    dataset = found.experiment.federation.dataset
    parts = [split.take(np.isin(split.y, classes)) for split in (dataset.train, dataset.test)]
    return dataclasses.replace(dataset, train=parts[0].take(np.arange(train)), test=parts[1])


def test_a_new_client_learns_with_defaults_and_is_compared_with_training_alone(run: Path) -> None:
    found = inference.load(run)
    data = newcomer(found, (1, 4, 7), train=24)
    fitted = found.personalize(data)
    start = found.predict(found.new_client(), data.test.x, data.test.y).score
    assert start is not None
    assert fitted.scores[-1] > start + 0.3
    assert len(fitted.scores) == fitted.epochs + 1
    assert fitted.lr in (0.001, 0.003, 0.01)
    assert fitted.alone[-1] > 0.6  # it has a fair chance too
    assert found.predict(fitted.model, data.test.x, data.test.y).score == pytest.approx(fitted.scores[-1])


def test_the_choices_for_a_new_client_depend_on_its_train_samples_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "EPOCHS", (1, 2))
    found = inference.load(run)
    data = newcomer(found, (1, 4, 7), train=24)
    fitted, other = (
        found.personalize(one) for one in (data, dataclasses.replace(data, test=data.test.take(np.arange(5))))
    )
    assert (other.start, other.lr, other.epochs) == (fitted.start, fitted.lr, fitted.epochs)
    assert isinstance(other.model, torch.Tensor)
    assert isinstance(fitted.model, torch.Tensor)
    assert torch.equal(other.model, fitted.model)


def test_the_nearest_client_is_the_one_with_the_same_digits(run: Path) -> None:
    found = inference.load(run)
    federation = found.experiment.federation
    own = federation.dataset.train.take(federation.partition.train[1])
    models = {n: vector_of(found.client(n)) for n in range(3)}
    models[1] = fine_tuned(
        Training(found.experiment.task, Adam(lr=0.01), 8, 0, 9), models[1], own, epochs=20
    )[-1]
    assert nearest(found.experiment.task, models, own) == 1


def test_a_single_sample_is_not_split(run: Path) -> None:
    found = inference.load(run)
    fitted = found.personalize(newcomer(found, (1, 4), train=1))
    assert (fitted.start, fitted.lr, fitted.epochs) == ("the global model", 0.001, 1)


@pytest.mark.parametrize("algorithm", ["apfl", "ktpfl"])
def test_mixtures_and_messages_of_their_own_serve_a_new_client_too(algorithm: str, tmp_path: Path) -> None:
    copfl.run(algorithm, **SETTINGS, out=tmp_path / "run")
    found = inference.load(tmp_path / "run")
    assert found.personalize(newcomer(found, (1, 4)), epochs=1, lr=0.01).epochs == 1


def test_a_torch_file_is_a_state_dict(run: Path, tmp_path: Path, data: dict[str, Any]) -> None:
    found = inference.load(run)
    path = export.write(found, found.client(1), "torch", tmp_path / "client.pt")
    net = build("mlp", (1, 8, 8), 10, 0, width=8)
    state = torch.load(path, weights_only=True)
    net.load_state_dict(state)
    known = found.experiment.federation.dataset
    assert state.copfl == {"classes": list(known.classes), "mean": list(known.mean), "std": list(known.std)}
    with torch.no_grad():
        ours = net.eval()(found.experiment.task.numbers(torch.from_numpy(data["x"]))).softmax(1)
    assert ours.numpy() == pytest.approx(found.predict(found.client(1), data["x"]).outputs, abs=1e-6)


def test_batch_norm_models_load_into_the_users_own_class(tmp_path: Path) -> None:
    copfl.run(
        "fedavg", clients=2, rounds=1, cnn={"width": 2, "norm": "batch"}, model="cnn", out=tmp_path / "run"
    )
    found = inference.load(tmp_path / "run")
    path = export.write(found, found.client(0), "torch", tmp_path / "client.pt")
    build("cnn", (1, 8, 8), 10, 0, width=2, norm="batch").load_state_dict(torch.load(path, weights_only=True))


def test_a_safetensors_file_says_how_samples_are_normalised(run: Path, tmp_path: Path) -> None:
    found = inference.load(run)
    path = export.write(found, found.client(2), "safetensors", tmp_path / "client.safetensors")
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["copfl"])
        assert set(file.keys()) == set(found.experiment.task.layout.names)
    assert about["classes"] == list("0123456789")
    assert tuple(about["mean"]) == found.experiment.federation.dataset.mean


EXPORTS = """
import sys
from copfl.cli import main as cli
for name in sys.argv[1:]:
    sys.argv = ["copfl", "export", name, "--client", "1", "--format", "onnx", "--out", f"{name}.onnx"]
    try:
        cli.main()
    except SystemExit as exit:
        assert exit.code == 0
"""


def test_onnx_answers_as_we_do(tmp_path: Path, data: dict[str, Any]) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is an extra, copfl[onnx]")
    pytest.importorskip("onnxscript", reason="onnxscript is an extra, copfl[onnx]")
    algorithms = ["copfl", "apfl"]  # one model, and a mixture of two
    for algorithm in algorithms:
        copfl.run(algorithm, **SETTINGS, out=tmp_path / algorithm)
    rng, targets = np.random.default_rng(0), ["values", "labels"]
    x = rng.normal(size=(40, 3)).astype(np.float32)
    of_targets = {"values": 1000 + 50 * x.sum(1), "labels": (x > 0).astype(np.float32)}
    for name, y in of_targets.items():
        kind = {"values": "regression", "labels": "multilabel"}[name]
        own = {"x": x, "y": y, "kind": kind}
        result = copfl.run("apfl", own, model="mlp", clients=2, partition="iid", rounds=1)
        result.save(tmp_path / name)
    texts = np.array([f"{word} is my word {n % 7}" for n in range(20) for word in ("lost", "found")])
    result = copfl.run("fedavg", (texts, np.arange(40) % 2), clients=2, partition="iid", rounds=1)
    result.save(tmp_path / "texts")  # the usual model of texts
    # The exporter warns of its own old parts as it loads, so it works in a process of its own, as for a user.
    words = [sys.executable, "-c", EXPORTS, *algorithms, *targets, "texts"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "copfl.onnx\napfl.onnx\nvalues.onnx\nlabels.onnx\ntexts.onnx\n",
        "",
    )
    for name in (*algorithms, *targets):
        session = runtime.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"])
        found, samples = inference.load(tmp_path / name), data["x"] if name in algorithms else x
        for count in (1, len(samples)):  # any number of samples
            (answers,) = session.run(None, {"x": samples[:count]})
            expected = found.predict(found.client(1), samples[:count]).outputs
            assert answers == pytest.approx(expected, abs=1e-5, rel=1e-5), name
    session = runtime.InferenceSession(tmp_path / "texts.onnx", providers=["CPUExecutionProvider"])
    found = inference.load(tmp_path / "texts")
    tokens = found.tokens(["my word is lost", "found"])
    (answers,) = session.run(None, tokens)
    assert answers == pytest.approx(found.predict(found.client(1), tokens).outputs, abs=1e-5)
    values = inference.load(tmp_path / "values")
    path = export.write(values, values.client(0), "safetensors", tmp_path / "values.safetensors")
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["copfl"])
    assert about["target_mean"] == pytest.approx([values.experiment.federation.dataset.train.y.mean()])


def test_the_commands(
    run: Path, data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "x.npz", x=data["x"])
    np.savez(tmp_path / "xy.npz", **data)
    for both in ([], ["--client", 1, "--global"]):
        refused = called(capsys, "predict", run, *both, "--data", tmp_path / "x.npz")
        assert (refused.code, "--client NUMBER" in refused.err) == (2, True)
    assert called(capsys, "predict", run, "--global", "--data", tmp_path / "x.npz").code == 0
    answer = called(capsys, "predict", run, "--client", 1, "--data", tmp_path / "x.npz")
    assert (answer.code, answer.err, len(answer.out.splitlines())) == (0, "", len(data["x"]))
    answer = called(
        capsys, "predict", run, "--client", 1, "--data", tmp_path / "xy.npz", "--out", tmp_path / "a.npz"
    )
    assert answer.err.startswith("accuracy ")
    with np.load(tmp_path / "a.npz") as saved:
        assert saved["probabilities"].shape == (len(data["x"]), 10)
    answer = called(
        capsys, "personalize", run, "--data", tmp_path / "xy.npz", "--epochs", 2, "--out", tmp_path / "new.pt",
        "--format", "torch", "--json",
    )  # fmt: skip
    assert len(json.loads(answer.out)["accuracy"]) == 3
    answer = called(capsys, "personalize", run, "--data", tmp_path / "xy.npz", "--lr", 0.01, "--epochs", 1)
    assert "training alone: " in answer.out
    assert "start: the " in answer.out
    assert (tmp_path / "new.pt").is_file()


def test_a_client_is_named_by_its_number_or_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    np.savez(tmp_path / "data.npz", x=x, y=y, group=np.repeat(["south", "north"], 20))
    settings: dict[str, Any] = {"partition": "by_group", "model": "mlp", "rounds": 1}
    copfl.run("fedavg", str(tmp_path / "data.npz"), **settings, out=tmp_path / "run")
    found = inference.load(tmp_path / "run")
    assert [found.number_of(client) for client in ("north", "south", "1", 0)] == [0, 1, 1, 0]
    words = ["predict", tmp_path / "run", "--data", tmp_path / "data.npz", "--client"]
    assert called(capsys, *words, "south") == called(capsys, *words, 1)
    refused = called(capsys, *words, "east")
    assert (refused.code, "the run has clients 0 to 1: north, south" in refused.err) == (2, True)


def test_a_name_that_is_the_number_of_another_client_is_not_guessed(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2
    np.savez(tmp_path / "data.npz", x=x, y=y, group=np.repeat([1, 2, 3], 20))
    settings: dict[str, Any] = {"partition": "by_group", "model": "mlp", "rounds": 1}
    copfl.run("fedavg", str(tmp_path / "data.npz"), **settings, out=tmp_path / "run")
    found = inference.load(tmp_path / "run")
    with pytest.raises(UsageError, match=r'name of another; write "0 \(1\)" or "1 \(2\)"'):
        found.number_of("1")
    assert [found.number_of(client) for client in ("0", "0 (1)", "1 (2)", "3", 1)] == [0, 0, 1, 2, 1]


def test_what_is_wrong_is_said(run: Path, data: dict[str, Any], tmp_path: Path) -> None:
    found = inference.load(run)
    with pytest.raises(UsageError, match="the run has clients 0 to 2"):
        found.client(3)
    with pytest.raises(UsageError, match='no format "pickle"'):
        export.write(found, found.client(0), "pickle", tmp_path / "x")
    with pytest.raises(UsageError, match="epochs=0"):
        found.personalize(found.experiment.federation.dataset, epochs=0)
    np.savez(tmp_path / "small.npz", x=data["x"][..., :4])
    with pytest.raises(DataError, match=r"one of the run is uint8 \[1, 8, 8\]"):
        found.further(tmp_path / "small.npz")
    with pytest.raises(DataError, match="lacks the array y"):
        found.samples(tmp_path / "small.npz")
    np.savez(tmp_path / "labels.npz", x=data["x"], y=data["y"] + 10)
    with pytest.raises(DataError, match="there is a label '10', but the names are 0, 1"):
        found.samples(tmp_path / "labels.npz")
    with pytest.raises(DataError, match=r"there is no file or folder nowhere\.csv; name the samples"):
        found.further(Path("nowhere.csv"))
    with pytest.raises(RunError, match=r"there is no folder nowhere; a run folder was expected"):
        inference.load(Path("nowhere"))
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "models")
    with pytest.raises(RunError, match="models are saved when a run ends"):
        inference.load(tmp_path / "run").client(0)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on a table, and of the table."""
    folder = tmp_path_factory.mktemp("table")
    rows = [f"{20 + n},{('Bern', 'Rome')[n % 2]},{('no', 'yes')[n % 3 == 0]},h{n % 3}" for n in range(60)]
    (folder / "visits.csv").write_text("\n".join(["age,town,ill,site", *rows]))
    options = {"target": "ill", "client": "site"}
    copfl.run("fedavg", str(folder / "visits.csv"), data_options=options, rounds=2, out=folder / "run")
    return folder


def test_new_rows_need_no_target(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = table / "new.csv"
    line = ("predict", table / "run", "--client", "h1", "--data", new)
    new.write_text("age,town,ill\n30,Bern,\n40,Rome,?\n50,Rome,\n")
    answer = called(capsys, *line)
    assert (answer.code, len(answer.out.splitlines()), answer.err) == (0, 3, "")
    new.write_text("age,town\n30,Bern\n40,Rome\n")
    answer = called(capsys, *line)
    assert (answer.code, len(answer.out.splitlines()), answer.err) == (0, 2, "")
    new.write_text("age,town,ill\n30,Bern,no\n40,Rome,\n50,Rome,yes\n")
    answer = called(capsys, *line)
    assert (answer.code, len(answer.out.splitlines())) == (0, 3)
    assert re.fullmatch(r"accuracy [0-9.]+ % of 2 samples; 1 have no target\n", answer.err)
    found = inference.load(table / "run")
    _, y, has_target, _ = found.further(new)
    assert (y.tolist(), has_target.tolist()) == ([0, 1], [True, False, True])
    outputs = [line.split("\t")[1] for line in answer.out.splitlines()]
    right = np.mean([outputs[0] == "no", outputs[2] == "yes"])
    assert answer.err.startswith(f"accuracy {100 * right:.1f} %")


def test_new_values_of_a_regression_may_be_missing(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x.sum(1))
    copfl.run("fedavg", str(tmp_path / "data.npz"), rounds=1, clients=2, out=tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=x[:3], y=np.array([1.0, np.nan, 2.0]))
    found = inference.load(tmp_path / "run")
    further = found.further(tmp_path / "new.npz")
    assert (further.y.tolist(), further.has_target.tolist()) == ([1.0, 2.0], [True, False, True])
    answer = found.predict(found.client(0), *further[:3])
    assert answer.outputs.shape == (3, 1)
    errors = answer.outputs[[0, 2], 0] - further.y
    assert answer.score == pytest.approx(np.sqrt((errors**2).mean()))


def test_unknown_categories_are_reported(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = table / "towns.csv"
    new.write_text("age,town\n30,Oslo\n40,Rome\n50,Oslo\n60,Graz\n")
    answer = called(capsys, "predict", table / "run", "--global", "--data", new)
    assert answer.code == 0
    assert (
        'warning: column "town": 3 of 4 values are categories that no train row has, and count as none: '
        '"Oslo", "Graz"\n' in answer.err
    )
    answer = called(capsys, "predict", table / "run", "--global", "--data", new, "--json")
    assert json.loads(answer.out)["warnings"] == found_notes(table, new)


def found_notes(table: Path, new: Path) -> list[str]:
    return inference.load(table / "run").further(new).notes


def test_a_new_client_s_table_needs_the_column_to_learn(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = table / "client.csv"
    new.write_text("age,town\n30,Bern\n40,Rome\n")
    answer = called(capsys, "personalize", table / "run", "--data", new)
    assert answer.code == 2
    assert "lacks the column ill to predict" in answer.err
    assert "array" not in answer.err
    new.write_text("age,town,ill\n30,Bern,no\n40,Rome,\n")
    answer = called(capsys, "personalize", table / "run", "--data", new)
    assert "has nothing in the column ill to predict in row 2; complete it or remove the row" in answer.err


def test_the_help_of_a_finished_run_s_client_is_about_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("export", "predict"):
        text = " ".join(called(capsys, command, "--help").out.split())
        assert "--client TEXT The client whose model is used: its number" in text
        assert "column that names the client" not in text
