"""How many rounds a row trains where nobody says it: as many as a run of it by itself would find.

The search holds out training samples and looks at no test sample. It has the first seed of the comparison, and every
seed of the row trains for as many rounds. FOLDER/HASH.json has what was found, so that the same command goes on.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from copfl import foreign
from copfl.choosing.first_run import with_found_rounds
from copfl.comparison.jobs.processes import Pool, only_here, sendable
from copfl.errors import RunError, raised_as
from copfl.files import write_json
from copfl.settings import named_code
from copfl.settings.complete import complete
from copfl.settings.identity import identity
from copfl.settings.schema import Run
from copfl.settings.toml import Tables

logger = logging.getLogger(__name__)
FIRST = "first"  # of run.find_rounds: the number is to be found


class RowRounds(NamedTuple):
    """Where the rounds of a comparison's rows are kept, and the seed that they were found with."""

    folder: Path
    seed: int

    def of(self, layers: Sequence[Tables], seed: int) -> Run:
        """The run of these layers and this seed, for as many rounds as somebody named or the search found.

        Args:
            layers: As of `complete`.
            seed: Of the run.
        """
        run = complete(*layers, {"run": {"seed": seed}})
        if run.run.find_rounds != FIRST:
            return run
        first = complete(*layers, {"run": {"seed": self.seed}})
        file = self._file(first)
        if not file.exists():
            _found(first, file)
        damaged = f"{file} is damaged ({{}}); delete it, and the number of rounds is looked for again"
        with raised_as(RunError, damaged, OSError, *foreign.DAMAGE):
            content = foreign.read_json(file)
            rounds, temperature = int(content["rounds"]), float(content["temperature"])
        settings = dataclasses.replace(run.run, rounds=rounds, temperature=temperature, find_rounds="done")
        return dataclasses.replace(run, run=settings)

    def search(
        self, rows: Mapping[str, Sequence[Tables]], pool: Pool, executor: Executor | None = None
    ) -> None:
        """Finds the rounds of all rows whose number is open, at the same time where several runs train so.

        Args:
            rows: The layers of each row, and of what it tries, by its title.
            pool: The processes of the comparison.
            executor: Trains elsewhere.
        """
        runs = {title: complete(*layers, {"run": {"seed": self.seed}}) for title, layers in rows.items()}
        files = {self._file(run): title for title, run in runs.items() if run.run.find_rounds == FIRST}
        left = {file: runs[title] for file, title in files.items() if not file.exists()}
        if not left:
            return
        are_several = executor is not None or min(pool.size, len(left)) > 1
        if not are_several or any(map(only_here, left.values())):
            for file, run in left.items():
                logger.info(f"{files[file]}: {_found(run, file)} rounds")
            return
        logger.info(f"finding the number of rounds of {', '.join(files[file] for file in left)}")
        where, code = pool.started() if executor is None else executor, named_code.named()
        waiting = {
            where.submit(_found_in_worker, run, file.absolute(), code): file for file, run in left.items()
        }
        try:
            for future in futures.as_completed(waiting):
                logger.info(f"{files[waiting[future]]}: {future.result()} rounds")
        except futures.BrokenExecutor as error:
            raise RunError(
                "a process was killed while it looked for the number of rounds, perhaps for lack of memory; run "
                "the same again with one process (jobs 1)"
            ) from error
        finally:
            for future in waiting:
                future.cancel()

    def _file(self, run: Run) -> Path:
        return self.folder / f"{identity(run)}.json"


def _found(run: Run, file: Path) -> int:
    # What clients have alone is beside the table, once for all rows.
    plain = dataclasses.replace(run.run, rivals=False, local_baseline=False)
    found = with_found_rounds(dataclasses.replace(run, run=plain)).run
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"rounds": found.rounds, "temperature": found.temperature})
    return found.rounds


def _found_in_worker(run: Run, file: Path, code: Sequence[str]) -> int:
    with named_code.scope():
        named_code.name(code)
        try:
            return _found(run, file)
        except (Exception, SystemExit) as error:
            raise sendable(error) from None
