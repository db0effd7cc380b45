"""Runs with pretrained models and adapters: what is trained, kept, resumed, exported and refused."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import copfl
from copfl.errors import DataError, UsageError
from copfl.experiment.export import formats
from copfl.settings.complete import complete
from copfl.settings.identity import essential, identity
from copfl.settings.schema import Run
from tests.commands import called, found
from tests.models import tiny
from tests.models.tiny import peft, transformers
from tests.slow import slow

LORA = {"name": "lora", "r": 2, "targets": "query+value"}
SMALL: dict[str, Any] = {"clients": 3, "rounds": 2, "batch": 4, "partition": "iid", "workers": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPFL_CACHE", str(tmp_path / "cache"))


def trained(folder: Path, out: Path | None = None, **options: Any) -> copfl.Result:
    """A short run with LoRA on the model in this folder."""
    settings = {"adapter": LORA, "optimizer": {"name": "adam", "lr": 1e-2}, **SMALL, **options}
    return copfl.run("fedper", tiny.sentences(), model=f"hf:{folder}", out=out, **settings)


@pytest.mark.job
def test_a_peft_model_with_dict_inputs_in_a_few_lines() -> None:
    config = transformers.BertConfig(**tiny.BERT, **tiny.LAYERS, num_labels=3)
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"])
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of one library about the other
        model = peft.get_peft_model(transformers.BertForSequenceClassification(config), lora)
    ids = np.random.default_rng(0).integers(1, 20, (60, 8))
    data = {"input_ids": ids, "attention_mask": np.ones_like(ids)}, ids[:, 0] % 3
    result = copfl.run("copfl", data, model=model, **SMALL)

    task = result.experiment.task
    assert task.d == len(task.initial) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    after = dict(task.module.named_parameters())
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(torch.equal(p, after[f"net.{name}"]) for name, p in frozen.items())


@pytest.mark.job
def test_the_engines_agree_with_frozen_parts_adapters_and_dropout(tmp_path: Path) -> None:
    folder = tiny.base(tmp_path)  # its dropout is 0.1
    one, other = (trained(folder, engine=e, precision="fp64").state.server for e in ("sequential", "vmap"))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.job
def test_sentences_train_and_models_have_trained_entries_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = trained(tiny.base(tmp_path), out, rounds=10)
    assert result.accuracy[-1].mean() > 0.9
    names = load_file(out / "models" / "client-0000" / "weights.safetensors").keys()
    assert names == set(result.experiment.task.layout.names)
    assert {name for name in names if "lora_" not in name} == {"head.weight", "head.bias"}
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


@pytest.mark.job
def test_a_stopped_run_resumes_exactly_and_only_on_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, out, whole = tiny.base(tmp_path), tmp_path / "run", tmp_path / "whole"
    trained(base, out)
    trained(base, whole, rounds=3)
    copfl.resume(out, rounds=3, data=tiny.sentences())
    assert found(out) == found(whole)
    shutil.copy(tiny.base(tmp_path, seed=1) / "model.safetensors", base / "model.safetensors")
    with pytest.raises(
        UsageError, match=r"has the SHA-256 \w+, but this run is of a base with \w+; put that"
    ):
        copfl.resume(out, rounds=4, data=tiny.sentences())


def test_the_content_of_a_base_is_the_runs_identity_and_not_its_place(tmp_path: Path) -> None:
    base, moved = tiny.base(tmp_path), tmp_path / "moved"
    shutil.copytree(base, moved)

    def of(folder: Path, **adapter: Any) -> str:
        tables: dict[str, Any] = {"model": {"name": f"hf:{folder}"}, "adapter": {**LORA, **adapter}}
        return identity(complete(tables))

    once = essential(complete({"model": {"name": f"hf:{base}"}}))
    assert essential(Run.of(once)) == once
    assert of(base) == of(moved)
    assert len({of(base), of(tiny.base(tmp_path, seed=1)), of(base, r=4)}) == 3


def test_an_adapter_in_one_word(tmp_path: Path) -> None:
    layers: list[Any] = [{"model": {"name": f"hf:{tiny.base(tmp_path)}"}}]
    layers += [{"adapter": {"name": "lora:r=4,alpha=8,targets=query+value"}}, {"adapter": {"dropout": 0.1}}]
    expected = {"name": "lora", "r": 4, "alpha": 8.0, "targets": "query+value", "dropout": 0.1}
    assert complete(*layers).tables()["adapter"] == expected
    with pytest.raises(UsageError, match=r'adapter.name=.loro. is unknown.*did you mean "lora"'):
        complete(*layers[:1], {"adapter": {"name": "loro"}}).tables()
    with pytest.raises(
        UsageError, match=r"adapter.rank=2 is no setting; allowed are alpha, dropout, r, targets"
    ):
        complete(*layers[:1], {"adapter": {"name": "lora:rank=2"}}).tables()


def test_a_value_may_get_an_adapter_too() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    before = copy.deepcopy(net.state_dict())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)).astype(np.float32)
    result = copfl.run("fedavg", (x, np.arange(40) % 2), model=net, adapter="lora:r=1,targets=0", **SMALL)
    assert result.experiment.task.d == 4 + 8 + 2 * 8 + 2
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())


@pytest.mark.job
def test_a_head_alone_trains_without_the_dropout_of_its_frozen_base(tmp_path: Path) -> None:
    base, table = tiny.base(tmp_path), {"train": "head"}  # its dropout is 0.1

    def probing(**more: Any) -> Any:
        options = {**SMALL, "rounds": 1, "model_options": {**table, **more}}
        return copfl.run("fedavg", tiny.sentences(), model=f"hf:{base}", **options).experiment

    new, noisy = probing(), probing(frozen_dropout=True)
    assert new.training.front.cut == "head"
    assert noisy.training.front is None
    assert (new.task.random, noisy.task.random) == (False, True)
    assert new.run.model.frozen_dropout is False
    former = {**new.run.tables()["model"]}  # a run file from before this option
    del former["frozen_dropout"]
    assert complete({"model": former}).tables()["model"] == former
    lora = complete({"model": {"name": f"hf:{base}", **table}, "adapter": LORA}).tables()
    assert "frozen_dropout" not in lora["model"]


# Out again


def logits_of(adapter: Path, base: Path, kind: str, inputs: dict[str, Any]) -> Any:
    """The logits of the exported adapter in plain peft."""
    torch_inputs = {name: torch.from_numpy(a) for name, a in inputs.items()}
    options = {} if kind == "AutoModel" else {"num_labels": 3, "ignore_mismatched_sizes": True}
    net = getattr(transformers, kind).from_pretrained(base, **options)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of one library about the other
        model = peft.PeftModel.from_pretrained(net, adapter).eval()
    with torch.no_grad():
        output = model(**torch_inputs)
    if kind != "AutoModel":
        return output.logits
    head, weight = load_file(adapter / "head.safetensors"), torch_inputs["attention_mask"][..., None]
    pooled = (output.last_hidden_state * weight).sum(1) / weight.sum(1)
    return pooled @ head["weight"].T + head["bias"]


@pytest.mark.job
@pytest.mark.parametrize(
    ("kind", "auto"),
    [("BertModel", "AutoModel"), ("BertForSequenceClassification", "AutoModelForSequenceClassification")],
)
def test_an_exported_adapter_predicts_the_same_in_peft(kind: str, auto: str, tmp_path: Path) -> None:
    base, run, out = tiny.base(tmp_path, kind), tmp_path / "run", tmp_path / "adapter"
    trained(base, run, model_options={"freeze": "*.lora_A*"}, adapter={**LORA, "r": 4})
    bundle = copfl.load(run, 1)
    x = bundle.preparation.of([str(text) for text in tiny.sentences().test.x]).x
    formats.write(bundle, "peft", out)
    assert {path.name for path in out.iterdir()} - {"head.safetensors"} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    expected = bundle.outputs(x)
    probabilities = torch.softmax(logits_of(out, base, auto, x).double(), 1).numpy()
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    card = (out / "README.md").read_text()
    for fact in (
        "base_model",
        bundle.description.model["sha256"],
        "sentences, 3 classes",
        "Licence",
    ):
        assert fact in card
    with pytest.raises(UsageError, match="exists already"):
        formats.write(bundle, "peft", out)


def gpt2(parent: Path) -> Path:
    """The folder of a GPT-2 of two layers with a classifier, whose projections are transposed (Conv1D)."""
    folder = parent / "gpt2"
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 20}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


# Quick: weights and biases of both; of gpt2 the base, whose projections are transposed. COPFL_SLOW=1: all.
TRAINED = ["*.base_layer.weight", "*.base_layer.bias", "{norm}.bias", "{norm}.weight"]
USUAL = {("gpt2", TRAINED[0]), ("bert", TRAINED[1]), ("gpt2", TRAINED[2]), ("bert", TRAINED[3])}


@pytest.mark.job
@pytest.mark.parametrize(
    ("architecture", "train"),
    [
        pytest.param(architecture, train, marks=[] if (architecture, train) in USUAL else slow)
        for architecture in ("bert", "gpt2")
        for train in TRAINED
    ],
)
def test_peft_loads_what_was_trained_beside_the_adapter(
    architecture: str, train: str, tmp_path: Path
) -> None:
    is_bert = architecture == "bert"
    base = tiny.base(tmp_path, "BertForSequenceClassification") if is_bert else gpt2(tmp_path)
    norm, targets = ("*.LayerNorm", "query+value") if is_bert else ("*.ln_1", "c_attn")
    algorithm = "fedex_lora" if train == "*.base_layer.weight" else "fedavg"
    result = copfl.run(
        algorithm,
        tiny.sentences(),
        model=f"hf:{base}",
        adapter={**LORA, "targets": targets},
        model_options={"train": train.format(norm=norm)},
        optimizer={"name": "adam", "lr": 1e-2},
        out=tmp_path / "run",
        **SMALL,
    )
    bundle = copfl.load(tmp_path / "run", 1)
    x = bundle.preparation.of([str(text) for text in tiny.sentences().test.x]).x
    entries, own = result.experiment.task.layout.entries, result.client_model(1)
    assert isinstance(own, torch.Tensor)
    after, before = (entries(w, train.format(norm=norm)) for w in (own, result.experiment.task.initial))
    assert not torch.equal(after, before)
    formats.write(bundle, "peft", tmp_path / "adapter")
    logits = logits_of(tmp_path / "adapter", base, "AutoModelForSequenceClassification", x)
    np.testing.assert_allclose(torch.softmax(logits.double(), 1).numpy(), bundle.outputs(x), atol=1e-5)


@pytest.mark.job
def test_merged_weights_are_those_of_a_plain_model(tmp_path: Path) -> None:
    base, run, file = (
        tiny.base(tmp_path, "BertForSequenceClassification"),
        tmp_path / "run",
        tmp_path / "m.st",
    )
    trained(base, run)
    bundle = copfl.load(run, 0)
    x = bundle.preparation.of([str(text) for text in tiny.sentences().test.x]).x
    formats.write(bundle, "safetensors", file)
    net = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3, ignore_mismatched_sizes=True
    ).eval()
    net.load_state_dict(load_file(file))
    with torch.no_grad():
        logits = net(**{name: torch.from_numpy(a) for name, a in x.items()}).logits
    np.testing.assert_allclose(torch.softmax(logits.double(), 1).numpy(), bundle.outputs(x), atol=1e-5)


@pytest.mark.job
def test_sentences_of_a_line_a_file_and_a_table_are_classified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tiny.sentences(), tmp_path / "run"
    names = np.array(tiny.CLASSES)
    np.savez(tmp_path / "data.npz", x=data.train.x, y=names[data.train.y])
    words = ["--dataset", tmp_path / "data.npz", "--model", f"hf:{tiny.base(tmp_path)}", "--adapter", "lora"]
    words += [
        "--partition",
        "iid",
        "--clients",
        3,
        "--rounds",
        10,
        "--batch-size",
        4,
        "--workers",
        1,
        "--lr",
        0.01,
    ]
    assert called(capsys, "run", *words, "--algorithm", "fedper", "--out", run).code == 0
    texts, labels = data.test.x[:6], names[data.test.y[:6]]
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    rows = [f"{text},{label}" for text, label in zip(texts, labels, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["text,label", *rows]))

    (tmp_path / "gap.csv").write_text(f"text,label\n?,{labels[0]}\n")
    refused = called(capsys, "predict", run, "--client", 0, "--data", tmp_path / "gap.csv")
    assert (refused.code, "values are missing: text 1, first in row 1" in refused.err) == (2, True)

    expected = copfl.load(run, 0).predict([str(text) for text in texts])
    lines = called(capsys, "predict", run, "--client", 0, "--data", tmp_path / "lines.txt").out.splitlines()
    assert [line.split("\t")[1] for line in lines] == expected.tolist()
    one = called(capsys, "predict", run, "--client", 0, "--sentence", texts[0]).out
    assert one.split("\t")[:2] == lines[0].split("\t")[:2]
    called(
        capsys, "predict", run, "--client", 0, "--data", tmp_path / "lines.txt", "--out", tmp_path / "a.csv"
    )
    answers = (tmp_path / "a.csv").read_text().splitlines()
    assert answers[0] == "row,prediction,probability_balance,probability_card,probability_money"
    assert [line.split(",")[1] for line in answers[1:]] == expected.tolist()
    table = called(capsys, "predict", run, "--client", 0, "--data", tmp_path / "table.csv")
    right = np.mean(expected == labels)
    assert f"accuracy {100 * right:.1f} % of 6 samples" in table.err
    both = called(capsys, "predict", run, "--client", 0)
    assert (both.code, "with --data FILE, or sentences with --sentence" in both.err) == (2, True)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    other = called(capsys, "predict", run, "--client", 0, "--data", tmp_path / "other.csv")
    assert (other.code, "lacks 1 of 1 columns: text; it has a, b" in other.err) == (2, True)


def test_image_files_are_classified(tmp_path: Path) -> None:
    from PIL import Image

    copfl.run("fedavg", model="mlp", clients=2, rounds=1, model_options={"width": 2}, out=tmp_path / "run")
    bundle = copfl.load(tmp_path / "run", 0)
    x = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8)).astype(np.uint8)
    (tmp_path / "images").mkdir()
    for number, image in enumerate(x):
        Image.fromarray(image[0]).save(tmp_path / "images" / f"{number}.png")
    several = bundle.read(tmp_path / "images")
    assert several.y is None
    np.testing.assert_array_equal(several.x, x)
    np.testing.assert_array_equal(bundle.read(tmp_path / "images" / "2.png").x, x[2:])
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="has no images"):
        bundle.read(tmp_path / "none")


def test_a_base_that_is_not_here_is_known_by_its_hash_and_compared_when_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.base(tmp_path)
    here = complete({"model": {"name": f"hf:{folder}"}, "partition": {"name": "iid"}}).tables()
    model = {key: here["model"][key] for key in ("sha256", "task")}
    for name in ("hf:elsewhere", "hf"):  # as an experiment and as its record have it
        there = complete({**here, "model": {"name": name, **model}}).tables()
        assert identity(Run.of(there)) == identity(Run.of(here))
    monkeypatch.setenv("COPFL_MODELS", str(folder.parent))
    options = {**model, "sha256": "0" * 64}
    with pytest.raises(UsageError, match="but this run is of a base with 0000"):
        trained(Path(folder.name), model_options=options)
    assert trained(Path(folder.name), model_options=model).records


# Bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapter", "lora:targets=keys"], "adapter.targets='keys' matches no layer of the model"),
        (["--adapter", "lora", "--freeze", "head"], "would freeze head.bias, which has no pretrained values"),
        (["--set", "model.sha256=abc"], "but this run is of a base with abc; put that one back"),
        (["--train", "tail"], '"tail" matches no parameter of the model. Known: head, body, norms'),
        (["--weights", "absent.pt"], "is no file; it is default, none or the path of a file"),
        (["--set", "model.task=speech"], 'no task "speech"'),
        (["--set", "model.pooling=max"], "model.pooling='max' is no setting"),
    ],
)
def test_bad_input_is_one_paragraph(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "run",
        "--model",
        f"hf:{tiny.base(tmp_path)}",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "out"),
        *words,
    ]
    answer = called(capsys, *words)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sentences_need_a_model_with_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"has sentences, and the model has no tokenizer.*'tokenizer': 'FOLDER'"
    ):
        copfl.run("fedavg", tiny.sentences(), model="mlp", **SMALL)
    net = tiny.bert("BertForSequenceClassification", num_labels=3)
    options = {"tokenizer": str(tiny.base(tmp_path)), "max_length": 4, "train": "head"}
    result = copfl.run("fedavg", tiny.sentences(), model=net, model_options=options, **SMALL)
    assert result.experiment.task.d == 3 * 32 + 3
    assert result.experiment.federation.shape == {"input_ids": (4,), "attention_mask": (4,)}
    with pytest.raises(UsageError, match="max_length=99, but the model takes 16 tokens"):
        trained(tiny.base(tmp_path), model_options={"max_length": 99})
