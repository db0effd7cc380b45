"""`copfl federate`: members and their keys, and proposals."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from copfl.cli.federate.options import AppFolder, Rounds, Settings, app_config, require_flower
from copfl.cli.options import argument, option
from copfl.errors import UsageError

if TYPE_CHECKING:
    from copfl.federation.protocol.invitation import Invitation

CoordinatorKey = Annotated[
    Path | None, option("Federation", "The coordinator's private key; default: where init put it.")
]
MemberName = Annotated[str, argument("The member's name.")]


def invite(
    *,
    folder: AppFolder,
    sites: Annotated[list[str], argument("The names of sites, such as north.")],
    days: Annotated[float, option("Federation", "Days until the invitations expire; default: 14.")] = 14.0,
    key: CoordinatorKey = None,
) -> None:
    """Write the invitation of a site, and the words to read out."""
    require_flower()
    from copfl.federation.server import invitations, membership

    signer = membership.coordinator_key(folder, key)
    for site in sites:
        signed = invitations.invite(folder, site, signer, days)
        print(invitation_text(folder, signed.invitation))


def invitation_text(folder: Path, invitation: "Invitation") -> str:
    """What the coordinator does with an invitation.

    Args:
        folder: The folder of the app.
        invitation: The one that was written.
    """
    from copfl.federation.server import invitations

    file, site = invitations.file_of(folder, invitation.site), invitation.site
    return (
        f"{site}: send {file}; it expires on {invitation.expires[:10]}\n"
        f"  {site} runs   copfl site join {file.name} --data FILE\n"
        f"  then telephone, and read out: {invitation.words}\n"
        f"  {site} reads out words of its own: copfl federate admit {folder} {site}"
    )


def admit(
    *,
    folder: AppFolder,
    site: Annotated[
        str, argument("A site that was invited, its file answer.json, or a member's public key, NAME.pub.")
    ],
    words: Annotated[
        str | None, option("Federation", "The words that the site reads out; default: asked for.")
    ] = None,
    name: Annotated[
        str | None, option("Federation", "The name of NAME.pub's member; default: that of the file.")
    ] = None,
    client: Annotated[
        int | None, option("Federation", "Of NAME.pub, its client's number; default: the next free one.")
    ] = None,
    rotation: Annotated[
        Path | None,
        option("Federation", "A member's new key: the file that its `copfl site rotate` wrote."),
    ] = None,
) -> None:
    """Admit a site whose words you have heard by telephone."""
    require_flower()
    from copfl.federation.protocol.app_folder import read_app
    from copfl.federation.protocol.keys import fingerprint, read_public
    from copfl.federation.server import invitations, membership

    file = Path(site)
    if file.suffix == ".pub" or rotation is not None:
        public, name = read_public(file), name or file.name.removesuffix(".pub")
        if rotation is not None:
            member = membership.replace_key(folder, name, public, membership.read_rotation(rotation))
        else:
            clients = int(read_app(folder)["config"]["run"]["clients"])
            member = membership.admit(folder, clients, name, public, client)
        print(f"client {member.number} is {member.name}, fingerprint {fingerprint(member.key)}")
        print("Compare the fingerprint with the member by telephone. The next run's proposal has the member.")
        return
    if file.suffix == ".json":
        site = invitations.receive_file(folder, file)
    invitations.waiting(folder, site)
    if words is None:
        if not sys.stdin.isatty():
            raise UsageError(
                f'this is no terminal to ask in: give the words that {site} reads out, --words "..."'
            )
        words = typer.prompt(f"The words that {site} reads out by telephone")
    member = invitations.admit_answer(folder, site, words)
    print(f"{member.name} is client {member.number}; its node connects within seconds")
    if missing := [other for other in invitations.invited(folder) if other.state != invitations.ADMITTED]:
        print(f"Missing: {', '.join(f'{other.invitation.site} ({other.state})' for other in missing)}")
    else:
        print(f"All sites are there. Train: copfl federate run {folder}")


def members(*, folder: AppFolder) -> None:
    """Print the members, and the fingerprints to compare by telephone."""
    require_flower()
    from copfl.federation.protocol.keys import fingerprint, read_public
    from copfl.federation.protocol.proposal import members_fingerprint
    from copfl.federation.server import invitations, membership

    roster = membership.read_roster(folder)
    public = folder / "keys" / f"{membership.COORDINATOR}.pub"
    if public.exists():
        print(f"coordinator  {fingerprint(read_public(public))}")
    for member in sorted(roster.members):
        print(f"client {member.number:<5} {fingerprint(member.key)}  {member.name}")
    for revoked, name in roster.revoked.items():
        print(f"revoked      {fingerprint(revoked)}  {name}")
    print(f"all members  {members_fingerprint(roster.members)}")
    for site in invitations.invited(folder):
        invitation = site.invitation
        print(f"invited      {invitation.site} {site.state}; words of its invitation: {invitation.words}")


def propose(
    *,
    folder: AppFolder,
    file: Annotated[Path, argument("The proposal to write.")],
    run: Annotated[str | None, option("Output", "The run's name; default: a new one.")] = None,
    rounds: Rounds = None,
    settings: Settings = None,
    key: CoordinatorKey = None,
) -> None:
    """Sign the settings and the members of a run, as a proposal."""
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
    """Take a member out: the server refuses its key at once.
    Later proposals do not have it.
    """
    require_flower()
    from copfl.federation.protocol.keys import fingerprint
    from copfl.federation.server import membership

    revoked = membership.revoke(folder, member)
    print(f"{revoked.name}, client {revoked.number}, is revoked: fingerprint {fingerprint(revoked.key)}")
    print("Nodes learn it with the next proposal: start one, so that they refuse those from before.")


def rotate(
    *,
    folder: AppFolder,
    authority: Annotated[
        Path | None, option("Federation", "The folder of the authority's key; default: where init put it.")
    ] = None,
    renew_authority: Annotated[
        bool,
        option(
            "Federation",
            "Renew the authority's certificate too, which all sites then need; default: off.",
            "--renew-authority",
        ),
    ] = False,
) -> None:
    """Replace the server's key and certificate."""
    require_flower()
    from copfl.federation.server import membership

    ends = membership.rotate_server(folder, authority, with_authority=renew_authority)
    keys = folder / "keys"
    print(f"{keys / 'server.pem'} is new, valid until {ends['server.pem']:%Y-%m-%d}; start the server again")
    if renew_authority:
        print(
            f"{keys / 'ca.pem'} is new, valid until {ends['ca.pem']:%Y-%m-%d}: send it to all sites before their old "
            "one ends; each puts it into its folder as ca.pem, and starts its node again"
        )
