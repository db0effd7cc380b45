"""The report of a choice among methods, from the ranking.json in its folder.

`copfl report` on the folder of a choice calls it. A choice whose time was up has a ranking, too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl import foreign
from copfl.errors import RunError, raised_as
from copfl.experiment.answer import of_verdict, section_of
from copfl.report.document import Document
from copfl.tables import Table
from copfl.verdict.verdict import from_json

FILE, LOSSES, CHOSEN = "ranking.json", "losses", "chosen"


def is_choice(folder: Path) -> bool:
    """Whether a folder is of `copfl choose`; RunError if it has no ranking yet."""
    if (folder / LOSSES).is_dir() and not (folder / FILE).is_file():
        raise RunError(
            f"{folder} has losses of candidates without a ranking: it was stopped, or its time was up before any "
            "candidate was tried; the same command goes on, with a larger budget"
        )
    return (folder / FILE).is_file()


def document_of(folder: Path) -> Document:
    path = folder / FILE
    damaged = f"cannot read {path} ({{}}); `copfl choose` writes it again"
    with raised_as(RunError, damaged, OSError, *foreign.DAMAGE):
        content = foreign.read_json(foreign.inside(folder, path))
        trained = (folder / CHOSEN / "rounds.jsonl").is_file()
        return _document(content, folder if trained else None)


def _document(content: Mapping[str, Any], trained: Path | None) -> Document:
    table = content["table"]
    verdict = None if content["verdict"] is None else from_json(content["verdict"])
    where = (
        [f"The choice, trained on all training samples: copfl report {trained / CHOSEN}"] if trained else []
    )
    return Document(
        title=str(table["title"]),
        subtitle=f"{len(table['rows'])} candidates; {content['loss']} on rows that they did not see",
        conclusion=[*map(str, content["answer"]), *where],
        tiles=[],
        tables=[Table("Ranking", [*map(str, table["head"])], [[*map(str, row)] for row in table["rows"]])],
        notes=[*map(str, table["notes"])],
        facts=None,
        sections=[],
        answer=None if verdict is None else section_of(of_verdict(verdict, [*map(str, content["sites"])])),
    )
