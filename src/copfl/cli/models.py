"""`copfl predict`, `evaluate`, `export` and `personalize`. Torch loads only when one is called."""

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from copfl.cli import options
from copfl.cli.options import argument, option
from copfl.errors import UsageError, raised_as
from copfl.experiment.known_runs import check_folder
from copfl.files import write_bytes
from copfl.foreign import printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from copfl.experiment.bundle.bundle import Bundle, Evaluation

BundlePath = Annotated[
    Path, argument("The folder of a bundle, of a run, of a federation's server, or the state-dir of a node.")
]
Missing = Annotated[
    str | None,
    option(
        "Data",
        "Rows with missing values: drop (no prediction), fill (the mean, no category, an empty text) or "
        "refuse; default: fill if training did, else drop.",
    ),
]


def _chosen(path: Path, client: str | None, of_server: bool, before_training: bool) -> "Bundle":
    """The model that the path and the options name."""
    from copfl.experiment.bundle.places import CLIENT_OR_GLOBAL, OF_SERVER, located, of_node

    if client is not None and of_server:
        raise UsageError(f"name the model: {CLIENT_OR_GLOBAL}, and not both")
    if before_training and client is None:
        raise UsageError("--before-training is about a client's model in a run folder; name it with --client")
    if (path / "pyproject.toml").is_file():  # the folder of a federation's server
        from copfl.federation.server.bundle import write_global

        if not of_server:
            raise UsageError(
                f"{path} is of a server, which has the global model alone: --global. A client's model is in "
                "the state-dir of its node"
            )
        path, of_server = write_global(path), False
    if not before_training:
        located(path, OF_SERVER if of_server else client)  # a wrong path is said before torch is loaded
    from copfl.experiment.loading import load

    bundle = load(path, OF_SERVER if of_server else client, before_training=before_training)
    if of_node(path) is not None:
        origin = bundle.description.origin
        whose = "a new client" if origin.client is None else f"client {origin.client}"
        how = ", the best on its validation samples" if origin.select == "best" else ""
        print(f"copfl: the model of {whose}, {origin.name}, round {origin.round}{how}", file=sys.stderr)
    return bundle


def _of_run(bundle: "Bundle", x: Any, y: Any, has_target: "NDArray[np.bool_]") -> list[str]:
    """A warning if a model of a run is measured on samples that it was trained on."""
    from copfl.data.samples import each
    from copfl.errors import DataError
    from copfl.experiment.bundle import known_rows

    try:
        targets = None if y is None else bundle.preparation.targets(y)
    except DataError:  # of other classes
        targets = None
    known = each(lambda array: array[has_target], x) if targets is not None else x
    said = known_rows.about(bundle.path, known, targets)
    return [said] if said else []


def _of_node(path: Path, bundle: "Bundle", data: Path) -> list[str]:
    """A warning if a node's model is measured on the table that it was trained with."""
    from copfl.data.tables.files import READERS
    from copfl.experiment.bundle.description import TEST
    from copfl.experiment.bundle.places import of_node

    folder, metric = of_node(path), bundle.task.metrics[0]
    if folder is None or data.suffix.lower() not in READERS or data.suffix.lower() == ".txt":
        return []
    from copfl.federation.node.remembered_run import known_rows

    if not (count := known_rows(folder.parent, data)):
        return []
    scores = [s for s in bundle.description.scores if (s.split, s.metric) == (TEST, metric.name)]
    measured = [
        f"; on its {s.samples} own test rows the node measured {metric.title} "
        f"{metric.text(s.value)}{metric.unit}"
        for s in scores
    ]
    return [f"{count:,} rows are among those that this model was trained and tested with{''.join(measured)}"]


def _report(notes: list[str]) -> None:
    for note in notes:
        print(f"copfl: warning: {note}", file=sys.stderr)


def export(
    *,
    bundle: BundlePath,
    out: Annotated[
        Path,
        option("Output", "The file to write, of a bundle, peft or mlflow the folder; required.", "--out -o"),
    ],
    client: options.Client = None,
    of_server: options.OfServer = False,
    before_training: options.BeforeTraining = False,
    format: Annotated[
        str,
        option(
            "Output", "bundle, safetensors, torch, onnx, json (of trees), peft or mlflow; default: bundle."
        ),
    ] = "bundle",
) -> None:
    """Write a model for other programs, or as a bundle that can be sent."""
    chosen = _chosen(bundle, client, of_server, before_training)
    from copfl.experiment.export import formats

    for path in formats.write(chosen, format, out):
        print(path)


def predict(
    *,
    bundle: BundlePath,
    client: options.Client = None,
    of_server: options.OfServer = False,
    before_training: options.BeforeTraining = False,
    data: Annotated[
        Path | None,
        option("Data", "An .npz file, a table or .txt of sentences, an image or a folder of them."),
    ] = None,
    sentence: Annotated[list[str] | None, option("Data", "A sentence to classify; repeatable.")] = None,
    missing: Missing = None,
    times: Annotated[
        str | None,
        option("Data", "Of survival, times with commas: the probability that there is no event up to each."),
    ] = None,
    out: Annotated[
        Path | None,
        option("Output", "An .npz or .csv file for the predictions; default: print them.", "--out -o"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict new samples: a line each with its class and probability, its labels, its values or its risk.

    Of survival, the model of a client has the median time beside the risk, and with --times probabilities.
    """
    if (data is None) == (not sentence):
        raise UsageError("name the samples with --data FILE, or sentences with --sentence, and not both")
    loaded = _chosen(bundle, client, of_server, before_training)
    import numpy as np

    from copfl.errors import DataError

    if data is None:
        outputs, score, rest = loaded.outputs(loaded.preparation.tokens(sentence or [])), None, 0
        notes, is_sample, files = list[str](), None, tuple[str, ...]()
    else:
        x, y, has_target, notes, *_, is_sample, files, _, _ = loaded.read(data, missing=missing)
        notes += _of_node(bundle, loaded, data) if y is not None else []
        notes += _of_run(loaded, x, y, has_target)
        outputs, score, rest = loaded.outputs(x), None, int((~has_target).sum())
        if y is not None:
            try:
                score = loaded.score(outputs[has_target], loaded.preparation.targets(y))
            except DataError as error:  # which is no reason to predict nothing
                notes.append(f"the predictions are not scored: {error}")
    is_sample = np.ones(len(outputs), np.bool_) if is_sample is None else is_sample
    wanted = _times(times)
    if wanted is None and loaded.has_curve:
        wanted = []
    predicted, metric = loaded.columns(outputs, wanted), loaded.task.metrics[0]
    predicted = {"file": list(files), **predicted} if files else predicted
    columns = {name: _in_rows(is_sample, values) for name, values in predicted.items()}
    if out is not None:
        write_bytes(out, _file(loaded, outputs, columns, is_sample, out.suffix), durable=False)
        options.logger(as_json)(f"{out}: {len(outputs):,} prediction{'s' * (len(outputs) != 1)}")
    if as_json:
        print(json.dumps({metric.name: score, **columns, "warnings": notes}))
        return
    _report(notes)
    if out is None:
        shown_too = ("file", "prediction", "survival_", "median")
        printed = {n: values for n, values in columns.items() if n.startswith(shown_too)}
        if loaded.description.output.kind == "classification":
            printed["probability"] = _in_rows(is_sample, outputs.max(1).tolist())
        _print(printed)
    if score is not None:
        shown = f"{metric.title} {metric.text(score)}{metric.unit} of {len(outputs) - rest} samples"
        print(f"{shown}; {rest} have no target" if rest else shown, file=sys.stderr)


def _times(text: str | None) -> list[float] | None:
    """The numbers of a list with commas."""
    if text is None:
        return None
    with raised_as(UsageError, "--times are numbers with commas, such as 365,730: {}", ValueError):
        return [float(part) for part in text.split(",")]


def _in_rows(is_sample: "NDArray[np.bool_]", values: list[Any]) -> list[Any]:
    """The values of the samples, one for each row of the file: None where the row is no sample."""
    remaining = iter(values)
    return [next(remaining) if has_value else None for has_value in is_sample]


def _print(columns: dict[str, list[Any]]) -> None:
    """A line per row for readers, with nothing but its number where there is no prediction."""
    for n, row in enumerate(zip(*columns.values(), strict=True)):
        values = [f"{v:.6g}" if isinstance(v, float) else printable(str(v)) for v in row if v is not None]
        print("\t".join([str(n), *values]))


def _file(
    bundle: "Bundle",
    outputs: Any,
    columns: dict[str, list[Any]],
    is_sample: "NDArray[np.bool_]",
    suffix: str,
) -> bytes:
    """A .csv file with all rows, or an .npz file with the arrays of the samples, and their rows."""
    import numpy as np

    from copfl.tables import Table, as_csv

    if suffix == ".csv":
        cells = [["" if value is None else str(value) for value in values] for values in columns.values()]
        rows = [[str(n), *row] for n, row in enumerate(zip(*cells, strict=True))]
        return as_csv(Table("", ["row", *columns], rows)).encode()
    if suffix != ".npz":
        raise UsageError(f'predictions are written as .csv or .npz, not as "{suffix}"; name another --out')
    arrays = {
        "row": np.flatnonzero(is_sample),
        "prediction": bundle.decided(outputs),
        "classes": bundle.classes,
    }
    if "file" in columns:
        arrays["file"] = np.array(columns["file"])
    if bundle.description.output.is_survival:
        of_curve = {
            name: values for name, values in columns.items() if name.startswith(("survival_", "median"))
        }
        arrays |= {
            name: np.array([v for v, s in zip(values, is_sample, strict=True) if s], np.float64)
            for name, values in of_curve.items()
        }
    elif not bundle.description.output.is_regression:
        arrays["probability"] = outputs
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def evaluate(
    *,
    bundle: BundlePath,
    data: Annotated[
        Path | None,
        option(
            "Data",
            "An .npz file with x and y, a table with the target's column, or a folder of images for each "
            "class; required without --all.",
        ),
    ] = None,
    client: options.Client = None,
    of_server: options.OfServer = False,
    before_training: options.BeforeTraining = False,
    every: Annotated[
        bool, option("Model", "Every model of a run on every client's test samples; default: off.", "--all")
    ] = False,
    samples: Annotated[
        int, option("Data", "With --all, test samples of each client at most, evenly chosen; default: 100.")
    ] = 100,
    out: Annotated[
        Path | None, option("Output", "With --all, a .csv or .json file for the matrix.", "--out -o")
    ] = None,
    missing: Missing = None,
    as_json: options.Json = False,
) -> None:
    """Evaluate a model on samples with targets: all metrics, the confusion matrix and the calibration.

    With --all, the matrix of every client's model on every client's test samples, which `copfl report` then
    shows.
    """
    from copfl.errors import DataError

    if every:
        if data is not None or client is not None or of_server or before_training:
            raise UsageError(
                "--all evaluates every model of the run on the clients' own samples; name only the run"
            )
        return _evaluate_all(bundle, samples, out, as_json)
    if data is None:
        raise UsageError(
            "name the samples with --data FILE; of a run, --all takes the test samples of every client"
        )
    if out is not None:
        raise UsageError("--out is for the matrix of --all; print one evaluation as JSON with --json")
    loaded = _chosen(bundle, client, of_server, before_training)
    x, y, has_target, notes, lacking, *_ = loaded.read(data, missing=missing)
    if y is None:
        raise DataError(f"{data} lacks {lacking}, so nothing can be evaluated; see `copfl predict`")
    if rest := int((~has_target).sum()):
        notes.append(f"{rest:,} of {len(has_target):,} samples have no target and are left out")
    notes += [*_of_node(bundle, loaded, data), *_of_run(loaded, x, y, has_target)]
    _report(notes)
    targets = loaded.preparation.targets(y)
    measured = loaded.measured(loaded.outputs(x)[has_target], targets)
    if as_json:
        print(json.dumps(plain_evaluation(measured)))
        return
    from copfl.measures.metrics import METRICS
    from copfl.tables import Table, as_text

    known = {metric.name: metric for metric in (*METRICS.values(), *loaded.task.metrics)}
    rows = [
        [known[n].title, f"{known[n].text(value)}{known[n].unit}"] for n, value in measured.metrics.items()
    ]
    print(as_text(Table(f"{measured.samples:,} samples", ["metric", "value"], rows)))
    if measured.confusion is not None:
        names = list(map(str, measured.classes))
        cells = [[name, *map(str, row)] for name, row in zip(names, measured.confusion.tolist(), strict=True)]
        print(as_text(Table("Samples by class (rows) and predicted class", ["", *names], cells)))
    if measured.calibration:
        bins = [
            [f"{b.low:.2f} to {b.high:.2f}", f"{b.samples:,}", f"{b.confidence:.3f}", f"{b.accuracy:.3f}"]
            for b in measured.calibration
        ]
        print(as_text(Table("Calibration", ["probability", "samples", "mean", "accuracy"], bins)))


def _evaluate_all(run: Path, samples: int, out: Path | None, as_json: bool) -> None:
    """The matrix on stdout, and in a file."""
    check_folder(run)
    from copfl.experiment.bundle.places import of_node
    from copfl.experiment.finished import cross_site
    from copfl.tables import RULE, Table, as_csv, as_text, plain

    if of_node(run) is not None:
        raise UsageError(
            f"--all compares the models of a run, and {run} is of a node, which has one: --data FILE"
        )
    if out is not None and out.suffix not in (".csv", ".json"):
        raise UsageError(f'the matrix is written as .csv or .json, not as "{out.suffix}"; name another --out')
    evaluation = cross_site(run, samples)
    metric, models = evaluation.metric, [*evaluation.clients, "global model"]
    content = plain(
        {
            "metric": metric.name,
            "models": models,
            "clients": evaluation.clients,
            "samples": evaluation.samples,
            "values": evaluation.values,
        }
    )
    if out is not None:
        rows = [
            [name, *(f"{v:.6g}" for v in row)] for name, row in zip(models, evaluation.values, strict=True)
        ]
        text = (
            as_csv(Table("", ["model", *evaluation.clients], rows))
            if out.suffix == ".csv"
            else json.dumps(content)
        )
        write_bytes(out, text.encode(), durable=False)
    if as_json:
        print(json.dumps(content))
        return
    cells = [
        [name, *map(metric.text, row)] for name, row in zip(models, evaluation.values.tolist(), strict=True)
    ]
    title = f"{metric.in_unit} of each row's model on the test samples of each column's client"
    short = [name.removeprefix("client ") for name in evaluation.clients]
    import numpy as np

    means = [
        metric.text(float(np.nanmean(v)))
        for v in (evaluation.own, evaluation.of_others)
        if not np.isnan(v).all()
    ]
    notes = [
        f"Mean on the own samples {means[0]}{metric.unit}, on other clients' samples "
        f"{means[-1]}{metric.unit}."
    ]
    print(
        as_text(
            Table(title, ["model", *short], [*cells[:-1], RULE, cells[-1]], notes if len(means) > 1 else [])
        )
    )


def plain_evaluation(evaluation: "Evaluation") -> dict[str, Any]:
    """The evaluation as plain values; a metric that the samples do not define is null."""
    from copfl.tables import plain

    content: dict[str, Any] = plain(
        {
            "samples": evaluation.samples,
            "metrics": evaluation.metrics,
            "classes": evaluation.classes,
            "confusion": None if evaluation.confusion is None else evaluation.confusion.tolist(),
            "calibration": [bin._asdict() for bin in evaluation.calibration],
        }
    )
    return content


def personalize(
    *,
    run: options.RunPath,
    data: Annotated[
        Path,
        option(
            "Data",
            "The new client's samples: an .npz file with x and y, or a table as in the run; a fifth is "
            "tested.",
        ),
    ],
    epochs: Annotated[
        int | None, option("Training", "Passes over the new client's data; default: by validation, up to 30.")
    ] = None,
    lr: Annotated[float | None, option("Training", "Learning rate, above 0; default: by validation.")] = None,
    seed: Annotated[int, option("Training", "Seed of the order of the samples, from 0; default: 0.")] = 0,
    out: Annotated[
        Path | None,
        option("Output", "A folder for the bundle of the model; default: it is not written.", "--out -o"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train a model for a new client on its data; start, rate and epochs by validation within them."""
    check_folder(run)
    if not data.exists():
        raise UsageError(f"there is no file {data}; name the new client's samples with --data")
    from copfl.experiment.personalisation import Personalisation

    new = Personalisation.of(run)
    if out is not None and out.exists():
        raise UsageError(f"{out} exists already; name a new folder with --out")
    train, test, notes = new.samples(data)
    _report(notes)
    with options.counted("validation", "training", hidden=as_json) as start:
        fitted = new.fit(train, test, epochs, lr, seed, start)
    if out is not None:
        fitted.bundle.save(out)
    metric = fitted.bundle.task.metrics[0]
    if as_json:
        content = {{"scores": metric.name}.get(key, key): value for key, value in fitted._asdict().items()}
        del content["bundle"]
        print(json.dumps(content))
        return
    values = (fitted.scores[0], fitted.scores[-1], fitted.alone[-1])
    before, after, alone = (f"{metric.text(value)}{metric.unit}" for value in values)
    interval = ""
    if fitted.gain is not None:
        low, high = (f"{metric.factor * value:+.3g}" for value in fitted.gain)
        interval = f", gain [{low}, {high}] (95 % over these samples)"
    constant = (
        "" if fitted.constant is None else f"; constant answer: {metric.text(fitted.constant)}{metric.unit}"
    )
    how = f"{fitted.epochs} updates on {fitted.train} samples"
    if fitted.lr is not None:
        how = f"{fitted.epochs} epochs on {fitted.train} samples at learning rate {fitted.lr:g}"
    print(
        f"{metric.title} {after} on {fitted.test} test samples; training alone: {alone}{interval}{constant}\n"
        f"start: {fitted.start} ({before}), then {how}{'' if out is None else f'; bundle: {out}'}"
    )
