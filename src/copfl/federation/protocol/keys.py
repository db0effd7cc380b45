"""Signing keys of the members and of the coordinator: P-384, in OpenSSH's format. Without torch.

A member has one key. With it the node proves to the server who it is, and signs its part of secure sums. All
that is signed here begins with its purpose, so that no signature can be used for another. (Flower signs times
alone.)
"""

import hashlib
import json
import os
import re
import shlex
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from copfl.errors import RunError, UsageError, raised_as
from copfl.files import write_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

PUBLIC = re.compile("0[23][0-9a-f]{96}")  # a public key as text: the point, compressed


def fingerprint(text: str) -> str:
    """A short name of a public key, or of any text, which people can compare by telephone: 128 bits."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return "-".join(digest[start : start + 4] for start in range(0, 32, 4))


def statement(purpose: str, *parts: Any) -> bytes:
    """The bytes that are signed: the purpose, and what is said.

    Args:
        purpose: What a signature of it is for; a signature for one purpose proves nothing for another.
        parts: What is said, as JSON can say it.
    """
    return json.dumps([f"copfl {purpose}", *parts], sort_keys=True, default=str).encode()


class SigningKey:
    """A private key."""

    def __init__(self, key: "EllipticCurvePrivateKey") -> None:
        self.key = key
        self.public = public_text(key.public_key())

    def sign(self, content: bytes) -> str:
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA384

        return self.key.sign(content, ECDSA(SHA384())).hex()


def is_signed(public: str, content: bytes, signature: str) -> bool:
    """Whether the owner of the public key signed the content.

    Args:
        public: The public key, as `public_text` gives it.
        content: What should be signed.
        signature: In hexadecimal digits; another machine's.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP384R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import SHA384

    try:
        key = EllipticCurvePublicKey.from_encoded_point(SECP384R1(), bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), content, ECDSA(SHA384()))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def public_text(key: Any) -> str:
    """A public key as text; UsageError if it is of another kind."""
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
        raise UsageError("it is no elliptic-curve key on P-384; create one with `copfl site key FILE`")
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex()


def openssh_line(public: str) -> bytes:
    """The content of the file NAME.pub of a public key."""
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = EllipticCurvePublicKey.from_encoded_point(SECP384R1(), bytes.fromhex(public))
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def new_key() -> "EllipticCurvePrivateKey":
    """A private key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def private_bytes(key: "EllipticCurvePrivateKey", form: str) -> bytes:
    """The content of a private key's file, in the format PKCS8 or OpenSSH.

    Args:
        key: The private key.
        form: PKCS8 or OpenSSH.
    """
    from cryptography.hazmat.primitives import serialization

    private_form = getattr(serialization.PrivateFormat, form)
    return bytes(key.private_bytes(serialization.Encoding.PEM, private_form, serialization.NoEncryption()))


def write_key(path: Path, key: "EllipticCurvePrivateKey", form: str = "OpenSSH") -> None:
    """Writes a private key that only its owner can read; an existing file is an error.

    Args:
        path: A file that does not exist.
        key: The private key.
        form: PKCS8 or OpenSSH.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    exists = f"{path} exists, and keys are never overwritten; move it away first"
    with raised_as(RunError, exists, FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as file:
        file.write(private_bytes(key, form))
        file.flush()
        os.fsync(file.fileno())


def make_key(path: Path) -> str:
    """Writes a private key to PATH and its public key to PATH.pub; the public key as text."""
    key = new_key()
    write_key(path, key)
    public = public_text(key.public_key())
    write_bytes(public_path(path), openssh_line(public))
    return public


def public_path(path: Path) -> Path:
    """The file of the public key that belongs to the private key in a file."""
    return path.with_name(path.name + ".pub")


def require_private(path: Path) -> None:
    """UsageError if others may read or write the file of a private key, as ssh has it.

    A file of another user is that user's concern: a container's secrets belong to root.

    Args:
        path: The file.
    """
    found = path.stat()
    if found.st_uid == os.getuid() and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"others on this machine can use the private key {path}, whose mode is {found.st_mode & 0o777:04o}: "
            f"`chmod 600 {shlex.quote(str(path))}`. If somebody may have read it, replace it"
        )


def read_key(path: Path) -> SigningKey:
    """The private key in a file of OpenSSH's format; UsageError if it cannot be used."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    with raised_as(UsageError, f"{path}: {{}}; name a file that this user can read", OSError):
        require_private(path.expanduser())
        content = path.expanduser().read_bytes()
    with raised_as(UsageError, f"{path} is not a private key without a password ({{}})", ValueError):
        key: Any = load_ssh_private_key(content, None)
    with raised_as(UsageError, f"{path}: {{}}", UsageError):
        return SigningKey(key)  # an error if it is of another kind


def read_public(path: Path) -> str:
    """The public key in a file NAME.pub, as text; UsageError if it cannot be used."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    with raised_as(UsageError, f"{path}: {{}}; name a file that this user can read", OSError):
        content = path.expanduser().read_bytes()
    with raised_as(
        UsageError, f"{path} is no public key: {{}}", ValueError, UnsupportedAlgorithm, UsageError
    ):
        return public_text(load_ssh_public_key(content))


def own_key(path: Path) -> SigningKey:
    """The key in a file of this node, created on first use."""
    if not path.exists():
        key = new_key()
        write_bytes(path, private_bytes(key, "OpenSSH"), private=True)
        write_bytes(public_path(path), openssh_line(public_text(key.public_key())))
    return read_key(path)
