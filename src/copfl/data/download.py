"""Downloads of published data sets from their own addresses: resumed after an interruption, and verified.

Not pooch: its downloads start over after an interruption, and CIFAR-10-C has 2.9 GB.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from copfl.data.reading import naming
from copfl.errors import DataError, UsageError, unknown

Progress = Callable[[int, int | None], None]  # bytes so far, and in total if the server reports it

TIMEOUT = 30  # seconds without a byte
CHUNK = 2**20


PUBLISHED = {  # address and md5
    "cifar10": (
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
    ),
    "cifar10c": (
        "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
        "56bf5dcef84df0e2308c6dcbcbbd8499",
    ),
    "cinic10": (
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
        "6ee4d0c996905fe93221de577967a372",
    ),
}
GET = "Get it with: copfl data get {name} --data-dir DIR"
ADVICE = {
    "digits": "It comes with scikit-learn: pip install scikit-learn",
    "cifar10c": f"{GET}; or get cifar10, and the corruptions are made from it",
    "mini_imagenet": "Mini-ImageNet has no open address: register at https://image-net.org, take the images "
    "named in the split files of Ravi & Larochelle, and put them into the data folder as mini-imagenet.tar "
    "or mini-imagenet/{{train,test}}/<wnid>/*.jpg, all 100 classes in both splits",
}


def advice(name: str) -> str:
    """How to obtain a data set, in one sentence."""
    return ADVICE.get(name, GET).format(name=name)


def get(name: str, data_dir: Path, progress: Progress | None = None, url: str | None = None) -> Path:
    """The file of a published data set in `data_dir`, fetched unless it exists; `url` is another address."""
    if name in ADVICE and name not in PUBLISHED:
        raise DataError(f"{name} cannot be fetched. {advice(name)}")
    if name not in PUBLISHED:
        raise unknown("data set to get", name, PUBLISHED)
    address, md5 = PUBLISHED[name]
    return fetch(url or address, data_dir / address.rpartition("/")[2], md5, progress)


def fetch(url: str, target: Path, md5: str, progress: Progress | None = None) -> Path:
    """`target`, with the content of `url`; an interrupted download in `target`.part is continued."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f'address "{url}" is not supported; it must begin with https:// or http://')
    if target.exists():
        if (found := _md5_of(target)) != md5:
            raise DataError(f"{target} exists, but has md5 {found} instead of {md5}; delete it first")
        return target
    part, parsed = target.with_name(target.name + ".part"), urllib.parse.urlsplit(url)
    # In messages the address has neither the password before the host nor a token behind the path.
    shown = f"{parsed.scheme}://{parsed.netloc.rpartition('@')[2]}{parsed.path}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _continue(url, part, progress)
        if (found := _md5_of(part)) != md5:
            part.unlink()
            wrong = f"{shown} has md5 {found} instead of {md5}; it has been removed"
            raise DataError(f"{wrong}. Get it again, or from another address (--url)")
        os.replace(part, target)
    except urllib.error.HTTPError as error:
        with error:
            answer = f"{error.code} {error.reason}"
        raise DataError(f"{shown} answers {answer}; name another address with --url") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        message = f"{shown} cannot be reached: {reason}. Run the same command again to continue"
        raise DataError(message) from error
    except OSError as error:
        raise DataError(f"{part} cannot be written: {error.strerror or error}") from error
    return target


def _md5_of(path: Path) -> str:
    with naming(str(path)), path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()


def _continue(url: str, part: Path, progress: Progress | None) -> None:
    """Appends to `part` the bytes of `url` that it lacks."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not done:
            raise
        error.close()
        return  # there are no further bytes: the part is complete or too long, and the checksum decides
    with response:
        span = response.headers.get("Content-Range", "")
        if response.status != http.HTTPStatus.PARTIAL_CONTENT or not span.startswith(f"bytes {done}-"):
            done = 0  # the server sends the whole file
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        with part.open("ab" if done else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the transfer ended after {done:,} of {total:,} bytes")
