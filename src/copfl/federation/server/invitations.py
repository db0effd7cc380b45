"""The coordinator's invitations, and the answers of the sites; the files are in the app's folder. Without torch.

A stolen file lets its thief answer in the site's name, once and before it expires. That answer waits: the coordinator
admits a key alone whose words the site has read out by telephone.
"""

import datetime
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from copfl.errors import UsageError, raised_as
from copfl.federation.protocol import invitation as invitations
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.files import alone
from copfl.federation.protocol.invitation import (
    JOINS,
    LEAVES,
    MISFITS,
    SUFFIX,
    Invitation,
    InvitationAnswer,
    SignedInvitation,
    invitation_of,
    read_answer,
)
from copfl.federation.protocol.keys import SigningKey
from copfl.federation.protocol.proposal import NAME, Member
from copfl.federation.protocol.words import same_words
from copfl.federation.server.membership import admit, read_roster, revoke
from copfl.files import write_bytes

INVITATIONS, ANSWERS, OTHERS = "invitations", "answers", "others"  # in the folder of the app
NO_ANSWER, WAITS, ADMITTED = "has not answered", "waits for admission", "is admitted"
EXPIRED, TWO_KEYS, DO_NOT_FIT = "has not answered, and its invitation expired", "answered twice", MISFITS
REVOKED = "is revoked"
GONE = (LEAVES, REVOKED)  # the federation goes on without it


class InvitedSite(NamedTuple):
    """A site that was invited, and how far it is."""

    invitation: Invitation
    state: str
    answer: InvitationAnswer | None = None

    def what_to_do(self, folder: Path) -> str:
        """What the coordinator does now; empty if nothing.

        Args:
            folder: Of the app.
        """
        name = self.invitation.site
        again = f"invite it again: copfl federate invite {folder} {name}"
        return {
            NO_ANSWER: f"telephone {name}; it runs copfl site join {name}{SUFFIX} --data FILE",
            EXPIRED: again,
            WAITS: f"telephone {name}, and enter its words: copfl federate admit {folder} {name}",
            TWO_KEYS: f"somebody else has its invitation, or the site lost its folder; {again}",
            DO_NOT_FIT: f"{name} corrects its file and runs copfl site start {name}, or all change the contract",
            LEAVES: again,
            REVOKED: again,
        }.get(self.state, "")


def invite(folder: Path, site: str, key: SigningKey, days: float = invitations.DAYS) -> SignedInvitation:
    """A new invitation, in FOLDER/invitations; an earlier one of the same site is void.

    Args:
        folder: The folder of the app.
        site: The member's name.
        key: The coordinator's.
        days: Until it expires.
    """
    app, roster = read_app(folder), read_roster(folder)
    check_names([site])
    if not app["secure"]:
        raise UsageError(f"{folder} has no certificates to invite with; make the app with --host ADDRESS")
    if not 0 < days <= 365:
        raise UsageError(f"--days {days:g} must be above 0 and at most 365")
    if site in {member.name for member in roster.members}:
        raise UsageError(f"{site} is a member; take it out first: copfl federate revoke {folder} {site}")
    clients = int(app["config"]["run"]["clients"])
    invited_numbers = {other.site: other.number for other in of_folder(folder)}
    taken_numbers = {member.number for member in roster.members}
    taken_numbers |= {number for name, number in invited_numbers.items() if name != site}
    number = invited_numbers.get(site, next((n for n in range(clients) if n not in taken_numbers), None))
    if number is None or number in taken_numbers:
        raise UsageError(f"all {clients} sites are invited; raise run.clients in pyproject.toml first")
    host = str(app["host"])
    with raised_as(UsageError, f"{folder / 'keys' / 'ca.pem'}: {{}}", OSError):
        authority = (folder / "keys" / "ca.pem").read_text()
    signed = invitations.invite(
        site,
        number,
        federation=re.sub(r"[^A-Za-z0-9_.-]", "-", folder.resolve().name).lstrip("-._") or "federation",
        address=f"{host}:{app['port']}",
        authority=authority,
        run_config=app["config"],
        key=key,
        days=days,
    )
    for earlier in (_answer_file(folder, site), _other_file(folder, site)):
        earlier.unlink(missing_ok=True)
    write_bytes(file_of(folder, site), signed.document, private=True)
    return signed


def check_names(sites: Sequence[str]) -> None:
    """UsageError if a site cannot have its name, or two have one.

    Args:
        sites: The names.
    """
    for site in sites:
        if not NAME.fullmatch(site):
            raise UsageError(f'the name "{site[:60]}" must be letters, digits, ".", "-" and "_", at most 64')
        if sites.count(site) > 1:
            raise UsageError(f"two sites are called {site}; give each a name of its own")


def file_of(folder: Path, site: str) -> Path:
    """The file that the coordinator sends to a site.

    Args:
        folder: The folder of the app.
        site: The member's name.
    """
    return folder / INVITATIONS / f"{site}{SUFFIX}"


def _answer_file(folder: Path, site: str) -> Path:
    return folder / ANSWERS / f"{site}.json"


def _other_file(folder: Path, site: str) -> Path:
    """An answer of another key to the same invitation."""
    return folder / ANSWERS / OTHERS / f"{site}.json"


def of_folder(folder: Path) -> Iterator[Invitation]:
    """The invitations of the app in a folder."""
    for path in sorted((folder / INVITATIONS).glob(f"*{SUFFIX}")):
        state = path.stat()
        yield _read(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1024)  # or everybody who posts has the server verify all of them
def _read(path: Path, size: int, changed: int) -> Invitation:
    """The invitation in a file of this size that was last changed then."""
    return invitations.read(path.read_bytes()).invitation


def invited(folder: Path) -> list[InvitedSite]:
    """The sites that were invited, by the number of their client."""
    now, roster = datetime.datetime.now(datetime.UTC), read_roster(folder)
    members = {member.name for member in roster.members}
    sites = []
    for invitation in of_folder(folder):
        path = _answer_file(folder, invitation.site)
        answer = read_answer(path.read_bytes()) if path.exists() else None
        if invitation.site in members:
            state = ADMITTED
        elif answer is not None and answer.key in roster.revoked:
            state = answer.state if answer.state == LEAVES else REVOKED
        elif _other_file(folder, invitation.site).exists():
            state = TWO_KEYS
        elif answer is None:
            state = EXPIRED if invitation.is_over(now) else NO_ANSWER
        else:
            state = WAITS if answer.state == JOINS else answer.state
        sites.append(InvitedSite(invitation, state, answer))
    return sorted(sites, key=lambda site: site.invitation.number)


def receive(folder: Path, document: bytes) -> str:
    """The state of a site after its answer has arrived; UsageError if the answer is refused.

    Args:
        folder: The folder of the app.
        document: What the site signed.
    """
    # Before anything is verified: who knows no invitation costs a look at a list.
    digest = invitation_of(document)
    invitation = next((known for known in of_folder(folder) if known.digest == digest), None)
    if invitation is None:
        raise UsageError(
            "the coordinator knows no such invitation: it wrote a newer one, or another coordinator wrote this "
            "one; ask it by telephone"
        )
    answer = read_answer(document)
    contract = invitation.contract
    columns = {""} if contract is None else {"", contract.group, contract.time}
    columns |= {column.name[:100] for column in (*contract.columns, *contract.targets)} if contract else set()
    if not {misfit.column for misfit in answer.misfits} <= columns:
        raise UsageError("it names columns that the contract does not have; ask the coordinator by telephone")
    path = _answer_file(folder, invitation.site)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    with alone(path):
        member = next((m for m in read_roster(folder).members if m.name == invitation.site), None)
        before = read_answer(path.read_bytes()) if path.exists() else None
        is_members = member is not None and member.key == answer.key  # also the new one of a rotation
        if before is not None and before.key != answer.key and not is_members:
            write_bytes(_other_file(folder, invitation.site), document, private=True)
            raise UsageError(
                "another key has answered this invitation already: somebody else may have the file; telephone "
                "the coordinator, who writes a new invitation"
            )
        if answer.key in read_roster(folder).revoked:
            raise UsageError(
                "the coordinator has taken this key out: leave with copfl site leave, and ask for a new invitation"
            )
        if member is None and before is None and invitation.is_over(datetime.datetime.now(datetime.UTC)):
            raise UsageError("the invitation has expired; ask the coordinator for a new one")
        write_bytes(path, document, private=True)
        if answer.state == LEAVES:
            if member is not None and member.key == answer.key:
                revoke(folder, invitation.site)
            return LEAVES
    return ADMITTED if member is not None else WAITS if answer.state == JOINS else answer.state


def receive_file(folder: Path, file: Path) -> str:
    """The name of the site whose answer came as a file, because it does not reach the server.

    Args:
        folder: The folder of the app.
        file: What the site signed.
    """
    with raised_as(UsageError, f"{file}: {{}}", OSError, UsageError):
        document = file.read_bytes()
        receive(folder, document)
    return answering(folder, document).invitation.site


def answering(folder: Path, document: bytes) -> InvitedSite:
    """The site whose answer has arrived.

    Args:
        folder: The folder of the app.
        document: What the site signed, which `receive` took.
    """
    digest = invitation_of(document)
    return next(site for site in invited(folder) if site.invitation.digest == digest)


def waiting(folder: Path, site: str) -> InvitedSite:
    """The site whose key the coordinator is about to admit; UsageError if none of it waits.

    Args:
        folder: The folder of the app.
        site: The member's name.
    """
    invited_site = next((other for other in invited(folder) if other.invitation.site == site), None)
    if invited_site is None:
        raise UsageError(
            f"{site} is neither invited nor a file; invite it: copfl federate invite {folder} {site}"
        )
    if invited_site.state != WAITS:
        what_to_do = invited_site.what_to_do(folder) or "nothing is to do"
        raise UsageError(f"{site} {invited_site.state}; {what_to_do}")
    return invited_site


def admit_answer(folder: Path, site: str, words: str) -> Member:
    """Enters a site whose words the coordinator heard; UsageError if its key has other words.

    Args:
        folder: The folder of the app.
        site: Its name.
        words: What the site read out by telephone.
    """
    invited_site = waiting(folder, site)
    assert invited_site.answer is not None
    if not same_words(words, invited_site.answer.words):
        raise UsageError(
            f"these are not the words of the key that answered for {site}: have them read again; if they stay "
            f"different, another has its invitation: copfl federate invite {folder} {site}"
        )
    clients = int(read_app(folder)["config"]["run"]["clients"])
    return admit(folder, clients, site, invited_site.answer.key, invited_site.invitation.number)
