"""A site takes part: what its owner reads before the consent, and the folder that the node has afterwards.

`copfl site join`, `start` and `leave` call it. Nothing is made or sent before the owner has consented. Without torch.
"""

import contextlib
import datetime
import getpass
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from copfl.data.contract.check import ContractCheck, check
from copfl.data.contract.contract import ARRAYS, DATE, FREE_TEXT, TEXT, Column, Contract
from copfl.errors import RunError, UsageError, raised_as
from copfl.federation.node.acceptance import invitation_of
from copfl.federation.node.explanation import explained
from copfl.federation.policy.file import FILE as POLICY
from copfl.federation.policy.file import policy_from, read_policy, strict
from copfl.federation.policy.record import Policy
from copfl.federation.protocol.app_folder import INVITATION, LEFT, WAITS
from copfl.federation.protocol.files import private_folder
from copfl.federation.protocol.invitation import (
    JOINS,
    LEAVES,
    MISFITS,
    Invitation,
    InvitationAnswer,
    Misfit,
    SignedInvitation,
)
from copfl.federation.protocol.keys import SigningKey, fingerprint, make_key, read_key
from copfl.federation.protocol.messages import printable
from copfl.federation.protocol.node_config import WORKER
from copfl.federation.protocol.proposal_text import outputs_of
from copfl.files import Busy, locked, write_bytes
from copfl.settings import toml
from copfl.settings.flat import nested
from copfl.tables import listed

OPTIONS, AUTHORITY, KEY, ANSWER = "site.toml", "ca.pem", "site.key", "answer.json"  # in the site's folder
SHOWN = 8  # names of columns, or of categories, in a sentence
MOST_COLUMNS = 40  # of a contract that are listed
MOST_MISFITS = 40  # that the coordinator is told: an answer has few bytes
LONGEST = 24  # characters of a name, of which those behind it are below each other
UNIT = """# The node of {site} in the federation {federation}, which survives a restart of this machine.
[Unit]
Description=copfl: {site} in {federation}
Wants=network-online.target
After=network-online.target

[Service]
User={user}
Environment=FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME={folder}/.flwr
ExecStart={python} -P -m copfl site start {folder}
Restart=on-failure
LimitNOFILE=16384
MemoryMax=80%
RestartSec=5
KillMode=control-group
ReadWritePaths={folder}
UMask=0077
CapabilityBoundingSet=
AmbientCapabilities=
NoNewPrivileges=true
PrivateTmp=true
PrivateDevices=true
DevicePolicy=closed
PrivateUsers=true
ProtectSystem=strict
ProtectHome=read-only
ProtectClock=true
ProtectHostname=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
ProtectControlGroups=true
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
RemoveIPC=true
LockPersonality=true
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""


class JoinedSite(NamedTuple):
    """The folder of a site that takes part."""

    folder: Path
    invitation: Invitation
    options: Mapping[str, Any]  # of its node, beside the state-dir

    @property
    def key(self) -> SigningKey:
        return read_key(self.folder / KEY)

    @property
    def authority(self) -> Path:
        return self.folder / AUTHORITY

    @property
    def node_options(self) -> dict[str, Any]:
        """What a node is started with."""
        return {**self.options, "state-dir": str(self.folder), "key": str(self.folder / KEY)}

    @property
    def has_left(self) -> bool:
        return (self.folder / WORKER / LEFT).exists()


# -- before the consent --------------------------------------------------------------------------------------


def open_invitation(content: bytes, name: str) -> SignedInvitation:
    """The invitation in a file; UsageError if it cannot be used, or has expired.

    Args:
        content: Of the file.
        name: Of the file.
    """
    from copfl.federation.protocol.invitation import read

    with raised_as(UsageError, f"{name}: {{}}; ask the coordinator to send its invitation again", UsageError):
        signed = read(content)
    if signed.invitation.is_over(datetime.datetime.now(datetime.UTC)):
        end = signed.invitation.expires[:10]
        raise UsageError(
            f"{name} expired on {end}: ask the coordinator for a new one (copfl federate invite FOLDER "
            f"{signed.invitation.site})"
        )
    return signed


def policy_of(invitation: Invitation, policy: Path | None = None, *, trusts_members: bool = False) -> str:
    """The text of the policy of a site that joins: the strict one, which knows the coordinator alone.

    Args:
        invitation: The one that the site accepts.
        policy: A policy of the owner's instead, to which the coordinator is added.
        trusts_members: Whether the strict one accepts the members that the coordinator lists first, unseen.
    """
    line, name = "coordinators = []", fingerprint(invitation.coordinator)
    if policy is not None:
        read_policy(policy)  # its errors
        text = policy.read_text("utf-8")
        if name in text:
            return text
        if line not in text:
            raise UsageError(f'{policy} must have the line coordinators = ["{name}"] under [proposals]')
    else:
        text = strict().replace('members = "approved"', 'members = "first"') if trusts_members else strict()
    return text.replace(line, f'coordinators = ["{name}"]')


def refused(invitation: Invitation, policy: str) -> list[str]:
    """What of the invitation the policy does not allow; none if it is all allowed.

    Args:
        invitation: The one that was received.
        policy: The text of the policy of the site.
    """
    lines = explained(parsed(policy), invitation.settings)
    return [line.removeprefix("refused").strip() for line in lines if line.startswith("refused")]


def parsed(policy: str) -> Policy:
    """The policy in a text of TOML."""
    import tomllib

    return policy_from(tomllib.loads(policy))


def checked(invitation: Invitation, data: str) -> ContractCheck | None:
    """How the site's data differ from the contract; None if there is no contract, or the data are a function.

    Args:
        invitation: The one that was received.
        data: Where the site's data are: a path, or module:function.
    """
    contract = invitation.contract
    if contract is None or ":" in data:
        return None
    return check(contract, Path(data))


def described(
    invitation: Invitation, data: str, compared: ContractCheck | None, policy: str
) -> Iterator[str]:
    """What the owner reads: who invites, what is trained, what leaves, what it costs, and how the data differ.

    Args:
        invitation: The one that was received.
        data: Where the site's data are, as their owner named them.
        compared: How they differ from the contract.
        policy: The text of the policy of the site.
    """
    tables = nested(invitation.settings)
    run, algorithm, model = tables.get("run", {}), tables.get("algorithm", {}), tables.get("model", {})
    is_secure, noise = (
        bool(tables.get("secure", {}).get("aggregation")),
        tables.get("privacy", {}).get("noise"),
    )
    contract, clients = invitation.contract, run.get("clients")
    yield f"invited by   {invitation.federation}, at {invitation.address}"
    yield f"coordinator  {fingerprint(invitation.coordinator)}; the invitation expires on {invitation.expires[:10]}"
    yield f"you are      {invitation.site}, one of {clients} sites"
    method = f"{algorithm.get('name')} with the model {model.get('name')}, {run.get('rounds')} rounds"
    chosen = tables.get("choice", {}).get("candidates", "")
    if chosen:
        method = f"{' or '.join(chosen.split(','))}, {run.get('rounds')} rounds"
    yield f"trained      {_task(contract)} by {method}"
    if chosen:
        parts = tables["choice"].get("folds")
        yield f"             which of them, rows decide that each site holds out by itself, in up to {parts} parts"
    yield f"outputs      {outputs_of(invitation.settings)}"
    if contract is not None and contract.data != ARRAYS:
        yield "your file    needs these columns, in any order:"
        yield from columns_of(contract)
    if contract is not None and contract.open:
        names = listed([column.name for column in contract.open], SHOWN)
        yield f"before that  the sites agree by sums on means and categories of {names}"
    if is_secure:
        yield (
            "leaves       after each round the change of the model, masked: the server learns the sum over all "
            f"{clients} sites, and no site's own"
        )
    else:
        yield "leaves       after each round the change of the model at your site, which the server can see"
    rules = parsed(policy)
    if rules.least_rows > 1:
        yield f"             rows of a class of which you have fewer than {rules.least_rows} do not count"
    metrics = rules.reports
    sent = metrics == "all" or (metrics == "sums" and is_secure)
    if chosen and sent:
        yield "             once, the mean losses of these rows" + ", in the same sums" * is_secure
    yield f"             your metrics{', in the same sums' if sent and is_secure else ' too' if sent else ' stay here'}"
    yield "stays        every row, your model, your report, and what the log of this machine says"
    costs = [
        line.removeprefix("privacy").strip()
        for line in explained(rules, invitation.settings)
        if line.startswith("privacy")
    ]
    yield "privacy      " + (
        "; ".join(costs)
        if noise and costs
        else "no noise is added, so no epsilon can be stated: the trained model may tell something of rare rows"
    )
    yield "members      " + (
        "the node waits until you have compared them by telephone: copfl site approve shows them"
        if rules.proposals.members == "approved"
        else "as the coordinator lists them first: if it invented them, it can read what your site adds to a sum"
    )
    yield f"allowed      that, and nothing else: other settings wait for your approval; rules in {POLICY}"
    if compared is None:
        yield f"your data    {data}, which no contract describes"
        return
    yield f"your data    {data}, {compared.rows:,} rows: they {'fit' if compared.fits else 'DO NOT FIT'} the contract"
    for difference in compared.differences:
        yield f"  {'note' if difference.is_note else 'differs':<9}  {difference.text}"


def columns_of(contract: Contract) -> Iterator[str]:
    """The columns that a site's file needs, a line each: their type, unit and range, or categories.

    Args:
        contract: What the members agreed on.
    """
    every = {
        column.name: _column(column, contract.data == TEXT) for column in contract.columns[:MOST_COLUMNS]
    }
    if (more := len(contract.columns) - MOST_COLUMNS) > 0:
        every[f"and {more} more"] = "as the check of your file says"
    for target in contract.targets:
        names = listed([name[:LONGEST] for name in target.categories or target.candidates], SHOWN)
        every[target.name] = f"what is predicted{f': {names}' if names else f', a {target.type}'}"
    for name, what in (
        (contract.group, "what belongs together, such as a patient"),
        (contract.time, "when a row was"),
    ):
        every |= {name: f"{what}; no model learns from it"} if name else {}
    width = min(LONGEST, max(map(len, every)))
    yield from (f"  {name:<{width}}  {text}" for name, text in every.items())


def _column(column: Column, is_text: bool) -> str:
    """Such as "number, in years, 0 to 120, may be missing"."""
    is_only_checked = column.type == DATE or (column.type == FREE_TEXT and not is_text)
    names = listed([name[:LONGEST] for name in column.categories or column.candidates], SHOWN)
    parts = [f"{column.type}: {names}" if names else column.type]
    parts += [f"in {column.unit[:LONGEST]}"] if column.unit else []
    low, high = ("" if bound is None else f"{bound:g}" for bound in (column.minimum, column.maximum))
    parts += (
        [
            (f"{low} to {high}" if low and high else f"from {low}" if low else f"up to {high}")
            + " (a guess)" * column.guess
        ]
        if low or high
        else []
    )
    parts += ["may be missing"] if column.missing else []
    parts += ["no model learns from it"] if is_only_checked else []
    return ", ".join(parts)


def _task(contract: Contract | None) -> str:
    if contract is None:
        return "a model"
    targets = listed([target.name for target in contract.targets], SHOWN)
    names = listed(list(contract.outputs), SHOWN) if contract.task == "classification" else ""
    learned = len(contract.columns)
    return f"{targets}{f' ({names})' if names else ''} from {learned} column{'s' * (learned != 1)}"


# -- the folder ----------------------------------------------------------------------------------------------


def make(folder: Path, signed: SignedInvitation, options: Mapping[str, Any], policy: str) -> JoinedSite:
    """The folder of a site whose owner has consented; its key is made, and kept if there is one.

    Args:
        folder: A new folder, or the one of the same site, whose coordinator has written a new invitation.
        signed: What the owner consented to.
        options: Of the node, such as data.
        policy: The text of its policy.
    """
    check_folder(folder, signed.invitation)
    folder = private_folder(folder).resolve()
    worker = private_folder(folder / WORKER)
    if (worker / LEFT).exists():  # the coordinator has revoked the key of the one who left
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d%H%M%S")
        for name in (KEY, f"{KEY}.pub"):
            (folder / name).rename(folder / f"{name}.{stamp}")
        (worker / LEFT).unlink()
    if not (folder / KEY).exists():
        make_key(folder / KEY)
    write_bytes(folder / AUTHORITY, signed.invitation.authority.encode())
    if not (folder / POLICY).exists():
        write_bytes(folder / POLICY, policy.encode(), private=True)
    write_bytes(folder / OPTIONS, toml.written({"node": dict(options)}).encode(), private=True)
    write_bytes(folder / INVITATION, signed.document, private=True)  # the last one: it is the consent
    return read(folder)


def check_folder(folder: Path, invitation: Invitation) -> None:
    """UsageError if a folder is of another federation, or is no site's.

    Args:
        folder: Where the site would be.
        invitation: The one that was received.
    """
    earlier = invitation_of(folder)
    if earlier is None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists, and is not of this site; name another folder with --folder")
        return
    before = earlier.invitation
    if (before.coordinator, before.site) != (invitation.coordinator, invitation.site):
        raise UsageError(
            f"{folder} takes part in {before.federation} as {before.site}, by another coordinator or name; name "
            "another folder with --folder"
        )


def read(folder: Path) -> JoinedSite:
    """The site in a folder; UsageError if nobody joined there."""
    signed = invitation_of(folder)
    if signed is None or not (folder / OPTIONS).exists():
        raise UsageError(
            f"{folder} is no folder of `copfl site join`; join first: copfl site join FILE --data FILE"
        )
    options = toml.read_file(folder / OPTIONS).get("node")
    if not isinstance(options, dict) or not isinstance(options.get("data"), str):
        raise UsageError(
            f"{folder / OPTIONS} names no data under [node]; restore it from a copy, or join again"
        )
    return JoinedSite(folder.resolve(), signed.invitation, options)


def with_options(site: JoinedSite, changed: Mapping[str, Any]) -> JoinedSite:
    """The site with other options of its node, which are kept.

    Args:
        site: The one that joined.
        changed: The options that change, such as cohort-changes.
    """
    options = {**site.options, **changed}
    if options != site.options:
        write_bytes(site.folder / OPTIONS, toml.written({"node": options}).encode(), private=True)
    return site._replace(options=options)


def answer(site: JoinedSite, compared: ContractCheck | None = None) -> tuple[InvitationAnswer, bytes]:
    """What the site answers to its invitation, with the signed document, which is in its folder too.

    Args:
        site: The one that joins.
        compared: How its data differ from the contract; only the names of the contract's columns are told.
    """
    differences = () if compared is None else compared.differences
    misfits = tuple(dict.fromkeys(Misfit(d.column[:100], d.what) for d in differences if not d.is_note))
    if len(misfits) > MOST_MISFITS:
        misfits = (*misfits[:MOST_MISFITS], Misfit("", "more"))
    state = LEAVES if site.has_left else MISFITS if misfits else JOINS
    key = site.key
    answered = InvitationAnswer(
        invitation=site.invitation.digest, key=key.public, state=state, misfits=misfits
    )
    document = answered.signed(key)
    write_bytes(site.folder / ANSWER, document, private=True)
    return answered, document


@contextlib.contextmanager
def waiting(site: JoinedSite, why: str) -> Iterator[None]:
    """While the node of a site waits before it can run; `copfl site status` says why.

    Args:
        site: The one that joins.
        why: What it waits for.
    """
    worker = private_folder(site.folder / WORKER)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(worker / "lock"))
        except Busy:  # a node runs already, and has a state of its own
            yield
            return
        write_bytes(worker / WAITS, why.encode(), durable=False, private=True)
        try:
            yield
        finally:
            (worker / WAITS).unlink(missing_ok=True)


def leave(site: JoinedSite) -> None:
    """Ends the participation: a running node ends within seconds, and none starts again."""
    private_folder(site.folder / WORKER)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_bytes(site.folder / WORKER / LEFT, json.dumps({"at": now}).encode(), private=True)


def write_unit(site: JoinedSite) -> Path:
    """A unit of systemd that runs the node of the site as this user."""
    if any(letter.isspace() or letter == "%" for letter in str(site.folder)):
        raise RunError(f"systemd cannot name the folder {printable(site.folder)}; choose one without spaces")
    path = site.folder / f"copfl-{site.invitation.federation}-{site.invitation.site}.service"
    text = UNIT.format(
        site=site.invitation.site,
        federation=site.invitation.federation,
        user=getpass.getuser(),
        folder=site.folder,
        python=sys.executable,
    )
    write_bytes(path, text.encode())
    return path
