"""`copfl report` and `watch`."""

import sys
import webbrowser
from pathlib import Path

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
