"""What a finding about a run is: its file, how it is measured, and how a terminal and a page show it.

`copfl.experiment.run_record` lists the findings that there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar, overload

from copfl import files, foreign
from copfl.core.task import Task
from copfl.data.clients.federation import FederatedData
from copfl.data.samples import Dataset
from copfl.engine.rounds import State
from copfl.experiment.models.client_models import ClientModels
from copfl.experiment.recording import Recording
from copfl.sections import Section
from copfl.settings.schema import RunSettings
from copfl.tables import Table, plain

T = TypeVar("T")


class Trained(NamedTuple):
    """What there is after the last round, in a run that keeps its models."""

    settings: RunSettings
    task: Task
    federation: FederatedData  # as the rounds trained on it: of frozen layers the features
    dataset: Dataset
    state: State
    models: ClientModels
    recording: Recording  # with the findings so far


@dataclass(eq=False, kw_only=True)
class Finding(Generic[T]):
    """One thing that is found out about a run, beside its rounds.

    It is an attribute of every `RunRecord`, which has a value or None there.

    Args:
        file: Its name in the run folder.
        as_json: The content of the file.
        parse: What `as_json` was given; one of `foreign.DAMAGE` where a run would not write this.
        fits: Whether what was read is of so many rounds and clients; a ValueError where no run writes that.
        indent: Of the file; None: it is one line.
        given: Whether it is found before the rounds, so that a resumed run reads it.
        measured: Finds it after the last round; None: `training` does, or it is `given`.
        sentences: Below the table of the clients, in the terminal.
        tables: After that table.
        section: Of the report. Sections of one name become one, in the order of the findings.
        at_site: Of the page of one site of a federation, whose node has the file in its folder of the run; None: no
            node has one.
        summary: For `--json`; None: the content of the file, under the finding's name.
    """

    file: str
    as_json: Callable[[T], Any]
    parse: Callable[[Any], T]
    fits: Callable[[T, int, int], bool] = lambda found, rounds, clients: True
    indent: int | None = None
    given: bool = False
    measured: Callable[[Trained], T | None] | None = None
    sentences: Callable[[T, Recording], Sequence[str]] = lambda found, run: ()
    tables: Callable[[T, Recording], Sequence[Table]] = lambda found, run: ()
    section: Callable[[T, Recording], Section | None] = lambda found, run: None
    at_site: Callable[[T], Section] | None = None
    summary: Callable[[T, Recording], Mapping[str, Any]] | None = None
    name: str = field(default="", init=False)  # of the attribute

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, run: None, owner: type) -> Self: ...

    @overload
    def __get__(self, run: Recording, owner: type) -> T | None: ...

    def __get__(self, run: Recording | None, owner: type) -> Self | T | None:
        return self if run is None else run.findings.get(self.name)

    def __set__(self, run: Recording, found: T | None) -> None:
        run.findings.pop(self.name, None)
        if found is not None:
            run.findings[self.name] = found

    def keep(self, run: Recording, found: T | None) -> None:
        """Puts what was found on the record of the run, and into its folder if it has one.

        Args:
            run: Whose finding it is.
            found: None: nothing.
        """
        self.__set__(run, found)
        if found is not None and run.folder is not None:
            self.write(found, run.folder)

    def write(self, found: T, folder: Path) -> None:
        """Writes the file of a run folder."""
        content = json.dumps(plain(self.as_json(found)), indent=self.indent) + "\n"
        files.write_bytes(folder / self.file, content.encode())

    def read(self, folder: Path, rounds: int | None = None, clients: int | None = None) -> T | None:
        """What the file of a run folder says; None where there is none, or it is of another run.

        Args:
            folder: Of the run.
            rounds: That the run has now; None: it is not asked.
            clients: Of the run.
        """

        def parsed(content: Any) -> T | None:
            found = self.parse(content)
            if rounds is None or clients is None or self.fits(found, rounds, clients):
                return found
            return None

        return foreign.of_run(folder / self.file, parsed)

    def summary_of(self, found: T, run: Recording) -> Mapping[str, Any]:
        """Its keys in the summary of a run."""
        return {self.name: self.as_json(found)} if self.summary is None else self.summary(found, run)
