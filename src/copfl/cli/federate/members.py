"""`copfl federate`: members and their keys, and proposals."""

from pathlib import Path
from typing import Annotated

from copfl.cli.federate.options import AppFolder, Rounds, Settings, app_config, require_flower
from copfl.cli.options import argument, option

CoordinatorKey = Annotated[
    Path | None, option("Federation", "The coordinator's private key; default: where init put it.")
]
MemberName = Annotated[str, argument("The member's name.")]


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
        option("Federation", "A member's new key: the file that its `copfl site rotate` wrote."),
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
    folder: AppFolder,
    authority: Annotated[
        Path | None, option("Federation", "The folder of the authority's key; default: where init put it.")
    ] = None,
) -> None:
    """Replace the server's key and certificate."""
    require_flower()
    from copfl.federation.server import membership

    end = membership.rotate_server(folder, authority)
    print(f"{folder / 'keys' / 'server.pem'} is new, valid until {end:%Y-%m-%d}; start the server again")
