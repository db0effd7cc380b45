"""`copfl site`: the steps of a site one by one: its check of the data, key, policy, consent and audit log."""

import json
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli.federate.options import require_flower
from copfl.cli.options import Json, argument, option
from copfl.errors import UsageError
from copfl.foreign import printable

SHOWN = 8  # names of columns in a sentence
StateFolder = Annotated[
    Path,
    argument("The folder that `copfl site join` made, such as north, or a node's state-dir.", "check_site"),
]


def check(
    *,
    contract: Annotated[Path, argument("Your invitation, or the contract, an app's folder, or a proposal.")],
    data: Annotated[Path, option("Data", "This site's data: a file or a folder.", "--data -d")],
    as_json: Json = False,
) -> None:
    """Compare this site's data with the data contract.
    Nothing leaves this machine; exit code 1 if they differ.
    """
    from copfl.data.contract.check import check as compare
    from copfl.federation.server.agreement import contract_at
    from copfl.tables import listed

    agreed = contract_at(contract)
    checked = compare(agreed, data)
    if as_json:
        print(json.dumps({"contract": agreed.digest, **checked.as_table()}, indent=1))
    else:
        for difference in checked.differences:
            print(f"{'note' if difference.is_note else 'differs':<9} {difference.text}")
        if open_names := listed([column.name for column in agreed.open], SHOWN):
            print(
                f"{'note':<9} means and categories that the contract leaves open are not compared: "
                f"{printable(open_names)}"
            )
        verdict = "fits" if checked.fits else "does not fit"
        print(f"{data} {verdict} the contract {agreed.digest}: {checked.rows:,} rows")
    if not checked.fits:
        raise typer.Exit(1)


def key(
    *, file: Annotated[Path, argument("A new file for the private key; FILE.pub gets the public one.")]
) -> None:
    """Make this member's key, and print its fingerprint."""
    require_flower()
    from copfl.federation.protocol.keys import fingerprint, make_key

    print(f"fingerprint {fingerprint(make_key(file))}")
    print(f"Send {file}.pub to the coordinator, and tell the fingerprint by telephone. {file} stays here.")


def policy(
    *,
    file: Annotated[Path, argument("The policy; written if there is none, else checked.")],
    of_app: Annotated[
        Path | None,
        option("Federation", "Explain what this policy refuses of the app in this folder.", "--app"),
    ] = None,
) -> None:
    """Write, check or explain the policy: what a run may ask of this machine."""
    from copfl.federation.node.explanation import explained
    from copfl.federation.policy.file import read_policy, write_strict
    from copfl.federation.protocol.app_folder import read_app

    if not file.exists() and of_app is None:
        write_strict(file)
        print(f"{file} is a strict policy: read it, and change the lines that you need")
        return
    allowed = read_policy(file)
    if of_app is None:
        entries = {"code": allowed.code, "bases": allowed.bases, "files": allowed.files}
        print(f"{file} is valid; entered: {', '.join(f'{len(e)} of {name}' for name, e in entries.items())}")
        return
    lines = explained(allowed, read_app(of_app)["config"], file.parent)
    print("\n".join(lines))
    if lines[0].startswith("refused"):
        raise typer.Exit(1)


def approve(
    *,
    folder: StateFolder,
    proposal: Annotated[
        str | None,
        argument("A file, or the first digits of one that waits; default: the only one that waits."),
    ] = None,
    policy: Annotated[
        Path | None, option("Federation", "The node's policy; default: policy.toml in its folder.")
    ] = None,
    members: Annotated[
        str | None,
        option(
            "Federation",
            "The fingerprint of all members that another site reads out; another one is refused.",
        ),
    ] = None,
    yes: Annotated[bool, option("Output", "Approve without a question.", "--yes -y")] = False,
) -> None:
    """Show a proposal that waits, its members, and what the policy says of it; accept it."""
    require_flower()
    from copfl.federation.node import acceptance
    from copfl.federation.node.explanation import explained
    from copfl.federation.policy.file import policy_of
    from copfl.federation.protocol import proposal_text
    from copfl.federation.protocol.proposal import members_fingerprint

    signed = proposal_text.chosen(acceptance.pending(folder), proposal)
    print("\n".join(map(printable, proposal_text.described(signed.proposal))))
    everybody = members_fingerprint(signed.proposal.members)
    if new := acceptance.strangers(folder, signed.proposal):
        print(f"new members  {', '.join(member.name for member in new)}")
        print(
            "Telephone the other sites, at numbers that you know from elsewhere: they see the same line in "
            f"copfl site approve,  all members  {everybody}"
        )
        print(
            "A coordinator that invents members can read what your site adds to a sum; it cannot answer these calls."
        )
    if members is not None and members.strip().lower() != everybody:
        raise UsageError(
            f"the members of this proposal are {everybody}, and another site sees others: do not approve it; telephone "
            "all sites"
        )
    lines = explained(policy_of(policy, folder), signed.proposal.settings)
    print("\n".join(map(printable, lines)))
    if lines[0].startswith("refused"):
        raise UsageError("the node's policy refuses this proposal, approved or not; change the policy first")
    compared = "Have other sites read out the same fingerprint of all members? Approve it?"
    if not yes and not typer.confirm(compared if new and members is None else "Approve it?"):
        raise typer.Exit(1)
    acceptance.approve(folder, signed)
    print(f"approved: this node trains on the proposal {signed.proposal.digest[:16]}")


def rotate(
    *,
    key: Annotated[
        Path,
        argument("The folder that `copfl site join` made, such as north, or the private key of this member."),
    ],
) -> None:
    """Replace this member's key by a new one, which the old one signs."""
    require_flower()
    from copfl.federation.operations import joining
    from copfl.federation.server import membership

    site = joining.read(key) if key.is_dir() else None
    private = key if site is None else key / joining.KEY
    public, statement = membership.rotate_member(private, "" if site is None else site.invitation.site)
    print(f"{private} is a new key; the old one is {private}.old")
    print(
        f"Send {public} and {statement} to the coordinator: "
        f"copfl federate admit FOLDER {public.name} --rotation {statement.name}"
    )
    start = "Start the node" if site is None else f"Start the node with copfl site start {key}"
    print(
        f"End the node if it runs: it has the old key. {start} when the coordinator has entered the new one."
    )


def log(
    *,
    folder: StateFolder,
    verify: Annotated[bool, option("Output", "Print where the chain breaks alone.", "--verify")] = False,
    noted: Annotated[
        list[str] | None, option("Output", "A last hash that you noted earlier; repeatable.", "--noted")
    ] = None,
) -> None:
    """Print what left this site, or verify that no line was changed."""
    from copfl.federation.node import audit_log
    from copfl.federation.protocol.chained_log import AUDIT, verified

    if not ((folder / AUDIT).exists() or noted or any(folder.glob("*/client.json"))):
        print("nothing has left this site: it has answered no run yet")
        return
    audit = verified(folder / AUDIT, noted or ())
    if not verify:
        print("".join(f"{audit_log.as_text(line)}\n" for line in audit.lines), end="")
    if audit.problem:
        print(f"BROKEN      {audit.problem}")
        raise typer.Exit(1)
    cut = "; the last line is cut off: a kill, or it is being written" if audit.is_cut else ""
    print(f"intact      {len(audit.lines)} lines, last hash {audit.last_hash}{cut}")
