"""`copfl site`: take part by an invitation, use what comes out, and leave."""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from copfl.cli import options
from copfl.cli.federate.options import LogFormat, LogLevel, app_config, require_flower, set_environment
from copfl.cli.options import argument, option
from copfl.cli.report import report_of_node
from copfl.errors import CopflError, UsageError, raised_as, stoppable
from copfl.foreign import printable

if TYPE_CHECKING:
    from copfl.federation.operations.joining import JoinedSite

RETRY = 3.0  # seconds between two attempts to reach the server
Settings = Annotated[
    list[str] | None,
    option("Training", "Another key of the node, such as threads=4, which is kept; repeatable.", "--set -s"),
]
SiteFolder = Annotated[Path, argument("The folder that `copfl site join` made, such as north.", "check_site")]


def join(
    *,
    invitation: Annotated[Path, argument("The file that the coordinator sent, such as north.invite.")],
    data: Annotated[
        str, option("Data", "This site's data: a file, a folder or module:function.", "--data -d")
    ],
    words: Annotated[
        str | None,
        option("Federation", "The words that the coordinator reads out by telephone; default: asked for."),
    ] = None,
    yes: Annotated[bool, option("Federation", "Consent without a question.", "--yes -y")] = False,
    folder: Annotated[
        Path | None, option("Output", "The folder of this site; default: its name in the invitation.")
    ] = None,
    policy: Annotated[
        Path | None, option("Federation", "A policy of your own; default: the strict one is written.")
    ] = None,
    trust_coordinator: Annotated[
        bool,
        option(
            "Federation",
            "Take part with the members that the coordinator lists first, without comparing them; not with --policy.",
            "--trust-coordinator",
        ),
    ] = False,
    systemd: Annotated[
        bool, option("Output", "Write a unit of systemd instead of running the node here.", "--systemd")
    ] = False,
    settings: Settings = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Take part: read what is asked, consent, and run the node."""
    require_flower()
    with raised_as(UsageError, f"{invitation}: {{}}; name the file that the coordinator sent", OSError):
        content = invitation.read_bytes()  # before the imports
    from copfl.federation.operations import joining
    from copfl.federation.protocol.words import same_words

    signed = joining.open_invitation(content, invitation.name)
    invited = signed.invitation
    target = folder or Path(invited.site)
    joining.check_folder(target, invited)
    shown = data
    if ":" not in data:
        if not Path(data).expanduser().exists():
            raise UsageError(f"there is no file {data}; name this site's data with --data")
        data = str(Path(data).expanduser().absolute())
    if policy is not None and trust_coordinator:
        raise UsageError(
            f"{policy} says which members it accepts, under [proposals]; leave --trust-coordinator out"
        )
    rules = joining.policy_of(invited, policy, trusts_members=trust_coordinator)
    if problems := joining.refused(invited, rules):
        raise UsageError(
            f"the {'strict ' * (policy is None)}policy refuses what {invited.federation} asks: {'; '.join(problems)}; "
            "the coordinator changes it, or you allow it with --policy FILE (copfl site policy FILE writes one); "
            "nothing was made or sent"
        )
    compared = joining.checked(invited, data)
    print("\n".join(map(printable, joining.described(invited, shown, compared, rules))))
    nothing = "nothing was made or sent"
    if (words is None or not yes) and not sys.stdin.isatty():
        raise UsageError(f'this is no terminal to ask in: give --words "..." and --yes; {nothing}')
    if words is None:
        words = typer.prompt("Telephone the coordinator. The words of your invitation that it reads out")
    if not same_words(words, invited.words):
        raise UsageError(
            f"these are not the words of {invitation.name}: have them read again; if they stay different, somebody "
            f"else wrote or replaced the file: do not use it; {nothing}"
        )
    unfit = "Your file does not fit, see above: nothing is trained until it does. Take part all the same?"
    if not yes and not typer.confirm(unfit if compared and not compared.fits else "Take part?"):
        raise UsageError(f"{nothing}; tell the coordinator that {invited.site} does not take part")
    site = joining.make(target, signed, {**app_config(settings), "data": data}, rules)
    _answer(site)
    if systemd:
        unit = joining.write_unit(site)
        print(f"Run the node: sudo cp {unit} /etc/systemd/system/ && sudo systemctl enable --now {unit.stem}")
        return
    _serve(site, log_format, log_level)


def start(
    *,
    folder: SiteFolder,
    settings: Settings = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run the node again, after a restart of this machine."""
    require_flower()
    from copfl.federation.operations import joining

    site = joining.with_options(joining.read(folder), app_config(settings))
    if site.has_left:
        raise UsageError(
            f"{folder} has left {site.invitation.federation}; to return, ask for a new invitation"
        )
    _answer(site)
    _serve(site, log_format, log_level)


def leave(
    *,
    folder: SiteFolder,
    yes: Annotated[bool, option("Federation", "Leave without a question.", "--yes -y")] = False,
) -> None:
    """End the participation: the node ends, and the server refuses its key."""
    require_flower()
    from copfl.federation.operations import joining

    site = joining.read(folder)
    if not yes and not typer.confirm(f"Leave {site.invitation.federation}? Your model stays in {folder}"):
        raise typer.Exit(1)
    joining.leave(site)
    print(f"The node ends, and none starts again. Your model and its log stay in {folder}.")
    try:
        _send(site, joining.answer(site)[1])
        print("The server refuses this site's key from now on.")
    except CopflError as error:
        name = site.invitation.site
        print(f"copfl: {error}", file=sys.stderr)
        print(f"Ask the coordinator to take your key out: copfl federate revoke FOLDER {name}")


def report(
    *,
    folder: SiteFolder,
    out: Annotated[
        Path | None, option("Output", "A file; default: report.html in FOLDER.", "--out -o")
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """What this site gained, over training alone too, and what left it."""
    _check_model(folder)
    report_of_node(folder, out, None, True, True, quiet)


def predict(
    *,
    folder: SiteFolder,
    data: Annotated[Path, option("Data", "New rows: a file of the same kind as in training.", "--data -d")],
    out: Annotated[
        Path | None, option("Output", "A .csv or .npz file; default: print the predictions.", "--out -o")
    ] = None,
) -> None:
    """Use this site's model, without the server."""
    _check_model(folder)
    from copfl.cli import models

    models.predict(bundle=folder, data=data, out=out)


def _check_model(folder: Path) -> None:
    """UsageError if the site has no model yet."""
    from copfl.experiment.bundle.places import of_node

    if of_node(folder) is None:
        raise UsageError(
            f"{folder} has no model yet: it gets one with the first round; see copfl site status {folder}"
        )


def _answer(site: "JoinedSite") -> None:
    """Sends the answer to the invitation; UsageError if the data do not fit, which the coordinator learns then."""
    from copfl.federation.operations import joining
    from copfl.federation.server.invitations import WAITS

    compared = joining.checked(site.invitation, str(site.options["data"]))
    answered, document = joining.answer(site, compared)
    with stoppable(f"`copfl site start {site.folder}` continues"):
        state = _sent(site, document, answered.words)
    if compared is not None and not compared.fits:
        raise UsageError(
            f"{site.options['data']} does not fit the contract: {'; '.join(compared.problems)}. Correct the file, "
            f"then: copfl site start {site.folder}. The coordinator was told the names of these columns alone"
        )
    if state == WAITS:
        print(f"Read these words to the coordinator, in the same call:  {answered.words}")
        print("The node waits until the coordinator has entered them.", flush=True)


def _sent(site: "JoinedSite", document: bytes, words: str) -> str:
    """`_send`, which waits for a server that is not there yet.

    Args:
        site: The one that answers.
        document: Its answer.
        words: Of its key, which the coordinator can hear meanwhile.
    """
    from copfl.federation.machines.admission import NotThere
    from copfl.federation.operations.joining import ANSWER, waiting

    told = False
    with contextlib.ExitStack() as stack:
        while True:
            try:
                return _send(site, document)
            except NotThere as error:
                if not told:
                    stack.enter_context(waiting(site, str(error)))
                    print(f"copfl: {error}. This waits for it", file=sys.stderr, flush=True)
                    print(f"If the coordinator has not entered your words yet, they are:  {words}")
                    print(f"Without a way to its server, send it the file {site.folder / ANSWER}", flush=True)
                told = True
                time.sleep(RETRY)
            except UsageError as error:  # the server refuses this invitation, or this key
                raise UsageError(
                    f"{error}. With its new file: copfl site join FILE --data {site.options['data']}"
                ) from error
            except CopflError as error:
                raise UsageError(f"{error}. Afterwards: copfl site start {site.folder}") from error


def _send(site: "JoinedSite", document: bytes) -> str:
    from copfl.federation.machines.admission import send

    with raised_as(
        UsageError, f"{site.authority}: {{}}; ask the coordinator for its ca.pem", OSError, ValueError
    ):
        authority = site.authority.read_text("utf-8")  # that of the invitation, or a renewed one
    return send(site.invitation.address, authority, document)


def _serve(site: "JoinedSite", log_format: str | None, log_level: str | None) -> None:
    set_environment(None, log_format, log_level)
    from copfl.federation.machines.supernode import Address, serve
    from copfl.federation.operations.joining import KEY

    serve(Address(site.invitation.address, site.authority, site.folder / KEY), site.node_options)
