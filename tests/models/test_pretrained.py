from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from copfl.errors import UsageError
from copfl.models import pretrained
from copfl.models.text import Tokenizer
from tests.models import tiny

BATCH = {
    "input_ids": torch.tensor([[2, 3, 4, 5], [6, 7, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}


def test_an_additive_mask_by_hand() -> None:
    low = torch.finfo(torch.float32).min
    seen = torch.tensor([[1, 1, 0]])
    assert pretrained.additive_mask(seen, torch.float32, causal=False).tolist() == [[[[0, 0, low]]]]
    causal = pretrained.additive_mask(seen, torch.float32, causal=True)
    assert causal.tolist() == [[[[0, low, low], [0, 0, low], [0, 0, low]]]]


def test_a_sentence_encoder_gets_mean_pooling_and_a_head(tmp_path: Path) -> None:
    folder = tiny.base(tmp_path)
    model = pretrained.build(f"hf:{folder}", 3, seed=0).eval()
    assert (model.mask, model.fresh) == ("all", ("head.weight", "head.bias"))
    net = tiny.transformers.AutoModel.from_pretrained(folder).eval()
    tokens = net(**BATCH).last_hidden_state
    pooled = torch.stack([tokens[0].mean(0), tokens[1, :2].mean(0)])
    assert model.head is not None
    torch.testing.assert_close(model(BATCH), model.head(pooled), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_a_classifier_equals_the_librarys_own(kind: str, tmp_path: Path) -> None:
    folder = tiny.base(tmp_path, kind)
    model = pretrained.build(f"hf:{folder}", 2, seed=0).eval()  # two labels, as it was saved
    own = getattr(tiny.transformers, kind).from_pretrained(folder).eval()
    valid = BATCH["attention_mask"] > 0
    one, other = model(BATCH), own(**BATCH).logits
    one, other = (t[valid] if t.dim() == 3 else t for t in (one, other))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert model.fresh == ()
    more = pretrained.build(f"hf:{folder}", 5, seed=0)
    assert more.fresh == ("net.classifier.bias", "net.classifier.weight")
    assert more(BATCH).shape[-1] == 5


def test_a_causal_model_gets_a_causal_mask(tmp_path: Path) -> None:
    config = tiny.transformers.GPT2Config(
        vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=16, eos_token_id=0, bos_token_id=0
    )
    net = tiny.transformers.GPT2LMHeadModel(config).eval()
    net.save_pretrained(tmp_path)
    model = pretrained.build(f"hf:{tmp_path}", 0, seed=0).eval()
    assert model.mask in ("all", "causal")  # transformers 5.0 adds the causal part by itself
    valid = BATCH["attention_mask"] > 0
    torch.testing.assert_close(model(BATCH)[valid], net(**BATCH).logits[valid], rtol=1e-4, atol=1e-5)


def test_an_image_classifier_has_its_size_and_normalisation(tmp_path: Path) -> None:
    options = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tiny.transformers.ViTConfig(image_size=8, patch_size=4, **options)
    tiny.transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}'
    )
    model = pretrained.build(f"hf:{tmp_path}", 4, seed=0)
    assert model.normalization == ((0.5, 0.5, 0.5), (1, 1, 1))
    assert model(torch.zeros(2, 1, 5, 7)).shape == (2, 4)  # grey, and of another size


def test_the_seed_determines_what_has_no_pretrained_values(tmp_path: Path) -> None:
    name = f"hf:{tiny.base(tmp_path)}"
    first, same, other = (pretrained.build(name, 3, seed).get_parameter("head.weight") for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    words = "net.embeddings.word_embeddings.weight"
    a, b = (pretrained.build(name, 3, seed, weights="none").get_parameter(words) for seed in (0, 1))
    assert not torch.equal(a, b)


def test_models_of_the_libraries_are_wrapped_and_others_are_not(tmp_path: Path) -> None:
    config = tiny.peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    adapted = tiny.peft.get_peft_model(tiny.bert("BertForSequenceClassification"), config)
    model = pretrained.wrapped(adapted)
    assert isinstance(model, pretrained.Pretrained)
    assert model.mask == "all"
    assert pretrained.wrapped(model) is model
    plain = torch.nn.Linear(2, 2)
    assert pretrained.wrapped(plain) is plain
    with pytest.raises(UsageError, match=r"the model returned BaseModelOutput.* take a model with a head"):
        pretrained.wrapped(tiny.bert("BertModel"))


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    one, other = (pretrained.base_of(f"hf:{tiny.base(tmp_path, seed=seed)}").sha256 for seed in (0, 1))
    assert one != other
    assert pretrained.base_of(f"hf:{tiny.base(tmp_path)}", "none").sha256 is None
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny.base(tmp_path).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert pretrained.base_of(f"hf:{copy}").sha256 == one
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("gelu", "relu"))
    assert pretrained.base_of(f"hf:{copy}").sha256 not in (None, one)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hf:EMPTY", {}, "has no config.json"),
        ("hf:BASE", {"weights": "absent.pt"}, "is no file; it is default, none or the path of a file"),
        ("hf:BASE", {"task": "speech"}, 'no task "speech".*Known: .*sequence'),
        ("hf:BASE", {"task": "causal", "weights": "OTHER"}, "do not fit: .* take the file of this model"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    name: str, options: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    torch.save({"a": torch.zeros(2)}, tmp_path / "other.pt")
    places = {"EMPTY": tmp_path / "empty", "BASE": tiny.base(tmp_path), "OTHER": tmp_path / "other.pt"}
    for word, path in places.items():
        name = name.replace(word, str(path))
        options = {key: value.replace(word, str(path)) for key, value in options.items()}
    with pytest.raises(UsageError, match=message):
        pretrained.build(name, 3, seed=0, **options)  # type: ignore[arg-type]


def test_a_model_without_weights_says_how_to_start(tmp_path: Path) -> None:
    folder = tiny.base(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no weights.*--weights none"):
        pretrained.build(f"hf:{folder}", 3, seed=0)


# Sentences


def test_tokens_by_hand(tmp_path: Path) -> None:
    tokens = Tokenizer(tiny.base(tmp_path))(["card lost", "my", "zebra is up"])
    assert tokens["input_ids"].tolist() == [[2, 3, 0], [8, 0, 0], [1, 7, 12]]
    assert tokens["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert Tokenizer(tiny.base(tmp_path), max_length=2)(["my card lost"])["input_ids"].tolist() == [[8, 2]]


def test_tokens_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, cache = Tokenizer(tiny.base(tmp_path)), tmp_path / "cache"
    first = tokenizer.cached(["card lost"], cache)
    monkeypatch.setattr(tokenizer, "tokenizer", None)  # it is not asked again
    again = tokenizer.cached(["card lost"], cache)
    assert {name: a.tolist() for name, a in first.items()} == {name: a.tolist() for name, a in again.items()}
    assert len(list((cache / "tokens").iterdir())) == 1
    other = Tokenizer(tiny.base(tmp_path), max_length=1)
    assert other.fingerprint(["card lost"]) != tokenizer.fingerprint(["card lost"])


def test_long_sentences_and_other_tokenizers_are_refused(tmp_path: Path) -> None:
    folder = tiny.base(tmp_path)
    long = "card " * 17
    with pytest.raises(
        UsageError, match=r"1 of 2 sentences have more than the 16 .*longest 17.*max_length=16"
    ):
        Tokenizer(folder)([long, "card"])
    assert Tokenizer(folder, max_length=16)([long])["input_ids"].shape == (1, 16)
    with pytest.raises(UsageError, match="max_length=17, but the model takes 16"):
        Tokenizer(folder, max_length=17)([long])
    tiny.save_tokenizer(tmp_path / "large", [f"word{n}" for n in range(40)])
    with pytest.raises(UsageError, match=r"does not fit the model: it has a token 41, .* 20 words"):
        Tokenizer(tmp_path / "large", model=folder)(["word39"])
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=r"the tokenizer in .* cannot be loaded"):
        Tokenizer(tmp_path / "none")


# The hub


def test_a_name_is_taken_from_the_hubs_cache_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def download(*, repo_id: str, revision: str | None, local_files_only: bool = False, **_: object) -> str:
        asked.append((repo_id, revision, local_files_only))
        if local_files_only and repo_id != "cached/model":
            raise FileNotFoundError("not in the cache")
        if repo_id == "absent/model":
            raise ConnectionError("the hub cannot be reached")
        return str(tiny.base(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert pretrained.base_of("hf:cached/model").name == str(tiny.base(tmp_path))
    assert (
        pretrained.base_of("hf:other/model@abc").sha256
        == pretrained.base_of(f"hf:{tiny.base(tmp_path)}").sha256
    )
    assert asked == [
        ("cached/model", None, True),
        ("other/model", "abc", True),
        ("other/model", "abc", False),
    ]
    with pytest.raises(
        UsageError, match=r'no folder "absent/model", .* cannot be fetched: the hub cannot be reached'
    ):
        pretrained.base_of("hf:absent/model")


def test_bases_in_the_folder_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.base(tmp_path)
    monkeypatch.setenv("COPFL_MODELS", str(tmp_path))
    assert pretrained.base_of(f"hf:{base.name}").name == str(base)


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"timm cannot be imported .* `pip install 'copfl\[vision\]'`"):
        pretrained.build("timm:resnet18", 3, seed=0, weights="none")
