"""An ablation: CO-PFL without one part at a time, on the same clients and seeds.

    python examples/ablation.py

Each row is compared with the first, client by client. With two seeds of a small data set almost no difference is
distinguishable, and the table reports it.
"""

from __future__ import annotations

import tempfile

import copfl

ROWS = [
    "copfl",
    "copfl:score=none",  # without COWA: equal weights
    "copfl:score=gradient",  # the gradient score alone
    "copfl:score=prediction",  # the prediction score alone
    "copfl:rate=0.0001",  # nearly without PWPM: hardly any entry becomes personal
    "copfl:optimizer=mamo",  # with MAMO in place of Adam, whose moments are not masked
    "local",  # local training
]


def main(rows: list[str] = ROWS, rounds: int = 20, seeds: tuple[int, ...] = (0, 1)) -> copfl.Comparison:
    """The comparison, as of `copfl compare -a copfl,copfl:score=none,... --no-tune`."""
    with tempfile.TemporaryDirectory() as folder:  # in a permanent folder, finished runs are reused
        return copfl.compare(rows, seeds=seeds, base_tables={"run": {"rounds": rounds}}, out=folder, tune={})


if __name__ == "__main__":
    print(main())
