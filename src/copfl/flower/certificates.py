"""Certificates and keys for a federation: one authority, the server's certificate, a key per node.

Good for a trial and for a small federation whose members hand each other files. An organisation that has an authority
of its own uses that one: the file names are the same.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Any

from copfl.errors import RunError

DAYS = 397  # what certificate checkers accept at most
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can come to this address."""
    return host in LOOPBACK


def make_certificates(folder: Path, host: str) -> None:
    """Writes ca.pem, ca.key, server.pem and server.key; the server's certificate is for this host and this machine."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def begin(subject: Any, issuer: Any, key: Any) -> Any:
        start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)  # clocks differ
        builder = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        )
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(start)
        return builder.not_valid_after(start + datetime.timedelta(days=DAYS))

    def usage(signs_certificates: bool) -> Any:
        other = (
            "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
        )
        others = dict.fromkeys(other.split(), False)
        return x509.KeyUsage(
            digital_signature=not signs_certificates,
            key_cert_sign=signs_certificates,
            crl_sign=signs_certificates,
            **others,
        )

    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = name("copfl federation")
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = begin(issuer, issuer, authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    root = root.add_extension(usage(signs_certificates=True), critical=True).add_extension(
        identifier, critical=False
    )
    leaf = begin(name(host), issuer, server).add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    leaf = leaf.add_extension(_names(x509, host), critical=False)
    leaf = leaf.add_extension(usage(signs_certificates=False), critical=True)
    leaf = leaf.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    leaf = leaf.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _private(folder / "ca.key", authority)
    _private(folder / "server.key", server)
    (folder / "ca.pem").write_bytes(_pem(root.sign(authority, hashes.SHA384())))
    (folder / "server.pem").write_bytes(_pem(leaf.sign(authority, hashes.SHA384())))


def make_node_key(path: Path) -> None:
    """Writes a node's private key at the path and its public key, in OpenSSH's form, at PATH.pub."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _private(path, key, "OpenSSH")
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")


def _names(x509: Any, host: str) -> Any:
    """The addresses that the certificate is good for: the host's, and the machine's own."""
    names = []
    for one in dict.fromkeys((host, "localhost", "127.0.0.1")):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(one)))
        except ValueError:
            names.append(x509.DNSName(one))
    return x509.SubjectAlternativeName(names)


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    result: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return result


def _private(path: Path, key: Any, form: str = "PKCS8") -> None:
    from cryptography.hazmat.primitives import serialization

    content = key.private_bytes(
        serialization.Encoding.PEM, getattr(serialization.PrivateFormat, form), serialization.NoEncryption()
    )
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except FileExistsError as error:
        raise RunError(f"{path} is there already; keys are never overwritten: move it away first") from error
