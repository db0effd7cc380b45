"""`copfl report`, `watch`, `export`, `predict` and `personalize`. Torch and plotly load only when one is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from copfl.experiment.inference import Answers

Runs = Annotated[
    list[Path], typer.Argument(help="Run folders; the first is what the others are compared with.")
]
Run = Annotated[Path, typer.Argument(help="The run folder.")]
Client = Annotated[int, typer.Option("--client", help="Which client's model, from 0.")]
Format = Annotated[str, typer.Option("--format", help="safetensors, torch or onnx.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def add_to(app: typer.Typer) -> None:
    """Adds the commands that look at a run, or use it."""
    for command in (report, watch, export, predict, personalize):
        app.command()(command)


def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Default: report.html in the run's folder.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder for each figure as PNG and SVG, for papers.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Write a page to look at: one HTML file, of one run or of several side by side."""
    from copfl import charts
    from copfl.files import write_bytes
    from copfl.report import page, run_data
    from copfl.report.sections import sections

    found = run_data.read_all(runs)
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    paths = [page.write(found, target)]
    if figures is not None:
        for chart in (chart for section in sections(found) for chart in section.charts):
            for kind, content in charts.pictures([[chart]]).items():
                paths.append(figures / f"{chart.name}.{kind}")
                write_bytes(paths[-1], content, durable=False)
    if not quiet:
        print("\n".join(map(str, paths)))


def watch(
    runs: Runs,
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8383,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve the report, live while a run goes on, to this machine alone; Ctrl-C ends it."""
    from copfl.errors import UsageError
    from copfl.report import watch as watching

    pages = watching.Watch(runs)
    pages.html()  # what is wrong with the folders is said here and not in the browser
    try:
        server = watching.server(pages, port)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot listen on port {port} ({error}); name another with --port, 0 for any"
        ) from error
    address = f"http://{watching.HOST}:{server.server_address[1]}/"
    print(f"{address}  (Ctrl-C ends it)", flush=True)
    if show:
        import webbrowser

        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.server_close()


def export(
    run: Run,
    client: Client,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    format: Format = "safetensors",
) -> None:
    """Write one client's model as a file for elsewhere."""
    from copfl.experiment import export as exporting
    from copfl.experiment import inference

    found = inference.load(run)
    print(exporting.write(found, found.client(client), format, out))


def predict(
    run: Run,
    client: Client,
    data: Annotated[
        Path, typer.Option("--data", help="An .npz file with x, and y where the labels are known.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="An .npz file for classes and probabilities.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask one client's model: a line per sample with its class and how sure the model is."""
    from copfl.experiment import inference

    found = inference.load(run)
    samples, labelled = found.samples(data, labelled=False)
    answers = found.answers(found.client(client), samples.train.x, samples.train.y if labelled else None)
    names = found.experiment.federation.dataset.classes
    if out is not None:
        _write_answers(answers, out)
    if as_json:
        sure = answers.probabilities.max(1).tolist()
        print(
            json.dumps(
                {"accuracy": answers.accuracy, "classes": [names[c] for c in answers.classes], "sure": sure}
            )
        )
    elif out is None:
        for number, (label, row) in enumerate(zip(answers.classes, answers.probabilities, strict=True)):
            print(f"{number}\t{names[label]}\t{row.max():.3f}")
    if answers.accuracy is not None and not as_json:
        print(f"accuracy {100 * answers.accuracy:.1f} % of {len(answers.classes)} samples", file=sys.stderr)


def personalize(
    run: Run,
    data: Annotated[
        Path, typer.Option("--data", help="An .npz file with x and y; every fifth is for testing.")
    ],
    epochs: Annotated[int, typer.Option(help="Times over the newcomer's data.")] = 5,
    lr: Annotated[float | None, typer.Option(help="Learning rate; default: the run's own.")] = None,
    seed: Annotated[int, typer.Option(help="The order of the samples follows from it.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file for the model.")] = None,
    format: Format = "safetensors",
    as_json: AsJson = False,
) -> None:
    """Fit the model to a client that was not there: from the server's newcomer model, on its data alone."""
    from copfl.experiment import export as exporting
    from copfl.experiment import inference

    found = inference.load(run)
    samples, _ = found.samples(data, labelled=True)
    fitted = found.personalize(samples, epochs, lr, seed)
    if out is not None:
        exporting.write(found, fitted.model, format, out)
    if as_json:
        print(json.dumps({"accuracy": fitted.accuracy, "train": fitted.train, "test": fitted.test}))
        return
    before, *_, after = fitted.accuracy
    print(
        f"accuracy {100 * before:.1f} % before, {100 * after:.1f} % after {epochs} epochs on {fitted.train} samples, "
        f"tested on {fitted.test} others" + (f"; model: {out}" if out is not None else "")
    )


def _write_answers(answers: Answers, path: Path) -> None:
    import io

    import numpy as np

    from copfl.files import write_bytes

    content = io.BytesIO()
    np.savez_compressed(content, classes=answers.classes, probabilities=answers.probabilities)
    write_bytes(path, content.getvalue(), durable=False)
