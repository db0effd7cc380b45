"""A bundle as a model of MLflow: `mlflow models serve`, `mlflow.pyfunc.load_model`. Nothing is unpickled.

MLmodel            the python_function flavour, with this module as its loader, and the signature
bundle/            the bundle itself
requirements.txt   the version of copfl that wrote it, with the extras that its model needs
python_env.yaml    the same for environments that MLflow builds
"""

import json
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from copfl import __version__
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN
from copfl.errors import UsageError
from copfl.experiment.bundle.bundle import Bundle
from copfl.experiment.bundle.description import TABLE, TEXT, Description, own_code
from copfl.experiment.loading import load

if TYPE_CHECKING:
    import pandas as pd

BUNDLE = "bundle"
MLMODEL = """flavors:
  python_function:
    data: {bundle}
    env:
      virtualenv: python_env.yaml
    loader_module: {loader}
    python_version: {python}
signature:
  inputs: {inputs}
  outputs: {outputs}
  params: null
"""
ENVIRONMENT = """python: {python}
dependencies:
- -r requirements.txt
"""


def write(bundle: Bundle, path: Path) -> Path:
    """The folder; it must not exist.

    Args:
        bundle: The model.
        path: Of the new folder.
    """
    facts = bundle.description
    if facts.output.kind == NEXT_TOKEN:
        raise UsageError(
            "the model predicts the next token, which MLflow's python_function has no signature for"
        )
    if path.exists():
        raise UsageError(f"{path} exists already; name a new folder with --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        folder = Path(temporary) / path.name  # with the usual rights; a temporary folder is private
        folder.mkdir()
        bundle.save(folder / BUNDLE)
        python = platform.python_version()
        content = MLMODEL.format(
            bundle=BUNDLE,
            loader=__name__,
            python=python,
            inputs=_quoted(inputs(facts)),
            outputs=_quoted(outputs(facts)),
        )
        (folder / "MLmodel").write_text(content, encoding="utf-8")
        (folder / "requirements.txt").write_text("\n".join(requirements(facts)) + "\n", encoding="utf-8")
        (folder / "python_env.yaml").write_text(ENVIRONMENT.format(python=python), encoding="utf-8")
        shutil.move(folder, path)
    return path


def _quoted(schema: list[dict[str, Any]]) -> str:
    """A schema as MLflow writes it: JSON within a text of YAML, of which a JSON text is one."""
    return json.dumps(json.dumps(schema, ensure_ascii=False), ensure_ascii=False)


def inputs(facts: Description) -> list[dict[str, Any]]:
    """The columns of a table or of texts, or the arrays of one sample."""
    given = facts.input
    if given.kind == TABLE:
        return [
            {"type": "string" if column.categories else "double", "name": column.name, "required": True}
            for column in given.columns
        ]
    if given.kind == TEXT:
        return [{"type": "string", "name": str(given.text), "required": True}]
    single = given.arrays.keys() == {"x"}
    return [
        {
            "type": "tensor",
            "tensor-spec": {"dtype": array.dtype, "shape": [-1, *array.shape]},
            **({} if single else {"name": name}),
        }
        for name, array in given.arrays.items()
    ]


def outputs(facts: Description) -> list[dict[str, Any]]:
    """The columns of `Bundle.columns`."""
    output = facts.output
    if output.is_regression:
        names = ["prediction"] if output.count == 1 else [f"prediction_{name}" for name in output.names]
        columns = dict.fromkeys(names, "double")
    elif output.is_survival:
        columns = {"prediction": "double"}
    else:
        is_number = all(isinstance(name, int) for name in output.classes)
        columns = {"prediction": "long" if is_number else "string"}
        if output.kind != CLASSIFICATION:
            columns = {f"prediction_{name}": "long" for name in output.names}
        columns |= {f"probability_{name}": "double" for name in output.names}
    return [{"type": kind, "name": name, "required": True} for name, kind in columns.items()]


def requirements(facts: Description) -> list[str]:
    """What serving installs; code of the user's own, which the bundle lacks, as a remark."""
    name = str(facts.model.get("name", ""))
    extras = ["adapters"] if name.startswith("hf:") or facts.adapter else []
    extras += ["vision"] if name.startswith(("torchvision:", "timm:")) else []
    chosen = f"[{','.join(extras)}]" if extras else ""
    code = [
        f"# and the package of {reference}, named in the variable COPFL_CODE={reference.partition(':')[0]}"
        for reference in (*own_code(facts.model), *own_code(facts.task))
    ]
    return [f"copfl{chosen}=={__version__}", *code]


class ServedBundle:
    """What MLflow calls."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> "pd.DataFrame":
        """A row per sample with the columns of `copfl predict --json`."""
        import pandas as pd

        bundle = self.bundle
        x = bundle.preparation.of(model_input).x
        return pd.DataFrame(bundle.columns(bundle.outputs(x)))


def _load_pyfunc(path: str) -> ServedBundle:
    """MLflow's entry point: the model in the folder `data` of MLmodel.

    MLmodel is a file of the folder and names no code. Who serves a model with code of its author names the modules
    in the variable COPFL_CODE, separated by commas.
    """
    return ServedBundle(load(path, code=[m for m in os.environ.get("COPFL_CODE", "").split(",") if m]))
