"""An algorithm of a user: FedAvg under another name."""

from __future__ import annotations

from copfl.algorithms import FedAvg


class FedMine(FedAvg):
    """FedAvg."""
