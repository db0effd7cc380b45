"""`copfl federate`: the server of several machines, and runs on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from copfl.cli.federate.options import (
    AppFolder,
    LogFormat,
    LogLevel,
    Metrics,
    Rounds,
    Settings,
    app_config,
    read_proposal,
    require_flower,
    set_environment,
)
from copfl.cli.options import option
from copfl.errors import UsageError, stoppable
from copfl.foreign import printable

if TYPE_CHECKING:
    from copfl.federation.server.invitations import InvitedSite


def server(
    *,
    folder: AppFolder,
    listen: Annotated[
        str | None,
        option("Federation", "HOST:PORT behind a reverse proxy; default: the app's port, for all machines."),
    ] = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run the server, until the command is ended.
    It registers the keys in keys/*.pub.
    """
    require_flower()
    set_environment(metrics, log_format, log_level)
    from copfl.federation.protocol.app_folder import read_app

    app = read_app(folder)
    if log_format != "json":
        where = listen or f"{app['host']}:{app['port']}"
        print(f"The server of {folder} starts at {where}, which takes some seconds; Ctrl-C ends it.")
        print(f"Who has answered, and what waits: copfl federate watch {folder}", flush=True)
    from copfl.federation.machines.deployed import serve

    serve(folder, listen)


def run(
    *,
    folder: AppFolder,
    run: Annotated[
        str | None, option("Output", "The run's name; default: a new one, or with --resume the last one.")
    ] = None,
    resume: Annotated[
        bool, option("Federation", "Continue a run from its last checkpoint.", "--resume")
    ] = False,
    rounds: Rounds = None,
    settings: Settings = None,
    proposal: Annotated[
        Path | None,
        option("Federation", "A proposal of `copfl federate propose`; default: one is signed here."),
    ] = None,
    anyway: Annotated[
        bool,
        option("Federation", "Start although sites that were invited are missing; default: off.", "--anyway"),
    ] = False,
) -> None:
    """Train; what the contract leaves open is agreed on first."""
    require_flower()
    from copfl.federation.machines.deployed import agree as by_sums
    from copfl.federation.machines.deployed import start_run
    from copfl.federation.operations.status import as_text
    from copfl.federation.protocol.app_folder import read_app
    from copfl.federation.protocol.proposal import settings_in
    from copfl.federation.server import invitations
    from copfl.federation.server.agreement import is_open

    config = app_config(settings, **{"session.run": run, "run.rounds": rounds})
    signed = read_proposal(proposal, config)
    absent = [site for site in invitations.invited(folder) if site.state != invitations.ADMITTED]
    if absent and not (resume or anyway):
        of_app = settings_in(read_app(folder)["config"])
        planned = signed.proposal.settings if signed else {**of_app, **config}
        _check_sites(folder, absent, planned)
    if signed is None and not resume and is_open(folder):
        with stoppable("the agreement continues on the server"):
            print(f"the contract is agreed: {by_sums(folder, {}).digest}")
    with stoppable(f"the run continues on the server; see `copfl federate status {folder}`"):
        print(as_text(start_run(folder, config, resume=resume, proposal=signed)))


def _check_sites(folder: Path, absent: "list[InvitedSite]", planned: Mapping[str, Any]) -> None:
    """UsageError if a run would wait for sites that are not there.

    Args:
        folder: Of the app.
        absent: The sites that were invited and are no members.
        planned: The settings of the run.
    """
    from copfl.federation.operations.watched import needed_replies
    from copfl.federation.server import invitations, membership

    reasons = "; ".join(f"{site.invitation.site} {site.state}: {site.what_to_do(folder)}" for site in absent)
    if any(site.state not in invitations.GONE for site in absent):
        raise UsageError(f"{reasons}. Nothing was started; --anyway starts a run that waits for them")
    members = len(membership.read_roster(folder).members)
    needed = needed_replies(planned, int(planned["run.clients"]))
    if members < needed:
        raise UsageError(
            f"{reasons}. To train without: --set network.min_replies={members}, which the other owners approve. "
            f"Nothing was started: a round needs {needed} sites, and {members} are members"
        )


def stop(
    *,
    folder: AppFolder,
    run: Annotated[str | None, option("Output", "The run's name; default: the last one.")] = None,
) -> None:
    """End a run that continues, such as one that waits for a site; the server and the nodes stay."""
    require_flower()
    from copfl.federation.machines.deployed import stop_run

    name = printable(stop_run(folder, run))  # whoever submitted it chose the name
    print(f"the run {name} ends; how far it came: copfl federate status {folder} --run {name}")


def agree(
    *,
    folder: AppFolder,
    run: Annotated[str | None, option("Output", "The run's name; default: a new one.")] = None,
    settings: Settings = None,
    proposal: Annotated[
        Path | None, option("Federation", "A proposal with session.agree=true; default: one is signed here.")
    ] = None,
) -> None:
    """Agree on what the contract leaves open, by sums over all members.
    These are means, deviations and categories.
    """
    require_flower()
    from copfl.federation.machines.deployed import agree as by_sums

    config = app_config(settings, **{"session.run": run})
    signed = read_proposal(proposal, config)
    with stoppable("the run continues on the server"):
        frozen = by_sums(folder, config, proposal=signed)
    print(f"{folder / 'contract.toml'} is frozen: {frozen.digest}. The next proposal has it")
