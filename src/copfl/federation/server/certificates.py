"""Certificates for a federation: one authority, and the server's certificate.

For tests and for small federations whose members exchange files. An organisation with its own authority uses
that one, under the same file names.
"""

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from copfl.errors import RunError, UsageError, raised_as
from copfl.federation.protocol.keys import new_key, private_bytes, require_private, write_key
from copfl.files import write_bytes

AUTHORITY = "copfl federation"
AUTHORITY_KEY = "ca.key"
DAYS = 397  # of a server's certificate: the longest validity that certificate checkers accept
AUTHORITY_DAYS = 3650  # every member has the authority's as a file, so it lasts as long as a federation may
WARNING_DAYS = 30  # before the end of a certificate
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # no other machine can reach these
CERTIFICATES = ("ca.pem", "server.pem")
# Purposes that neither certificate has.
UNUSED = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"


def make_certificates(folder: Path, host: str, authority: Path | None = None) -> None:
    """Writes a new authority, and the server's certificate for this host and localhost.

    Args:
        folder: For ca.pem, server.pem and server.key.
        host: Of the server.
        authority: The folder for ca.key, which signs certificates; None: the same folder.
    """
    authority_key, key = (authority or folder) / AUTHORITY_KEY, new_key()
    write_key(authority_key, key, "PKCS8")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_authority(folder, key)
    issue_server(folder, host, authority_key)


def renew_authority(folder: Path, authority_key: Path) -> None:
    """Writes a new ca.pem with the key of the old one; until that one ends, both are the same authority.

    Args:
        folder: Has ca.pem.
        authority_key: The file of its key.
    """
    _write_authority(folder, _signer(folder, authority_key))


def issue_server(folder: Path, host: str, authority_key: Path) -> None:
    """Writes a new server.pem and server.key, signed with the authority's key.

    Args:
        folder: Has ca.pem; receives server.pem and server.key.
        host: The address or the name of the server.
        authority_key: The file of the key that signs.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signer = _signer(folder, authority_key)
    identifier = x509.SubjectKeyIdentifier.from_public_key(signer.public_key())
    addresses: list[x509.GeneralName] = []
    for address in dict.fromkeys((host, "localhost", "127.0.0.1")):
        try:
            addresses.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            addresses.append(x509.DNSName(address))
    key = new_key()
    leaf = _certificate(
        host,
        key,
        signer,
        False,
        x509.SubjectAlternativeName(addresses),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
    )
    write_bytes(folder / "server.key", private_bytes(key, "PKCS8"), private=True)
    write_bytes(folder / "server.pem", leaf)


def expiries(folder: Path) -> dict[str, datetime.datetime]:
    """Until when the certificates in the folder are valid, by the names of their files."""
    return {
        name: _read(folder / name).not_valid_after_utc for name in CERTIFICATES if (folder / name).exists()
    }


def expiry_warnings(ends: dict[str, datetime.datetime], now: datetime.datetime) -> list[str]:
    """A sentence for each certificate that is not valid, or soon will not be.

    Args:
        ends: Until when each certificate is valid, see `expiries`.
        now: The time.
    """
    lines = []
    for name, end in ends.items():
        days = (end - now).total_seconds() / 86400
        how = f"`copfl federate rotate FOLDER{'' if name == 'server.pem' else ' --renew-authority'}`"
        if days < 0:
            lines.append(f"the certificate {name} expired on {end:%Y-%m-%d}; it needs {how}")
        elif days < WARNING_DAYS:
            lines.append(
                f"the certificate {name} expires in {days:.0f} days, on {end:%Y-%m-%d}; it needs {how}"
            )
    return lines


def _signer(folder: Path, authority_key: Path) -> Any:
    """The key of the authority whose ca.pem is in the folder."""
    from cryptography.hazmat.primitives import serialization

    absent = f"the authority's key {authority_key} cannot be read: {{}}; name its folder with --authority"
    with raised_as(UsageError, absent, OSError, ValueError):
        require_private(authority_key)
        signer: Any = serialization.load_pem_private_key(authority_key.read_bytes(), None)
    if _read(folder / "ca.pem").public_key() != signer.public_key():
        raise UsageError(f"{authority_key} is not the key of the authority in {folder / 'ca.pem'}")
    return signer


def _write_authority(folder: Path, key: Any) -> None:
    from cryptography import x509

    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    write_bytes(folder / "ca.pem", _certificate(AUTHORITY, key, key, True, identifier))


def _read(path: Path) -> Any:
    from cryptography import x509

    with raised_as(RunError, f"{path} is no certificate: {{}}", OSError, ValueError):
        return x509.load_pem_x509_certificate(path.read_bytes())


def _certificate(subject: str, key: Any, signer: Any, is_authority: bool, *extensions: Any) -> bytes:
    """A certificate of the authority's, of itself or of the server."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import NameOID

    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, AUTHORITY)]
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)  # clocks differ
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **dict.fromkeys(UNUSED.split(), False),
    )
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    builder = (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=AUTHORITY_DAYS if is_authority else DAYS))
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
