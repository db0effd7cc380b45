"""Pretrained models of transformers, torchvision and timm, as modules that map samples to logits.

A base is identified by the SHA-256 of its files. The libraries are imported only where a model needs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl import foreign
from copfl.errors import UsageError, library, one_of, raised_as
from copfl.kernels.draws import seeded
from copfl.kernels.modules import logits_of

SOURCES = ("hf", "torchvision", "timm")
TASKS = {
    "embedding": "AutoModel",  # without a head: the mean over the tokens, and a new linear head
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "image": "AutoModelForImageClassification",
    "causal": "AutoModelForCausalLM",
}
ARCHITECTURES = {  # the end of a class's name in config.json
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForImageClassification": "image",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "sequence",
    "ForPreTraining": "sequence",
}
HUB_FILES = ("*.json", "*.txt", "*.model", "*.safetensors")


class Pretrained(nn.Module):
    """A model of another library that is called with a batch of samples and returns logits.

    The arrays of a dict become keyword arguments. The attention mask is made here, in the form that is added
    to the scores: the library's own conversion depends on values, which vmap and CUDA graphs do not allow.
    """

    def __init__(self, net: nn.Module, head: nn.Module | None = None, *, size: int = 0) -> None:
        super().__init__()
        self.net = net
        self.head = head  # over the mean of the tokens; None: the model has its own
        self.size = size  # images are resized to this many pixels; 0: they stay as they are
        self.dtype = _dtype_of(net)  # kept here: the batched form of a model has no parameters
        self.mask = "plain"  # or "all", "causal": see additive_mask
        self.positions = "position_ids" in inspect.signature(net.forward).parameters
        self.fresh: tuple[str, ...] = ()  # parameters without pretrained values
        # Mean and deviation of the channels that the weights were trained with; None: those of the data set.
        self.normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        self.trains_head = True  # beside an adapter; that of a language model stays as it is
        self.evaluated: tuple[str, ...] = ()  # frozen modules without dropout: in evaluation mode, always

    def forward(self, x: Tensor | dict[str, Tensor]) -> Tensor:
        if isinstance(x, Tensor):
            return logits_of(self.net(self._image(x)))
        seen, inputs = x.get("attention_mask"), dict(x)
        if seen is not None and self.mask != "plain":
            inputs["attention_mask"] = additive_mask(seen, self.dtype, causal=self.mask == "causal")
        if self.mask == "causal" and self.positions:  # of every sample: the first axis batches clients
            ids = x["input_ids"]
            inputs.setdefault(
                "position_ids", torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
            )
        output = self.net(**inputs)
        if self.head is None:
            return logits_of(output)
        tokens: Tensor = output.last_hidden_state  # [b, length, width]
        weight = torch.ones_like(tokens[..., :1]) if seen is None else seen[..., None].to(tokens.dtype)
        logits: Tensor = self.head((tokens * weight).sum(1) / weight.sum(1).clamp(min=1))
        return logits

    def train(self, mode: bool = True) -> Pretrained:
        super().train(mode)
        for path in self.evaluated:
            self.get_submodule(path).eval()
        return self

    def _image(self, x: Tensor) -> Tensor:
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        if self.size and tuple(x.shape[2:]) != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        return x

    def _apply(self, fn: Any, recurse: bool = True) -> Pretrained:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = _dtype_of(self.net)
        return self


def _dtype_of(net: nn.Module) -> torch.dtype:
    return next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)


def wrapped(model: nn.Module) -> nn.Module:
    """A model of transformers or peft as `Pretrained`; any other module unchanged."""
    modules = {c.__module__.partition(".")[0] for c in type(model).__mro__}
    if isinstance(model, Pretrained) or not modules & {"transformers", "peft"}:
        return model
    result = Pretrained(model)
    result.mask = mask_of(result)
    return result


# Attention masks, in a form that vmap and CUDA graphs allow


def additive_mask(seen: Tensor, dtype: torch.dtype, causal: bool) -> Tensor:
    """[b, 1, 1 or length, length]: 0 where a token may be attended to, the lowest number elsewhere."""
    allowed = seen[:, None, None, :] > 0
    if causal:
        length = seen.shape[1]
        allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


@torch.no_grad()
def mask_of(model: Pretrained) -> str:
    """The mask that gives the outputs of the library's own; "plain" where none does."""
    embeddings = getattr(model.net, "get_input_embeddings", lambda: None)()
    if not isinstance(embeddings, nn.Embedding):
        return "plain"
    ids = torch.arange(3, 11).view(2, 4) % embeddings.num_embeddings
    seen = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    sample = {
        "input_ids": ids.to(embeddings.weight.device),
        "attention_mask": seen.to(embeddings.weight.device),
    }
    training = model.training
    model.eval()
    try:
        expected = _valid(model(sample), seen)
        for model.mask in ("all", "causal"):
            with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError):
                if torch.allclose(_valid(model(sample), seen), expected, rtol=1e-4, atol=1e-5):
                    return str(model.mask)
        return "plain"
    finally:
        model.mask = "plain"
        model.train(training)


def _valid(logits: Tensor, seen: Tensor) -> Tensor:
    """The logits of tokens that are no padding; those of whole sequences unchanged."""
    return logits[seen.to(logits.device) > 0] if logits.dim() == 3 else logits


# Bases: files and their hash


class Base(NamedTuple):
    """The files of a pretrained model."""

    source: str  # of SOURCES
    name: str  # of the architecture in its library; of hf: the folder
    config: Path | None  # None where the name is enough
    weights: tuple[Path, ...]  # empty: initial weights from the seed

    @property
    def sha256(self) -> str | None:
        """Of the only file, or of the hashes of several; None without weights."""
        files = [file for file in (self.config, *self.weights) if file is not None]
        if not self.weights:
            return None
        digests = [_file_sha256(file, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


@lru_cache(maxsize=64)
def _file_sha256(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_pretrained(name: str) -> bool:
    """Whether the name of a model begins with one of SOURCES."""
    source, colon, rest = name.partition(":")
    return source in SOURCES and bool(colon and rest)


def base_of(name: str, weights: str = "default") -> Base:
    """The base with this name: its folder or file, fetched from the hub where it is not here."""
    source, _, rest = name.partition(":")
    file = None if weights in ("default", "none") else located(weights) or Path(weights)
    if file is not None and not file.is_file():
        raise UsageError(f'model.weights="{weights}" is no file; it is default, none or the path of a file')
    if source == "hf":
        folder = located(rest) or _snapshot(rest)
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} has no config.json; hf:FOLDER is a folder that transformers saved")
        weight_files = () if weights == "none" else (file,) if file is not None else _weight_files(folder)
        return Base(source, str(folder), folder / "config.json", tuple(weight_files))
    if not re.fullmatch(r"[\w.]+", rest):  # timm would fetch "hf-hub:NAME", and read "local-dir:PATH"
        raise UsageError(
            f"{source}:{rest} is no model of {source}; its names have letters, digits, _ and . alone"
        )
    if weights == "default":
        file = _published(source, rest)
    return Base(source, rest, None, () if file is None else (file,))


def located(name: str) -> Path | None:
    """The folder or file of this name, here or in COPFL_MODELS, where each machine has its bases."""
    places = [Path(name), *(Path(place) / name for place in [os.environ.get("COPFL_MODELS")] if place)]
    return next((place for place in places if name and place.exists()), None)


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise UsageError(
            f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin. Take a complete copy "
            "of the model, or start from random weights with --weights none"
        )
    return files


def _snapshot(name: str) -> Path:
    """The folder of a model in the hub's cache, fetched if it is not there; NAME@REVISION pins a version."""
    hub = library("huggingface_hub")
    repository, _, revision = name.partition("@")
    options: dict[str, Any] = {"repo_id": repository, "revision": revision or None}
    problem: Exception | None = None
    for local in (True, False):
        try:
            folder = Path(hub.snapshot_download(allow_patterns=HUB_FILES, local_files_only=local, **options))
            if not local and not list(folder.glob("*.safetensors")):
                hub.snapshot_download(allow_patterns=["pytorch_model*.bin"], **options)
        except Exception as error:  # of the hub, of the network, of a name that is none
            problem = error
        else:
            return folder
    why = " ".join(str(problem).split())[:200]
    raise UsageError(
        f'hf:{name}: there is no folder "{name}", the hub\'s cache does not have it, and it cannot be '
        f"fetched: {why}. Give the path of a folder with config.json, the weights and the tokenizer"
    )


def _published(source: str, name: str) -> Path:
    """The file of the library's own weights, fetched if it is not here."""
    if source == "torchvision":
        models = library("torchvision.models")
        with usage_errors(f"torchvision:{name}", "--weights FILE, or --weights none for random ones"):
            url: str = models.get_model_weights(name).DEFAULT.url
            path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
            if not path.is_file():
                torch.hub.load_state_dict_from_url(url, check_hash=True, progress=False, weights_only=True)
        return path
    timm, hub = library("timm"), library("huggingface_hub")
    with usage_errors(f"timm:{name}", "--weights FILE, or --weights none for random ones"):
        repository = timm.get_pretrained_cfg(name).hf_hub_id
        return Path(hub.hf_hub_download(repository, "model.safetensors"))


def tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; a torch file may contain nothing else."""
    with usage_errors(str(path), "a .safetensors file, or a state dict that torch.save wrote"):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors: dict[str, Tensor] = load_file(path)
            return tensors
        content = torch.load(path, map_location="cpu", weights_only=True)
        content = content.get("state_dict", content)
        return {name: t for name, t in content.items() if isinstance(t, Tensor)}


# Models


def build(
    name: str, classes: int, seed: int, *, task: str = "auto", weights: str = "default", size: int = 0
) -> Pretrained:
    """The model for this many classes; what has no pretrained values is initialised from the seed.

    `task` is of hf models alone: see TASKS. `size` resizes images, in pixels.
    """
    base = base_of(name, weights)
    with seeded(seed):
        if base.source == "hf":
            return _hugging_face(base, task_of(base, task), classes, size)
        return _image_classifier(base, classes, size)


def task_of(base: Base, task: str = "auto") -> str:
    """The task of an hf model, by default the one it was made for."""
    if task != "auto":
        one_of(TASKS, task=task)
        return task
    config = read_json(base.config)
    for architecture in config.get("architectures") or ():
        for ending, meant in ARCHITECTURES.items():
            if str(architecture).endswith(ending):
                return meant
    return "image" if "image_size" in config else "embedding"


def read_json(path: Path | None) -> dict[str, Any]:
    """The content of a JSON file, {} where there is none."""
    if path is None or not path.is_file():
        return {}
    with raised_as(
        UsageError, f"{path} is damaged: it is no valid JSON ({{}}); take another copy", ValueError
    ):
        content: dict[str, Any] = foreign.read_json(path)
    return content


def _hugging_face(base: Base, task: str, classes: int, size: int) -> Pretrained:
    transformers = library("transformers")
    folder = Path(base.name)
    # Eager attention: its rounding does not depend on the shape of the mask, and vmap has a rule for it.
    options: dict[str, Any] = {"attn_implementation": "eager", "trust_remote_code": False}
    labels = {} if task in ("embedding", "causal") else {"num_labels": classes}
    with (
        quiet(),
        usage_errors(f"hf:{base.name}", f"a model for the task {task}; other tasks: {', '.join(TASKS)}"),
    ):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, **labels)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = getattr(config, "eos_token_id", None)
        factory = getattr(transformers, TASKS[task])
        if base.weights and base.weights[0].parent == folder:
            net, loading = factory.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
                **options,
            )
            fresh = sorted({*loading["missing_keys"], *(key[0] for key in loading["mismatched_keys"])})
        else:
            net = factory.from_config(config, **options)
            fresh = _filled(net, base.weights[0]) if base.weights else []
    head = nn.Linear(config.hidden_size, classes) if task == "embedding" else None
    size = size or int(getattr(config, "image_size", 0) or 0) if task == "image" else 0
    model = Pretrained(net, head, size=size)
    model.fresh = _checked_fresh(base, net, fresh) + (("head.weight", "head.bias") if head else ())
    model.trains_head = task != "causal"
    pixels = read_json(folder / "preprocessor_config.json")
    if task == "image" and base.weights and "image_mean" in pixels and "image_std" in pixels:
        model.normalization = tuple(pixels["image_mean"]), tuple(pixels["image_std"])
    if task != "image":
        model.mask = mask_of(model)
    return model


def _image_classifier(base: Base, classes: int, size: int) -> Pretrained:
    if base.source == "torchvision":
        models = library("torchvision.models")
        with usage_errors(f"torchvision:{base.name}", "one of torchvision.models.list_models()"):
            net = models.get_model(base.name, weights=None, num_classes=classes)
            pixels = models.get_model_weights(base.name).DEFAULT.transforms()
    else:
        timm = library("timm")
        with usage_errors(f"timm:{base.name}", "one of timm.list_models()"):
            net = timm.create_model(base.name, pretrained=False, num_classes=classes)
            pixels = timm.get_pretrained_cfg(base.name)
    model = Pretrained(net, size=size)
    if base.weights:
        model.fresh = _checked_fresh(base, net, _filled(net, base.weights[0]))
        mean, std = getattr(pixels, "mean", None), getattr(pixels, "std", None)
        model.normalization = (tuple(mean), tuple(std)) if mean and std else None
    return model


def _filled(net: nn.Module, path: Path) -> list[str]:
    """The names of the parameters that the file does not have; the others are filled from it, in place."""
    own, given = net.state_dict(), tensors_in(path)
    fitting = {name: t for name, t in given.items() if name in own and own[name].shape == t.shape}
    net.load_state_dict(fitting, strict=False)
    return [name for name in own if name not in fitting and not name.endswith("num_batches_tracked")]


def _checked_fresh(base: Base, net: nn.Module, fresh: list[str]) -> tuple[str, ...]:
    """Their names in `Pretrained`; UsageError if more than a head or a pooling layer lacks values."""
    if base.source == "hf":
        prefix = getattr(net, "base_model_prefix", "")
        body = f"{prefix}." if hasattr(net, prefix) else ""
        lacking = [name for name in fresh if name.startswith(body) and "pooler" not in name]
    else:
        linears = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
        lacking = [name for name in fresh if not name.startswith(tuple(f"{name}." for name in linears[-1:]))]
    if base.weights and lacking:
        raise UsageError(
            f"the weights of {base.source}:{base.name} do not fit: {base.weights[0].name} has no values for "
            f"{len(lacking)} tensors of the model, such as {lacking[0]}; take the file of this model"
        )
    return tuple(f"net.{name}" for name in fresh)


# Other libraries


@contextlib.contextmanager
def usage_errors(what: str, allowed: str) -> Iterator[None]:
    """UsageError in place of an error of another library."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # transformers hides it: "Could not import module 'BertModel'"
            cause = cause.__cause__
        why = " ".join(str(cause).split())[:200]
        raise UsageError(f"{what} cannot be loaded: {type(cause).__name__}: {why}. Use {allowed}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the library's reports of new heads and without its progress bars."""
    logging = library("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
