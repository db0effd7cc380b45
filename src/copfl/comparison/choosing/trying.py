"""Candidates on folds, within a budget: in this process or in several, each kept in a file.

FOLDER/LABEL-HASH.npz has the losses of an attempt, so that the same command goes on. Whether an attempt is begun
depends on what those before it cost and on what it may cost at most, and so not on the number of processes.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import re
import time
import zipfile
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from copfl.choosing.evaluate import ENOUGH, PATIENCE, QUICK, Evaluated, Room, tried_on
from copfl.comparison.jobs.forecast import Forecast
from copfl.comparison.jobs.processes import Pool, only_here, sendable
from copfl.comparison.jobs.submission import TimeIsUp
from copfl.errors import RunError, UsageError, raised_as
from copfl.files import write_bytes
from copfl.settings import named_code
from copfl.settings.identity import identity
from copfl.settings.schema import Run

logger = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """A candidate that is tried on some folds."""

    label: str
    run: Run  # its rounds are the most that it trains
    numbers: tuple[int, ...]  # of the folds
    steps: bool  # it trains by steps
    to_the_end: bool  # all of its rounds count, as somebody named them

    @property
    def most(self) -> int:
        """The rounds that it trains at most, on all folds."""
        rounds = self.run.run.rounds
        return len(self.numbers) * (rounds if self.steps or rounds > QUICK else min(rounds, ENOUGH))


class Trial(NamedTuple):
    """What came of it."""

    evaluated: Evaluated
    trained: int  # rounds, on all folds
    seconds: float


@dataclass(eq=False)
class Trying:
    """What was tried so far, and what it cost.

    Args:
        folder: Of the files.
        first: A run with the rows that are divided.
        room: Those rows, and which are held out.
        samples: Their hash.
        pool: The processes.
        rounds: That all attempts may train.
        end: Of the last one, by the monotonic clock.
        forecast: Is kept up to date.
    """

    folder: Path
    first: Run
    room: Room
    samples: str
    pool: Pool
    rounds: float = math.inf
    end: float = math.inf
    forecast: Forecast = field(default_factory=Forecast)

    def __post_init__(self) -> None:
        self.spent = 0
        self.trials: dict[str, list[tuple[Attempt, Trial]]] = {}  # by label
        self.refused: dict[str, str] = {}  # by label, why it cannot train
        self.is_over = False  # the time is up

    def all_of(self, attempts: Sequence[Attempt]) -> set[str]:
        """Tries these in their order, as far as the budget allows it; the labels of those that were tried.

        Args:
            attempts: One of each label.
        """
        waiting, done = list(attempts), set[str]()
        while waiting and not self.is_over:
            fitting, left = list[Attempt](), self.rounds - self.spent
            for attempt in waiting:
                if attempt.most > left:
                    break
                fitting.append(attempt)
                left -= attempt.most
            if not fitting and (shorter := self._shortened(waiting[0])) is not None:
                fitting = [shorter]
            if not fitting:
                break
            self.forecast.later = sum(attempt.most for attempt in waiting)
            done |= self._tried(fitting)
            waiting = waiting[len(fitting) :]
        self.forecast.later = 0.0
        return done

    def _shortened(self, attempt: Attempt) -> Attempt | None:
        """With the rounds that are left, where nobody named their number and they are enough to tell."""
        rounds = (self.rounds - self.spent) // len(attempt.numbers)
        if not attempt.steps or attempt.to_the_end or rounds < PATIENCE:
            return None
        return attempt._replace(run=_with_rounds(attempt.run, int(rounds)))

    def _tried(self, attempts: Sequence[Attempt]) -> set[str]:
        files = {attempt.label: self._file(attempt) for attempt in attempts}
        new = [attempt for attempt in attempts if not files[attempt.label].exists()]
        if new:
            self._train(new, files)
        done = set[str]()
        for attempt in attempts:
            if files[attempt.label].exists():
                trial = _read(files[attempt.label], self.room)
                self.trials.setdefault(attempt.label, []).append((attempt, trial))
                self.spent += trial.trained
                done.add(attempt.label)
        return done

    def _train(self, attempts: Sequence[Attempt], files: dict[str, Path]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if min(self.pool.size, len(attempts)) < 2 or any(only_here(attempt.run) for attempt in attempts):
            for number, attempt in enumerate(attempts, 1):
                if time.monotonic() > self.end:
                    self.is_over = True
                    return
                logger.debug(f"trying {attempt.label} ({number} of {len(attempts)})")
                try:
                    self._ended(_written(attempt, self.room, files[attempt.label], self.end))
                except UsageError as error:
                    self.refused[attempt.label] = str(error)
                except TimeIsUp:
                    self.is_over = True
                    return
            return
        where, code = self.pool.started(), named_code.named()
        waiting = {
            where.submit(
                _in_worker, attempt, self.first, files[attempt.label].absolute(), self.end, code
            ): attempt.label
            for attempt in attempts
        }
        try:
            for number, future in enumerate(futures.as_completed(waiting), 1):
                try:
                    self._ended(future.result())
                    logger.debug(f"tried {waiting[future]} ({number} of {len(attempts)})")
                except UsageError as error:
                    self.refused[waiting[future]] = str(error)
                except TimeIsUp:
                    self.is_over = True
        except futures.BrokenExecutor as error:
            raise RunError(
                "a process was killed while it tried a candidate, perhaps for lack of memory; run the same again "
                "with one process (jobs 1)"
            ) from error
        finally:
            for future in waiting:
                future.cancel()

    def _ended(self, trained: int) -> None:
        self.forecast.trained += trained
        self.forecast.later = max(0.0, self.forecast.later - trained)

    def _file(self, attempt: Attempt) -> Path:
        name = re.sub(r"[^A-Za-z0-9._=-]+", "-", attempt.label)
        what = identity(attempt.run, self.samples, list(attempt.numbers), attempt.steps, attempt.to_the_end)
        return self.folder / f"{name}-{what}.npz"


def _with_rounds(run: Run, rounds: int) -> Run:
    return dataclasses.replace(run, run=dataclasses.replace(run.run, rounds=rounds))


def again(attempt: Attempt, trial: Trial, numbers: Sequence[int], seed: int) -> Attempt:
    """The same on other folds or with another seed, for as many rounds on each of them.

    Args:
        attempt: What was tried.
        trial: What came of it.
        numbers: Of the folds.
        seed: Of the run.
    """
    run = attempt.run
    if attempt.steps and not attempt.to_the_end:
        run = _with_rounds(run, max(1, trial.trained // len(attempt.numbers)))
    seeded = dataclasses.replace(run, run=dataclasses.replace(run.run, seed=seed))
    return attempt._replace(run=seeded, numbers=tuple(numbers))


def _written(attempt: Attempt, room: Room, file: Path, end: float) -> int:
    """The rounds that were trained, after the losses were written; TimeIsUp after a round at the end of the time."""
    begin, trained = time.monotonic(), 0

    def after() -> None:
        nonlocal trained
        trained += 1
        if time.monotonic() > end:
            raise TimeIsUp

    found = tried_on(
        attempt.run,
        room,
        attempt.numbers,
        steps=attempt.steps,
        to_the_end=attempt.to_the_end,
        on_round=after,
    )
    content = io.BytesIO()
    np.savez(
        content,
        losses=np.concatenate(found.losses),
        sizes=[len(rows) for rows in found.losses],
        rounds=found.rounds,
        temperature=found.temperature,
        trained=trained,
        seconds=time.monotonic() - begin,
    )
    write_bytes(file, content.getvalue())
    return trained


_rooms: dict[str, Room] = {}  # of the last rows, in a process that tries many candidates


def _in_worker(attempt: Attempt, first: Run, file: Path, end: float, code: Sequence[str]) -> int:
    with named_code.scope():
        named_code.name(code)
        try:
            known = identity(first)
            if known not in _rooms:
                _rooms.clear()
                _rooms[known] = Room.of(first)
            return _written(attempt, _rooms[known], file, end)
        except (Exception, SystemExit) as error:
            raise sendable(error) from None


def _read(file: Path, room: Room) -> Trial:
    damaged = f"{file} is damaged ({{}}); delete it, and the candidate is tried again"
    kinds = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
    with raised_as(RunError, damaged, *kinds), np.load(file, allow_pickle=False) as content:
        sizes = content["sizes"].tolist()
        if sizes != [len(rows) for rows in room.folds.whole.train]:
            raise ValueError("it is of other rows")
        losses = np.split(content["losses"].astype(np.float64), np.cumsum(sizes)[:-1])
        found = Evaluated(list(losses), int(content["rounds"]), float(content["temperature"]))
        return Trial(found, int(content["trained"]), float(content["seconds"]))


def joined(trials: Sequence[tuple[Attempt, Trial]]) -> Evaluated:
    """One candidate on all of its folds and seeds: of a row the mean loss, of the rounds the mean over folds.

    Args:
        trials: Of the candidate.
    """
    found = [trial.evaluated for _, trial in trials]
    losses = []
    for of_site in zip(*(one.losses for one in found), strict=True):
        rows = np.stack(of_site)
        known = ~np.isnan(rows)
        count = known.sum(0)
        sums = np.where(known, rows, 0.0).sum(0)
        losses.append(np.where(count > 0, sums / np.maximum(count, 1), np.nan))
    rounds = round(float(np.mean([one.rounds for one in found])))
    return Evaluated(losses, rounds, float(np.exp(np.mean([np.log(one.temperature) for one in found]))))
