"""The cryptography under a secure sum: key agreement, sealed texts, and Shamir's shares of a secret.

Thin functions over `cryptography` and `pycryptodome`. Keys travel as PEM, texts as Fernet tokens; a share is
its number in four bytes and then a block of 16 bytes for each block of the secret.
"""

import base64

from copfl.errors import WireError, raised_as

SCALAR = 48  # bytes of the number of a private key
BLOCK = 16  # bytes of a secret that Shamir's scheme of pycryptodome shares at once
NUMBER = 4  # bytes of the number of a share


# -- keys ----------------------------------------------------------------------------------------------------


def new_key() -> bytes:
    """A fresh private key on the curve secp384r1."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return _private_bytes(ec.generate_private_key(ec.SECP384R1()))


def public_key(private: bytes) -> bytes:
    """The public key of a private key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    key = load_pem_private_key(private, None).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def scalar_of(private: bytes) -> bytes:
    """The number of a private key: a fifth of its file, which makes its shares short."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    number: int = load_pem_private_key(private, None).private_numbers().private_value  # type: ignore[union-attr]
    return number.to_bytes(SCALAR, "big")


def key_of_scalar(scalar: bytes) -> bytes:
    """The private key of this number; WireError if there is none."""
    from cryptography.hazmat.primitives.asymmetric import ec

    with raised_as(WireError, "the revealed shares do not fit together", ValueError):
        return _private_bytes(ec.derive_private_key(int.from_bytes(scalar, "big"), ec.SECP384R1()))


def agreed_key(private: bytes, public: bytes) -> bytes:
    """The 32 bytes that two parties agree on, from one's private key and the other's public key.

    Args:
        private: The private key of one party, as PEM.
        public: The public key of the other party, as PEM; another machine's.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    unusable = "a key of another client cannot be used"
    with raised_as(WireError, unusable, ValueError, TypeError, AttributeError, UnsupportedAlgorithm):
        private_key, public_key = load_pem_private_key(private, None), load_pem_public_key(public)
        secret = private_key.exchange(ec.ECDH(), public_key)  # type: ignore[union-attr, call-arg, arg-type]
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=None).derive(secret)


def _private_bytes(key: object) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # type: ignore[attr-defined]
    return pem


# -- sealed texts --------------------------------------------------------------------------------------------


def seal(key: bytes, text: bytes) -> bytes:
    """The text, encrypted and authenticated with an agreed key.

    Args:
        key: What `agreed_key` gives.
        text: What the receiver alone may read.
    """
    from cryptography.fernet import Fernet

    return Fernet(base64.urlsafe_b64encode(key)).encrypt(text)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """The text; None if it was changed, or sealed with another key.

    Args:
        key: What `agreed_key` gives.
        sealed: What `seal` gave; another machine's.
    """
    from cryptography.fernet import Fernet, InvalidToken

    try:
        return Fernet(base64.urlsafe_b64encode(key)).decrypt(sealed)
    except InvalidToken:
        return None


# -- Shamir's shares -----------------------------------------------------------------------------------------


def split_secret(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """A share of the secret for each holder; any `threshold` of them have the secret, fewer have nothing.

    Args:
        secret: The bytes to share.
        threshold: How many shares have the secret.
        holders: How many shares there are.
    """
    from Crypto.Protocol.SecretSharing import Shamir
    from Crypto.Util.Padding import pad

    padded = pad(secret, BLOCK)
    shares = [number.to_bytes(NUMBER, "little") for number in range(1, holders + 1)]
    for start in range(0, len(padded), BLOCK):
        for number, block in Shamir.split(threshold, holders, padded[start : start + BLOCK], False):
            shares[number - 1] += block
    return shares


def combine_shares(shares: list[bytes]) -> bytes:
    """The secret of these shares; WireError if they are not of one secret."""
    from Crypto.Protocol.SecretSharing import Shamir
    from Crypto.Util.Padding import unpad

    with raised_as(WireError, "the revealed shares do not fit together", ValueError, IndexError):
        numbers = [int.from_bytes(share[:NUMBER], "little") for share in shares]
        blocks = [
            Shamir.combine(
                [(n, s[start : start + BLOCK]) for n, s in zip(numbers, shares, strict=True)], False
            )
            for start in range(NUMBER, len(shares[0]), BLOCK)
        ]
        return unpad(b"".join(blocks), BLOCK)
