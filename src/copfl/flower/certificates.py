"""Certificates and keys for a federation: one authority, the server's certificate, and a key per node.

For tests and for small federations whose members exchange files. An organisation with its own authority uses
that one, under the same file names.
"""

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Any

from copfl.errors import RunError, raised_as

AUTHORITY = "copfl federation"
DAYS = 397  # the longest validity that certificate checkers accept
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # no other machine can reach these
# Purposes that neither certificate has.
UNUSED = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"


def make_certificates(folder: Path, host: str) -> None:
    """Writes ca.pem, ca.key, server.pem and server.key; the certificate is for this host and localhost."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    authority, server = new_key(), new_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())

    def certificate(subject: str, key: Any, is_authority: bool, *extensions: Any) -> bytes:
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
            .not_valid_after(start + datetime.timedelta(days=DAYS))
            .add_extension(constraints, critical=True)
            .add_extension(usage, critical=True)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(authority, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)

    addresses: list[x509.GeneralName] = []
    for address in dict.fromkeys((host, "localhost", "127.0.0.1")):
        try:
            addresses.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            addresses.append(x509.DNSName(address))
    root = certificate(AUTHORITY, authority, True, identifier)
    leaf = certificate(
        host,
        server,
        False,
        x509.SubjectAlternativeName(addresses),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
    )
    _write_key(folder / "ca.key", authority, "PKCS8")
    _write_key(folder / "server.key", server, "PKCS8")
    (folder / "ca.pem").write_bytes(root)
    (folder / "server.pem").write_bytes(leaf)


def make_node_key(path: Path) -> None:
    """Writes a node's private key to PATH and its public key to PATH.pub, in OpenSSH's format."""
    from cryptography.hazmat.primitives import serialization

    key = new_key()
    _write_key(path, key, "OpenSSH")
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")


def new_key() -> Any:
    """A private key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def private_bytes(key: Any, form: str) -> bytes:
    """The content of a private key's file, in the format PKCS8 or OpenSSH."""
    from cryptography.hazmat.primitives import serialization

    private_form = getattr(serialization.PrivateFormat, form)
    return bytes(key.private_bytes(serialization.Encoding.PEM, private_form, serialization.NoEncryption()))


def _write_key(path: Path, key: Any, form: str) -> None:
    """Writes a private key that only its owner can read; an existing file is an error."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    exists = f"{path} exists, and keys are never overwritten; move it away first"
    with raised_as(RunError, exists, FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as file:
        file.write(private_bytes(key, form))
