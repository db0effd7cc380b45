"""What one run gains over another, client by client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from copfl.report.run_data import Numbers, RunData
from copfl.stats import Interval, over_clients

EQUAL = 1e-7  # points of accuracy: less is how the numbers were added up


class Paired(NamedTuple):
    """A run against the first one, in points of accuracy."""

    label: str
    against: str
    gain: Numbers  # [clients], nan where either run never looked at the client
    clients: Interval  # 95 %, over the clients of these two runs

    @property
    def mean(self) -> float:
        return float(np.nanmean(self.gain))

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many clients are better, equal, worse."""
        known = self.gain[~np.isnan(self.gain)]
        better, worse = int((known > EQUAL).sum()), int((known < -EQUAL).sum())
        return better, len(known) - better - worse, worse


def paired(stories: Sequence[RunData]) -> list[Paired]:
    """Each run against the first, where both have the same clients with the same samples."""
    first, *others = stories
    result = []
    for story in others:
        if story.partition != first.partition:
            continue
        gain = 100 * (story.last("accuracy") - first.last("accuracy"))
        known = gain[~np.isnan(gain)]
        if len(known):
            result.append(Paired(story.label, first.label, gain, over_clients([known])))
    return result
