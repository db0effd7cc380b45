from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from copfl import models
from copfl.errors import UsageError
from copfl.models import adapters, pretrained
from tests.models import tiny


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_lora_by_hand() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    x, weight = torch.randn(4, 3), model[0].weight.detach().clone()
    before = model(x)
    adapters.lora(model, r=1, alpha=6, targets="0")
    torch.testing.assert_close(model(x), before)  # B begins at zero
    layer = model[0]
    a, b = torch.tensor([[1.0, 2, 3]]), torch.tensor([[1.0], [-1]])
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = a, b
    torch.testing.assert_close(layer(x), x @ (weight + 6 * b @ a).t())


def test_lora_on_convolutions_of_one_pixel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(4, 2))
    x = torch.randn(2, 3, 3, 3)
    before = model(x)
    assert adapters.target_modules(model, "auto") == adapters.target_modules(model, "1x1") == ["0"]
    torch.testing.assert_close(adapters.lora(model, r=2)(x), before)


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("auto", 4),
        ("query+value", 4),
        ("query", 2),
        ("*.attention.output.dense", 2),
        ("layer.1.output.dense", 1),
    ],
)
def test_targets(targets: str, count: int) -> None:
    assert len(adapters.target_modules(tiny.bert(), targets)) == count


def test_targets_that_match_nothing_name_what_there_is() -> None:
    with pytest.raises(UsageError, match=r'targets="keys" matches no layer .*\(dense, key, query, value\)'):
        adapters.target_modules(tiny.bert(), "keys")
    with pytest.raises(UsageError, match="it has none"):
        adapters.target_modules(nn.ReLU(), "auto")


def test_with_an_adapter_the_head_is_trained_too(tmp_path: Path) -> None:
    model = pretrained.build(f"hf:{tiny.base(tmp_path)}", 3, seed=0)
    adapters.lora(model, targets="query")
    adapters.select(model, adapted=True)
    query = "net.encoder.layer.{}.attention.self.query.lora_{}.default.weight"
    assert trained(model) == {"head.weight", "head.bias"} | {query.format(n, m) for n in (0, 1) for m in "AB"}
    adapters.select(model, adapted=True, train="norms", freeze="*.lora_A*")
    assert not any("lora_A" in name for name in trained(model))
    assert "net.embeddings.LayerNorm.bias" in trained(model)


def test_parts_and_patterns_of_what_is_trained() -> None:
    def choose(**options: str) -> set[str]:
        model = models.build("cnn", (1, 8, 8), 3, 0, norm="batch")
        adapters.select(model, **options)  # type: ignore[arg-type]
        return trained(model)

    everything = choose()
    assert choose(train="head") == {"head.weight", "head.bias"}
    assert choose(train="head, *.bias") == {name for name in everything if "bias" in name or "head" in name}
    assert choose(freeze="body") == choose(train="head")
    assert choose(train="body") == choose(freeze="head")
    assert choose(train="norms") == {"body.1.weight", "body.1.bias", "body.5.weight", "body.5.bias"}
    assert choose(train="body.1") < choose(train="norms")
    with pytest.raises(
        UsageError, match=r'model.train="head,tail": "tail" matches no parameter.*Known: head'
    ):
        choose(train="head,tail")


def test_a_head_without_pretrained_values_stays_trained(tmp_path: Path) -> None:
    name = f"hf:{tiny.base(tmp_path)}"
    model = pretrained.build(name, 3, seed=0)
    adapters.select(model, train="norms")
    assert {"head.weight", "head.bias"} <= trained(model)
    with pytest.raises(UsageError, match=r"would freeze head.bias, .* no trained head"):
        adapters.select(pretrained.build(name, 3, seed=0), freeze="head")
