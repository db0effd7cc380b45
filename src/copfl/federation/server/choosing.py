"""Which method the federation takes, from the sums of losses of rows that each site held out.

The rule is that of `copfl.choosing.choice`: the lowest mean over sites, and what sites train alone only where it is
shown to be better.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from copfl import foreign
from copfl.errors import RunError, raised_as
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.choice import ALONE_NAMES, GAIN, LOSS, REPORTS, VARIANCE, names_of
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.settings import federation_of
from copfl.federation.server.folder import ServerFolder
from copfl.rivals.records import CONSTANT
from copfl.settings.federation import Choice
from copfl.settings.flat import flattened, nested
from copfl.verdict.drawn import ERRORS_ALONE

CHOOSE, TAKEN, CANDIDATES = "session.choose", "session.taken", "choice.candidates"
FILE = "choice.json"  # in the app's folder


class Chosen(NamedTuple):
    """What the federation takes."""

    taken: str  # a candidate; one that sites train alone: nothing is to be trained together
    losses: dict[str, float]  # the mean over the sites of each candidate, the simplest first
    sites: int  # that held rows out

    @property
    def is_alone(self) -> bool:
        """Whether what each site has alone is better."""
        return self.taken in ALONE_NAMES

    def required(self) -> str:
        """The method that is trained together; RunError if what sites train alone is better."""
        if self.is_alone:
            raise RunError(
                f"nothing is trained together: {self.taken} has the lowest loss of held-out rows over {self.sites} "
                f"sites. To train all the same, name the method, as in --set {TAKEN}=levels"
            )
        return self.taken

    def __str__(self) -> str:
        rows = sorted(self.losses.items(), key=lambda item: item[1])
        width = max(map(len, self.losses))
        lines = [
            f"  {name.ljust(width)}  {loss:.4f}{'  taken' * (name == self.taken)}" for name, loss in rows
        ]
        return "\n".join([f"Mean loss of held-out rows over {self.sites} sites:", *lines])


def chosen_from(means: Mapping[str, float | None], clients: int, methods: Sequence[str]) -> Chosen:
    """The choice; RunError where no losses came.

    Args:
        means: Over the sites that report, of what `names_of` lists.
        clients: Sites of the round.
        methods: The candidates of the federation.
    """
    known = {name: means.get(name) for name in names_of(methods)}
    sites = round((known[REPORTS] or 0) * clients)
    order = [CONSTANT, *methods, *(name for name in ALONE_NAMES if name != CONSTANT)]
    losses = {name: value for name in order if (value := known[LOSS + name]) is not None}
    able = [name for name in methods if name in losses]
    if not sites or not able:
        raise RunError(
            "no site reports losses of held-out rows, so nothing can be chosen: their owners let no metrics leave, or "
            f"each has too few rows; name the method, as in --set {TAKEN}={methods[0]}"
        )
    taken = min(losses, key=lambda name: losses[name])
    if taken in ALONE_NAMES:
        best = min(able, key=lambda name: losses[name])
        gain, variance = (known[f"{of}{taken} over {best}"] for of in (GAIN, VARIANCE))
        is_shown = gain is not None and gain > ERRORS_ALONE * math.sqrt(max(variance or 0.0, 0.0) / sites)
        taken = taken if is_shown else best
    return Chosen(taken, losses, sites)


def candidates_in(folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The candidates of an app, where no run has named one; none where its method is named.

    Args:
        folder: Of the app.
        config: Keys of the run config that are set for a run.
    """
    settings = {**flattened(nested(read_app(folder)["config"])), **config}
    is_decided = settings.get(TAKEN) or settings.get(CHOOSE)
    return () if is_decided else Choice(candidates=str(settings.get(CANDIDATES, ""))).names


def is_choice(folder: Path, run: str) -> bool:
    """Whether a run of the app in a folder measures candidates, and trains nothing."""
    return bool(_config_of(folder, run).get(CHOOSE))


def taken_in(folder: Path, run: str) -> dict[str, str]:
    """The method that a run of the app in a folder trains, as a key of the run config; none where it is named."""
    taken = _config_of(folder, run).get(TAKEN)
    return {TAKEN: str(taken)} if taken else {}


def _config_of(folder: Path, run: str) -> dict[str, Any]:
    path = folder / "runs" / run / "config.json"
    with raised_as(
        RunError, f"{path} cannot be used ({{}}); restore it from a copy", OSError, *foreign.DAMAGE
    ):
        return dict(foreign.read_json(path)) if path.is_file() else {}


def chosen_by(folder: Path, run: str, config: Mapping[str, Any], why: str = "see the log") -> Chosen:
    """What a run with session.choose found, which the app's folder keeps; RunError if it did not end.

    Args:
        folder: Of the app.
        run: The name of the run.
        config: Keys of the run config that were set for it.
        why: For the error.
    """
    federation = federation_of({**flattened(nested(read_app(folder)["config"])), **config})
    lines = ServerFolder(str(folder.resolve() / "runs"), run, resume=True).rounds()
    if len(lines) < federation.rounds:
        raise RunError(
            f"the choice ended after round {len(lines)} of {federation.rounds} of run {run}: {why}"
        )
    last = lines[-1]
    chosen = chosen_from(last["mean"], len(last["clients"]), federation.choice.names)
    write_json(folder / FILE, {"run": run, **chosen._asdict()})
    return chosen


def kept(folder: Path, methods: Sequence[str]) -> Chosen | None:
    """An earlier choice among the same methods; None: there is none.

    Args:
        folder: Of the app.
        methods: The candidates.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    damaged = f"{path} cannot be used ({{}}); remove it, and the next run chooses again"
    with raised_as(RunError, damaged, OSError, *foreign.DAMAGE):
        content = foreign.json_of(path.read_text())
        losses = {str(name): float(loss) for name, loss in content["losses"].items()}
        found = Chosen(str(content["taken"]), losses, int(content["sites"]))
        if found.taken not in (*methods, *ALONE_NAMES):
            raise ValueError(f"{json.dumps(found.taken)} is none of its candidates")
        return found
