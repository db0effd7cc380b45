"""Published data sets fetched from their own addresses: resumed where they broke off, and checked."""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from copfl.data.reading import md5_of
from copfl.errors import DataError, UsageError, unknown

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server says

TIMEOUT = 30  # seconds without a byte
CHUNK = 2**20


class Published(NamedTuple):
    """Where a data set is published, in one file."""

    url: str
    md5: str


PUBLISHED = {
    "cifar10": Published(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"
    ),
    "cifar10c": Published(
        "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar", "56bf5dcef84df0e2308c6dcbcbbd8499"
    ),
    "cinic10": Published(
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
        "6ee4d0c996905fe93221de577967a372",
    ),
}


def advice(name: str) -> str:
    """How to come by a data set, in one sentence."""
    if name in PUBLISHED:
        made = "; or get cifar10, and the corruptions are made from it" if name == "cifar10c" else ""
        return f"Get it with: copfl data get {name} --data-dir DIR{made}"
    if name == "mini_imagenet":
        return (
            "Mini-ImageNet has no open address: register at https://image-net.org, take the images named in the split "
            "files of Ravi & Larochelle, and put them into the data folder as mini-imagenet/{train,test}/<wnid>/*.jpg, "
            "all 100 classes in both splits, or as a mini-imagenet.tar of that"
        )
    return "It comes with scikit-learn: pip install scikit-learn"


def get(name: str, data_dir: Path, progress: Progress | None = None, url: str | None = None) -> Path:
    """The file of a published data set in `data_dir`, fetched unless it is there; `url` names another place to ask."""
    if name not in PUBLISHED:
        if name not in ("digits", "mini_imagenet"):
            raise unknown("data set to get", name, PUBLISHED)
        raise DataError(f"{name} cannot be fetched. {advice(name)}")
    published = PUBLISHED[name]
    target = data_dir / published.url.rsplit("/", 1)[1]
    return fetch(url or published.url, target, published.md5, progress)


def fetch(url: str, target: Path, md5: str, progress: Progress | None = None) -> Path:
    """`target`, with the content of `url`. What a broken transfer left in `target`.part is taken up again."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f'address "{url}" is not supported; it must begin with https:// or http://')
    if target.exists():
        found = md5_of(target)
        if found != md5:
            raise DataError(
                f"{target} is there, but has md5 {found} instead of {md5}; delete it and get it again"
            )
        return target
    part, shown = target.with_name(target.name + ".part"), _shown(url)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _transfer(url, part, progress)
        found = md5_of(part)
        if found != md5:
            part.unlink()
            raise DataError(
                f"{shown} gave a file with md5 {found} instead of {md5}; it has been removed. "
                "Get it again, or from another address (--url)"
            )
        os.replace(part, target)
    except urllib.error.HTTPError as why:
        with why:
            raise DataError(
                f"{shown} answers {why.code} {why.reason}; name another address with --url"
            ) from why
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as why:
        reason = getattr(why, "reason", None) or why
        raise DataError(
            f"{shown} cannot be reached: {reason}. Run the same command again to go on from there"
        ) from why
    except OSError as why:
        raise DataError(f"{part} cannot be written: {why.strerror or why}") from why
    return target


def _shown(url: str) -> str:
    """The address without what may be a secret in it: a password before the host, a token behind the path."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """Appends to `part` what it lacks of `url`."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as why:
        if why.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not done:
            raise
        # Nothing is left to send: the part is whole, or longer than the file; the checksum tells.
        with why:
            return
    with response:
        if done and not _continues(response, done):
            done = 0  # the server starts from the beginning, and so do we
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        with part.open("ab" if done else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the transfer broke off after {done:,} of {total:,} bytes")


def _continues(response: http.client.HTTPResponse, done: int) -> bool:
    """Whether the answer begins at byte `done`."""
    span = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return response.status == http.HTTPStatus.PARTIAL_CONTENT and span is not None and int(span[1]) == done
