"""A bundle as an ONNX file: columns, images, arrays or tokens in, classes and probabilities or values out.

Outputs have the names of skl2onnx: label and probabilities; of a regression, values; of survival, risks, or in
discrete time incidences.
"""

import importlib.util
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from copfl.data.samples import CLASSIFICATION, MULTILABEL, by_name, each
from copfl.data.tables.columns import Column, DataTable, floats, words
from copfl.data.tables.encoders import Encoder, encoded
from copfl.errors import EXTRAS, UsageError, library
from copfl.experiment.bundle.base import TOKENIZER
from copfl.experiment.bundle.bundle import Bundle, base_of
from copfl.experiment.export.formats import (
    CHECKED,
    EXAMPLES,
    TOLERANCE,
    about,
    dynamic,
    example,
    exporting,
    quiet,
)
from copfl.files import write_bytes

CORE = "network/"  # before the names of the network's own tensors: a column may have any name
SPLIT = "lower-case text, split by the regular expression \\w+|[^\\w\\s], cut to max_length"
PADDED = "input_ids are padded with 0, and attention_mask is 1 for the others"
TOKEN_RULES = {
    "embedding": f"{SPLIT} (128 if it is 0); a word's token is 1 + zlib.crc32(word in UTF-8) % words; {PADDED}",
    "words": f"{SPLIT} (512 if it is 0); a word's token is 1 + zlib.crc32(word in UTF-8) % words, and that of a "
    "word and the next one 1 + words + zlib.crc32(both with a space between them) % pairs, if pairs is not 0; each "
    f"token once, in ascending order; {PADDED}",
    "causal_cnn": "the bytes of the text in UTF-8, cut to max_length (128 if it is 0), padded with 0; "
    "attention_mask is 1 for bytes",
}


def write(bundle: Bundle, path: Path) -> list[Path]:
    """The file, compared with the model before it is written; beside it, the tokenizer of a base.

    Args:
        bundle: The model.
        path: Of the file.
    """
    for name in EXTRAS["onnx"]:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"ONNX needs {name}; install it with `pip install 'copfl[onnx]'`")
    content = _content(bundle)
    _compare(bundle, content)
    written = [path]
    base = None if bundle.path is None else base_of(bundle.path, bundle.description)
    if base is not None and (base / TOKENIZER).is_dir():
        companion = path.with_name(f"{path.name}.{TOKENIZER}")
        if companion.exists():
            raise UsageError(
                f"{companion} exists already; it is the place of the tokenizer. Name another --out"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(base / TOKENIZER, companion)
        written.append(companion)
    write_bytes(path, content, durable=False)
    return written


def _content(bundle: Bundle) -> bytes:
    """The file: the network as torch exports it, with what comes before and after it."""
    onnx, x = library("onnx"), example(bundle, EXAMPLES)
    given = {"x": each(torch.from_numpy, x)}
    with tempfile.TemporaryDirectory() as folder, quiet(), exporting(
        "torch cannot write this model as ONNX ({}); export as safetensors or torch"
    ):  # fmt: skip
        file = Path(folder) / "model.onnx"
        torch.onnx.export(
            bundle.module,
            (),
            file,
            kwargs=given,
            input_names=list(by_name(x)),
            output_names=["outputs"],
            dynamo=True,
            verbose=False,
            external_data=False,
            dynamic_shapes=dynamic(bundle, given),
        )
        model = onnx.compose.add_prefix(onnx.load(file), CORE)
    graph, network = model.graph, list(model.graph.node)
    columns = bundle.description.input.columns
    before = _before(onnx, graph, columns) if columns else _renamed_inputs(onnx, graph)
    after = _after(onnx, graph, bundle)
    del graph.node[:]
    graph.node.extend([*before, *network, *after])
    del graph.value_info[:]
    if not any(one.domain == "ai.onnx.ml" for one in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    facts = {"copfl": about(bundle.description)}
    if rule := TOKEN_RULES.get(str(bundle.description.model.get("name"))):
        facts["tokens"] = rule
    onnx.helper.set_model_props(model, facts)
    content: bytes = model.SerializeToString()
    return content


def _constant(onnx: Any, graph: Any, name: str, values: Any) -> str:
    """The name of a constant of the graph."""
    if isinstance(values, list) and values and isinstance(values[0], str):
        texts = [value.encode() for value in values]
        tensor = onnx.helper.make_tensor(name, onnx.TensorProto.STRING, [len(texts)], texts)
    else:
        tensor = onnx.numpy_helper.from_array(np.asarray(values), name)
    graph.initializer.append(tensor)
    return name


def _before(onnx: Any, graph: Any, columns: Sequence[Encoder]) -> list[Any]:
    """The nodes from the columns, each an input [n, 1] under its own name, to the features."""
    make, nodes, parts = onnx.helper.make_node, [], []
    features = graph.input[0].name
    del graph.input[:]
    for n, column in enumerate(columns):
        here = f"{CORE}column {n} "
        kind = onnx.TensorProto.STRING if column.categories else onnx.TensorProto.DOUBLE
        graph.input.append(onnx.helper.make_tensor_value_info(column.name, kind, ["samples", 1]))
        if column.categories:
            places = np.arange(len(column.categories), dtype=np.int64)
            nodes.append(
                make(
                    "LabelEncoder", [column.name], [f"{here}place"], domain="ai.onnx.ml",
                    keys_strings=list(column.categories), values_int64s=places.tolist(), default_int64=-1,
                )
            )  # fmt: skip
            known = _constant(onnx, graph, f"{here}known", places[None])
            nodes.append(make("Equal", [f"{here}place", known], [f"{here}is"]))
            nodes.append(make("Cast", [f"{here}is"], [f"{here}feature"], to=onnx.TensorProto.FLOAT))
        else:
            mean, std, zero = (
                _constant(onnx, graph, f"{here}{name}", np.float64(value))
                for name, value in (("mean", column.mean), ("std", column.std), ("zero", 0))
            )
            nodes += [
                make("Sub", [column.name, mean], [f"{here}centred"]),
                make("Div", [f"{here}centred", std], [f"{here}scaled"]),
                make("IsNaN", [f"{here}scaled"], [f"{here}missing"]),
                make("Where", [f"{here}missing", zero, f"{here}scaled"], [f"{here}filled"]),
                make("Cast", [f"{here}filled"], [f"{here}feature"], to=onnx.TensorProto.FLOAT),
            ]
        parts.append(f"{here}feature")
        if column.indicator:
            nodes.append(make("Cast", [f"{here}missing"], [f"{here}indicator"], to=onnx.TensorProto.FLOAT))
            parts.append(f"{here}indicator")
    return [*nodes, make("Concat", parts, [features], axis=1)]


def _renamed_inputs(onnx: Any, graph: Any) -> list[Any]:
    """The inputs of the network under their own names."""
    nodes = []
    for value in graph.input:
        inner, outer = value.name, value.name.removeprefix(CORE)
        nodes.append(onnx.helper.make_node("Identity", [outer], [inner]))
        value.name = outer
    return nodes


def _after(onnx: Any, graph: Any, bundle: Bundle) -> list[Any]:
    """The nodes from the network's output to the outputs of the file."""
    make, found = onnx.helper.make_node, graph.output[0].name
    shape = [d.dim_param or d.dim_value for d in graph.output[0].type.tensor_type.shape.dim]
    kind, output = bundle.description.output.kind, bundle.description.output
    del graph.output[:]
    float_type = onnx.TensorProto.DOUBLE if bundle.description.dtype == "float64" else onnx.TensorProto.FLOAT

    def declare(name: str, element: int, axes: list[Any]) -> None:
        graph.output.append(onnx.helper.make_tensor_value_info(name, element, axes))

    if kind not in (CLASSIFICATION, MULTILABEL):
        of_survival = "incidences" if bundle.task.criterion.cuts else "risks"
        named = "values" if output.is_regression else of_survival if output.is_survival else "probabilities"
        declare(named, float_type, shape)
        return [make("Identity", [found], [graph.output[0].name])]
    nodes = []
    if kind == CLASSIFICATION:
        classes = output.classes
        are_texts = isinstance(classes[0], str)
        names = _constant(
            onnx, graph, f"{CORE}classes", classes if are_texts else np.array(classes, np.int64)
        )
        nodes += [
            make("ArgMax", [found], [f"{CORE}best"], axis=1, keepdims=0),
            make("Gather", [names, f"{CORE}best"], ["label"]),
        ]
        declare("label", onnx.TensorProto.STRING if are_texts else onnx.TensorProto.INT64, shape[:1])
    else:
        half = _constant(onnx, graph, f"{CORE}half", np.array(0.5, bundle.description.dtype))
        nodes += [
            make("Greater", [found, half], [f"{CORE}above"]),
            make("Cast", [f"{CORE}above"], ["label"], to=onnx.TensorProto.INT64),
        ]
        declare("label", onnx.TensorProto.INT64, shape)
    declare("probabilities", float_type, shape)
    return [*nodes, make("Identity", [found], ["probabilities"])]


def _compare(bundle: Bundle, content: bytes) -> None:
    """UsageError if the file's outputs differ from the model's."""
    from copfl.core.evaluation import on_host_arrays
    from copfl.measures.calibration import tempered

    runtime, columns = library("onnxruntime"), bundle.description.input.columns
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    if columns:
        rows = _rows(columns)
        x: Any = encoded(columns, rows)
        feed = {c.name: _column(c, rows.columns[c.name]) for c in columns}
    else:
        x = example(bundle, CHECKED)
        feed = by_name(x)
    found = session.run(None, feed)[-1]
    with torch.no_grad():
        predicted = bundle.task.predict(bundle.model, each(torch.from_numpy, x))
    own, _ = on_host_arrays(bundle.task, predicted, torch.zeros(0))
    if bundle.task.criterion.kind == "next_token":
        own = np.exp(own)
    own = tempered(own, bundle.description.output.temperature)
    difference = float(np.abs(found.reshape(own.shape) - own).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(own).max())):
        problem = f"the ONNX file's outputs differ from the model's by {difference:.2g}"
        raise UsageError(f"{problem}; export as safetensors or torch")


def _rows(encoders: Sequence[Encoder]) -> DataTable:
    """Rows to compare on: numbers around the mean, all categories, unknown ones, and missing values."""
    rng = np.random.default_rng(0)
    columns: dict[str, list[Any]] = {}
    for encoder in encoders:
        if encoder.categories:
            cells: list[Any] = rng.choice([*encoder.categories, "unknown?"], CHECKED).tolist()
        else:
            cells = (encoder.mean + encoder.std * rng.normal(size=CHECKED)).tolist()
        columns[encoder.name] = [None, *cells[1:]]
    return DataTable.of(columns)


def _column(encoder: Encoder, column: Column) -> NDArray[Any]:
    """A column as the file takes it: nan and the empty text are missing."""
    if encoder.categories:
        return np.array([["" if text is None else text] for text in words(column)], dtype=object)
    return floats(column)[:, None]
