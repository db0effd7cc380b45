"""A short name of a document in words that people read to each other by telephone.

The coordinator reads out the words of an invitation, the site the words of its key: so nobody can have replaced either.
"""

import hashlib
import re
from pathlib import Path

COUNT = 8  # words of eight bits each
# 256 everyday words that differ in their first four letters, and by ear.
WORDS = (Path(__file__).parent / "words.txt").read_text().split()


def in_words(content: bytes) -> str:
    """Eight words for a document.

    Each try costs scrypt's 16 MiB and some hundredths of a second, so nobody can search for another document with the
    same 64 bits.
    """
    key = hashlib.scrypt(content, salt=b"copfl words", n=2**14, r=8, p=1, dklen=COUNT)
    return " ".join(WORDS[byte] for byte in key)


def same_words(first: str, second: str) -> bool:
    """Whether two texts are the same words, however they are written.

    Args:
        first: What was heard.
        second: What it should be.
    """
    return re.findall(r"[a-z]+", first.lower()) == re.findall(r"[a-z]+", second.lower())
