"""`copfl report` and `watch`."""

import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from copfl import foreign
from copfl.cli import options
from copfl.cli.options import argument, option
from copfl.errors import RunError, UsageError, raised_as
from copfl.experiment.known_runs import check_folder
from copfl.files import write_bytes

if TYPE_CHECKING:
    from copfl.report.serving import Page

Port = Annotated[int, option("Output", "The port to listen on, 0 for any free one; default: 8383.")]
Browse = Annotated[bool, option("Output", "Open the page in the browser; default: off.", "--open")]


def report(
    *,
    runs: Annotated[
        list[Path],
        argument(
            "Run folders, the others compared with the first; or the folder of a comparison or a choice, or "
            "a node's state-dir."
        ),
    ],
    out: Annotated[
        Path | None, option("Output", "A file; default: report.html in the run folder.", "--out -o")
    ] = None,
    figures: Annotated[
        Path | None, option("Output", "Folder for each chart as PNG and SVG; default: none are written.")
    ] = None,
    data: Annotated[
        str | None,
        option("Data", "Of a node: its data, if they are not where they were in training.", "--data -d"),
    ] = None,
    baseline: Annotated[
        bool,
        option(
            "Training",
            "Of a node: train alone as well, once, to compare; default: on.",
            "--baseline/--no-baseline",
        ),
    ] = True,
    rivals: Annotated[
        bool,
        option(
            "Training",
            "Of a node: train scikit-learn's usual models as well, once, to compare; default: on.",
            "--rivals/--no-rivals",
        ),
    ] = True,
    quiet: options.Quiet = False,
) -> None:
    """Write a report of one or several runs, of a comparison, a choice or a node, as one HTML file."""
    for run in runs:
        check_folder(run)
    from copfl import charts
    from copfl.experiment.bundle.places import of_node
    from copfl.experiment.reading import read_all
    from copfl.report import choice_page, comparison_page, document, page

    if len(runs) == 1 and of_node(runs[0]) is not None:
        return report_of_node(runs[0], out, data, baseline, rivals, quiet)
    if data is not None:
        raise UsageError("--data is for the report of a node; name its state-dir")
    kinds = {run: _page_of_its_own(run) for run in runs}
    for run, kind in kinds.items():
        if kind and len(runs) > 1:
            raise UsageError(
                f"{run} is a {kind}, which has a page of its own; name it alone, or name run folders"
            )
    if kinds[runs[0]] == "choice":
        made = choice_page.document_of(runs[0])
    elif kinds[runs[0]]:
        made = comparison_page.document_of(runs[0])
    else:
        made = page.document_of(read_all(runs))
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    contents = {target: document.render(made).encode()}
    if figures is not None:
        answer = [] if made.answer is None else [made.answer]
        for chart in (chart for section in (*answer, *made.sections) for chart in section.charts):
            title = chart.title if isinstance(chart, charts.GainChart) else ""
            for kind, content in charts.pictures([[chart]], title).items():
                contents[figures / f"{chart.name}.{kind}"] = content
    for path, content in contents.items():
        write_bytes(path, content, durable=False)
        if not quiet:
            print(path)


def _page_of_its_own(folder: Path) -> str:
    """What a folder is that is no run: a "comparison" or a "choice"; "" of a run."""
    from copfl.report import choice_page, comparison_page

    if choice_page.is_choice(folder):
        return "choice"
    return "comparison" if comparison_page.is_comparison(folder) else ""


def report_of_node(
    state: Path, out: Path | None, data: str | None, baseline: bool, rivals: bool, quiet: bool
) -> None:
    """The page for the owner of a node, and the same as text.

    Args:
        state: The folder of the node.
        out: The file of the page.
        data: The node's data, for a comparison with a baseline.
        baseline: As of `copfl site report`.
        rivals: As of `copfl site report`.
        quiet: Whether nothing is printed.
    """
    from copfl.federation.node import site_page
    from copfl.federation.node.report import site_of
    from copfl.report import document
    from copfl.settings import named_code

    def tell(round: int) -> None:
        if not quiet:
            print(f"copfl: training alone, round {round}", file=sys.stderr)

    named_code.name(named_code.modules_in(data))
    site = site_of(state, data, baseline=baseline, tell=tell, rivals=rivals)
    target = out or state / "report.html"
    damaged = f"a file of {state} is damaged ({{}}); restore it from a copy"
    with raised_as(RunError, damaged, *foreign.DAMAGE):
        content = document.render(site_page.document_of(site)).encode()
        text = foreign.printable_lines(site_page.text_of(site))
    write_bytes(target, content, durable=False, private=True)
    if not quiet:
        print(f"{text}\n\n{target}")


def watch(
    *,
    runs: Annotated[list[Path], argument("Run folders; the others are compared with the first.")],
    port: Port = 8383,
    browse: Browse = False,
) -> None:
    """Serve the report to this machine, updated while a run continues; Ctrl-C stops the server."""
    for run in runs:
        check_folder(run)
    from copfl.report.page import RunsPage

    page = RunsPage(runs)
    page.html()  # an unreadable folder is reported here, not in the browser
    serve(page, port, browse)


def serve(page: "Page", port: int, browse: bool) -> None:
    """Serves a page to this machine until Ctrl-C, and prints its address.

    Args:
        page: What is served.
        port: On which this machine listens.
        browse: Whether a browser is opened.
    """
    from copfl.report.serving import PageServer

    port_in_use = f"cannot listen on port {port} ({{}}); name another with --port, 0 for any"
    with raised_as(UsageError, port_in_use, OSError, OverflowError):
        server = PageServer(page, port)
    print(f"{server.address}  (Ctrl-C stops the server)", flush=True)
    with server, tempfile.TemporaryDirectory(prefix="copfl-") as private:
        if browse:
            # All users of a machine see the browser's command line, and this user alone reads the file.
            link = Path(private) / "open.html"
            link.write_text(f'<meta http-equiv="refresh" content="0;url={server.address}">')
            webbrowser.open(link.as_uri())
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
