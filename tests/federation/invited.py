"""A coordinator's folder with invitations, and sites that answer, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from copfl.data.contract.contract import Contract
from copfl.federation import init
from copfl.federation.operations import joining
from copfl.federation.protocol.invitation import Invitation
from copfl.federation.server import invitations
from copfl.federation.server.membership import coordinator_key

TABLE = {
    "format": 1,
    "missing": "fill",
    "columns": [
        {"name": "age", "type": "number", "minimum": 0, "maximum": 120},
        {"name": "ward", "type": "category", "candidates": ["heart", "lung", "skin"]},
    ],
    "targets": [{"name": "outcome", "type": "category", "categories": ["ill", "well"]}],
}
SITES = ("north", "south", "west")


def coordinated(folder: Path, *sites: str, **settings: Any) -> Path:
    """The folder of a coordinator who has invited these sites: by secure sums, with a contract that is open."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"clients": 3, "rounds": 2},
        "secure": {"aggregation": True},
        "algorithm": {"name": "fedavg"},
        "model": {"name": "linear"},
    }
    app = init(
        folder / "clinic",
        tables | settings,
        contract=Contract.of_table(TABLE),
        host="fl.example.org",
        trial=False,
    )
    for site in sites:
        invitations.invite(app, site, coordinator_key(app))
    return app


def file_of(app: Path, site: str) -> Path:
    """The file that the coordinator sends."""
    return invitations.file_of(app, site)


def invitation_in(app: Path, site: str) -> Invitation:
    return joining.open_invitation(file_of(app, site).read_bytes(), site).invitation


def write_rows(path: Path, header: str = "age,ward,outcome") -> Path:
    rows = [f"{20 + n},{('heart', 'lung')[n % 2]},{('ill', 'well')[n % 3 > 0]}" for n in range(30)]
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def joined(app: Path, site: str, folder: Path) -> joining.JoinedSite:
    """A site whose owner has consented."""
    signed = joining.open_invitation(file_of(app, site).read_bytes(), site)
    data = write_rows(folder / f"{site}.csv")
    return joining.make(folder / site, signed, {"data": str(data)}, joining.policy_of(signed.invitation))
