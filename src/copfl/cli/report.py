"""`copfl report`, `watch`, `export`, `predict` and `personalize`. Torch loads only when one is called."""

import io
import json
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from copfl.cli import options
from copfl.errors import UsageError, raised_as
from copfl.files import write_bytes


def report(given: options.Given) -> None:
    """Write a report of one or several runs, or of a comparison, as one HTML file."""
    from copfl import charts
    from copfl.report import comparison_page, document, page, run_data

    compared = [run for run in given.runs if comparison_page.is_comparison(run)]
    if compared and len(given.runs) > 1:
        raise UsageError(
            f"{compared[0]} is a comparison, which has a page of its own; name it alone, or name run folders"
        )
    read = run_data.read_all
    found = comparison_page.document_of(compared[0]) if compared else page.document_of(read(given.runs))
    target = given.out or (given.runs[0] / "report.html" if len(given.runs) == 1 else Path("report.html"))
    contents = {target: document.render(found).encode()}
    if given.figures is not None:
        for chart in (chart for section in found.sections for chart in section.charts):
            for kind, content in charts.pictures([[chart]]).items():
                contents[given.figures / f"{chart.name}.{kind}"] = content
    for path, content in contents.items():
        write_bytes(path, content, durable=False)
        if not given.quiet:
            print(path)


def watch(given: options.Given) -> None:
    """Serve the report to this machine, updated while a run continues; Ctrl-C stops the server."""
    from copfl.report import watch as watching

    watching.html(given.runs)  # an unreadable folder is reported here, not in the browser
    taken = f"cannot listen on port {given.port} ({{}}); name another with --port, 0 for any"
    with raised_as(UsageError, taken, OSError, OverflowError):
        server = watching.server(given.runs, given.port)
    address = f"http://{watching.HOST}:{server.server_address[1]}/"
    print(f"{address}  (Ctrl-C stops the server)", flush=True)
    if given.browse:
        webbrowser.open(address)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)


def export(given: options.Given) -> None:
    """Write one client's model, or the global model, to a file."""
    from copfl.experiment import export as exporting

    found, model = _chosen(given)
    print(exporting.write(found, model, given.format, given.out))


def _chosen(given: options.Given) -> tuple[Any, Any]:
    """The models of a run, and the one of them that the options name."""
    from copfl.experiment import inference

    if (given.client is None) != given.of_server:
        raise UsageError("name the model: --client NUMBER (or the client's name), or --global, and not both")
    found = inference.load(given.run)
    return found, found.client(given.client) if given.client is not None else found.new_client()


def predict(given: options.Given) -> None:
    """Predict samples with one client's or the global model: a line each with its class, labels or values."""
    import numpy as np

    from copfl.tables import Table, as_csv

    if (given.data is None) == (not given.sentence):
        raise UsageError("name the samples with --data FILE, or sentences with --sentence, and not both")
    found, model = _chosen(given)
    if given.data is None:
        x = found.tokens(given.sentence or [])
        answers, tested, notes = found.predict(model, x), 0, []
    else:
        x, y, has_target, notes = found.further(given.data)
        answers, tested = found.predict(model, x, y, has_target), len(y)
    known, metric = found.experiment.federation.dataset, found.experiment.task.metrics[0]
    lines, arrays = described(answers.outputs, known.kind, known.classes)
    rows = [[str(n), *map(_cell, row)] for n, row in enumerate(zip(*lines.values(), strict=True))]
    if given.out is not None and given.out.suffix == ".csv":
        write_bytes(given.out, as_csv(Table("", ["row", *lines], rows)).encode(), durable=False)
    elif given.out is not None:
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_bytes(given.out, content.getvalue(), durable=False)
    if given.as_json:
        print(json.dumps({metric.name: answers.score, **lines, "warnings": notes}))
        return
    for note in notes:
        print(f"copfl: warning: {note}", file=sys.stderr)
    if given.out is None:
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


def personalize(given: options.Given) -> None:
    """Train a model for a new client on its data; start, rate and epochs by validation within them."""
    from copfl.experiment import export as exporting
    from copfl.experiment import inference

    found = inference.load(given.run)
    fitted = found.personalize(found.samples(given.data), given.epochs, given.lr, given.seed)
    if given.out is not None:
        exporting.write(found, fitted.model, given.format, given.out)
    metric = found.experiment.task.metrics[0]
    if given.as_json:
        content = {{"scores": metric.name}.get(key, key): value for key, value in fitted._asdict().items()}
        del content["model"]
        print(json.dumps(content))
        return
    values = (fitted.scores[0], fitted.scores[-1], fitted.alone[-1])
    before, after, alone = (f"{metric.text(value)}{metric.unit}" for value in values)
    print(
        f"{metric.title} {after} on {fitted.test} test samples; training alone: {alone}\n"
        f"start: {fitted.start} ({before}), then {fitted.epochs} epochs on {fitted.train} samples at "
        f"learning rate {fitted.lr:g}{'' if given.out is None else f'; model: {given.out}'}"
    )
