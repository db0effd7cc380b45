"""Image classifiers of torchvision and timm; they are not installed with the tests, and then these are skipped."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from copfl.errors import UsageError
from copfl.kernels.modules import for_tasks
from copfl.models import adapters, pretrained
from tests import vision as vision

with warnings.catch_warnings(action="ignore"):
    torchvision: Any = pytest.importorskip("torchvision")
    timm: Any = pytest.importorskip("timm")

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # what the weights of both expect


@pytest.mark.job
@pytest.mark.parametrize("name", ["torchvision:mobilenet_v3_small", "timm:test_efficientnet"])
def test_a_file_of_weights_and_a_new_head(name: str, tmp_path: Path) -> None:
    source, _, architecture = name.partition(":")
    if source == "timm":
        own = timm.create_model(architecture, pretrained=False)
    else:
        own = torchvision.models.get_model(architecture, weights=None)
    file = tmp_path / "weights.pt"
    torch.save({"state_dict": own.state_dict()}, file)
    model = pretrained.build(name, 10, seed=0, weights=str(file), size=32).eval()
    assert model.normalization == IMAGENET
    assert len(model.fresh) == 2
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(for_tasks(copy.deepcopy(model)).eval()(images), model(images))
    after = model.net.state_dict()
    assert all(
        torch.equal(t, after[key]) for key, t in own.state_dict().items() if f"net.{key}" not in model.fresh
    )
    again = pretrained.build(name, 10, seed=0, weights=str(file), size=32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    pointwise = adapters.target_modules(model, "1x1")
    adapters.lora(model, r=2, targets="1x1")
    adapters.select(model, adapted=True)
    trained = [key for key, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * len(pointwise) + 2


def test_without_weights_the_normalisation_is_that_of_the_data() -> None:
    assert pretrained.build("torchvision:mobilenet_v3_small", 3, seed=0, weights="none").normalization is None


def test_files_and_names_that_do_not_fit(tmp_path: Path) -> None:
    torch.save({"features.0.weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"do not fit: other.pt has no values for \d+ tensors"):
        pretrained.build("torchvision:mobilenet_v3_small", 3, seed=0, weights=str(tmp_path / "other.pt"))
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(
        UsageError, match=r"text.pt cannot be loaded: .* Use a .safetensors file, or a state dict"
    ):
        pretrained.build("torchvision:mobilenet_v3_small", 3, seed=0, weights=str(tmp_path / "text.pt"))
    for name in ("torchvision:mobilnet", "timm:mobilnet"):
        with pytest.raises(UsageError, match=f"{name} cannot be loaded: .*list_models"):
            pretrained.build(name, 3, seed=0, weights="none")
