"""The coordinator's side: who is a member, whose key is revoked, and the proposals that it signs.

The list of members is `members.json` in the app's folder. The coordinator's key is in the same folder only in
a trial on one machine; else it is where `init` put it, and is moved off the server. Without torch.
"""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from copfl.errors import RunError, UsageError, raised_as, unknown
from copfl.federation.policy.record import Policy
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol import keys, proposal
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.files import stored
from copfl.federation.protocol.keys import SigningKey, fingerprint, read_key, read_public
from copfl.federation.protocol.proposal import (
    KEY,
    NAME,
    Member,
    Proposal,
    Rotation,
    SignedProposal,
    member_problem,
    rotation_statement,
)
from copfl.federation.server.certificates import AUTHORITY_KEY, expiries, issue_server, renew_authority
from copfl.files import write_bytes
from copfl.settings import federation
from copfl.settings.checking import SettingError, unknown_key
from copfl.settings.federation import Session
from copfl.settings.flat import flattened, nested

FILE, PROPOSALS = "members.json", "proposals"  # in the app's folder
SIGNED = "proposal.json"  # in the folder of a run: what its coordinator signed
COORDINATOR = "coordinator"  # the name of the coordinator's key, in keys/ or in the authority's folder
# In [tool.copfl] of pyproject.toml: the folder of the keys of the authority and of the coordinator.
AUTHORITY = "authority"


class Roster(NamedTuple):
    """The members of a federation, and the keys that are members no more."""

    members: tuple[Member, ...] = ()
    revoked: Mapping[str, str] = MappingProxyType({})  # public key -> the name of its member

    def named(self, name: str) -> Member:
        """The member of this name; UsageError if there is none."""
        members = [member for member in self.members if member.name == name]
        if not members:
            raise unknown("member", name, [member.name for member in self.members])
        return members[0]


def read_roster(folder: Path) -> Roster:
    """The members of the app in the folder; none if the list was not begun."""
    return stored(
        folder / FILE, _roster, {"members": [], "revoked": {}}, f"{folder / FILE} cannot be used: {{}}"
    )


def _roster(fields: Mapping[str, Any]) -> Roster:
    members = tuple(
        Member(
            int(entry["number"]),
            str(entry["name"]),
            str(entry["key"]),
            tuple(Rotation(**old) for old in entry["rotations"]),
        )
        for entry in fields["members"]
    )
    return Roster(members, dict(fields["revoked"]))


def write_roster(folder: Path, roster: Roster) -> None:
    """Replaces the list of members.

    Args:
        folder: The folder of the app.
        roster: The members, and the keys that are revoked.
    """
    members = [
        member._asdict() | {"rotations": [rotation._asdict() for rotation in member.rotations]}
        for member in sorted(roster.members)
    ]
    content = json.dumps({"members": members, "revoked": dict(roster.revoked)}, indent=1)
    write_bytes(folder / FILE, content.encode() + b"\n")


def admit(folder: Path, clients: int, name: str, public: str, number: int | None = None) -> Member:
    """Enters a member with its public key; without a number it gets the next free one.

    Args:
        folder: The folder of the app.
        clients: Number of clients of the app.
        name: Of the member, for people.
        public: Its key, as `keys.read_public` gives it.
        number: Of its client.
    """
    roster = read_roster(folder)
    taken_numbers = {member.number for member in roster.members}
    free = [n for n in range(clients) if n not in taken_numbers]
    if not NAME.fullmatch(name):
        raise UsageError(f'name="{name[:60]}" must be letters, digits, ".", "-" and "_", at most 64')
    if number is None and not free:
        raise UsageError(
            f"all {clients} clients have a member; raise run.clients in pyproject.toml first, or if `init` "
            "made their keys for a trial, make the app again with --no-trial"
        )
    member = Member(free[0] if number is None else number, name, public)
    if member.number not in free:
        raise UsageError(f"client {member.number} is a member's already, or not one of {clients} clients")
    if public in roster.revoked:
        raise UsageError(f"this key was revoked ({roster.revoked[public]}); the member makes a new one")
    for other in roster.members:
        other_keys = {other.key, *(rotation.key for rotation in other.rotations)}
        if other.name == name or public in other_keys:
            known = f"{other.name} is a member already, as client {other.number}"
            own = f"{name} makes a key of its own, in a folder of its own"
            raise UsageError(known if other.name == name else f"{known}, with this key: {own}")
    _write_public(folder, member)
    write_roster(folder, roster._replace(members=(*roster.members, member)))
    return member


def revoke(folder: Path, name: str) -> Member:
    """Takes a member and its key out of the list; the server refuses the key from now on.

    Args:
        folder: The folder of the app.
        name: The member's.
    """
    roster = read_roster(folder)
    member = roster.named(name)
    others = tuple(other for other in roster.members if other != member)
    keys_of_member = dict.fromkeys([member.key, *(rotation.key for rotation in member.rotations)], name)
    write_roster(folder, Roster(others, {**roster.revoked, **keys_of_member}))
    _public_file(folder, name).unlink(missing_ok=True)
    return member


def replace_key(folder: Path, name: str, public: str, signature: str) -> Member:
    """Enters a member's new key, which its old one signed; the old key is revoked.

    Args:
        folder: The folder of the app.
        name: Of the member.
        public: Its new key.
        signature: Of the new key, with the old one.
    """
    roster = read_roster(folder)
    before = roster.named(name)
    member = before._replace(key=public, rotations=(*before.rotations, Rotation(before.key, signature)))
    if problem := member_problem(member):
        raise UsageError(f"{problem}; ask the member for the file of its `copfl site rotate`")
    others = tuple(other for other in roster.members if other != before)
    write_roster(folder, Roster((*others, member), {**roster.revoked, before.key: name}))
    _write_public(folder, member)
    return member


def rotate_member(path: Path, name: str = "") -> tuple[Path, Path]:
    """Makes a member's new key; its public file, and that of the rotation, in which the old key signs the new one.

    Args:
        path: The private key.
        name: Of the member, for the names of both files; empty: that of the key.
    """
    old, old_path = read_key(path), path.with_name(path.name + ".old")
    if old_path.exists():
        raise RunError(
            f"{old_path} exists: an earlier rotation; move it away when the coordinator has admitted that key"
        )
    new = SigningKey(keys.new_key())
    statement = path.with_name(f"{name or path.name}.rotation")
    fields = {"from": old.public, "to": new.public, "signature": old.sign(rotation_statement(new.public))}
    write_bytes(statement, json.dumps(fields, indent=1).encode() + b"\n")
    path.rename(old_path)
    keys.write_key(path, new.key)
    public = path.with_name(f"{name or path.name}.pub")
    for file in {keys.public_path(path), public}:
        write_bytes(file, keys.openssh_line(new.public))
    return public, statement


def read_rotation(path: Path) -> str:
    """The signature in a file of `rotate_member`."""
    with raised_as(UsageError, f"{path} is no rotation: {{}}", OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text())["signature"])


def rotate_server(
    folder: Path, authority: Path | None = None, *, with_authority: bool = False
) -> dict[str, datetime.datetime]:
    """Makes a new key and certificate of the server; until when the certificates are valid, by their files.

    Args:
        folder: The folder of the app.
        authority: Where the authority's key is; None: where `init` put it.
        with_authority: Whether the authority's certificate is made anew too, with its key.
    """
    app = read_app(folder)
    if not app["secure"]:
        raise UsageError(f"the server in {folder} has no certificate")
    authority_folder = authority or Path(str(app.get(AUTHORITY, folder / "keys")))
    if with_authority:
        renew_authority(folder / "keys", authority_folder / AUTHORITY_KEY)
    issue_server(folder / "keys", str(app["host"]), authority_folder / AUTHORITY_KEY)
    return expiries(folder / "keys")


def revoked_keys(folder: Path) -> frozenset[str]:
    """The public keys that are revoked now."""
    return frozenset(read_roster(folder).revoked)


def _public_file(folder: Path, name: str) -> Path:
    return folder / "keys" / f"{name}.pub"


def _write_public(folder: Path, member: Member) -> None:
    """The key's file, which the server registers with Flower."""
    write_bytes(_public_file(folder, member.name), keys.openssh_line(member.key))


def make_member_keys(folder: Path, clients: int) -> None:
    """Keys for all clients of a trial, whose user is the owner of every node, where there are none.

    Args:
        folder: The folder of the app.
        clients: How many there are.
    """
    for client in range(clients):
        path = folder / "keys" / f"node-{client}"
        if not path.exists():
            keys.make_key(path)
        if client not in {member.number for member in read_roster(folder).members}:
            admit(folder, clients, path.name, read_public(keys.public_path(path)), client)


# -- proposals -----------------------------------------------------------------------------------------------


def coordinator_key(folder: Path, path: Path | None = None) -> SigningKey:
    """The coordinator's key: of the file, of a trial, or where `init` put it; UsageError if not here.

    Args:
        folder: The folder of the app.
        path: The file of the key; None: where `init` put it.
    """
    authority = read_app(folder).get(AUTHORITY)
    paths = [folder / "keys" / COORDINATOR, *([Path(authority) / COORDINATOR] if authority else [])]
    existing = [candidate for candidate in ([path] if path else paths) if candidate.expanduser().exists()]
    if not existing:
        raise UsageError(
            f"the coordinator's key is not on this machine ({path or paths[-1]}): bring it (invite and propose have "
            "--key FILE), or where it is, sign a proposal with `copfl federate propose FOLDER --key FILE`, and "
            "start it here with `run --proposal FILE`"
        )
    return read_key(existing[0])


def propose(folder: Path, config: Mapping[str, Any], key: SigningKey, roster: Roster) -> SignedProposal:
    """The signed proposal of a run; the earlier one of this run if nothing has changed.

    Args:
        folder: The folder of the app.
        config: Further keys of the run config, the run's name among them.
        key: The coordinator's.
        roster: The members.
    """
    of_app = read_app(folder)["config"]
    check_keys(folder, flattened(nested(of_app)), config)
    settings = {**proposal.settings_in(of_app), **config}
    members = tuple(m for m in sorted(roster.members) if m.number < int(settings["run.clients"]))
    signed = proposal.sign(settings, members, tuple(sorted(roster.revoked)), key)
    path = folder / PROPOSALS / f"{signed.proposal.run}.json"
    if path.exists():
        before = proposal.read(path.read_bytes())
        if proposal.is_same_proposal(before.proposal, signed.proposal):
            return before
    write_bytes(path, signed.document)
    return signed


def check_keys(folder: Path, of_app: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """SettingError for a key that the app does not have: Flower changes no others, and ends the run.

    Args:
        folder: The folder of the app.
        of_app: Its run config, flat.
        config: Keys that are set for one run.
    """
    for key, value in config.items():
        if key in of_app or key.startswith(f"{Session.title}."):
            continue
        if key in federation.paths():
            what = f"is not among the settings of this app; write it into {folder / 'pyproject.toml'}, and start again"
            raise SettingError(key, value, what)
        table, _, _ = key.rpartition(".")
        tables = nested(of_app)
        if table not in tables:
            raise unknown_key(table or key, None, tables)
        raise unknown_key(key, value, tables[table])


def overrides(folder: Path, agreed: Proposal) -> dict[str, Any]:
    """The keys of the app's run config that differ from a proposal, with the proposal's values.

    Args:
        folder: The folder of the app.
        agreed: The proposal.
    """
    of_app = proposal.settings_in(read_app(folder)["config"])
    return {key: value for key, value in agreed.settings.items() if key not in of_app or of_app[key] != value}


def server_proposal(policy: Policy, run_config: Mapping[str, Any]) -> SignedProposal | None:
    """The proposal that a run config carries, or None. UsageError if the server's policy refuses it.

    Args:
        policy: The policy of the server's owner.
        run_config: What was submitted.
    """
    text, coordinators = run_config.get(KEY), policy.proposals.coordinators
    if not text and policy.proposals.unsigned:
        return None
    if not text:
        why = "no coordinator signed it; start the run with `copfl federate run`"
        raise PolicyError((Refusal("proposals.unsigned", why),))
    signed = proposal.from_text(text)
    if (
        name := fingerprint(signed.proposal.coordinator)
    ) not in coordinators and not policy.proposals.unsigned:
        raise PolicyError((Refusal("proposals.coordinators", f"its proposal is signed by {name}"),))
    if differ := proposal.differences(signed.proposal, run_config):
        raise UsageError(f"the run config is not that of its proposal: {'; '.join(differ[:5])}")
    return signed


def make_coordinator(folder: Path, authority: Path) -> str:
    """Writes the coordinator's key to the authority's folder and its public part to the app's.

    The result is the fingerprint.

    Args:
        folder: The folder of the app.
        authority: The folder of the private keys.
    """
    public = keys.make_key(authority / COORDINATOR)
    write_bytes(folder / "keys" / f"{COORDINATOR}.pub", keys.openssh_line(public))
    return fingerprint(public)
