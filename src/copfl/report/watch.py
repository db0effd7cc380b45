"""The report of runs as a page that follows them, for `copfl.report.serving`."""

from collections.abc import Sequence
from pathlib import Path

from copfl.report import document, page, run_data


class RunsPage:
    """The report of runs."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def fingerprint(self) -> str:
        return page.fingerprint_of(self.paths)

    def html(self, fingerprint: str = "") -> str:
        return document.render(page.document_of(run_data.read_all(self.paths)), fingerprint)
