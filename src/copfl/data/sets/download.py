"""Downloads of published data sets from their own addresses: resumed after an interruption, and verified.

Not pooch: its downloads start over after an interruption, and CIFAR-10-C has 2.9 GB.
"""

import hashlib
import http.client
import os
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from copfl.data.reading import data_errors
from copfl.errors import DataError, UsageError, unknown

Progress = Callable[[int, int | None], None]  # bytes so far, and in total if the server reports it

TIMEOUT = 30  # seconds without a byte
CHUNK = 2**20


class RemoteFile(NamedTuple):
    url: str
    digest: str  # md5 or sha256 as published; empty: none is known, and the file is not compared
    path: str  # in the data folder


TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "published.toml").read_text("utf-8")
)
PUBLISHED = {
    name: tuple(
        RemoteFile(f"{table['address']}/{file}", digest, str(Path(table.get("folder", ""), file)))
        for file, digest in table["files"].items()
    )
    for name, table in TABLE.items()
    if "files" in table
}
GET = "Get it with: copfl data get {name} --data-dir DIR"
ADVICE: dict[str, str] = {name: table["advice"] for name, table in TABLE.items() if "advice" in table}


def advice(name: str) -> str:
    """How to obtain a data set, in one sentence."""
    return ADVICE.get(name, GET).format(name=name)


def get(name: str, data_dir: Path, progress: Progress | None = None, url: str | None = None) -> Path:
    """The file, or the folder of several, of a published data set in `data_dir`, fetched unless it exists.

    `url` is another address of a data set of one file.

    Args:
        name: Of the data set.
        data_dir: The data folder.
        progress: Shows how much is there.
        url: Another address of a data set of one file.
    """
    if name in ADVICE and name not in PUBLISHED:
        raise DataError(f"{name} cannot be fetched. {advice(name)}")
    if name not in PUBLISHED:
        raise unknown("data set to get", name, PUBLISHED)
    files = PUBLISHED[name]
    if url and len(files) > 1:
        raise UsageError(f"{name} has {len(files)} files, so --url cannot name them; leave it out")
    paths = [fetch(url or file.url, data_dir / file.path, file.digest, progress) for file in files]
    return paths[0] if len(paths) == 1 else paths[0].parent


def is_pinned(name: str) -> bool:
    """Whether the checksums of all files of a data set are known."""
    return all(file.digest for file in PUBLISHED[name])


def fetch(url: str, target: Path, digest: str, progress: Progress | None = None) -> Path:
    """`target`, with the content of `url`; an interrupted download in `target`.part is continued.

    `digest` is its md5 or sha256; without one the content is not compared.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f'address "{url}" is not supported; it must begin with https:// or http://')
    if target.exists():
        if wrong := _difference(target, digest):
            raise DataError(f"{target} exists, but has {wrong}; delete it first")
        return target
    unfinished, parsed = target.with_name(target.name + ".part"), urllib.parse.urlsplit(url)
    # In messages the address has neither the password before the host nor a token behind the path.
    shown = f"{parsed.scheme}://{parsed.netloc.rpartition('@')[2]}{parsed.path}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _continue(url, unfinished, progress)
        if wrong := _difference(unfinished, digest):
            unfinished.unlink()
            raise DataError(
                f"{shown} has {wrong}; it has been removed. Get it again, or from another address (--url)"
            )
        os.replace(unfinished, target)
    except urllib.error.HTTPError as error:
        with error:
            answer = f"{error.code} {error.reason}"
        raise DataError(f"{shown} answers {answer}; name another address with --url") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        message = f"{shown} cannot be reached: {reason}. Run the same command again to continue"
        raise DataError(message) from error
    except OSError as error:
        raise DataError(f"{unfinished} cannot be written: {error.strerror or error}") from error
    return target


def _difference(path: Path, digest: str) -> str:
    """Such as "md5 0a... instead of 1b..."; empty if the file has this digest, or if none is known."""
    if not digest:
        return ""
    kind = "md5" if len(digest) == 32 else "sha256"
    with data_errors(str(path)), path.open("rb") as file:
        actual = hashlib.file_digest(file, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()
    return "" if actual == digest else f"{kind} {actual} instead of {digest}"


def _continue(url: str, unfinished: Path, progress: Progress | None) -> None:
    """Appends to `unfinished` the bytes of `url` that it lacks."""
    done = unfinished.stat().st_size if unfinished.exists() else 0
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
        with unfinished.open("ab" if done else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the transfer ended after {done:,} of {total:,} bytes")
