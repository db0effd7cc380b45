"""The data contract of an app: read for a check, and frozen when the members have agreed. Without torch.

`machines.deployed` and `machines.local` freeze it after the statistics; `copfl site check` reads it.
"""

from pathlib import Path

from copfl.data.contract.contract import Contract
from copfl.data.contract.file import read_contract, write_contract
from copfl.errors import RunError, UsageError, raised_as
from copfl.federation.protocol.agreed_samples import samples_of
from copfl.federation.protocol.app_folder import AGREEMENTS, read_app
from copfl.federation.protocol.invitation import SUFFIX
from copfl.federation.protocol.invitation import read as read_invitation
from copfl.federation.protocol.proposal import read as read_proposal
from copfl.files import write_bytes
from copfl.settings.flat import flat
from copfl.settings.toml import written

AGREE = "session.agree"
AGREED = "contract.json"  # in the folder of a run: the frozen contract
FILE = "contract.toml"  # in the app's folder
SECTION = "[tool.flwr.app.config.samples]"


def contract_at(path: Path) -> Contract:
    """The contract of an app's folder, a contract.toml, an invitation or a proposal; UsageError if there is none."""
    if path.is_dir():
        text = read_app(path)["config"].get("samples", {}).get("contract")
    elif path.suffix == SUFFIX:
        with raised_as(UsageError, f"{path}: {{}}", OSError, UsageError):
            text = read_invitation(path.read_bytes()).invitation.settings.get("samples.contract")
    elif path.suffix == ".json":
        with raised_as(UsageError, f"{path}: {{}}", OSError, UsageError):
            text = read_proposal(path.read_bytes()).proposal.settings.get("samples.contract")
    else:
        return read_contract(path)
    if not text:
        raise UsageError(
            f"{path} has no data contract; make one with `copfl federate contract TABLE --target COLUMN`"
        )
    return Contract.read(text)


def is_open(folder: Path) -> bool:
    """Whether the app in a folder has a contract on whose rest the members must agree."""
    text = read_app(folder)["config"].get("samples", {}).get("contract")
    return bool(text) and not Contract.read(text).is_frozen


def frozen_by(folder: Path, run: str, why: str = "see the log") -> Contract:
    """The contract that a run of the statistics phase froze, which the app has afterwards.

    Args:
        folder: The folder of the app.
        run: The name of the run.
        why: For the error if it froze none.
    """
    path = folder / AGREEMENTS / run / AGREED
    if not path.exists():
        raise RunError(f"the members did not agree on the encoders in run {run}: {why}")
    contract = Contract.read(path.read_text())
    freeze(folder, contract)
    return contract


def freeze(folder: Path, contract: Contract) -> None:
    """Writes the frozen contract into the app: contract.toml, and the run config of later proposals.

    Args:
        folder: The folder of the app.
        contract: The frozen one.
    """
    path = folder / "pyproject.toml"
    before, section, after = path.read_text("utf-8").partition(SECTION)
    table, following, rest = after.partition("\n[")
    lines = table.split("\n")
    for key, value in samples_of(contract).items():
        lines_of_key = [n for n, line in enumerate(lines) if line.startswith(f"{key} = ")]
        if len(lines_of_key) != 1:
            raise RunError(
                f"{path} has no line {key} in {SECTION}; make the app again with `copfl federate init`"
            )
        lines[lines_of_key[0]] = written({"samples": {key: flat(value)}}).splitlines()[1]
    table = "\n".join(lines)
    write_bytes(path, f"{before}{section}{table}{following}{rest}".encode())
    write_contract(folder / FILE, contract)
