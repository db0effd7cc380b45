"""`copfl report`, `watch`, `export`, `predict` and `personalize`. Torch and plotly load only when one is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[list[Path], typer.Argument(help="Run folders; the first is what the others are compared with.")]
Run = Annotated[Path, typer.Argument(help="The run folder.")]


def add_to(app: typer.Typer) -> None:
    """Adds the commands that look at a run, or use it."""
    for command in (report, watch):
        app.command()(command)


def report(
    runs: Runs,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Default: report.html in the run's folder.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for each figure as PNG and SVG, for papers.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Write a page to look at: one HTML file, of one run or of several side by side."""
    from copfl.report import charts, page, pictures, story

    stories = story.read_all(runs)
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    paths = [page.write(stories, target)]
    if figures is not None:
        paths += pictures.write([one for section in charts.sections(stories) for one in section.charts], figures)
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
        raise UsageError(f"cannot listen on port {port} ({error}); name another with --port, 0 for any") from error
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
