"""CO-PFL without one part at a time, on the same clients and seeds.

    python examples/ablation.py

Every part is a value, so an ablation swaps one. Each row is compared with the first, client by client; with two seeds
of a small data set nearly nothing can be told apart, and the table says so.
"""

from __future__ import annotations

import tempfile

import copfl

ROWS = [
    "copfl",
    "copfl:score=none",  # without COWA: everybody counts alike
    "copfl:score=gradient",  # COWA's one half
    "copfl:score=prediction",  # and the other
    "copfl:rate=0.0001",  # nearly without PWPM: hardly anything becomes personal
    "copfl:optimizer=adam",  # without MAMO: Adam knows nothing of the mask
    "local",  # without the others
]


def main(rows: list[str] = ROWS, rounds: int = 20, seeds: tuple[int, ...] = (0, 1)) -> copfl.Comparison:
    """The comparison; `copfl compare -a copfl,copfl:score=none,...` does the same."""
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # name a folder instead, and its runs are used again next time
        return copfl.compare(rows, seeds=seeds, base_tables={"run": {"rounds": rounds}}, out=folder)


if __name__ == "__main__":
    print(main())
