"""`copfl predict`, `evaluate`, `export` and `personalize`. Torch loads only when one is called."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

from copfl.cli import options
from copfl.errors import UsageError
from copfl.files import write_bytes

if TYPE_CHECKING:
    from copfl.experiment.bundle.bundle import Bundle, Evaluation


def _chosen(given: options.Given) -> Bundle:
    """The model that the path and the options name."""
    from copfl.experiment.bundle.bundle import load
    from copfl.experiment.bundle.writing import OF_SERVER

    if given.client is not None and given.of_server:
        raise UsageError("name the model: --client NUMBER (or the client's name), or --global, and not both")
    return load(given.bundle, OF_SERVER if given.of_server else given.client)


def _report(notes: list[str]) -> None:
    for note in notes:
        print(f"copfl: warning: {note}", file=sys.stderr)


def export(given: options.Given) -> None:
    """Write a model for other programs, or as a bundle that can be sent."""
    from copfl.experiment.bundle import exporting

    for path in exporting.write(_chosen(given), given.format, given.out):
        print(path)


def predict(given: options.Given) -> None:
    """Predict new samples: a line each with its class and probability, its labels or its values."""
    if (given.data is None) == (not given.sentence):
        raise UsageError("name the samples with --data FILE, or sentences with --sentence, and not both")
    bundle = _chosen(given)
    if given.data is None:
        outputs, score, rest = bundle.outputs(bundle.preparation.tokens(given.sentence)), None, 0
        notes = list[str]()
    else:
        x, y, has_target, notes, *_ = bundle.read(given.data, missing=given.missing)
        outputs = bundle.outputs(x)
        score, rest = None if y is None else bundle.score(outputs[has_target], y), int((~has_target).sum())
    columns, metric = columns_of(bundle, outputs), bundle.task.metrics[0]
    if given.out is not None:
        write_bytes(given.out, _file(bundle, outputs, columns, given.out.suffix), durable=False)
    if given.as_json:
        print(json.dumps({metric.name: score, **columns, "warnings": notes}))
        return
    _report(notes)
    if given.out is None:
        _print(bundle, outputs, columns)
    if score is not None:
        shown = f"{metric.title} {metric.text(score)}{metric.unit} of {len(outputs) - rest} samples"
        print(f"{shown}; {rest} have no target" if rest else shown, file=sys.stderr)


def columns_of(bundle: Bundle, outputs: Any) -> dict[str, list[Any]]:
    """The predictions as columns: prediction, and probability_CLASS of each class.

    Several labels or values are prediction_NAME each.
    """
    output, decided = bundle.description.output, bundle.decided(outputs)
    if decided.ndim == 1:
        columns = {"prediction": decided.tolist()}
    else:
        columns = {f"prediction_{name}": decided[:, n].tolist() for n, name in enumerate(output.names)}
    if not output.is_regression:
        columns |= {f"probability_{name}": outputs[:, n].tolist() for n, name in enumerate(output.names)}
    return columns


def _print(bundle: Bundle, outputs: Any, columns: dict[str, list[Any]]) -> None:
    """A line per sample for readers."""
    shown = {name: values for name, values in columns.items() if name.startswith("prediction")}
    if bundle.description.output.kind == "classification":
        shown["probability"] = outputs.max(1).tolist()
    for n, row in enumerate(zip(*shown.values(), strict=True)):
        print("\t".join([str(n), *(f"{v:.6g}" if isinstance(v, float) else str(v) for v in row)]))


def _file(bundle: Bundle, outputs: Any, columns: dict[str, list[Any]], suffix: str) -> bytes:
    """A .csv file with a row per sample, or an .npz file with the arrays."""
    import numpy as np

    from copfl.tables import Table, as_csv

    if suffix == ".csv":
        rows = [[str(n), *map(str, row)] for n, row in enumerate(zip(*columns.values(), strict=True))]
        return as_csv(Table("", ["row", *columns], rows)).encode()
    if suffix != ".npz":
        raise UsageError(f'predictions are written as .csv or .npz, not as "{suffix}"; name another --out')
    arrays = {"prediction": bundle.decided(outputs), "classes": bundle.classes}
    if not bundle.description.output.is_regression:
        arrays["probability"] = outputs
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def evaluate(given: options.Given) -> None:
    """Evaluate a model on samples with targets: all metrics, the confusion matrix and the calibration."""
    from copfl.errors import DataError

    bundle = _chosen(given)
    x, y, has_target, notes, lacking, _ = bundle.read(given.data, missing=given.missing)
    if y is None:
        raise DataError(f"{given.data} lacks {lacking}, so nothing can be evaluated; see `copfl predict`")
    if rest := int((~has_target).sum()):
        notes.append(f"{rest:,} of {len(has_target):,} samples have no target and are left out")
    _report(notes)
    found = bundle.measured(bundle.outputs(x)[has_target], y)
    if given.as_json:
        print(json.dumps(as_json(found)))
        return
    from copfl.core.metrics import METRICS
    from copfl.tables import Table, as_text

    known = {metric.name: metric for metric in (*METRICS.values(), *bundle.task.metrics)}
    rows = [[known[n].title, f"{known[n].text(value)}{known[n].unit}"] for n, value in found.metrics.items()]
    print(as_text(Table(f"{found.samples:,} samples", ["metric", "value"], rows)))
    if found.confusion is not None:
        names = list(map(str, found.classes))
        cells = [[name, *map(str, row)] for name, row in zip(names, found.confusion.tolist(), strict=True)]
        print(as_text(Table("Samples by class (rows) and predicted class", ["", *names], cells)))
    if found.calibration:
        bins = [
            [f"{b.low:.2f} to {b.high:.2f}", f"{b.samples:,}", f"{b.confidence:.3f}", f"{b.accuracy:.3f}"]
            for b in found.calibration
        ]
        print(as_text(Table("Calibration", ["probability", "samples", "mean", "accuracy"], bins)))


def as_json(found: Evaluation) -> dict[str, Any]:
    """The evaluation as plain values; a metric that the samples do not define is null."""
    from copfl.tables import plain

    content: dict[str, Any] = plain(
        {
            "samples": found.samples,
            "metrics": found.metrics,
            "classes": found.classes,
            "confusion": None if found.confusion is None else found.confusion.tolist(),
            "calibration": [bin._asdict() for bin in found.calibration],
        }
    )
    return content


def personalize(given: options.Given) -> None:
    """Train a model for a new client on its data; start, rate and epochs by validation within them."""
    from copfl.experiment.personalisation import Personalisation

    new = Personalisation.of(given.run)
    if given.out is not None and given.out.exists():
        raise UsageError(f"{given.out} exists already; name a new folder with --out")
    own, test, notes = new.samples(given.data)
    _report(notes)
    fitted = new.fit(own, test, given.epochs, given.lr, given.seed)
    if given.out is not None:
        fitted.bundle.save(given.out)
    metric = fitted.bundle.task.metrics[0]
    if given.as_json:
        content = {{"scores": metric.name}.get(key, key): value for key, value in fitted._asdict().items()}
        del content["bundle"]
        print(json.dumps(content))
        return
    values = (fitted.scores[0], fitted.scores[-1], fitted.alone[-1])
    before, after, alone = (f"{metric.text(value)}{metric.unit}" for value in values)
    print(
        f"{metric.title} {after} on {fitted.test} test samples; training alone: {alone}\n"
        f"start: {fitted.start} ({before}), then {fitted.epochs} epochs on {fitted.train} samples at "
        f"learning rate {fitted.lr:g}{'' if given.out is None else f'; bundle: {given.out}'}"
    )
