"""`copfl report`, `watch`, `export`, `predict` and `personalize`. Torch loads only when one is called."""

import io
import json
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from copfl.cli import options
from copfl.cli.options import argument, option
from copfl.errors import UsageError, raised_as
from copfl.files import write_bytes


def report(
    *,
    runs: Annotated[
        list[Path],
        argument("Run folders, the others compared with the first; or the folder of a comparison."),
    ],
    out: Annotated[
        Path | None, option("Output", "A file; default: report.html in the run folder.", "--out -o")
    ] = None,
    figures: Annotated[
        Path | None, option("Output", "Folder for each chart as PNG and SVG; default: none are written.")
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Write a report of one or several runs, or of a comparison, as one HTML file."""
    from copfl import charts
    from copfl.report import comparison_page, document, page, run_data

    compared = [run for run in runs if comparison_page.is_comparison(run)]
    if compared and len(runs) > 1:
        raise UsageError(
            f"{compared[0]} is a comparison, which has a page of its own; name it alone, or name run folders"
        )
    read = run_data.read_all
    found = comparison_page.document_of(compared[0]) if compared else page.document_of(read(runs))
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    contents = {target: document.render(found).encode()}
    if figures is not None:
        for chart in (chart for section in found.sections for chart in section.charts):
            for kind, content in charts.pictures([[chart]]).items():
                contents[figures / f"{chart.name}.{kind}"] = content
    for path, content in contents.items():
        write_bytes(path, content, durable=False)
        if not quiet:
            print(path)


def watch(
    *,
    runs: Annotated[list[Path], argument("Run folders; the others are compared with the first.")],
    port: Annotated[
        int, option("Output", "The port to listen on, 0 for any free one; default: 8383.")
    ] = 8383,
    browse: Annotated[
        bool, option("Output", "Open the page in the browser; default: off.", "--open")
    ] = False,
) -> None:
    """Serve the report to this machine, updated while a run continues; Ctrl-C stops the server."""
    from copfl.report import watch as watching

    watching.html(runs)  # an unreadable folder is reported here, not in the browser
    taken = f"cannot listen on port {port} ({{}}); name another with --port, 0 for any"
    with raised_as(UsageError, taken, OSError, OverflowError):
        server = watching.server(runs, port)
    address = f"http://{watching.HOST}:{server.server_address[1]}/"
    print(f"{address}  (Ctrl-C stops the server)", flush=True)
    if browse:
        webbrowser.open(address)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)


def export(
    *,
    run: options.RunPath,
    out: Annotated[Path, option("Output", "The file to write, of peft the folder; required.", "--out -o")],
    client: options.Client = None,
    of_server: options.OfServer = False,
    format: Annotated[
        str, option("Output", "safetensors, torch, onnx or peft; default: safetensors.")
    ] = "safetensors",
) -> None:
    """Write one client's model, or the global model, to a file."""
    from copfl.experiment import export as exporting

    found, model = _chosen(run, client, of_server)
    print(exporting.write(found, model, format, out))


def _chosen(run: Path, client: str | None, of_server: bool) -> tuple[Any, Any]:
    """The models of a run, and the one of them that the options name."""
    from copfl.experiment import inference

    if (client is None) != of_server:
        raise UsageError("name the model: --client NUMBER (or the client's name), or --global, and not both")
    found = inference.load(run)
    return found, found.client(client) if client is not None else found.new_client()


def predict(
    *,
    run: options.RunPath,
    client: options.Client = None,
    of_server: options.OfServer = False,
    data: Annotated[
        Path | None,
        option("Data", "An .npz file, a table or .txt of sentences, an image or a folder of them."),
    ] = None,
    sentence: Annotated[list[str] | None, option("Data", "A sentence to classify; repeatable.")] = None,
    out: Annotated[
        Path | None,
        option("Output", "An .npz or .csv file for the predictions; default: print them.", "--out -o"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict samples with one client's or the global model: a line each with its class, labels or values."""
    import numpy as np

    from copfl.tables import Table, as_csv

    if (data is None) == (not sentence):
        raise UsageError("name the samples with --data FILE, or sentences with --sentence, and not both")
    found, model = _chosen(run, client, of_server)
    if data is None:
        x = found.tokens(sentence or [])
        answers, tested, notes = found.predict(model, x), 0, []
    else:
        x, y, has_target, notes = found.further(data)
        answers, tested = found.predict(model, x, y, has_target), len(y)
    known, metric = found.experiment.federation.dataset, found.experiment.task.metrics[0]
    lines, arrays = described(answers.outputs, known.kind, known.classes)
    rows = [[str(n), *map(_cell, row)] for n, row in enumerate(zip(*lines.values(), strict=True))]
    if out is not None and out.suffix == ".csv":
        write_bytes(out, as_csv(Table("", ["row", *lines], rows)).encode(), durable=False)
    elif out is not None:
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_bytes(out, content.getvalue(), durable=False)
    if as_json:
        print(json.dumps({metric.name: answers.score, **lines, "warnings": notes}))
        return
    for note in notes:
        print(f"copfl: warning: {note}", file=sys.stderr)
    if out is None:
        print("\n".join(map("\t".join, rows)))
    if answers.score is not None:
        shown = f"{metric.title} {metric.text(answers.score)}{metric.unit}"
        without = f"; {len(has_target) - tested} have no target" if tested < len(has_target) else ""
        print(f"{shown} of {tested} samples{without}", file=sys.stderr)


def described(outputs: Any, kind: str, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns with a value per sample for readers, and the arrays for a file."""
    if kind == "regression":
        return {"values": outputs.tolist()}, {"values": outputs}
    if kind == "multilabel":
        labels = [[name for name, p in zip(names, row, strict=True) if p > 0.5] for row in outputs]
        return {"labels": labels}, {"probabilities": outputs}
    classes = outputs.argmax(1)
    found = {"classes": [names[label] for label in classes], "sure": outputs.max(1).tolist()}
    return found, {"classes": classes, "probabilities": outputs}


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_cell, value))
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def personalize(
    *,
    run: options.RunPath,
    data: Annotated[
        Path,
        option(
            "Data",
            "The new client's samples: an .npz file with x and y, or a table as in the run; a fifth is tested.",
        ),
    ],
    epochs: Annotated[
        int | None, option("Training", "Passes over the new client's data; default: by validation, up to 30.")
    ] = None,
    lr: Annotated[float | None, option("Training", "Learning rate, above 0; default: by validation.")] = None,
    seed: Annotated[int, option("Training", "Seed of the order of the samples, from 0; default: 0.")] = 0,
    out: Annotated[
        Path | None, option("Output", "A file for the model; default: it is not written.", "--out -o")
    ] = None,
    format: Annotated[
        str, option("Output", "safetensors, torch, onnx or peft; default: safetensors.")
    ] = "safetensors",
    as_json: options.Json = False,
) -> None:
    """Train a model for a new client on its data; start, rate and epochs by validation within them."""
    from copfl.experiment import export as exporting
    from copfl.experiment import inference

    found = inference.load(run)
    fitted = found.personalize(found.samples(data), epochs, lr, seed)
    if out is not None:
        exporting.write(found, fitted.model, format, out)
    metric = found.experiment.task.metrics[0]
    if as_json:
        content = {{"scores": metric.name}.get(key, key): value for key, value in fitted._asdict().items()}
        del content["model"]
        print(json.dumps(content))
        return
    values = (fitted.scores[0], fitted.scores[-1], fitted.alone[-1])
    before, after, alone = (f"{metric.text(value)}{metric.unit}" for value in values)
    print(
        f"{metric.title} {after} on {fitted.test} test samples; training alone: {alone}\n"
        f"start: {fitted.start} ({before}), then {fitted.epochs} epochs on {fitted.train} samples at "
        f"learning rate {fitted.lr:g}{'' if out is None else f'; model: {out}'}"
    )
