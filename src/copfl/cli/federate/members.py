"""`copfl federate`: members and their keys, proposals, and a node's audit log."""

from pathlib import Path
from typing import Annotated

import typer

from copfl.cli.federate.options import AppFolder, Rounds, Settings, app_config, require_flower
from copfl.cli.options import argument, option
from copfl.errors import UsageError

StateFolder = Annotated[Path, argument("The state-dir of a node.")]
CoordinatorKey = Annotated[
    Path | None, option("Federation", "The coordinator's private key; default: where init put it.")
]
MemberName = Annotated[str, argument("The member's name.")]


def key(
    *, file: Annotated[Path, argument("A new file for the private key; FILE.pub gets the public one.")]
) -> None:
    """Make a member's key, on the member's own machine, and print its fingerprint."""
    require_flower()
    from copfl.federation.protocol.keys import fingerprint, make_key

    print(f"fingerprint {fingerprint(make_key(file))}")
    print(f"Send {file}.pub to the coordinator, and tell the fingerprint by telephone. {file} stays here.")


def admit(
    *,
    folder: AppFolder,
    file: Annotated[Path, argument("The member's public key, NAME.pub.")],
    name: Annotated[str | None, option("Federation", "Its name; default: that of the file.")] = None,
    client: Annotated[
        int | None, option("Federation", "Its client's number; default: the next free one.")
    ] = None,
    rotation: Annotated[
        Path | None,
        option("Federation", "A member's new key: the file that its `copfl federate rotate` wrote."),
    ] = None,
) -> None:
    """Enter a member with its public key, or a member's new key."""
    require_flower()
    from copfl.federation.protocol.app_folder import read_app
    from copfl.federation.protocol.keys import fingerprint, read_public
    from copfl.federation.server import membership

    public, name = read_public(file), name or file.name.removesuffix(".pub")
    if rotation is not None:
        member = membership.replace_key(folder, name, public, membership.read_rotation(rotation))
    else:
        clients = int(read_app(folder)["config"]["run"]["clients"])
        member = membership.admit(folder, clients, name, public, client)
    print(f"client {member.number} is {member.name}, fingerprint {fingerprint(member.key)}")
    print("Compare the fingerprint with the member by telephone. The next run's proposal has the member.")


def members(*, folder: AppFolder) -> None:
    """Print the members, and the fingerprints that people compare by telephone."""
    require_flower()
    from copfl.federation.protocol.keys import fingerprint, read_public
    from copfl.federation.protocol.proposal import members_fingerprint
    from copfl.federation.server import membership

    roster = membership.read_roster(folder)
    public = folder / "keys" / f"{membership.COORDINATOR}.pub"
    if public.exists():
        print(f"coordinator  {fingerprint(read_public(public))}")
    for member in sorted(roster.members):
        print(f"client {member.number:<5} {fingerprint(member.key)}  {member.name}")
    for revoked, name in roster.revoked.items():
        print(f"revoked      {fingerprint(revoked)}  {name}")
    print(f"all members  {members_fingerprint(roster.members)}")


def propose(
    *,
    folder: AppFolder,
    file: Annotated[Path, argument("The proposal to write.")],
    run: Annotated[str | None, option("Output", "The run's name; default: a new one.")] = None,
    rounds: Rounds = None,
    settings: Settings = None,
    key: CoordinatorKey = None,
) -> None:
    """Write and sign a proposal: the settings of a run and its members."""
    require_flower()
    from copfl.federation.machines.deployed import new_name
    from copfl.federation.protocol import proposal_text
    from copfl.federation.server import membership
    from copfl.files import write_bytes

    config = app_config(settings, **{"run.rounds": rounds}) | {"session.run": run or new_name()}
    signer, roster = membership.coordinator_key(folder, key), membership.read_roster(folder)
    signed = membership.propose(folder, config, signer, roster)
    write_bytes(file, signed.document)
    print("\n".join(proposal_text.described(signed.proposal)))
    starts = "agree" if signed.proposal.settings.get("session.agree") else "run"
    print(f"{file} is signed. Start it with: copfl federate {starts} {folder} --proposal {file}")


def approve(
    *,
    state: StateFolder,
    proposal: Annotated[
        str | None,
        argument("A file, or the first digits of one that waits; default: the only one that waits."),
    ] = None,
    policy: Annotated[
        Path | None, option("Federation", "The node's policy; default: policy.toml in its state-dir.")
    ] = None,
    yes: Annotated[bool, option("Output", "Approve without a question.", "--yes -y")] = False,
) -> None:
    """Show a proposal and what the node's policy says of it, and accept it by hand."""
    require_flower()
    from copfl.federation.node import acceptance
    from copfl.federation.node.explanation import explained
    from copfl.federation.policy.file import policy_of
    from copfl.federation.protocol import proposal_text

    signed = proposal_text.chosen(acceptance.pending(state), proposal)
    print("\n".join(proposal_text.described(signed.proposal)))
    lines = explained(policy_of(policy, state), signed.proposal.settings)
    print("\n".join(lines))
    if lines[0].startswith("refused"):
        raise UsageError("the node's policy refuses this proposal, approved or not; change the policy first")
    if not yes and not typer.confirm("Approve it?"):
        raise typer.Exit(1)
    acceptance.approve(state, signed)
    print(f"approved: this node trains on the proposal {signed.proposal.digest[:16]}")


def revoke(*, folder: AppFolder, member: MemberName) -> None:
    """Take a member out: the server refuses its key at once, and later proposals do not have it."""
    require_flower()
    from copfl.federation.protocol.keys import fingerprint
    from copfl.federation.server import membership

    gone = membership.revoke(folder, member)
    print(f"{gone.name}, client {gone.number}, is revoked: fingerprint {fingerprint(gone.key)}")
    print("Nodes learn it with the next proposal: start one, so that they refuse those from before.")


def rotate(
    *,
    path: Annotated[
        Path, argument("A member's private key, or the app's folder for the server's certificate.")
    ],
    authority: Annotated[
        Path | None, option("Federation", "The folder of the authority's key; default: where init put it.")
    ] = None,
) -> None:
    """Replace a member's key by a new one, or the server's key and certificate."""
    require_flower()
    from copfl.federation.server import membership

    if path.is_dir():
        end = membership.rotate_server(path, authority)
        print(f"{path / 'keys' / 'server.pem'} is new, valid until {end:%Y-%m-%d}; start the server again")
        return
    statement = membership.rotate_member(path)
    print(f"{path} is a new key; the old one is {path}.old")
    print(
        f"Send {path}.pub and {statement} to the coordinator: copfl federate admit FOLDER FILE.pub "
        "--rotation FILE"
    )


def log(
    *,
    state: StateFolder,
    verify: Annotated[bool, option("Output", "Print where the chain breaks alone.", "--verify")] = False,
    noted: Annotated[
        list[str] | None, option("Output", "A last hash that you noted earlier; repeatable.", "--noted")
    ] = None,
) -> None:
    """Print what left a node, or verify that no line of it was changed or removed."""
    from copfl.federation.node import audit_log
    from copfl.federation.protocol.chained_log import AUDIT, verified

    found = verified(state / AUDIT, noted or ())
    if not verify:
        print("".join(f"{audit_log.as_text(line)}\n" for line in found.lines), end="")
    if found.problem:
        print(f"BROKEN      {found.problem}")
        raise typer.Exit(1)
    cut = "; the last line is cut off: a kill, or it is being written" if found.is_cut else ""
    print(f"intact      {len(found.lines)} lines, last hash {found.last_hash}{cut}")
