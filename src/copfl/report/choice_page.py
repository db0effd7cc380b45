"""The report of a choice among methods, from the ranking.json in its folder.

`copfl report` on the folder of a choice calls it. A race whose time was up has a ranking, too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl import foreign
from copfl.charts import Lines, mean_curve
from copfl.errors import RunError, raised_as
from copfl.measures.metrics import MetricInfo
from copfl.report.document import Document
from copfl.sections import Section
from copfl.tables import Table

FILE, RACE, CHOSEN = "ranking.json", "race", "chosen"


def is_choice(folder: Path) -> bool:
    """Whether a folder is of `copfl choose`; RunError if its race has no ranking."""
    if (folder / RACE).is_dir() and not (folder / FILE).is_file():
        raise RunError(
            f"{folder} has a race without a ranking: it was stopped, or its time was up before any candidate had "
            "trained enough; the same command goes on, with a larger budget"
        )
    return (folder / FILE).is_file()


def document_of(folder: Path) -> Document:
    path = folder / FILE
    damaged = f"cannot read {path} ({{}}); `copfl choose` writes it again"
    with raised_as(RunError, damaged, OSError, *foreign.DAMAGE):
        content = foreign.read_json(foreign.inside(folder, path))
        trained = (folder / CHOSEN / "rounds.jsonl").is_file()
        return _document(content, MetricInfo(**content["metric"]), folder if trained else None)


def _document(content: Mapping[str, Any], metric: MetricInfo, trained: Path | None) -> Document:
    table = content["table"]
    lines = [
        mean_curve(
            str(label),
            [dict(zip(run["rounds"], run[metric.name], strict=True)) for run in runs],
            n,
            metric.factor,
        )
        for n, (label, runs) in enumerate(content["curves"].items())
    ]
    about = "The mean over sites and seeds, on validation samples."
    curves = Lines("curves", "The race by round", about, [], metric.label, lines, metric.unit)
    where = (
        [f"The choice, trained on all training samples: copfl report {trained / CHOSEN}"] if trained else []
    )
    return Document(
        title=str(table["title"]),
        subtitle=f"{len(table['rows'])} rows; {metric.in_unit} on validation samples",
        conclusion=[*map(str, content["answer"]), str(content["verdict"]["text"]), *where],
        tiles=[],
        tables=[Table("Ranking", [*map(str, table["head"])], [[*map(str, row)] for row in table["rows"]])],
        notes=[*map(str, table["notes"])],
        facts=None,
        sections=[Section("race", "The race", "How did the candidates train?", [curves])],
    )
