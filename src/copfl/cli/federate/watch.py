"""`copfl federate watch`: the coordinator's page, live or as a file."""

from pathlib import Path
from typing import Annotated

from copfl.cli.federate.options import AppFolder, RunName
from copfl.cli.options import option
from copfl.cli.report import Browse, serve
from copfl.files import write_bytes


def watch(
    *,
    folder: AppFolder,
    run: RunName = None,
    port: Annotated[int, option("Output", "The port to listen on; default: any free one.")] = 0,
    browse: Browse = False,
    once: Annotated[
        Path | None, option("Output", "Write the page to this HTML file, and serve nothing; default: none.")
    ] = None,
) -> None:
    """Show the coordinator's page: members, rounds, who is waited for.
    It is served to this machine alone, until Ctrl-C.
    """
    from copfl.federation.operations import watched

    watched.read(folder, run)  # its errors come before the page's parts are imported, and not in the browser
    from copfl.federation.operations.page import FederationPage

    page = FederationPage(folder, run)
    content = page.html().encode()
    if once is None:
        return serve(page, port, browse)
    write_bytes(once, content, durable=False)
    print(once)
