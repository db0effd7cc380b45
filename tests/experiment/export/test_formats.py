"""What other programs read predicts as the bundle does."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import copfl
from copfl.algorithms import ALGORITHMS
from copfl.errors import UsageError
from copfl.experiment.export import formats, mlflow_folder, onnx_file
from copfl.models import build
from copfl.settings.complete import complete
from tests.commands import called
from tests.experiment.bundle.test_bundle import ADDONS, samples_of, settings_with
from tests.experiment.bundle.test_tables import frame
from tests.experiment.models.test_client_models import trained
from tests.models import tiny
from tests.slow import slow

pytestmark = pytest.mark.long  # its fixtures
MLP: dict[str, Any] = {
    "clients": 2,
    "rounds": 1,
    "model": "mlp",
    "model_options": {"width": 8},
    "engine": "sequential",
}
TEXTS = [f"{word} is my word {n % 7}" for n in range(20) for word in ("lost", "found")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, copfl.Bundle]:
    """Bundles of every kind of input and output."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    frame().to_csv(folder / "patients.csv", index=False)
    plain: dict[str, Any] = {"clients": 2, "partition": "iid", "rounds": 1, "engine": "sequential"}
    table: dict[str, Any] = {"data_options": {"target": "state", "client": "site"}, "engine": "sequential"}
    values = {"x": x, "y": (1000 + 50 * x.sum(1)).astype(np.float32), "kind": "regression"}
    labels = {"x": x, "y": (x > 0).astype(np.float32), "kind": "multilabel"}
    runs: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "images": ("feddpa", "digits", {**MLP, "model": "cnn", "model_options": {}}),  # mixed by features
        "values": ("apfl", values, {**plain, "model": "mlp"}),  # mixed by weights
        "labels": ("fedavg", labels, {**plain, "model": "mlp"}),
        "table": ("fedper", str(folder / "patients.csv"), {**table, "rounds": 2}),
        "texts": ("fedavg", (np.array(TEXTS), np.arange(40) % 2), plain),
    }
    for name, (algorithm, data, settings) in runs.items():
        settings = {key: value for key, value in settings.items() if value != {}}
        copfl.run(algorithm, data, **settings, rivals=False, out=folder / name)
    return {name: copfl.load(folder / name, 1) for name in runs}


def raw(name: str, count: int) -> Any:
    """New samples for the bundle of this name."""
    rng = np.random.default_rng(1)
    if name == "table":
        return frame(count, seed=1)[["age", "sex", "lab"]]
    if name == "texts":
        return TEXTS[:count]
    if name in ("values", "labels"):
        return rng.normal(size=(count, 3)).astype(np.float32)
    return rng.integers(0, 256, (count, 1, 8, 8)).astype(np.uint8)


# Every kind of input, and a mixture; the ONNX files have every kind of output too.
TORCH = ["images", "table", "texts"]
# A command writes one file. For several, torch's table of what each operation is in ONNX is made once.
WRITES = f"""
import functools, sys
from pathlib import Path
import copfl
from copfl.experiment.export import formats
if sys.argv[1] == "with onnx":
    from torch.onnx._internal.exporter._registration import ONNXRegistry
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
for name in sys.argv[2:]:
    bundle = copfl.load(name, 1)
    if name in {TORCH}:
        formats.write(bundle, "torch", Path(f"{{name}}.pt2"))
    if sys.argv[1] == "with onnx":
        formats.write(bundle, "onnx", Path(f"{{name}}.onnx"))
"""
ONNX = all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnxscript"))
onnx = pytest.mark.skipif(not ONNX, reason="onnxruntime and onnxscript are an extra, copfl[onnx]")


@pytest.fixture(scope="module")
def based(folder: Path) -> copfl.Bundle:
    """A bundle with a pretrained base."""
    base = tiny.base(folder)
    settings: dict[str, Any] = {"clients": 2, "rounds": 1, "partition": "iid", "adapter": "lora:r=2"}
    copfl.run("fedper", tiny.sentences(), model=f"hf:{base}", **settings, out=folder / "base")
    return copfl.load(folder / "base", 1)


@pytest.fixture(scope="module")
def exported(found: dict[str, copfl.Bundle], folder: Path) -> Path:
    """Those bundles in every format.

    In a process of its own, as for a user: the exporter warns of its own old parts as it loads.
    """
    words = [sys.executable, "-c", WRITES, "with onnx" if ONNX else "torch alone", *found]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


TORCH_ALONE = """
import sys
import torch
for name in sys.argv[1:]:
    program = torch.export.load(name + ".pt2").module()
    for given, expected in torch.load(name + ".samples.pt"):
        with torch.no_grad():
            torch.testing.assert_close(program(**given), expected, atol=1e-5, rtol=1e-5, check_dtype=False)
assert "copfl" not in sys.modules
"""


@slow
def test_torch_alone_predicts_the_same(found: dict[str, copfl.Bundle], exported: Path) -> None:
    for name in TORCH:
        bundle, cases = found[name], []
        for count in (1, 9):
            samples = raw(name, count)
            x: Any = bundle.preparation.of(samples).x
            given: dict[str, Any]
            if name == "table":
                numbers, sexes = (
                    samples[["age", "lab"]].to_numpy(),
                    (samples.sex == "m").to_numpy().astype(int),
                )
                given = {"numbers": torch.tensor(numbers), "categories": torch.tensor(sexes)[:, None]}
            elif isinstance(x, dict):
                given = {"x": {key: torch.from_numpy(array) for key, array in x.items()}}
            else:
                given = {"x": torch.from_numpy(x)}
            cases.append((given, torch.from_numpy(bundle.outputs(x))))
        torch.save(cases, exported / f"{name}.samples.pt")
    words = [sys.executable, "-c", TORCH_ALONE, *TORCH]
    done = subprocess.run(words, cwd=exported, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.job
@onnx
def test_onnx_takes_raw_columns_and_names_the_classes(found: dict[str, copfl.Bundle], exported: Path) -> None:
    import onnxruntime as runtime

    for name, bundle in found.items():
        session = runtime.InferenceSession(exported / f"{name}.onnx", providers=["CPUExecutionProvider"])
        about = session.get_modelmeta().custom_metadata_map
        assert json.loads(about["copfl"])["output"]["names"] == list(bundle.description.output.names)
        for count in (1, 9):  # any number of samples
            samples = raw(name, count)
            if name == "table":
                texts = {"sex": samples[["sex"]].to_numpy(object)}
                feed = {column: samples[[column]].to_numpy() for column in ("age", "lab")} | texts
            else:
                x = bundle.preparation.of(samples).x
                feed = x if isinstance(x, dict) else {"x": x}
            answers = dict(zip((o.name for o in session.get_outputs()), session.run(None, feed), strict=True))
            if name == "values":
                assert answers["values"][:, 0] == pytest.approx(bundle.predict(samples), rel=1e-5)
            else:
                assert answers["label"].tolist() == bundle.predict(samples).tolist()
                assert answers["probabilities"] == pytest.approx(bundle.predict_proba(samples), abs=1e-5)
    assert "zlib.crc32" in about["tokens"]  # of the texts: how a word becomes a token
    # Unknown categories and missing values.
    session = runtime.InferenceSession(exported / "table.onnx", providers=["CPUExecutionProvider"])
    rows = frame(3, seed=1).assign(age=[np.nan, 40.0, 60.0], sex=["m", "x", None])[["age", "sex", "lab"]]
    feed = {"age": rows[["age"]].to_numpy(), "lab": rows[["lab"]].to_numpy()}
    feed["sex"] = np.array([["m"], ["x"], [""]], dtype=object)
    with pytest.warns(RuntimeWarning, match="filled"):
        expected = found["table"].predict_proba(rows, missing="fill")
    assert session.run(["probabilities"], feed)[0] == pytest.approx(expected, abs=1e-5)


@slow
@pytest.mark.parametrize("addons", ADDONS)
@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"levels", "trees", "wide_levels"}))
def test_onnx_gives_the_number_of_the_table_for_every_algorithm(
    name: str, addons: str, tmp_path: Path
) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is an extra, copfl[onnx]")
    result = trained(name, tmp_path, out=tmp_path / "run", **settings_with(addons, name))
    bundle, (x, y) = copfl.load(tmp_path / "run", 1), samples_of(result, 1)
    with warnings.catch_warnings(action="ignore"):  # of the exporter as it loads
        file, *_ = formats.write(bundle, "onnx", tmp_path / "model.onnx")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    probabilities = session.run(["probabilities"], x if isinstance(x, dict) else {"x": x})[0]
    assert probabilities == pytest.approx(bundle.outputs(x), abs=1e-5)
    assert bundle.score(probabilities, y) == pytest.approx(result.final("accuracy")[1], abs=1e-6)


def test_mlflow_loads_the_bundle_by_its_loader_and_signature(
    found: dict[str, copfl.Bundle], tmp_path: Path
) -> None:
    yaml = pytest.importorskip("yaml", reason="MLflow reads MLmodel as YAML")
    for name, bundle in found.items():
        folder = mlflow_folder.write(bundle, tmp_path / name)
        content = yaml.safe_load((folder / "MLmodel").read_text("utf-8"))
        flavour = content["flavors"]["python_function"]
        model = importlib.import_module(flavour["loader_module"])._load_pyfunc(str(folder / flavour["data"]))
        inputs, outputs = (json.loads(content["signature"][key]) for key in ("inputs", "outputs"))
        samples: Any = raw(name, 9)
        if name == "texts":
            samples = pd.DataFrame({inputs[0]["name"]: samples})
        if name in ("table", "texts"):
            assert [column["name"] for column in inputs] == list(samples.columns)
            assert [column["type"] for column in inputs] == [
                "double" if np.issubdtype(kind, np.number) else "string" for kind in samples.dtypes.map(str)
            ]
        else:
            spec = inputs[0]["tensor-spec"]
            assert (spec["dtype"], spec["shape"]) == (str(samples.dtype), [-1, *samples.shape[1:]])
        answers = model.predict(samples)
        assert answers.to_dict("list") == bundle.columns(bundle.outputs(bundle.preparation.of(samples).x))
        assert list(answers.columns) == [column["name"] for column in outputs]
        kinds = {"double": "f", "long": "i", "string": "O"}
        for column in outputs:
            assert np.asarray(answers[column["name"]].to_numpy(), None).dtype.kind == kinds[column["type"]]
        assert (folder / "requirements.txt").read_text("utf-8") == f"copfl=={copfl.__version__}\n"
        assert not list(folder.rglob("*.pkl"))
    with pytest.raises(UsageError, match="exists already"):
        mlflow_folder.write(found["table"], tmp_path / "table")


def test_safetensors_load_into_the_users_own_class(tmp_path: Path) -> None:
    options = {"width": 2, "norm": "batch"}
    copfl.run("fedavg", clients=2, rounds=1, model_options=options, model="cnn", out=tmp_path / "run")
    bundle = copfl.load(tmp_path / "run", 0)
    (path,) = formats.write(bundle, "safetensors", tmp_path / "client.safetensors")
    net = build("cnn", (1, 8, 8), 10, 0, width=2, norm="batch").eval()
    net.load_state_dict(load_file(path), strict=False)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["copfl"])
    x = raw("images", 5)
    mean, std = (torch.tensor(about["input"][key]).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        ours = net((torch.from_numpy(x) / 255 - mean) / std).softmax(1)
    assert ours.numpy() == pytest.approx(bundle.predict_proba(x), abs=1e-6)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copfl.run("fedavg", **MLP, out=tmp_path / "run")
    words: list[Any] = ["export", tmp_path / "run", "--client", 1, "--out", tmp_path / "sent"]
    assert called(capsys, *words).out == f"{tmp_path / 'sent'}\n"
    assert copfl.load(tmp_path / "sent").description == copfl.load(tmp_path / "run", 1).description
    again = called(capsys, *words)
    assert (again.code, "exists already" in again.err) == (2, True)
    wrong = called(capsys, *words, "--format", "pickle")
    assert (wrong.code, 'no format "pickle"' in wrong.err) == (2, True)
    both = called(capsys, *words, "--global")
    assert (both.code, "and not both" in both.err) == (2, True)
    name = called(capsys, *words[:-1], tmp_path / "model.pt", "--format", "torch")
    assert (name.code, "name model.pt2 with --out" in name.err) == (2, True)
    nothing = called(capsys, *words[:-1], tmp_path / "adapter", "--format", "peft")
    assert (nothing.code, "the run has no adapter" in nothing.err) == (2, True)


def has_its_tokenizer(file: Path, bundle: copfl.Bundle) -> None:
    again = tiny.transformers.AutoTokenizer.from_pretrained(file.with_name(f"{file.name}.tokenizer"))
    assert again(["my card"])["input_ids"] == bundle.preparation.tokens(["my card"])["input_ids"].tolist()


@pytest.mark.job
@onnx
def test_onnx_of_a_base_has_its_tokenizer_beside_it(
    based: copfl.Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "_content", lambda bundle: b"a graph")
    monkeypatch.setattr(onnx_file, "_compare", lambda bundle, content: None)
    written = formats.write(based, "onnx", tmp_path / "base.onnx")
    assert written == [tmp_path / "base.onnx", tmp_path / "base.onnx.tokenizer"]
    assert written[0].read_bytes() == b"a graph"
    has_its_tokenizer(written[0], based)


@slow
@onnx
def test_onnx_of_a_base_predicts_as_the_bundle(based: copfl.Bundle, folder: Path) -> None:
    words = [sys.executable, "-c", WRITES, "with onnx", "base"]  # which compares them
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (folder / "base.onnx").is_file()
    has_its_tokenizer(folder / "base.onnx", based)


def test_a_model_that_torch_cannot_trace_is_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copfl.run("fedavg", **MLP, out=tmp_path / "run")

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a long\ntraceback\n" * 100)

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(UsageError, match=r"^torch cannot trace this model \(RuntimeError: a long\)"):
        formats.write(copfl.load(tmp_path / "run", 0), "torch", tmp_path / "model.pt2")


@pytest.mark.job
@pytest.mark.usefixtures("one_onnx_table")
@onnx
def test_exports_have_the_temperature_and_know_what_is_missing(tmp_path: Path) -> None:
    import onnxruntime as runtime

    rng = np.random.default_rng(0)
    age = rng.normal(size=80)
    is_missing = rng.random(80) < 0.5
    cells = ["" if gap else f"{number:.3f}" for number, gap in zip(age, is_missing, strict=True)]
    rows = [f"{cell},{'yes' if gap else 'no'}" for cell, gap in zip(cells, is_missing, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["age,ill", *rows]) + "\n")
    data = {"name": str(tmp_path / "rows.csv"), "target": "ill", "missing": "fill"}
    settings: dict[str, Any] = {"data": data, "partition": {"name": "iid"}}
    run = complete(
        {**settings, "algorithm": {"name": "fedavg"}, "run": {"rounds": 5, "clients": 2, "validation": 0.3}}
    )
    result = copfl.run(run, out=tmp_path / "run")
    bundle = copfl.load(tmp_path / "run", 0)
    assert bundle.description.output.temperature != 1
    assert result.final("accuracy").min() == 1.0  # what is missing says everything
    numbers = np.array([np.nan, 0.5, -1.0])
    with pytest.warns(RuntimeWarning, match="filled"):
        expected = bundle.predict_proba({"age": [None, 0.5, -1.0]})
    with warnings.catch_warnings(action="ignore"):  # of the exporter as it loads
        file, *_ = formats.write(bundle, "onnx", tmp_path / "model.onnx")
        program, *_ = formats.write(bundle, "torch", tmp_path / "model.pt2")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert session.run(["probabilities"], {"age": numbers[:, None]})[0] == pytest.approx(expected, abs=1e-5)
    module = torch.export.load(program).module()
    found = module(numbers=torch.tensor(numbers)[:, None], categories=torch.zeros(3, 0, dtype=torch.int64))
    assert found.detach().numpy() == pytest.approx(expected, abs=1e-5)
